"""Intervals cover what they should, and image statistics are those of the images."""

import numpy as np
import pytest
import torch

from segcal import CalibrationMeter
from tests.support.synthetic_reports import K, images, measured


def test_intervals_cover_the_large_sample_value():
    """200 data sets of 40 images, ECE 6 % off and biased up by noise: 90-99 % are covered."""
    generator = torch.Generator().manual_seed(0)
    meter = CalibrationMeter(K)
    for _ in range(10):
        meter.update(*images(4000, generator))
    large = meter.compute()
    covered = {"ece": 0, "sce": 0, "accuracy": 0, "miou": 0}
    estimates = []
    for _ in range(200):
        report = measured(*images(40, generator)).compute(resamples=300)
        estimates.append(report.ece)
        for name in covered:
            interval = report.intervals[name]
            assert 0 <= interval.low <= interval.high <= 1
            covered[name] += interval.low <= getattr(large, name) <= interval.high
    assert np.mean(estimates) > large.ece  # the bias that plain percentiles would double
    assert 180 <= covered["ece"] <= 198
    assert 180 <= covered["accuracy"] <= 198
    assert 180 <= covered["miou"] <= 198
    assert covered["sce"] >= 180  # errs to the safe side: many small gaps, each mostly noise


def test_perfect_calibration_is_within_the_interval():
    """ECE of a calibrated source is positive by noise alone; the interval must reach 0."""
    generator = torch.Generator().manual_seed(1)
    reached = 0
    for _ in range(50):
        truth = 2 * torch.randn(30, K, 64, generator=generator, dtype=torch.float64)
        draw = torch.rand(30, 1, 64, generator=generator, dtype=torch.float64)
        labels = (truth.softmax(1).cumsum(1) < draw).sum(1).clamp(max=K - 1)
        report = measured(truth, labels).compute(resamples=200)
        assert report.ece > 0.005
        reached += report.intervals["ece"].low == 0
    assert reached >= 45


def test_resamples_are_sums_of_images():
    """Accuracy and mIoU intervals from literal resampling: whole meters of images added up."""
    logits, labels = images(6, torch.Generator().manual_seed(2))
    report = measured(logits, labels).compute(resamples=40, seed=7)
    weights = np.random.default_rng(7).multinomial(6, np.full(6, 1 / 6), size=40)
    drawn = []
    for row in weights:
        which = torch.arange(6).repeat_interleave(torch.from_numpy(row))
        drawn.append(measured(logits[which], labels[which]).compute(resamples=0))
    for name in ("accuracy", "miou"):
        low, high = np.quantile([getattr(r, name) for r in drawn], [0.025, 0.975])
        interval = report.intervals[name]
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-12)


def test_equal_images_leave_no_doubt():
    logits, labels = images(1, torch.Generator().manual_seed(3))
    report = measured(logits.repeat(8, 1, 1), labels.repeat(8, 1)).compute()
    for name, interval in report.intervals.items():
        value = getattr(report, name)
        assert (interval.low, interval.high) == pytest.approx((value, value), abs=1e-9)


def test_seeded_and_independent_of_order():
    logits, labels = images(9, torch.Generator().manual_seed(4))
    names = [f"{i:02d}.png" for i in range(9)]
    one = measured(logits, labels, names).compute()
    other = measured(logits.flip(0), labels.flip(0), names[::-1]).compute()
    assert one.intervals == other.intervals
    assert one.worst_images == other.worst_images
    again = measured(logits, labels, names).compute(seed=1)
    assert again.intervals["ece"] != one.intervals["ece"]


def test_image_averaged_ece_and_worst_images():
    logits, labels = images(30, torch.Generator().manual_seed(5))
    labels[3] = 255  # nothing to count: not an image of the average
    meter = measured(logits, labels, [f"{i:02d}.png" for i in range(30)])
    report = meter.compute()
    own = {}
    for i in range(30):
        single = CalibrationMeter(K)
        single.update(logits[i : i + 1], labels[i : i + 1])
        own[f"{i:02d}.png"] = single.compute().ece
    del own["03.png"]
    assert report.protocol.images == 29
    assert report.image_ece == pytest.approx(np.mean(list(own.values())), abs=1e-12)
    assert report.image_ece > report.ece
    expected = sorted(own, key=own.get, reverse=True)[:20]
    assert [image.name for image in report.worst_images] == expected
    assert report.worst_images[0].ece == pytest.approx(own[expected[0]], abs=1e-12)
    assert report.worst_images[0].pixels == 64


def test_one_image_has_no_interval():
    report = measured(*images(1, torch.Generator().manual_seed(6))).compute()
    assert report.intervals == {}
    assert report.image_ece == pytest.approx(report.ece)
