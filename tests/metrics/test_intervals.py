"""Intervals cover what they should, and image statistics are those of the images."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from segcal import CalibrationMeter, Report
from segcal.metrics.intervals import ImageScores, looks_like_sequence, sorted_sums, t_margins
from segcal.metrics.regions import class_group
from segcal.viz.tables import interval_notes
from tests.support.synthetic_reports import K, images, measured


def test_intervals_cover_the_large_sample_value():
    """100 data sets of 40 images, ECE 6 % off and biased up by noise."""
    generator = torch.Generator().manual_seed(0)
    meter = CalibrationMeter(K)
    for _ in range(10):
        meter.update(*images(4000, generator))
    large = meter.compute()
    covered = {"ece": 0, "sce": 0, "accuracy": 0, "miou": 0}
    estimates = []
    for _ in range(100):
        report = measured(*images(40, generator)).compute(resamples=100)
        estimates.append((report.ece, report.ece_debiased))
        for name in covered:
            interval = report.intervals[name]
            assert 0 <= interval.low <= interval.high <= 1
            covered[name] += interval.low <= getattr(large, name) <= interval.high
    assert min(covered.values()) >= 90
    assert max(covered["accuracy"], covered["miou"], covered["ece"]) <= 99  # no wider than needed
    plain, debiased = np.mean(estimates, 0)
    assert debiased < large.ece < plain


def test_noise_adds_nothing_to_debiased_errors():
    """A calibrated source: ECE and SCE are positive by noise alone, debiased they are 0."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(100):
        report = measured(*calibrated(25, generator)).compute(resamples=0)
        found.append((report.ece_debiased, report.sce_debiased, report.ece, report.sce))
    mean, error = np.mean(found, 0), np.std(found, 0) / 10
    assert (np.abs(mean[:2]) < 3 * error[:2]).all()
    assert (mean[2:] > 10 * error[2:]).all()
    assert np.min(found, 0)[0] < 0  # as an estimate of 0 without bias must be


def test_clear_errors_need_no_correction():
    """Where every gap is clear, all signs are known, and the debiased error is the error."""
    sure = torch.full((20, K, 50), 0.0, dtype=torch.float64)
    sure[:, 0] = 3.0
    labels = (torch.arange(50) % 2 + torch.arange(20)[:, None] % 2).long()
    report = measured(sure, labels).compute(resamples=0)
    assert report.ece > 0.3
    assert report.ece_debiased == pytest.approx(report.ece, abs=1e-12)
    assert report.sce_debiased == pytest.approx(report.sce, abs=1e-12)


def test_debiased_error_by_its_formula():
    """The docstring's formula, one image and one bin at a time."""
    meter = measured(*images(7, torch.Generator().manual_seed(2)))
    gap = meter.image_sums()["top_gap"].numpy()
    total = 0.0
    for i, b in np.ndindex(gap.shape):
        others = np.delete(gap[:, b], i)
        if others.any():
            total += gap[i, b] * np.clip(2 * others.sum() / np.sqrt((others**2).sum()), -1, 1)
    expected = total / meter.image_sums()["pixels"].sum().item()
    assert meter.compute(resamples=0).ece_debiased == pytest.approx(expected, abs=1e-15)


def test_perfect_calibration_is_within_the_interval():
    """ECE of a calibrated source is positive by noise alone; the interval must reach 0."""
    generator = torch.Generator().manual_seed(1)
    reached = {"ece": 0, "sce": 0}
    for _ in range(50):
        report = measured(*calibrated(30, generator)).compute(resamples=100)
        assert report.ece > 0.005
        for name in reached:
            reached[name] += report.intervals[name].low == 0
    assert min(reached.values()) >= 45


def calibrated(n, generator):
    """Logits of `n` images, and labels drawn from their softmax."""
    logits = 2 * torch.randn(n, K, 64, generator=generator, dtype=torch.float64)
    draw = torch.rand(n, 1, 64, generator=generator, dtype=torch.float64)
    return logits, (logits.softmax(1).cumsum(1) < draw).sum(1).clamp(max=K - 1)


