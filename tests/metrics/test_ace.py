"""ACE by image and class: its literal definition, the loss of the same name, and who counts."""

import math

import numpy as np
import pytest
import torch

import segcal
from segcal.metrics import counting
from tests.support.metric_oracles import tables
from tests.support.synthetic_reports import K, images, synthetic_report


def slow_ace(bins):
    """The mean over bins that are not empty of |mean p - frequency|."""
    gaps = [abs(sum(p - hit for p, hit in b)) / len(b) for b in bins if b]
    return sum(gaps) / len(gaps)


def case(n=4, pixels=40):
    logits, labels = images(n, torch.Generator().manual_seed(0), pixels=pixels)
    labels[0][labels[0] == 2] = 255  # class 2 is not in the first image
    labels[1] = 255  # nothing of the second one counts
    return logits, labels


def measured(logits, labels, num_bins=15):
    meter = segcal.CalibrationMeter(K, num_bins, per_image=True)
    for z, y in zip(logits.split(3), labels.split(3), strict=True):
        meter.update(z, y)
    return meter.compute(resamples=0)


def test_ace_is_its_definition():
    logits, labels = case()
    found = {}
    for i in range(len(logits)):
        _, classes, _ = tables(logits[i : i + 1].softmax(1), labels[i : i + 1])
        found |= {(i, c): slow_ace(classes[c]) for c in range(K) if (labels[i] == c).any()}
    assert len(found) == 2 + 0 + 3 + 3
    report = measured(logits, labels)
    assert report.image_ace == pytest.approx(np.mean(list(found.values())), rel=1e-12)
    expected = np.mean([value for (_, label), value in found.items() if label > 0])
    assert report.foreground_ace == pytest.approx(expected, rel=1e-12)
    for c in range(K):
        expected = np.mean([value for (_, label), value in found.items() if label == c])
        assert report.class_ace[c] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bins", [15, 20])
def test_it_is_the_loss_of_that_name(bins):
    logits, labels = case(n=5)
    loss = segcal.build_loss("nll+ace", bins=bins, beta=1.0)
    expected = loss.terms(logits, labels)["ace"].item()
    assert measured(logits, labels, bins).image_ace == pytest.approx(expected, rel=1e-6)


def test_both_passes_count_it_alike(monkeypatch):
    logits, labels = case()
    compiled = measured(logits, labels)
    monkeypatch.setattr(counting, "compiled", lambda: None)
    in_torch = measured(logits, labels)
    assert in_torch.class_ace == pytest.approx(compiled.class_ace, rel=1e-9)
    assert in_torch.image_ace == pytest.approx(compiled.image_ace, rel=1e-9)


def test_images_in_pieces_and_threads(monkeypatch):
    """An image may be counted in pieces; its ACE is known when all are."""
    logits, labels = case(pixels=1000)
    whole = measured(logits, labels)
    monkeypatch.setattr("segcal.metrics.counting._BLOCK", 64)
    monkeypatch.setattr("segcal.metrics.counting._WORTH_A_THREAD", 1)
    assert measured(logits, labels).class_ace == pytest.approx(whole.class_ace, rel=1e-9)


def test_classes_in_no_image_are_nan():
    logits, labels = case()
    labels[labels == 2] = 255
    report = measured(logits, labels)
    assert math.isnan(report.class_ace[2]) and np.isfinite(report.class_ace[:2]).all()
    assert math.isfinite(report.image_ace)


def test_without_sums_of_images_it_is_nan():
    report = synthetic_report(images=1)
    assert math.isnan(report.image_ace) and np.isnan(report.class_ace).all()


def test_another_number_of_classes_is_refused():
    data = measured(*case()).to_dict()
    data["images"]["class_ace"] = [0.1]
    with pytest.raises(ValueError, match="Expected 3 class_ace, but got 1"):
        segcal.Report.from_dict(data)
