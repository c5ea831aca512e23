"""Volumes: what equals the same voxels seen as slices, and volumes that come in parts."""

import pytest
import torch

from segcal.losses import build_loss
from segcal.metrics import CalibrationMeter, update_together
from segcal.metrics.regions import boundary, interior
from tests.support.framework_batches import CLASSES, batches

SIZE = (9, 8, 7)


def volumes(count=3):
    return batches(count, images=1, size=SIZE)


def as_slices(tensor):
    """(N, …, D, H, W) as (N · D, …, H, W)."""
    return tensor.movedim(-3, 1).flatten(0, 1)


def assert_same(report, other, scores=None):
    for name in scores or report.scores:
        assert getattr(report, name) == pytest.approx(getattr(other, name), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("spec", ["nll", "fl+mdca", "dicece+mdca+cp", "brier+dca", "ls+mmce"])
def test_the_loss_of_a_volume_is_that_of_its_slices(spec):
    ((logits, labels),) = batches(1, images=2, size=SIZE)
    planes = build_loss(spec)(as_slices(logits), as_slices(labels))
    assert float(build_loss(spec)(logits, labels)) == pytest.approx(float(planes), rel=1e-5)


def test_the_meter_of_a_volume_is_that_of_its_slices():
    whole, planes = CalibrationMeter(CLASSES), CalibrationMeter(CLASSES)
    for logits, labels in volumes():
        whole.update(logits, labels)
        planes.update(as_slices(logits), as_slices(labels))
    assert_same(whole.compute(), planes.compute())
    assert whole.compute().protocol.images == 3  # a volume is one image
    assert planes.compute().protocol.images == 3 * SIZE[0]


def test_volumes_of_one_slice_are_images():
    """Scores, intervals, regions and the worst images."""
    regions = (boundary(1), interior(1))
    volume, image = ([CalibrationMeter(CLASSES, per_image=True) for _ in range(3)] for _ in "ab")
    for logits, labels in batches(4, images=2, size=(8, 7)):
        deep = (logits[:, :, None], labels[:, None])
        for meters, (x, y) in ((image, (logits, labels)), (volume, deep)):
            update_together(meters, x, y, inside=[None, *(region(y) for region in regions)])
    for one, other in zip(volume, image, strict=True):
        assert one.compute() == other.compute()
    assert volume[0].compute().intervals


def near_another_label(labels, width):
    """Literally: whether another label lies within `width` along every axis."""
    found = torch.zeros(labels.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, labels.shape)).tolist():
        near = labels[tuple(slice(max(p - width, 0), p + width + 1) for p in place)]
        found[tuple(place)] = bool((near != labels[tuple(place)]).any())
    return found


@pytest.mark.parametrize("width", [1, 2])
def test_edges_have_three_dimensions(width):
    labels = torch.zeros(SIZE, dtype=torch.long)
    labels[4:, 2:5, 3:] = 1
    labels[8, 7, 0] = 255
    expected = near_another_label(labels, width)
    assert torch.equal(boundary(width)(labels[None])[0], expected)
    assert torch.equal(interior(width)(labels[None])[0], ~expected)
    assert expected.any() and not expected.all()


def test_edges_of_a_volume_whose_slices_are_alike_are_those_of_a_slice():
    plane = batches(1, images=1, size=(8, 7))[0][1]
    volume = plane[:, None].expand(1, 5, 8, 7)
    assert torch.equal(boundary(2)(volume), boundary(2)(plane)[:, None].expand(1, 5, 8, 7))