def test_influences_are_those_of_leaving_images_out():
    """Against whole meters that did not see the image; sizes differ."""
    logits, labels = images(6, torch.Generator().manual_seed(2), overconfidence=2.0)
    labels[0, :30] = 255
    whole = measured(logits, labels)
    model = ImageScores(sorted_sums(whole.image_sums(), [f"{i}" for i in range(6)])[1])
    found = dict(model.influences(np.ones((1, 6)), classes=True)) | model.linear
    assert set(found) == {"accuracy", "miou", "ece", "sce", *(f"class_ece/{c}" for c in range(K))}
    report = whole.compute(resamples=0)
    for i in range(6):
        kept = [j for j in range(6) if j != i]
        without = measured(logits[kept], labels[kept]).compute(resamples=0)
        for name in ("accuracy", "miou"):
            change = getattr(report, name) - getattr(without, name)
            assert found[name][0, i] == pytest.approx(change, abs=1e-12)
        # An absolute gap is a sum with a given sign, that of all images.
        sign = np.sign(report.top.confidence_sum - report.top.hits)
        gap = sign * (without.top.confidence_sum - without.top.hits)
        change = report.ece - gap.sum() / without.protocol.pixels
        assert found["ece"][0, i] == pytest.approx(change, abs=1e-12)
    mean = np.mean([found[f"class_ece/{c}"] for c in range(K)], 0)
    np.testing.assert_allclose(found["sce"], mean, atol=1e-15)


def test_accuracy_has_a_t_interval():
    """Of images of equal size whose accuracies are symmetric: Student's, times n/(n - 1)."""
    right = [30, 32, 34, 36]
    labels = torch.zeros(4, 40, dtype=torch.int64)
    logits = torch.zeros(4, K, 40, dtype=torch.float64)
    for i, number in enumerate(right):
        logits[i, 0, :number] = 2
        logits[i, 1, number:] = 2
    accuracy = np.array(right) / 40
    margin = student.ppf(0.975, 3) * accuracy.std(ddof=1) / np.sqrt(4) * 4 / 3
    interval = measured(logits, labels).compute().intervals["accuracy"]
    ends = (accuracy.mean() - margin, min(accuracy.mean() + margin, 1.0))
    assert (interval.low, interval.high) == pytest.approx(ends, abs=1e-12)


def test_miou_has_a_plain_t_interval():
    """Of the jackknife: two classes, IoU by image left out, by hand."""
    right = np.array([[30, 4], [25, 8], [28, 2], [36, 1], [20, 9]])  # of 40 and 10 pixels
    labels = (torch.arange(50) >= 40).long().expand(5, 50).contiguous()
    logits = torch.zeros(5, 2, 50, dtype=torch.float64)
    for i, (first, second) in enumerate(right):
        predicted = torch.zeros(50, dtype=torch.int64)
        predicted[first:40] = 1
        predicted[40 : 40 + second] = 1
        logits[i, 0], logits[i, 1] = (predicted == 0) * 2.0, (predicted == 1) * 2.0
    union = np.stack([40 + 10 - right[:, 1], 10 + 40 - right[:, 0]], 1)  # truth + false positives

    def miou(kept):
        return np.mean(right[kept].sum(0) / union[kept].sum(0))

    change = np.array([miou(range(5)) - miou([j for j in range(5) if j != i]) for i in range(5)])
    margin = student.ppf(0.975, 4) * np.sqrt(((change - change.mean()) ** 2).sum() * 5 / 4)
    meter = CalibrationMeter(2, per_image=True)
    meter.update(logits, labels)
    interval = meter.compute().intervals["miou"]
    ends = (miou(range(5)) - margin, miou(range(5)) + margin)
    assert (interval.low, interval.high) == pytest.approx(ends, abs=1e-12)


@pytest.mark.parametrize("few", [(2, 2), (2, 1)])
def test_variances_over_images_and_seeds_add_up(few):
    """Welch's degrees of freedom for equally many seeds, and weighted quantiles, by hand."""
    influences = np.array([[0.3, -0.1, 0.2, -0.4]])
    by_images = 4 / 3 * (influences**2).sum()
    seeds = [(np.array([0.5, 0.8]), few[0]), (np.array([0.1, 0.0]), few[1])]
    down, up = t_margins(influences, seeds, plain=True)
    for margin, (one, other) in ((down, (0.5, 0.1)), (up, (0.8, 0.0))):
        parts = [(by_images, 3), (one, few[0]), (other, few[1])]
        if few[0] == few[1]:
            freedom = (one + other) ** 2 / (one**2 / few[0] + other**2 / few[1])
            parts = [(by_images, 3), (one + other, freedom)]
        quantile = sum(part * student.ppf(0.975, freedom) for part, freedom in parts)
        total = by_images + one + other
        assert margin[0] == pytest.approx(quantile / total * np.sqrt(total))
    none = t_margins(influences, plain=True)
    assert none[:, 0] == pytest.approx(student.ppf(0.975, 3) * np.sqrt(by_images))
    assert t_margins(influences, [(np.zeros(2), 1)], plain=True) == pytest.approx(none)


def test_margins_of_tiny_gaps():
    """The class-j-ECE of a class that is never likely: its variance squared is below 1e-308."""
    influences = np.array([[0.3, -0.1, 0.2, -0.4, 0.1]])
    assert t_margins(influences * 1e-90) * 1e90 == pytest.approx(t_margins(influences))


