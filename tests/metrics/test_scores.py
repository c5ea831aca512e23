"""Scores against hand-computed numbers, scikit-learn, torchmetrics and exact sorts."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    brier_score_loss,
    confusion_matrix,
    jaccard_score,
    log_loss,
    roc_auc_score,
)
from torchmetrics.functional.classification import multiclass_calibration_error

from segcal import CalibrationMeter
from segcal.metrics import scores

# Three bins: 4 pixels of which 1 hit at mean 0.2; none; 6 pixels of which 6 hit at mean 0.9.
COUNT, HITS, CONFIDENCE = np.array([4, 0, 6]), np.array([1, 0, 6]), np.array([0.8, 0.0, 5.4])


def test_bin_scores_by_hand():
    table = COUNT, HITS, CONFIDENCE
    assert scores.ece(*table) == pytest.approx((0.2 + 0.6) / 10)
    assert scores.mce(*table) == pytest.approx(0.1)
    assert scores.underconfidence(*table) == pytest.approx((0.2 + 0.6) / 10)
    assert scores.overconfidence(*table) == 0
    assert scores.accuracy(COUNT, HITS) == pytest.approx(0.7)
    assert scores.mean_confidence(COUNT, CONFIDENCE) == pytest.approx(0.62)


def test_signed_parts_add_up_to_ece():
    generator = np.random.default_rng(0)
    count = generator.integers(0, 50, (4, 15))
    hits = generator.integers(0, count + 1)
    confidence = generator.random((4, 15)) * count
    over = scores.overconfidence(count, hits, confidence)
    under = scores.underconfidence(count, hits, confidence)
    assert over + under == pytest.approx(scores.ece(count, hits, confidence))
    assert scores.sce(count, hits, confidence) == pytest.approx((over + under).mean())
    assert min(over.min(), under.min()) > 0


def test_nothing_is_nan():
    none = np.zeros(3, int)
    for score in (scores.ece, scores.mce, scores.overconfidence, scores.underconfidence):
        assert np.isnan(score(none, none, none.astype(float)))
    assert np.isnan(scores.miou(none, none, none))
    assert np.isnan(scores.adaptive_ece(none, none, none, 5))
    assert np.isnan(scores.auroc(none, none))
    assert np.isnan(scores.aurc(none, none))


def test_absent_classes_are_left_out_of_miou():
    """Class 2 is neither predicted nor in the truth; class 1 is predicted only, so its IoU is 0."""
    intersection, predicted, truth = np.array([3, 0, 0]), np.array([3, 1, 0]), np.array([4, 0, 0])
    assert scores.class_iou(intersection, predicted, truth)[:2].tolist() == [0.75, 0]
    assert scores.miou(intersection, predicted, truth) == pytest.approx(0.375)


def test_error_detection_by_hand():
    """Confidence low to high: wrong, right, {right, wrong} tied, right."""
    correct, wrong = np.array([0, 1, 1, 1]), np.array([1, 0, 1, 0])
    # Pairs (right, wrong): 3 · 2; won 1+0, 1+½, 1+1.
    assert scores.auroc(correct, wrong) == pytest.approx(4.5 / 6)
    # Risk at coverage 1..5: 0; then the tied pair, ½ error expected after one; ⅓; ¼; 2/5.
    assert scores.aurc(correct, wrong) == pytest.approx((0 + 0.5 / 2 + 1 / 3 + 1 / 4 + 2 / 5) / 5)


def test_adaptive_ece_by_hand():
    """Two bins of two pixels: (0.5, 0.6) with one hit, (0.9, 1.0) with two."""
    confidence = np.array([0.5, 0.6, 0.9, 1.0])
    correct, wrong = np.array([1, 0, 1, 1]), np.array([0, 1, 0, 0])
    expected = (abs(1.1 - 1) + abs(1.9 - 2)) / 4
    assert scores.adaptive_ece(correct, wrong, confidence, 2) == pytest.approx(expected)


def predictions(n=4000, k=4, sharp=4.0, seed=0):
    """Probabilities of a plausible network: mostly near 1, and overconfident."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64) * sharp
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)
    return logits, labels


def report_of(logits, labels):
    meter = CalibrationMeter(logits.shape[1])
    meter.update(logits, labels)
    return meter.compute()


@pytest.mark.parametrize("sharp", [1.0, 4.0, 12.0])
def test_equals_scikit_learn(sharp):
    logits, labels = predictions(sharp=sharp)
    report = report_of(logits, labels)
    probs, predicted = logits.softmax(1), logits.argmax(1)
    onehot = torch.nn.functional.one_hot(labels)
    assert report.nll == pytest.approx(log_loss(labels, probs), rel=1e-9)
    brier = sum(brier_score_loss(onehot[:, c], probs[:, c]) for c in range(4))
    assert report.brier == pytest.approx(brier, rel=1e-9)
    assert report.confusion.tolist() == confusion_matrix(labels, predicted).tolist()
    assert report.miou == pytest.approx(jaccard_score(labels, predicted, average="macro"))
    # From the fine histogram, where neighbours are ties: close, not equal.
    exact = roc_auc_score(labels == predicted, probs.amax(1))
    assert report.auroc == pytest.approx(exact, abs=5e-4)


def test_equals_torchmetrics_where_that_is_right():
    logits, labels = predictions()
    probs = logits.softmax(1)
    report = report_of(logits, labels)
    for norm, score in (("l1", report.ece), ("max", report.mce)):
        reference = multiclass_calibration_error(probs, labels, 4, n_bins=15, norm=norm)
        assert score == pytest.approx(reference.item(), abs=2e-6)  # theirs is in float32


def exact_adaptive_ece(confidence, correct, num_bins):
    order = np.argsort(confidence, kind="stable")
    gap = (confidence - correct)[order]
    return sum(abs(part.sum()) for part in np.array_split(gap, num_bins)) / len(gap)


def exact_aurc(confidence, correct):
    order = np.argsort(-confidence, kind="stable")
    errors = np.cumsum(~correct[order])
    return (errors / np.arange(1, len(errors) + 1)).mean()


@pytest.mark.parametrize("sharp", [1.0, 4.0, 12.0])
def test_fine_histogram_is_close_to_exact_sorts(sharp):
    logits, labels = predictions(n=30_000, sharp=sharp)
    report = report_of(logits, labels)
    confidence, predicted = (x.numpy() for x in logits.softmax(1).max(1))
    correct = predicted == labels.numpy()
    exact = exact_adaptive_ece(confidence, correct, 15)
    assert report.adaptive_ece == pytest.approx(exact, abs=5e-4)
    assert report.aurc == pytest.approx(exact_aurc(confidence, correct), abs=5e-4)
