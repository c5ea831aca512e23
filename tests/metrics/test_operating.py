"""Operating points: thresholds by hand, counts as the meter's, and intervals that hold."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from segcal import CalibrationMeter, Report
from segcal.metrics.intervals import fraction_interval
from segcal.metrics.report import FineHistogram, Interval
from segcal.metrics.triage import (
    TARGETS,
    AcceptedPixels,
    OperatingPoint,
    Target,
    accepted,
    choose_threshold,
)
from tests.support.synthetic_reports import K, images, synthetic_report

# Pixels by bin: none; 4 of which 2 wrong; none; 6 of which 1 wrong; 10 right.
FINE = FineHistogram([0, 0.2, 0.4, 0.6, 0.8, 1], [0, 2, 0, 5, 10], [0, 2, 0, 1, 0], [0] * 5)


@pytest.mark.parametrize(
    ("target", "threshold", "coverage", "accuracy"),
    [
        ("accuracy=0.99", 0.8, 0.5, 1.0),
        ("accuracy=0.9", 0.6, 0.8, 15 / 16),
        ("risk=0.0625", 0.6, 0.8, 15 / 16),
        ("risk=0.15", 0.2, 1.0, 0.85),  # nothing was seen at 0.2 and below
        ("coverage=0.5", 0.8, 0.5, 1.0),
        ("coverage=0.51", 0.6, 0.8, 15 / 16),
        ("coverage=0.99", 0.2, 1.0, 0.85),
    ],
)
def test_thresholds_by_hand(target, threshold, coverage, accuracy):
    assert choose_threshold(FINE, Target.parse(target)) == threshold
    assert accepted(FINE, threshold) == pytest.approx((coverage, accuracy))


def test_a_target_that_nothing_reaches():
    fine = FineHistogram([0, 0.5, 1], [9, 8], [1, 2], [0, 0])
    assert choose_threshold(fine, Target("accuracy", 0.95)) is None
    counts = AcceptedPixels(None)
    counts.update(torch.randn(2, 3, 5), torch.zeros(2, 5, dtype=torch.long))
    point = counts.point(Target("accuracy", 0.95), fine, 7)
    assert (point.coverage, point.holdout_coverage) == (0, 0)
    assert math.isnan(point.threshold) and math.isnan(point.accuracy)
    assert point.verdict == "no threshold reaches it on the hold-out"
    assert choose_threshold(FineHistogram([0, 1], [0], [0], [0]), Target("coverage", 0.5)) is None


@pytest.mark.parametrize("text", ["accuracy", "accuracy=1", "risk=0", "odd=0.5", "risk=x", "=0.5"])
def test_other_targets_are_refused(text):
    with pytest.raises(ValueError, match=f"Expected a target .*, but got '{text}'"):
        Target.parse(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_counts_are_those_of_the_fine_histogram(dtype, sharp):
    """Any edge of the histogram accepts the same pixels here and there."""
    logits, labels = images(6, torch.Generator().manual_seed(0))
    logits = (sharp * logits).to(dtype)
    labels[:, ::7] = 255
    meter = CalibrationMeter(K)
    meter.update(logits, labels)
    fine = meter.compute().fine
    for edge in fine.edges[np.flatnonzero(fine.correct + fine.wrong)[::9]].tolist():
        counts = AcceptedPixels(edge)
        counts.update(logits, labels)
        pixels, taken, right = counts.counts().sum(0)
        assert pixels == (labels != 255).sum()
        assert (taken / pixels, right / taken) == accepted(fine, edge)


def test_shapes_and_batches_do_not_matter():
    logits, labels = images(8, torch.Generator().manual_seed(0), pixels=12)
    labels[3] = 255  # an image without labels does not count
    one, other, flat = (AcceptedPixels(0.7) for _ in range(3))
    one.update(logits, labels)
    for part in (slice(0, 3), slice(3, 8)):
        other.update(logits[part].view(-1, K, 3, 4), labels[part].view(-1, 3, 4))
    assert one.counts().tolist() == other.counts().tolist()
    assert len(one.counts()) == 7
    flat.update(logits.movedim(1, 2).reshape(-1, K), labels.flatten())  # classification
    assert flat.counts().sum(0).tolist() == one.counts().sum(0).tolist()


@pytest.mark.parametrize("hits", [0, 1, 60, 199, 200])
def test_interval_of_independent_trials_is_the_exact_one(hits):
    trials = (np.arange(200) < hits).astype(int)
    found = fraction_interval(trials, np.ones(200, int))
    exact = binomtest(hits, 200).proportion_ci()
    assert (found.low, found.high) == pytest.approx(tuple(exact), abs=2e-3)


def test_interval_needs_two_images_and_knows_of_clusters():
    assert fraction_interval(np.array([3, 0]), np.array([4, 0])) is None
    right = np.tile([50, 100], 10)
    wide = fraction_interval(right, np.full(20, 100))
    narrow = fraction_interval(np.full(20, 75) + np.tile([-2, 2], 10), np.full(20, 100))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    same = fraction_interval(np.full(20, 75), np.full(20, 100))  # no trial varies: 20 of them
    assert (same.low, same.high) == pytest.approx(tuple(binomtest(15, 20).proportion_ci()))


@pytest.mark.parametrize(("threshold", "least"), [(0.6, 0.9), (0.99, 0.9)])
def test_interval_holds(threshold, least):
    """The interval of a data set holds the accuracy of very many images; also with few errors."""
    generator = torch.Generator().manual_seed(0)

    def counts(n):
        found = AcceptedPixels(threshold)
        found.update(*images(n, generator))
        return found.counts()

    _, taken, right = counts(20_000).sum(0)
    held = 0
    for _ in range(200):
        _, accepted_pixels, right_pixels = counts(20).T
        interval = fraction_interval(right_pixels, accepted_pixels)
        held += interval.low <= right / taken <= interval.high
    assert least <= held / 200 <= 0.995


def operating_point(**changes):
    given = {
        "target": "accuracy=0.9",
        "threshold": 0.75,
        "holdout_images": 12,
        "holdout_coverage": 0.5,
        "holdout_accuracy": 0.91,
        "coverage": 0.4,
        "accuracy": 0.92,
        "intervals": {"coverage": Interval(0.3, 0.5), "accuracy": Interval(0.89, 0.95)},
    }
    return OperatingPoint(**{**given, **changes})


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ("accuracy=0.88", "reached"),
        ("accuracy=0.9", "within the interval"),
        ("accuracy=0.96", "not reached"),
        ("risk=0.12", "reached"),
        ("risk=0.04", "not reached"),
        ("coverage=0.2", "reached"),
        ("coverage=0.4", "within the interval"),
        ("coverage=0.6", "not reached"),
    ],
)
def test_verdicts(target, verdict):
    assert operating_point(target=target).verdict == verdict
    assert operating_point(target=target, intervals={}).verdict == "too few images to tell"


def test_points_survive_json():
    points = (operating_point(), operating_point(threshold=math.nan, accuracy=math.nan))
    report = replace(synthetic_report(images=2), operating_points=points)
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report and again.operating_points[0] == points[0]
    bad = {**report.to_dict(), "operating_points": [{"target": "accuracy=0.9"}]}
    with pytest.raises(ValueError, match="Expected a complete report"):
        Report.from_dict(bad)


def test_every_target_is_described():
    assert all(Target(kind, 0.5) and words for kind, words in TARGETS.items())
