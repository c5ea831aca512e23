"""`evaluate` measures any module at label resolution, and leaves it as it found it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import segcal
from segcal.metrics.regions import boundary, class_group, interior
from tests.support.ranks import run_on_ranks

K = 4


class Constant(nn.Module):
    """Gives the first channels of its input as logits, wrapped as asked."""

    def __init__(self, wrap=lambda logits: logits, stride=1):
        super().__init__()
        self.wrap, self.stride = wrap, stride
        self.norm = nn.BatchNorm2d(K, affine=False)
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        self.norm(x)
        return self.wrap(x[:, :, :: self.stride, :: self.stride])


def data(n=5, size=(8, 12), seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = 3 * torch.randn(n, K, *size, generator=generator)
    labels = torch.randint(0, K, (n, *size), generator=generator)
    labels[:, 0] = 255
    return inputs, labels


def batches(inputs, labels, size=2):
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def measured(logits, labels, **settings):
    meter = segcal.CalibrationMeter(K, **settings)
    meter.update(logits, labels)
    return meter.compute()


def close(a, b):
    assert a.protocol == b.protocol
    assert a.confusion.tolist() == b.confusion.tolist()
    shared = {name: a.scores[name] for name in b.scores}  # a knows what a calibrator changed too
    assert shared == pytest.approx(b.scores, rel=1e-9)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z: z,
        lambda z: {"out": z, "aux": None},
        lambda z: (z, "more"),
        lambda z: SimpleNamespace(logits=z),
    ],
)
def test_is_the_meter_over_all_batches(wrap):
    inputs, labels = data()
    report = segcal.evaluate(Constant(wrap), batches(inputs, labels), num_classes=K, progress=False)
    close(report, measured(inputs, labels))


def test_settings_are_those_of_the_meter():
    inputs, labels = data()
    settings = {"num_bins": 4, "edge_rule": "left", "ignore_index": 7}
    labels[labels == 255] = 7
    loader = batches((4 * inputs).round() / 4, labels)  # many equal probabilities
    report = segcal.evaluate(Constant(), loader, num_classes=K, progress=False, **settings)
    close(report, measured((4 * inputs).round() / 4, labels, **settings))
    assert report.protocol.num_bins == 4 and report.protocol.edge_rule == "left"


def test_eval_mode_is_enforced_and_every_mode_restored():
    model = nn.Sequential(Constant(), nn.Dropout())
    model[1].eval()
    before = model[0].norm.running_mean.clone()
    segcal.evaluate(model, batches(*data()), num_classes=K, progress=False)
    assert model[0].modes == [False] * 3
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert torch.equal(model[0].norm.running_mean, before)


def test_modes_are_restored_after_an_error():
    model = Constant()
    inputs, labels = data()
    labels[3, 4, 4] = K
    with pytest.raises(ValueError, match="4"):
        segcal.evaluate(model, batches(inputs, labels), num_classes=K, progress=False)
    assert model.training


def test_logits_are_upsampled_to_the_labels():
    inputs, labels = data()
    report = segcal.evaluate(
        Constant(stride=4), batches(inputs, labels), num_classes=K, progress=False
    )
    logits = interpolate(inputs[:, :, ::4, ::4], size=(8, 12), mode="bilinear")
    close(report, measured(logits, labels))


class NeedsMultiplesOf16(Constant):
    def forward(self, x):
        assert x.shape[-2] % 16 == x.shape[-1] % 16 == 0
        return super().forward(x)


@pytest.mark.parametrize("stride", [1, 4])
def test_padding_is_undone(stride):
    """Padded by `evaluate` or by the loader: only the image itself is counted."""
    inputs, labels = data()
    padded = torch.nn.functional.pad(inputs, (0, 4, 0, 8))
    model = NeedsMultiplesOf16(stride=stride)
    by_us = segcal.evaluate(
        model, batches(inputs, labels), num_classes=K, pad_to=16, progress=False
    )
    by_loader = segcal.evaluate(
        model, batches(padded, labels), num_classes=K, padded=True, progress=False
    )
    logits = interpolate(padded[:, :, ::stride, ::stride], size=(16, 16), mode="bilinear")
    expected = measured(logits[:, :, :8, :12], labels)
    close(by_us, expected)
    close(by_loader, expected)


def test_images_larger_than_labels_are_not_guessed_about():
    inputs, labels = data(size=(16, 24))
    small = labels[:, ::2, ::2]
    with pytest.raises(ValueError, match="padded=True"):
        segcal.evaluate(Constant(), batches(inputs, small), num_classes=K, progress=False)
    report = segcal.evaluate(
        Constant(), batches(inputs, small), num_classes=K, padded=False, progress=False
    )
    close(report, measured(interpolate(inputs, size=(8, 12), mode="bilinear"), small))


def test_classification():
    inputs, labels = data(size=(1, 1))
    model = nn.Flatten()
    report = segcal.evaluate(model, batches(inputs, labels[:, 0, 0].clamp(max=3)), num_classes=K)
    close(report, measured(inputs, labels.clamp(max=3)))


def test_transform_regions_and_names():
    inputs, labels = data()
    named = [
        (x, y, [f"b{i}", f"a{i}"][: len(x)]) for i, (x, y) in enumerate(batches(inputs, labels))
    ]
    regions = {"boundary": boundary(1), "interior": interior(1), "few": class_group([2])}
    report = segcal.evaluate(
        Constant(),
        named,
        num_classes=K,
        transform=lambda z: z / 2,
        regions=regions,
        per_image=True,
        class_names="abcd",
        progress=False,
    )
    assert report.changed == 0  # half the logits are of the same class
    close(replace(report, changed=None), measured(inputs / 2, labels, class_names="abcd"))
    assert {image.name for image in report.worst_images} == {"b0", "a0", "b1", "a1", "b2"}
    assert {"ece", "sce", "accuracy", "miou"} <= set(report.intervals)
    parts = report.regions
    assert list(parts) == list(regions)
    assert parts["few"].protocol.region == "few"
    assert parts["few"].protocol.pixels == int((labels == 2).sum())
    both = parts["boundary"].protocol.pixels + parts["interior"].protocol.pixels
    assert both == report.protocol.pixels


def test_names_of_all_images():
    report = segcal.evaluate(
        Constant(),
        batches(*data()),
        num_classes=K,
        per_image=True,
        names=list("vwxyz"),
        progress=False,
    )
    assert {image.name for image in report.worst_images} == set("vwxyz")


def test_wrong_batches_and_models_are_named():
    with pytest.raises(ValueError, match=r"\(inputs, labels\).*dict"):
        segcal.evaluate(Constant(), [{"x": 1}], num_classes=K, progress=False)
    with pytest.raises(ValueError, match="must return logits"):
        segcal.evaluate(Constant(lambda z: {}), batches(*data()), num_classes=K, progress=False)
    with pytest.raises(ValueError, match="'all'"):
        segcal.evaluate(Constant(), [], num_classes=K, regions={"all": boundary()})


def _evaluate_share(rank):
    inputs, labels = data()
    share = slice(rank, None, 2)
    loader = batches(inputs[share], labels[share], 1)  # 3 batches and 2
    model = nn.Sequential(Constant(), nn.Conv2d(K, K, 1))
    nn.init.dirac_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    model = nn.parallel.DistributedDataParallel(model)  # its buffers must not make ranks wait
    names = [f"{i}" for i in range(5)][share]
    report = segcal.evaluate(model, loader, num_classes=K, per_image=True, names=names)
    return {**report.scores, "low": report.intervals["ece"].low}


@pytest.mark.slow
def test_ranks_with_uneven_shares_return_the_whole():
    inputs, labels = data()
    expected = segcal.evaluate(
        Constant(), batches(inputs, labels), num_classes=K, per_image=True, names=list("01234")
    )
    for scores in run_on_ranks(_evaluate_share):
        assert scores.pop("low") == pytest.approx(expected.intervals["ece"].low, rel=1e-9)
        assert scores == pytest.approx(expected.scores, rel=1e-9)
