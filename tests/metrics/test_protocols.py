"""Protocols of averaging: by hand, by slow definitions, and what they have in common."""

import json

import pytest
import torch

from segcal import CalibrationMeter, Report
from segcal.evaluation.measure import measure
from segcal.metrics.protocols import (
    PROTOCOLS,
    check_protocols,
    describe_protocol,
    scores_by_protocol,
)
from segcal.sources import Batch, Source
from tests.support.metric_oracles import ece, tables

EVERY = ("pooled", "image", "foreground", "batch:2", "batch:3")


class Images(Source):
    """Images of different sizes, in a given order, as a source of predictions."""

    name, num_classes, ignore_index, class_names = "images", 3, 255, ()

    def __init__(self, order=range(5)):
        self.order, self.skipped, self.num_images = order, {}, len(order)

    def __iter__(self):
        for index in self.order:
            logits, labels = image(index)
            yield Batch([f"im{index}"], "logits", logits, labels)


def image(index):
    generator = torch.Generator().manual_seed(index)
    logits = 3 * torch.randn(1, 3, 6, 4 + index, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (1, 6, 4 + index), generator=generator)
    labels[:, 0, : index + 1] = 255
    return logits, labels


def found(order=range(5), protocols=EVERY):
    return measure(Images(order), {"none": None}, protocols=protocols, resamples=0)["none"].report


def slow_ece(indices):
    """ECE of the pixels of some images, by its definition."""
    top = [[] for _ in range(15)]
    for index in indices:
        logits, labels = image(index)
        for pixels, more in zip(top, tables(logits.softmax(1), labels)[0], strict=True):
            pixels += more
    return ece(top), sum(map(len, top))


def weighted(groups):
    values, weights = zip(*map(slow_ece, groups), strict=True)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def test_each_protocol_is_its_definition():
    report = found()
    by_protocol = {name: scores["ece"] for name, scores in report.protocols.items()}
    singles = [slow_ece([index])[0] for index in range(5)]
    assert by_protocol.pop("pooled") == report.ece
    assert by_protocol.pop("image") == pytest.approx(sum(singles) / 5, rel=1e-12)
    assert by_protocol.pop("batch:2") == pytest.approx(weighted([[0, 1], [2, 3], [4]]), rel=1e-12)
    assert by_protocol.pop("batch:3") == pytest.approx(weighted([[0, 1, 2], [3, 4]]), rel=1e-12)
    meter = CalibrationMeter(3)
    for index in range(5):
        logits, labels = image(index)
        meter.update(logits, torch.where(labels == 0, 255, labels))
    assert by_protocol.pop("foreground") == pytest.approx(meter.compute().ece, rel=1e-12)
    assert not by_protocol


def test_scores_by_hand():
    """Two images of two classes: four pixels, three right at 0.8; one pixel, wrong at 0.6."""
    meter = CalibrationMeter(2, per_image=True)
    for confidence, labels in ((0.8, [0, 0, 0, 1]), (0.6, [1])):
        probs = torch.tensor([confidence, 1 - confidence]).view(1, 2, 1).expand(1, 2, len(labels))
        meter.update_probs(probs, torch.tensor([labels]), names=[f"{confidence}"])
    got = scores_by_protocol(["image", "batch:1", "batch:9"], meter.compute(), meter)
    assert got["image"] == pytest.approx(
        {"accuracy": 0.375, "miou": 0.1875, "ece": 0.325, "sce": 0.325}
    )
    assert got["batch:1"] == pytest.approx({"accuracy": 0.6, "miou": 0.3, "ece": 0.16, "sce": 0.16})
    assert got["batch:9"]["ece"] == pytest.approx(meter.compute().ece)


def test_the_order_of_images_does_not_matter():
    one, other = found(), found([3, 0, 4, 2, 1])
    for name in EVERY:
        assert other.protocols[name] == pytest.approx(one.protocols[name], rel=1e-12)


def test_averages_of_parts_are_larger():
    """ECE is a norm of sums: the fewer images are pooled, the larger it is."""
    pooled, by_two, by_one = (
        found(protocols=[name]).protocols[name]["ece"] for name in ("pooled", "batch:2", "batch:1")
    )
    assert pooled < by_two < by_one


def test_they_survive_json():
    report = found()
    assert set(report.protocols) == set(EVERY)
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert again.protocols == report.protocols


@pytest.mark.parametrize("probs", [False, True])
def test_an_image_without_any_class_leaves_the_means_defined(probs):
    """By hand: nothing is present or predicted in the second of three images."""
    z = torch.tensor([[[4.0, -4.0]], [[-4.0, -4.0]], [[4.0, 4.0]]])  # (N, K = 1, 2)
    labels = torch.tensor([[[1, 0]], [[0, 0]], [[1, 0]]])
    meter = CalibrationMeter(1, per_image=True, multilabel=True)
    (meter.update_probs if probs else meter.update)(z.sigmoid() if probs else z, labels)
    found = scores_by_protocol(["image", "batch:1", "batch:2"], meter.compute(), meter)
    assert found["image"]["miou"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["batch:1"]["miou"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["batch:2"]["miou"] == pytest.approx((4 * 1 + 2 * 1 / 2) / 6)
    assert found["image"]["accuracy"] == pytest.approx(5 / 6)


def test_nothing_counted_is_nan():
    meter = CalibrationMeter(3, per_image=True)
    got = scores_by_protocol(["image", "batch:4"], meter.compute(), meter)
    assert all(value != value for scores in got.values() for value in scores.values())


def test_other_names_are_refused():
    for name in ("", "Image", "batch", "batch:", "batch:0", "batch:N", "image:2"):
        with pytest.raises(ValueError, match="Expected protocols among pooled"):
            check_protocols(["pooled", name])


def test_every_protocol_is_described():
    shown = {describe_protocol(name.replace("N", "7")) for name in PROTOCOLS}
    assert len(shown) == len(PROTOCOLS) and any("batches of 7 images" in text for text in shown)
