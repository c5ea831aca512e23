"""Two models on the same images: what the difference is, and how often its interval is right."""

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from segcal import CalibrationMeter
from segcal.metrics import mean_intervals, paired_differences
from segcal.metrics.compare import FIXED, ONE_SEED, Difference, compare_models
from segcal.metrics.meter import say_once
from tests.support.synthetic_reports import K, images, measured

SCORES = ("ece", "sce", "accuracy", "miou")


def two_models(n, generator, sharpness=0.75):
    """The same images seen by a model that is too sure, and by one that is less so."""
    logits, labels = images(n, generator)
    shaken = logits + 0.5 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return (logits, labels), (sharpness * shaken, labels)


@pytest.mark.parametrize("sharpness", [0.75, 1.0])
def test_intervals_cover_the_large_sample_value(sharpness):
    generator = torch.Generator().manual_seed(0)
    large = [CalibrationMeter(K), CalibrationMeter(K)]
    for _ in range(5):
        for meter, seen in zip(large, two_models(4000, generator, sharpness), strict=True):
            meter.update(*seen)
    before, after = (meter.compute() for meter in large)
    covered = dict.fromkeys(SCORES, 0)
    for _ in range(100):
        first, second = (measured(*seen) for seen in two_models(40, generator, sharpness))
        found = paired_differences([first], [second], resamples=100)
        for name in SCORES:
            truth = getattr(after, name) - getattr(before, name)
            covered[name] += found[name].low <= truth <= found[name].high
    assert min(covered.values()) >= 90, covered


def test_paired_interval_is_narrower_than_the_two_apart():
    first, second = (measured(*seen) for seen in two_models(60, torch.Generator().manual_seed(1)))
    found = paired_differences([first], [second])["accuracy"]
    apart = [meter.compute().intervals["accuracy"] for meter in (first, second)]
    assert found.high - found.low < 0.8 * np.hypot(*(i.high - i.low for i in apart))


def test_interval_of_a_mean_of_models():
    """One model: that of its report, once or twice. Several: about their mean."""
    names = [f"im{i:02d}" for i in range(40)]
    models = two_models(40, torch.Generator().manual_seed(3))
    first, second = (measured(*seen, names=names) for seen in models)
    for meters in ([first], [first, first], [[first, first]]):
        found = mean_intervals(meters)
        for name in SCORES:
            interval = first.compute().intervals[name]
            ends = (found[name].low, found[name].high)
            assert ends == pytest.approx((interval.low, interval.high), abs=1e-12)
    both = mean_intervals([first, second])
    for name in SCORES:
        values = [getattr(meter.compute(), name) for meter in (first, second)]
        assert both[name].low <= np.mean(values) <= both[name].high
    with pytest.raises(ValueError, match="is in one alone"):
        mean_intervals([first, measured(*images(3, torch.Generator()))])


def test_values_are_differences_of_reports_and_means_over_seeds():
    generator = torch.Generator().manual_seed(2)
    logits, labels = images(7, generator)
    others = [logits * factor for factor in (0.5, 0.8)]
    first = [measured(logits, labels)]
    second = [measured(other, labels) for other in others]
    found = paired_differences(first, second)
    for name in SCORES:
        mean = np.mean([getattr(meter.compute(), name) for meter in second])
        expected = mean - getattr(first[0].compute(), name)
        assert found[name].value == pytest.approx(expected, abs=1e-12)
        assert found[name].low <= found[name].value <= found[name].high


def test_a_model_does_not_differ_from_itself():
    generator = torch.Generator().manual_seed(3)
    seeds = [measured(*seen) for seen in two_models(5, generator)]
    for found in (
        paired_differences(seeds[:1], seeds[:1]),
        paired_differences(seeds, seeds, same_trainings=True),
        paired_differences(seeds, seeds, fixed=True),
    ):
        for difference in found.values():
            assert (difference.value, difference.low, difference.high) == (0, 0, 0)
            assert not difference.sure
    apart = paired_differences(seeds, seeds)["ece"]  # two trainings may be equal by chance
    assert apart.value == 0 and apart.low < 0 < apart.high


