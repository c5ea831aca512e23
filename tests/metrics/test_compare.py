"""Two models on the same images: what the difference is, and how often its interval is right."""

import numpy as np
import pytest
import torch

from segcal import CalibrationMeter
from segcal.cli import main
from segcal.metrics import mean_intervals, paired_differences
from segcal.metrics.compare import Difference, compare_models
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
    for meters in ([first], [first, first]):
        found = mean_intervals(meters)
        for name, interval in first.compute().intervals.items():
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
    meter = measured(*images(5, torch.Generator().manual_seed(3)))
    for difference in paired_differences([meter], [meter]).values():
        assert (difference.value, difference.low, difference.high) == (0, 0, 0)
        assert not difference.sure


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


def test_rare_classes_have_no_interval_of_miou(tmp_path, capsys):
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
    paths = [str(tmp_path / f"{i}.npz") for i in (0, 1)]
    for path, meter in zip(paths, meters, strict=True):
        meter.save(path)
    assert main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert f"| {100 * found.value:+.2f} (no interval) |" in out
    assert "no interval for mIoU: class 2 is labelled in only one image" in out


def test_command(tmp_path, capsys):
    first, second = (measured(*seen) for seen in two_models(60, torch.Generator().manual_seed(6)))
    paths = [tmp_path / "first" / "state.npz", tmp_path / "second.npz"]
    for path, meter in zip(paths, (first, second), strict=True):
        path.parent.mkdir(exist_ok=True)
        meter.save(path)
    assert main(["compare", str(paths[0].parent), str(paths[1]), "--resamples", "100"]) == 0
    found = paired_differences([first], [second], resamples=100)
    *_, header, _, row = (line.split("|") for line in capsys.readouterr().out.splitlines())
    assert row[1].strip() == str(paths[1])
    row = dict(zip((name.strip() for name in header), (cell.strip() for cell in row), strict=True))
    ece = found["ece"]
    assert not ece.sure and ece.high < 0  # one seed
    assert row["ECE (%)"] == (
        f"{100 * ece.value:+.2f} ({100 * ece.low:+.2f} to {100 * ece.high:+.2f})"
    )
    assert row["SCE (1e-3)"].startswith(f"{1000 * found['sce'].value:+.2f}")

    assert main(["compare", str(paths[1])]) == 2
    assert "Expected two states or more to compare, but got 1" in capsys.readouterr().err
    CalibrationMeter(K + 1, per_image=True).save(paths[1])
    assert main(["compare", *map(str, paths)]) == 2
    error = capsys.readouterr().err
    assert "num_classes 3 and 4" in error and str(paths[1]) in error and error.count("\n") == 1


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
