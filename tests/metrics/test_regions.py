"""Regions are the pixels their names say, and a meter over them is the ordinary meter."""

import re

import pytest
import torch

from segcal import CalibrationMeter
from segcal.metrics.regions import boundary, class_group, interior, named_regions


def labels_by_hand():
    return torch.tensor([[[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]])


@pytest.mark.parametrize(("width", "columns"), [(1, [3, 4]), (2, [2, 3, 4, 5]), (9, range(6))])
def test_boundary_by_hand(width, columns):
    expected = torch.zeros(1, 3, 6, dtype=torch.bool)
    expected[..., list(columns)] = True
    assert torch.equal(boundary(width)(labels_by_hand()), expected)
    assert torch.equal(interior(width)(labels_by_hand()), ~expected)


@pytest.mark.parametrize(("width", "dtype"), [(1, torch.uint8), (2, torch.int64), (4, torch.uint8)])
def test_boundary_is_its_definition(width, dtype):
    generator = torch.Generator().manual_seed(width)
    labels = torch.randint(0, 3, (2, 3, 4), generator=generator)
    labels = labels.repeat_interleave(4, 1).repeat_interleave(4, 2)
    labels[labels == 2] = 255
    got = boundary(width)(labels.to(dtype))
    for n in range(2):
        for i in range(12):
            for j in range(16):
                window = labels[
                    n, max(i - width, 0) : i + width + 1, max(j - width, 0) : j + width + 1
                ]
                assert got[n, i, j] == bool((window != labels[n, i, j]).any())


def test_a_boundary_wider_than_the_image_is_all_of_it():
    labels = torch.zeros(2, 5, 7, dtype=torch.int64)
    labels[0, 4, 6] = 1
    inside = boundary(10**12)(labels)
    assert inside[0].all() and not inside[1].any()


def test_constant_labels_have_no_boundary():
    assert not boundary(3)(torch.full((1, 8, 8), 7)).any()


def test_a_class_outside_the_region_is_no_class_of_it():
    """Of 8 pixels of classes 1 and 2, all right but two that are predicted as background."""
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    logits = torch.nn.functional.one_hot(labels.clone(), 3) * 4.0
    logits[2], logits[6], logits[0] = torch.tensor([[4.0, 0, 0], [4.0, 0, 0], [0, 4.0, 0]])
    for name, ious in (("foreground", [3 / 4, 3 / 4]), ("classes:1", [3 / 4])):
        meter = CalibrationMeter(3, per_image=True, region=name)
        inside = named_regions([name], 3)[name](labels)
        for _ in range(2):
            image = logits.T[None, :, None], labels.where(inside, 255)[None, None]
            meter.update(*image)
        report = meter.compute()
        assert report.miou == pytest.approx(sum(ious) / len(ious))
        assert torch.tensor(report.class_iou).isnan().sum() == 3 - len(ious)
        for score in ("miou", "dice"):  # both images are alike
            assert report.intervals[score].low == pytest.approx(getattr(report, score))


def test_regions_add_up_to_all():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 12, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (2, 3, 4), generator=generator)
    labels = labels.repeat_interleave(4, 1).repeat_interleave(4, 2).to(torch.uint8)
    labels[0, 0] = 255

    def counted(region):
        meter = CalibrationMeter(4)
        part = labels if region is None else labels.masked_fill(~region(labels), 255)
        meter.update(logits, part)
        return meter.compute()

    whole = counted(None)
    for a, b in [(boundary(1), interior(1)), (class_group([0, 2]), class_group([1, 3]))]:
        parts = counted(a), counted(b)
        assert min(part.protocol.pixels for part in parts) > 0
        assert sum(part.classes.count for part in parts).tolist() == whole.classes.count.tolist()
        assert sum(part.confusion for part in parts).tolist() == whole.confusion.tolist()


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="width must be an integer >= 1"):
        boundary(0)
    with pytest.raises(ValueError, match=r"\(N, H, W\) or \(N, D, H, W\), but got \(5,\)"):
        boundary(1)(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one class"):
        class_group([])


def test_regions_by_name():
    labels = labels_by_hand()
    named = named_regions(["boundary:2", "interior:2", "classes:0+1", "classes:1", "foreground"], 2)
    assert torch.equal(named["boundary:2"](labels), boundary(2)(labels))
    assert torch.equal(named["interior:2"](labels), interior(2)(labels))
    assert named["classes:0+1"](labels).all()
    assert torch.equal(named["classes:1"](labels), labels == 1)
    assert torch.equal(named["foreground"](labels), labels != 0)


def test_regions_of_sigmoid_outputs_are_of_decisions():
    """Each class has its own edges; a group of classes is their decisions, in all pixels."""
    second = torch.zeros(1, 3, 6, dtype=torch.int64)
    second[0, 0] = 1
    labels = torch.stack([labels_by_hand(), second], 1)
    names = ["boundary:1", "interior:1", "classes:1", "foreground"]
    named = named_regions(names, 2, multilabel=True)
    edges = torch.stack([boundary(1)(labels_by_hand()), boundary(1)(second)], 1)
    assert torch.equal(named["boundary:1"](labels), edges)
    assert torch.equal(named["interior:1"](labels), ~edges)
    assert named["classes:1"](labels)[:, 1].all() and not named["classes:1"](labels)[:, 0].any()
    present = ((labels_by_hand() == 1) | (second == 1)).unsqueeze(1)
    assert torch.equal(named["foreground"](labels), present.expand(1, 2, 3, 6))


def test_other_region_names_are_refused():
    for name in ("boundary", "boundary:0", "boundary:1+2", "interior:-1", "classes:", "classes:2"):
        with pytest.raises(ValueError, match=f"classes below 2, but got '{re.escape(name)}'"):
            named_regions([name], 2)
