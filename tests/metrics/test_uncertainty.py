"""Scores of finding errors against scikit-learn, and the histograms behind them."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

import segcal
from segcal.metrics.report import Detection
from segcal.metrics.scores import SCORES
from segcal.metrics.uncertainty import DETECTION, UNCERTAINTIES, ErrorDetection

N, C, SIDE = 12, 5, 24


@pytest.fixture(scope="module")
def batch():
    """(N, C, H, W) probabilities, labels with ignored ones, and maps of three members' spread."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(3, N, C, SIDE, SIDE).double()
    members = (logits + 2 * torch.randn(N, C, SIDE, SIDE)).softmax(2)
    probs = members.mean(0)
    labels = torch.distributions.Categorical(probs.movedim(1, -1)).sample()
    labels[:, :3] = 255
    chosen = probs.argmax(1, keepdim=True)
    information = torch.special.entr(probs).sum(1) - torch.special.entr(members).sum(2).mean(0)
    variance = torch.stack([m.gather(1, chosen)[:, 0] for m in members]).var(0, unbiased=False)
    return probs, labels, {"mutual_information": information, "variance": variance}


def counted(batch, **options):
    detection = ErrorDetection(C, **options)
    probs, labels, spread = batch
    for some in (slice(0, 5), slice(5, N)):
        detection.update(probs[some], labels[some], {k: v[some] for k, v in spread.items()})
    return detection


def test_scores_are_those_of_scikit_learn(batch):
    probs, labels, spread = batch
    valid = labels != 255
    wrong = (probs.argmax(1) != labels)[valid].numpy()
    found = {one.name: one for one in counted(batch).compute(resamples=0)}
    assert list(found) == list(UNCERTAINTIES)
    first, second = probs.sort(1, descending=True).values[:, :2].unbind(1)
    values = {
        "confidence": 1 - first,
        "entropy": -(probs * probs.log()).sum(1),
        "margin": 1 - (first - second),
        **spread,
    }
    for name, value in values.items():
        u = value[valid].numpy()
        fpr, tpr, _ = roc_curve(~wrong, -u, drop_intermediate=False)
        order = np.argsort(u, kind="stable")
        risk = (np.cumsum(wrong[order]) / np.arange(1, len(u) + 1)).mean()
        best = (np.cumsum(np.sort(wrong)) / np.arange(1, len(u) + 1)).mean()
        expected = {
            "auroc": roc_auc_score(wrong, u),
            "aupr_errors": average_precision_score(wrong, u),
            "aupr_successes": average_precision_score(~wrong, -u),
            "fpr_95": fpr[np.flatnonzero(tpr >= 0.95)[0]],
            "aurc": risk,
            "prr": (wrong.mean() - risk) / (wrong.mean() - best),
        }
        for score in DETECTION:  # values in one bin of 1/1024 count as equal
            assert SCORES[score].of(found[name]) == pytest.approx(expected[score], abs=4e-3), (
                name,
                score,
            )


def test_scores_of_histograms_are_exact():
    """Where the values are the bins themselves, scikit-learn has the same numbers."""
    rng = np.random.default_rng(0)
    correct, wrong = rng.integers(0, 9, 50) * np.arange(50), rng.integers(0, 9, 50) * 20
    u = -np.repeat(np.tile(np.arange(50), 2), np.concatenate([correct, wrong]))
    errors = np.repeat([False, True], [correct.sum(), wrong.sum()])
    one = Detection("entropy", correct, wrong, {})
    assert SCORES["aupr_errors"].of(one) == pytest.approx(average_precision_score(errors, u))
    assert SCORES["aupr_successes"].of(one) == pytest.approx(average_precision_score(~errors, -u))
    fpr, tpr, _ = roc_curve(~errors, -u, drop_intermediate=False)
    assert SCORES["fpr_95"].of(one) == pytest.approx(fpr[np.flatnonzero(tpr >= 0.95)[0]])


def test_known_orders():
    best = Detection("entropy", np.array([0, 30]), np.array([10, 0]), {})
    none = Detection("entropy", np.array([30]), np.array([10]), {})
    assert SCORES["prr"].of(best) == pytest.approx(1) and SCORES["fpr_95"].of(best) == 0
    assert SCORES["prr"].of(none) == pytest.approx(0) and SCORES["fpr_95"].of(none) == 1
    assert SCORES["aupr_errors"].of(none) == pytest.approx(0.25)
    right = Detection("entropy", np.array([30]), np.array([0]), {})
    assert all(np.isnan(SCORES[name].of(right)) for name in ("prr", "fpr_95", "aupr_errors"))