@pytest.mark.parametrize("numbers", [(2, 2), (2, 5), (5, 2), (3, 10)])
def test_equal_methods_of_any_numbers_of_seeds_are_seldom_called_different(numbers):
    """Normal scores, where the second method varies half as much over seeds: at most 7 %."""
    rng = np.random.default_rng(0)
    called, draws = 0, 2000
    for _ in range(draws):
        scores = [rng.normal(0, scale, n) for scale, n in zip((1, 0.5), numbers, strict=True)]
        seeds = [(np.full(2, s.var(ddof=1) / len(s)), len(s) - 1) for s in scores]
        influences = rng.normal(0, 0.01, (1, 60))  # images decide little
        margin = t_margins(influences, seeds, plain=True)[0, 0]
        called += abs(scores[1].mean() - scores[0].mean() + influences.sum()) > margin
    assert called / draws <= 0.07


def test_a_group_is_one_large_image():
    """Of two images each, against images of twice the pixels; the image table stays as it is."""
    logits, labels = images(24, torch.Generator().manual_seed(12))
    names = [f"{i:02d}" for i in range(24)]
    groups = [f"patient {i // 2}" for i in range(24)]

    def grouped(order, groups=groups):
        meter = CalibrationMeter(K, per_image=True)
        for i in order:
            who = None if groups is None else [groups[i]]
            meter.update(logits[i : i + 1], labels[i : i + 1], names=[names[i]], groups=who)
        return meter.compute()

    report, alone = grouped(range(24)), grouped(range(24), None)
    stitched = measured(
        torch.cat([logits[::2], logits[1::2]], 2),
        torch.cat([labels[::2], labels[1::2]], 1),
        names[::2],
    ).compute()
    assert (report.images.groups, alone.images.groups) == (12, None)
    assert report.images.ece_debiased == pytest.approx(stitched.images.ece_debiased, abs=1e-12)
    for name, interval in stitched.intervals.items():
        if not name.endswith("ace"):  # which is of each image, not of the group
            low, high = report.intervals[name].low, report.intervals[name].high
            assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert report.images.table == alone.images.table
    assert report.worst_images == alone.worst_images
    assert grouped(reversed(range(24))).images == report.images
    assert "over 12 groups of 24 images" in "".join(interval_notes(report))
    for single in (names, [""] * 24):  # groups of one image
        found = grouped(range(24), single)
        assert found.intervals == alone.intervals
    one = grouped(range(24), ["all"] * 24)
    assert set(one.images.withheld.values()) == {"there is only one group"}


def test_names_of_a_sequence():
    assert looks_like_sequence([f"0016E5_{n:05d}.png" for n in range(7959, 8400, 30)])
    assert looks_like_sequence([f"patient{p}_slice_{n}" for p in range(3) for n in range(20)])
    assert not looks_like_sequence(["2007_000032", "2007_000129", "2007_000241", "2007_000799"])
    assert not looks_like_sequence([f"{n:05d}.png" for n in range(50)])
    assert not looks_like_sequence([f"test-{n:04d}" for n in range(0, 600, 3)])  # data.limit
    assert not looks_like_sequence([f"img{n:03d}" for n in range(50)])
    assert looks_like_sequence([f"img{n:03d}" for n in range(0, 50, 2)])
    assert looks_like_sequence([f"frame_{n:04d}.png" for n in range(1, 51)])
    assert not looks_like_sequence(["a.png", "b.png", "c1.png"]) and not looks_like_sequence([])


def test_one_odd_image_makes_the_interval_longer_on_its_side():
    labels = torch.zeros(20, 40, dtype=torch.int64)
    logits = torch.zeros(20, K, 40, dtype=torch.float64)
    logits[:, 0] = 2
    logits[:, 0, ::10] = -2  # nine of ten pixels are right
    logits[7, 0] = -2  # none is
    report = measured(logits, labels).compute()
    interval = report.intervals["accuracy"]
    error = 0.9 / 20  # about the standard error
    assert (
        report.accuracy - interval.low > 4 * error
    )  # a bootstrap's percentile: 0.105 = 2.3 errors
    assert report.accuracy - interval.low > 1.2 * (interval.high - report.accuracy)


def test_miou_needs_two_images_of_each_class():
    logits, labels = images(12, torch.Generator().manual_seed(8))
    labels = labels.clamp(max=1)
    assert "miou" not in measured(logits, labels).compute().intervals  # class 2 is predicted
    labels[3, 0] = 2
    report = measured(logits, labels).compute()
    others = {"ece", "sce", "accuracy", "bias", "image_ace", "foreground_ace"}
    assert set(report.intervals) == others
    why = "class 2 is labelled in only one image"
    assert report.images.withheld == dict.fromkeys(["miou", "dice", "foreground_dice"], why)
    assert f"no interval for mIoU, Dice, Dice without class 0: {why}" in interval_notes(report)
    assert Report.from_dict(report.to_dict()) == report
    labels[4, 0] = 2
    assert "miou" in measured(logits, labels).compute().intervals