def seeds_of(accuracies):
    """A meter for each, of 4 equal images of 100 pixels."""
    labels = torch.zeros(4, 100, dtype=torch.int64)
    meters = []
    for accuracy in accuracies:
        logits = torch.zeros(4, K, 100, dtype=torch.float64)
        logits[:, 1] = (torch.arange(100) >= 100 * accuracy) * 4.0 - 2
        meters.append(measured(logits, labels, [f"{i}" for i in range(4)]))
    return meters


def test_variance_over_seeds_by_hand():
    """Equal images tell nothing: the t interval of the seeds is left.

    Two and three seeds: the quantiles of both are weighted by their variances.
    """
    first, second = [0.80, 0.90], [0.60, 0.70, 0.62]
    parts = [np.var(first, ddof=1) / 2, np.var(second, ddof=1) / 3]
    quantile = np.average(student.ppf(0.975, [1, 2]), weights=parts)
    margin = quantile * np.sqrt(sum(parts))
    found = paired_differences(seeds_of(first), seeds_of(second))["accuracy"]
    difference = 0.64 - 0.85
    expected = (difference, difference - margin, difference + margin)
    assert (found.value, found.low, found.high) == pytest.approx(expected, abs=1e-9)
    assert found.note == "" and not found.sure  # two and three seeds

    mean = mean_intervals(seeds_of(second))["accuracy"]
    margin = student.ppf(0.975, 2) * np.sqrt(parts[1])
    assert (mean.low, mean.high) == pytest.approx((0.64 - margin, 0.64 + margin), abs=1e-9)
    fixed = mean_intervals(seeds_of(second), fixed=True)["accuracy"]
    assert (fixed.low, fixed.high) == pytest.approx((0.64, 0.64), abs=1e-9)

    third = [0.5, 0.62, 0.51]  # after a calibrator, say
    changes = np.subtract(third, second)
    margin = student.ppf(0.975, 2) * changes.std(ddof=1) / np.sqrt(3)
    same = paired_differences(seeds_of(second), seeds_of(third), same_trainings=True)["accuracy"]
    expected = (changes.mean() - margin, changes.mean() + margin)
    assert (same.low, same.high) == pytest.approx(expected, abs=1e-9) and same.sure


def test_no_difference_is_beyond_1():
    found = paired_differences(seeds_of([0.1, 0.9]), seeds_of([0.2, 0.7]))["accuracy"]
    assert (found.low, found.high) == (-1.0, 1.0) and not found.sure


def test_one_seed_is_never_sure():
    better, worse = seeds_of([0.9]), seeds_of([0.5, 0.51])
    for first, second in ((worse, better), (better, worse), (worse[:1], better)):
        found = paired_differences(first, second)["accuracy"]
        assert found.note == ONE_SEED and not found.sure
        fixed = paired_differences(first, second, fixed=True)["accuracy"]
        assert fixed.note == FIXED and fixed.sure
        assert (fixed.low, fixed.high) == (found.low, found.high)
    with pytest.raises(ValueError, match="each training"):
        paired_differences(worse, better, same_trainings=True)


def test_equal_methods_are_seldom_called_different():
    """Seeds with a factor, a bias and noise of their own: 5 % are expected, 7 % allowed.

    With images as the only source of chance, most of these were sure.
    """
    generator = torch.Generator().manual_seed(12)

    def trained(logits, labels):
        factor = (0.15 * torch.randn(1, generator=generator)).exp()
        bias = 0.3 * torch.randn(K, 1, generator=generator)
        noise = 0.3 * torch.randn(logits.shape, generator=generator)
        return measured(factor * (logits + bias + noise), labels, names)

    names = [f"{i:02d}" for i in range(40)]
    called = {False: [], True: []}
    for _ in range(80):
        seen = images(40, generator)
        models = [[trained(*seen) for _ in range(3)] for _ in range(2)]
        for fixed, every in called.items():
            found = paired_differences(*models, fixed=fixed, resamples=20)
            every.append([found[name].sure for name in ("ece", "sce", "accuracy")])
    assert (np.mean(called[False], 0) <= 0.07 + 2 * np.sqrt(0.07 * 0.93 / 80)).all()
    assert np.mean(called[True], 0)[0] > 0.3


