"""The hold-out profile: false alarms are as rare as promised, drift is found, files are checked."""

import numpy as np
import pytest
import torch

import segcal
from segcal.metrics.drift import (
    CONFIDENCE_EDGES,
    RATE,
    HoldoutProfile,
    ProfileCounts,
    measure_drift,
    prediction_sums,
)

CLASSES = 4


def images(count, seed, temperature=1.0):
    """(N, C, H, W) logits of images of several kinds, and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    kinds = 2 * torch.randn(count, CLASSES, 1, 1, generator=generator)
    logits = kinds + 1.5 * torch.randn(count, CLASSES, 12, 12, generator=generator)
    draws = torch.rand(count, 1, 12, 12, generator=generator)
    labels = (draws > logits.softmax(1).cumsum(1)).sum(1).clamp(max=CLASSES - 1)
    return logits / temperature, labels


def profile_of(logits, labels, **chosen):
    counts, meter = ProfileCounts(CLASSES), segcal.CalibrationMeter(CLASSES)
    counts.update(logits, labels)
    meter.update(logits, labels)
    points = {"operating_points": {}, "class_sets": {}, **chosen}
    return HoldoutProfile.of(meter.compute(resamples=0), counts, **points)


def drift_of(profile, logits):
    sums = prediction_sums(logits.softmax(1))
    pixels = sums["pixels"][:, None]
    return measure_drift(profile, *((sums[k] / pixels).numpy() for k in ("bins", "predicted")))


@pytest.fixture(scope="module")
def profile():
    return profile_of(*images(300, seed=0))


def test_false_alarms_are_as_rare_as_promised_and_drift_is_found(profile):
    same = [drift_of(profile, images(20, seed)[0]) for seed in range(1, 101)]
    assert np.mean([found.alarm for found in same]) <= 2 * RATE
    assert same[0].image_rate == pytest.approx(RATE, abs=0.01)
    unlike = np.mean([found.unlike.any(0).mean() for found in same])
    assert unlike == pytest.approx(RATE, abs=0.03)
    colder, _ = images(20, 101, temperature=0.5)
    assert drift_of(profile, colder).alarm
    fewer = images(20, 102)[0]
    fewer[:, 0] -= 9  # a class is gone
    found = drift_of(profile, fewer)
    assert found.alarm and found.distances[1] > found.limits[1]
    assert drift_of(profile_of(*images(1, 0)), fewer) is None  # one image tells nothing


def test_atc_expects_the_accuracy_of_the_holdout(profile):
    logits, labels = images(300, seed=0)
    top, predicted = logits.softmax(1).max(1)
    assert profile.accuracy == pytest.approx((predicted == labels).double().mean().item())
    above = (top > profile.atc_threshold).double().mean().item()
    assert above == pytest.approx(profile.accuracy, abs=0.002)


def test_sums_by_hand():
    """Confidence 0.5 is in the bin (0.25, 0.5], 1 in the last one."""
    probs = torch.tensor([[[1.0, 0.5, 0.2], [0.0, 0.5, 0.8]]])  # (1, 2, 3)
    sums = prediction_sums(probs)
    assert sums["predicted"].tolist() == [[2, 1]]
    assert sums["inside"][0].tolist() == pytest.approx([1.5, 0.8])
    assert sums["outside"][0].tolist() == pytest.approx([0.2, 0.5])
    bins = np.zeros(len(CONFIDENCE_EDGES) - 1)
    bins[[1, 3, -1]] = 1
    assert sums["bins"][0].tolist() == bins.tolist()
    sums = prediction_sums(probs, multilabel=True)
    assert sums["pixels"].tolist() == [6] and sums["predicted"].tolist() == [[2, 2]]
    assert sums["confidence"].item() == pytest.approx(1 + 0.5 + 0.8 + 1 + 0.5 + 0.8)


def test_a_profile_survives_its_file_and_others_are_refused(tmp_path):
    chosen = {"operating_points": {"accuracy=0.9": 0.8, "risk=0.01": None}}
    found = profile_of(*images(10, 0), **chosen, class_sets={"0.1": 0.9})
    found.save(tmp_path / "holdout.json")
    again = HoldoutProfile.load(tmp_path / "holdout.json")
    assert again.point() == ("accuracy=0.9", 0.8) and again.point("risk=0.01")[1] is None
    assert again.lam("0.1") == 0.9 and again.atc_threshold == found.atc_threshold
    assert np.array_equal(again.confidence, found.confidence)
    with pytest.raises(ValueError, match="--operate"):
        again.point("accuracy=0.99")
    text = (tmp_path / "holdout.json").read_text()
    for wrong in ("[1]", "{}", text.replace('"images": 10', '"images": 11'), text[:50]):
        (tmp_path / "holdout.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"holdout\.json"):
            HoldoutProfile.load(tmp_path / "holdout.json")