def test_few_images_are_said():
    generator = torch.Generator().manual_seed(9)
    said = [interval_notes(measured(*images(n, generator)).compute()) for n in (19, 20)]
    assert ["fewer than 20 images" in "".join(notes) for notes in said] == [True, False]


def test_an_error_above_its_interval_is_explained():
    """On few pixels of a calibrated network of many classes the printed SCE is mostly noise."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(500, 10, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]

    def measure(logits):
        meter = CalibrationMeter(10, per_image=True)
        meter.update(logits, labels)
        return meter.compute()

    calibrated, wrong = measure(logits), measure(9 * logits)
    assert calibrated.sce > calibrated.intervals["sce"].high
    assert calibrated.ece < calibrated.intervals["ece"].high
    assert any(n.startswith("SCE above the interval") for n in interval_notes(calibrated))
    assert wrong.sce < wrong.intervals["sce"].high
    assert not any("above the interval" in note for note in interval_notes(wrong))


def test_classes_and_regions_have_intervals():
    logits, labels = images(12, torch.Generator().manual_seed(10))
    report = measured(logits, labels).compute()
    assert len(report.images.class_intervals["class_ece"]) == K
    for interval, value in zip(
        report.images.class_intervals["class_ece"], report.class_ece, strict=True
    ):
        assert 0 <= interval.low <= value and interval.low < interval.high < 1
    assert report.foreground_dice == pytest.approx(np.mean(report.class_dice[1:]))
    for score in ("dice", "foreground_dice", "image_ace", "foreground_ace"):
        interval = report.intervals[score]
        assert interval.low < getattr(report, score) < interval.high
    for score in ("class_dice", "class_ace"):
        for interval, value in zip(
            report.images.class_intervals[score], getattr(report, score), strict=True
        ):
            assert interval.low < value < interval.high
    part = labels.masked_fill(~class_group([0, 1])(labels), 255)
    region = measured(logits, part).compute()
    assert region.intervals["ece"] != report.intervals["ece"]
    assert region.intervals["ece"].low <= region.ece_debiased <= region.intervals["ece"].high


def test_merged_is_one_shot():
    logits, labels = images(12, torch.Generator().manual_seed(11))
    names = [f"{i:02d}" for i in range(12)]
    parts = [measured(logits[i::3], labels[i::3], names[i::3]) for i in range(3)]
    merged = (parts[2] + parts[0] + parts[1]).compute()
    assert merged.images == measured(logits, labels, names).compute().images


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
    assert report.worst_images[0].ece == pytest.approx(own[expected[0]], abs=1e-6)
    assert report.worst_images[0].pixels == 64
    table = report.images.table
    assert dict(zip(table.names, table.ece, strict=True)) == pytest.approx(own, abs=1e-6)


def test_table_of_images_and_gaps_of_bins_add_up_to_the_report():
    logits, labels = images(30, torch.Generator().manual_seed(7))
    report = measured(logits, labels, [f"{i:02d}.png" for i in range(30)]).compute()
    table, pixels = report.images.table, report.protocol.pixels
    assert sum(table.pixels) == pixels
    assert sum(table.correct) == report.top.hits.sum()
    bias = sum(n * b for n, b in zip(table.pixels, table.bias, strict=True)) / pixels
    assert bias == pytest.approx(report.mean_confidence - report.accuracy, abs=1e-6)
    gaps = (report.top.confidence_sum - report.top.hits) / pixels
    for gap, found in zip(gaps, report.images.bins, strict=True):
        assert found.low <= gap <= found.high
    last = report.images.bins[-1]
    own = []
    for i in range(30):
        top = measured(logits[i : i + 1], labels[i : i + 1]).compute().top
        own.append(abs(top.confidence_sum[-1] - top.hits[-1]) / pixels)
    assert [abs(gap) for _, gap in last.images] == pytest.approx(sorted(own)[:-4:-1])
    few = measured(logits, labels).compute(resamples=0).images.bins
    assert all(math.isnan(found.low) for found in few) and few[-1].images


def test_one_image_has_no_interval():
    report = measured(*images(1, torch.Generator().manual_seed(6))).compute()
    assert report.intervals == {}
    assert set(report.images.withheld.values()) == {"there is only one image"}
    assert set(report.images.withheld) == {"accuracy", "miou", "ece", "sce"}
    assert report.image_ece == pytest.approx(report.ece)
    assert math.isnan(report.ece_debiased)