def test_confidence_has_the_histogram_of_the_report(batch):
    probs, labels, _ = batch
    meter = segcal.CalibrationMeter(C)
    meter.update_probs(probs.float(), labels)
    report, detection = meter.compute(), ErrorDetection(C)
    detection.update(probs.float(), labels)
    first, *rest = detection.compute(resamples=0)
    assert (first.correct == report.fine.correct).all()
    assert (first.wrong == report.fine.wrong).all()
    assert [one.name for one in rest] == ["entropy", "margin"]  # there are no members
    assert SCORES["prr"].of(first) == report.prr


def test_streamed_is_one_shot(batch):
    probs, labels, spread = batch
    whole, streamed = ErrorDetection(C), ErrorDetection(C)
    whole.update(probs, labels, spread)
    for i in range(3):
        streamed.update(probs[i::3], labels[i::3], {k: v[i::3] for k, v in spread.items()})
    for one, other in zip(whole.compute(), streamed.compute(), strict=True):
        assert (one.correct == other.correct).all() and (one.wrong == other.wrong).all()
        for score in DETECTION:
            low, high = one.intervals[score].low, one.intervals[score].high
            assert low < SCORES[score].of(one) < high
            again = other.intervals[score]
            assert (again.low, again.high) == pytest.approx((low, high), abs=0.3 * (high - low))


def test_ignored_pixels_touch_nothing(batch):
    probs, labels, spread = batch
    changed = probs.clone()
    changed[:, :, :3] = probs.flip(0)[:, :, :3]
    one, other = counted(batch), counted((changed, labels, spread))
    for a, b in zip(one.compute(resamples=0), other.compute(resamples=0), strict=True):
        assert (a.correct == b.correct).all() and (a.wrong == b.wrong).all()


def test_sigmoid_outputs_are_problems_of_two_classes():
    torch.manual_seed(0)
    probs, labels = torch.rand(4, 3, 8, 8), torch.randint(0, 2, (4, 3, 8, 8))
    labels[0, 0] = 255
    one, two = ErrorDetection(3, multilabel=True), ErrorDetection(2)
    one.update(probs, labels)
    two.update(torch.stack([1 - probs, probs], 1).movedim(2, 1).flatten(0, 1), labels.flatten(0, 1))
    for a, b in zip(one.compute(resamples=0), two.compute(resamples=0), strict=True):
        assert (a.correct == b.correct).all() and (a.wrong == b.wrong).all()


def test_intervals_do_not_depend_on_the_order_of_images(batch):
    probs, labels, spread = batch
    found = []
    for order in (slice(None), [*range(1, N, 2), *range(0, N, 2)]):  # of one process, of two
        counter = ErrorDetection(C)
        counter.update(probs[order], labels[order], {k: x[order] for k, x in spread.items()})
        found.append(counter.compute())
    assert [one.intervals for one in found[0]] == [other.intervals for other in found[1]]


def test_a_group_is_one_large_image(batch):
    """Two images each, against images of twice the rows."""
    apart, together, alone = ErrorDetection(C), ErrorDetection(C), ErrorDetection(C)
    probs, labels, spread = batch
    groups = [f"patient {i // 2}" for i in range(N)]
    apart.update(probs, labels, spread, groups)
    alone.update(probs, labels, spread)
    joined = {name: torch.cat([x[::2], x[1::2]], 1) for name, x in spread.items()}
    labels = torch.cat([labels[::2], labels[1::2]], 1)
    together.update(torch.cat([probs[::2], probs[1::2]], 2), labels, joined, groups[::2])
    every = zip(apart.compute(), together.compute(), alone.compute(), strict=True)
    for one, other, single in every:
        assert (one.correct == other.correct).all() and (one.wrong == single.wrong).all()
        for score in DETECTION:
            interval, same = one.intervals[score], other.intervals[score]
            assert (interval.low, interval.high) == pytest.approx((same.low, same.high), abs=1e-12)
            assert interval != single.intervals[score]