def test_groups_are_the_units_of_a_comparison():
    generator = torch.Generator().manual_seed(13)
    names = [f"{i:02d}" for i in range(20)]

    def grouped(seen, groups):
        meter = CalibrationMeter(K, per_image=True)
        meter.update(*seen, names=names, groups=groups)
        return meter

    first, second = two_models(20, generator)
    alone = paired_differences([measured(*first, names)], [measured(*second, names)])
    single = paired_differences([grouped(first, names)], [grouped(second, names)])
    assert single == alone
    of_two = [name[0] + str(int(name[1]) // 2) for name in names]
    pairs = paired_differences([grouped(first, of_two)], [grouped(second, of_two)])
    assert pairs["ece"].value == pytest.approx(alone["ece"].value) and pairs != alone
    with pytest.raises(ValueError, match="same groups"):
        paired_differences([grouped(first, of_two)], [grouped(second, names)])
    with pytest.raises(ValueError, match="two groups"):
        paired_differences([grouped(first, ["a"] * 20)], [grouped(second, ["a"] * 20)])


def test_order_of_the_images_does_not_matter():
    logits, labels = images(6, torch.Generator().manual_seed(4))
    names = [f"{i}.png" for i in range(6)]
    second = measured(0.5 * logits, labels, names)
    reversed_ = measured(0.5 * logits.flip(0), labels.flip(0), names[::-1])
    first = measured(logits, labels, names)
    assert paired_differences([first], [second]) == paired_differences([first], [reversed_])


def test_what_cannot_be_paired():
    logits, labels = images(3, torch.Generator().manual_seed(5))
    meter = measured(logits, labels, ["a", "b", "c"])
    with pytest.raises(ValueError, match="Expected meters of two models, but got 1 and 0"):
        paired_differences([meter], [])
    with pytest.raises(ValueError, match="same images, but 'c' is in one alone"):
        paired_differences([meter], [measured(logits, labels, ["a", "b", "d"])])
    with pytest.raises(ValueError, match="equal settings, but got per_image True and False"):
        paired_differences([meter], [CalibrationMeter(K)])
    with pytest.raises(ValueError, match="per_image=True"):
        paired_differences([CalibrationMeter(K)], [CalibrationMeter(K)])
    fewer = labels.clone()
    fewer[0, 0] = 255
    with pytest.raises(ValueError, match="same pixels, but image 'a' has other labels"):
        paired_differences([meter], [measured(logits, fewer, ["a", "b", "c"])])
    one = measured(logits[:1], labels[:1])
    with pytest.raises(ValueError, match="at least two images to resample, but got 1"):
        paired_differences([one], [one])


def test_other_images_of_the_same_names_and_sizes():
    generator = torch.Generator().manual_seed(7)
    first, second = (images(3, generator) for _ in range(2))
    names = ["a", "b", "c"]
    with pytest.raises(ValueError, match="same pixels, but image 'a' has other labels"):
        paired_differences([measured(*first, names)], [measured(*second, names)])


def test_shifts_of_the_same_images():
    """Meters of a model may differ in their labels if those of the other differ in the same way."""
    logits, labels = images(12, torch.Generator().manual_seed(10))
    names = [f"{i:02d}" for i in range(12)]
    rolled = labels.roll(1, 0)
    first, second = (
        [measured(scale * logits, seen, names) for seen in (labels, rolled)] for scale in (1, 0.5)
    )
    found = paired_differences([first], [second])["ece"]
    singles = [
        paired_differences([a], [b])["ece"].value for a, b in zip(first, second, strict=True)
    ]
    assert found.value == pytest.approx(np.mean(singles))
    with pytest.raises(ValueError, match="same pixels, but image '00' has other labels"):
        paired_differences([first], [second[::-1]])
    with pytest.raises(ValueError, match="equally many shifts"):
        paired_differences([first], [second[:1]])


def test_images_without_names_are_matched_by_order(caplog):
    say_once.cache_clear()
    logits, labels = images(3, torch.Generator().manual_seed(8))
    meter = measured(logits, labels)
    flipped = measured(logits.flip(0), labels.flip(0))
    with pytest.raises(ValueError, match="image number 1, without a name to match it by, has oth"):
        paired_differences([meter], [flipped])
    paired_differences([meter], [measured(0.5 * logits, labels)], resamples=1)
    assert "matched in the order in which they were counted" in caplog.text
    caplog.clear()
    named = [measured(scale * logits, labels, ["a", "b", "c"]) for scale in (1, 0.5)]
    paired_differences(named[:1], named[1:], resamples=1)
    assert not caplog.text


def test_rare_classes_have_no_interval_of_miou():
    logits, labels = images(8, torch.Generator().manual_seed(9))
    labels = labels.clamp(max=1)
    labels[0, 0] = 2
    names = [f"{i}" for i in range(8)]
    meters = [measured(scale * logits, labels, names) for scale in (1.0, -1.0)]
    found = paired_differences(meters[:1], meters[1:])["miou"]
    reports = [meter.compute() for meter in meters]
    assert found.value == pytest.approx(reports[1].miou - reports[0].miou)
    assert np.isnan(found.low) and np.isnan(found.high) and not found.sure
    # Equal predictions have equal mIoU, however rare the classes.
    scaled = measured(0.5 * logits, labels, names)
    same = paired_differences(meters[:1], [scaled])["miou"]
    assert (same.value, same.low, same.high, same.withheld) == (0, 0, 0, "")


def test_best_is_marked_only_where_every_interval_says_so():
    logits, labels = images(60, torch.Generator().manual_seed(3))
    names = [f"{i:02d}" for i in range(60)]
    sharp, calm = (measured(factor * logits, labels, names) for factor in (4.0, 1.0))
    found = compare_models({"sharp": [sharp], "calm": [calm]}, fixed=True, resamples=100)
    assert found.differences == {
        "calm": paired_differences([sharp], [calm], fixed=True, resamples=100)
    }
    assert found.differences["calm"]["ece"].high < 0 and found.best["ece"] == "calm"
    twins = compare_models(
        {"sharp": [sharp], "calm": [calm], "twin": [calm]}, fixed=True, resamples=100
    )
    assert not twins.best  # neither of the twins is better than the other
    assert not compare_models({"sharp": [sharp], "calm": [calm]}, resamples=100).best  # one seed
    two = {"sharp": [sharp, sharp], "calm": [calm, calm]}
    for trainings in (None, {"sharp": [1, 2], "calm": [1, 2]}):
        pairs = compare_models(two, trainings=trainings, resamples=100)
        assert pairs.differences["calm"] == paired_differences(
            *two.values(), same_trainings=trainings is not None, resamples=100
        )
        assert pairs.best["ece"] == "calm"
    seeds = compare_models({"sharp": [sharp, sharp], "calm": [calm]}, resamples=100)
    assert seeds.seeds == {"sharp": 2, "calm": 1}
    assert seeds.differences["calm"]["ece"].value == pytest.approx(
        calm.compute(resamples=0).ece - sharp.compute(resamples=0).ece, abs=1e-12
    )


def test_a_difference_of_rounding_is_not_sure():
    """Means over shifts of equal accuracies differ by 1e-17."""
    assert not Difference(1e-17, 1e-17, 2e-17).sure
    assert not Difference(-1e-17, -2e-17, -1e-17).sure
    assert Difference(0.02, 0.01, 0.03).sure and Difference(-0.02, -0.03, -0.01).sure
