"""Scores against hand-computed numbers, scikit-learn, torchmetrics and exact sorts."""

import numpy as np
import pytest
import relplot
import torch
from sklearn.metrics import (
    brier_score_loss,
    confusion_matrix,
    f1_score,
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
    assert scores.rms_ce(*table) == pytest.approx(np.sqrt((4 * 0.05**2 + 6 * 0.1**2) / 10))
    assert scores.underconfidence(*table) == pytest.approx((0.2 + 0.6) / 10)
    assert scores.overconfidence(*table) == 0


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
    bins = (scores.ece, scores.mce, scores.rms_ce, scores.overconfidence, scores.underconfidence)
    for score in (*bins, scores.smece, scores.ks):
        assert np.isnan(score(none, none, none.astype(float)))
    assert np.isnan(scores.miou(none, none, none))
    for score in (scores.risk_at_coverage, scores.coverage_at_risk):
        assert np.isnan(score(none, none, 0.5))
    assert np.isnan(scores.augrc(none, none))
    assert np.isnan(scores.adaptive_ece(none, none, none, 5))
    assert np.isnan(scores.auroc(none, none))
    assert np.isnan(scores.aurc(none, none))


def test_absent_classes_are_left_out_of_miou():
    """Class 2 is neither predicted nor in the truth; class 1 is predicted only, so its IoU is 0."""
    intersection, predicted, truth = np.array([3, 0, 0]), np.array([3, 1, 0]), np.array([4, 0, 0])
    assert scores.class_iou(intersection, predicted, truth)[:2].tolist() == [0.75, 0]
    assert scores.miou(intersection, predicted, truth) == pytest.approx(0.375)
    assert scores.class_dice(intersection, predicted, truth)[:2].tolist() == [6 / 7, 0]
    assert scores.mean_of_known([6 / 7, 0, np.nan]) == pytest.approx(3 / 7)


FIVE = np.array([0, 1, 1, 1]), np.array([1, 0, 1, 0])  # (correct, wrong) of five pixels


def test_error_detection_by_hand():
    """Confidence low to high: wrong, right, {right, wrong} tied, right."""
    correct, wrong = FIVE
    # Pairs (right, wrong): 3 · 2; won 1+0, 1+½, 1+1.
    assert scores.auroc(correct, wrong) == pytest.approx(4.5 / 6)
    # Risk at coverage 1..5: 0; then the tied pair, ½ error expected after one; ⅓; ¼; 2/5.
    assert scores.aurc(correct, wrong) == pytest.approx((0 + 0.5 / 2 + 1 / 3 + 1 / 4 + 2 / 5) / 5)
    # Errors among the 1..5 most confident, as shares of all 5 pixels.
    assert scores.augrc(correct, wrong) == pytest.approx((0 + 0.5 + 1 + 1 + 2) / 25)


@pytest.mark.parametrize(
    ("coverage", "risk"), [(0.2, 0), (0.4, 0.25), (0.6, 1 / 3), (0.8, 0.25), (1, 0.4)]
)
def test_risk_at_coverage_by_hand(coverage, risk):
    assert scores.risk_at_coverage(*FIVE, coverage) == pytest.approx(risk)


@pytest.mark.parametrize(
    ("risk", "coverage"),
    [
        (0, 0.2),  # the surest pixel
        (0.2, 1 / 3),  # m = 5/3 pixels have (m - 1) / 2 = 1/3 expected errors
        (0.25, 0.8),  # 1 of 4; higher at 3 pixels, but 4 are more
        (0.3, 5 / 7 * 1.2),  # in the last bin m = 30/7 pixels have 1 + (m - 4) errors
        (0.4, 1),
        (0.9, 1),
    ],
)
def test_coverage_at_risk_by_hand(risk, coverage):
    assert scores.coverage_at_risk(*FIVE, risk) == pytest.approx(coverage)


def test_no_coverage_where_the_surest_are_too_often_wrong():
    assert scores.coverage_at_risk(np.array([90, 1]), np.array([0, 1]), 0.01) == 0.0


def test_ks_by_hand():
    """Confidence 0.4 wrong, 0.6 right, 0.8 right: the gap adds up to 0.4, 0.0, -0.2."""
    correct, wrong = np.array([0, 1, 1]), np.array([1, 0, 0])
    assert scores.ks(correct, wrong, np.array([0.4, 0.6, 0.8])) == pytest.approx(0.4 / 3)


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
    assert report.dice == pytest.approx(f1_score(labels, predicted, average="macro"))
    # From the fine histogram, where neighbours are ties: close, not equal.
    exact = roc_auc_score(labels == predicted, probs.amax(1))
    assert report.auroc == pytest.approx(exact, abs=5e-4)


def test_equals_torchmetrics_where_that_is_right():
    logits, labels = predictions()
    probs = logits.softmax(1)
    report = report_of(logits, labels)
    for norm, score in (("l1", report.ece), ("l2", report.rms_ce), ("max", report.mce)):
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
    order = np.argsort(confidence, kind="stable")
    gap = np.abs(np.cumsum((confidence - correct)[order])).max() / len(order)
    assert report.ks == pytest.approx(gap, abs=2e-4)
    errors = np.cumsum(~correct[order[::-1]])
    assert report.augrc == pytest.approx(errors.mean() / len(order), abs=5e-4)
    risk = errors / np.arange(1, len(order) + 1)
    for percent in (80, 90, 95):
        exact = risk[len(order) * percent // 100 - 1]
        assert getattr(report, f"risk_at_coverage_{percent}") == pytest.approx(exact, abs=5e-4)
    exact = (np.flatnonzero(risk <= 0.9 * report.error)[-1] + 1) / len(order)
    found = scores.coverage_at_risk(report.fine.correct, report.fine.wrong, 0.9 * report.error)
    assert found == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("sharp", [1.0, 4.0, 12.0])
def test_augrc_is_what_auroc_and_accuracy_give(sharp):
    """AUGRC = (1 - AUROC) acc (1 - acc) + (1 - acc)²/2, up to 1/n (Traub et al. 2024, eq. 6)."""
    report = report_of(*predictions(n=30_000, sharp=sharp))
    accuracy, error = report.accuracy, report.error
    expected = (1 - report.auroc) * accuracy * error + error**2 / 2
    assert report.augrc == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("n", "sharp"), [(1_000_000, 4.0), (100_000, 1.0), (100_000, 12.0)], ids=str
)
def test_smece_agrees_with_its_authors(n, sharp):
    logits, labels = predictions(n, sharp=sharp)
    confidence, predicted = (x.numpy() for x in logits.softmax(1).max(1))
    expected = relplot.smECE(confidence, (predicted == labels.numpy()).astype(float))
    assert report_of(logits, labels).smece == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("k", "sharp"), [(4, 4.0), (21, 4.0)])
def test_smece_of_a_calibrated_network_is_that_of_its_authors(k, sharp):
    """There σ is about 0.002, and no bin of the fine histogram may be much wider."""
    generator = torch.Generator().manual_seed(1)
    logits = sharp * torch.randn(1_000_000, k, generator=generator)
    probs = logits.softmax(1)
    draw = torch.rand(len(probs), 1, generator=generator)
    labels = (probs.cumsum(1) < draw).sum(1).clamp(max=k - 1)
    confidence, predicted = (x.double().numpy() for x in probs.max(1))
    expected = relplot.smECE(confidence, (predicted == labels.numpy()).astype(float))
    assert expected < 0.003
    assert report_of(logits, labels).smece == pytest.approx(expected, abs=1e-4)


def test_smece_of_gaps_of_one_sign_is_their_mean():
    """Smoothing keeps the sum. All confidences lie well inside [0, 1]."""
    correct, wrong = np.array([40, 30, 70]), np.array([60, 20, 30])
    confidence = np.array([0.42, 0.63, 0.78]) * (correct + wrong)
    expected = (confidence - correct).sum() / 250
    assert scores.smece(correct, wrong, confidence) == pytest.approx(expected, abs=1e-5)
