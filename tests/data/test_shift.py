"""Test images rotated and classes thinned out, against formulas written out by hand."""

import math

import numpy as np
import pytest
import torch

from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.data.corruptions import CORRUPTIONS
from segcal.data.shift import Shift, imbalanced, parse_shifts, rotate, shifted_part
from segcal.data.splits import shifted as build_shifted
from tests.support.datasets import write_cifar


def rotated_literally(image, degrees):
    """Bilinear, pixel by pixel: where does each pixel of the rotated image come from?"""
    height, width = image.shape[:2]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    out = np.zeros(image.shape)
    for row in range(height):
        for column in range(width):
            x, y = column - (width - 1) / 2, (height - 1) / 2 - row  # y grows upward
            # Turning back clockwise finds the point that came here.
            from_x, from_y = cos * x + sin * y, -sin * x + cos * y
            c, r = from_x + (width - 1) / 2, (height - 1) / 2 - from_y
            if not (-0.5 <= c < width - 0.5 and -0.5 <= r < height - 0.5):
                continue
            left, top = math.floor(c), math.floor(r)
            for i in (0, 1):
                for j in (0, 1):
                    weight = (1 - abs(r - top - i)) * (1 - abs(c - left - j))
                    i_in, j_in = np.clip(top + i, 0, height - 1), np.clip(left + j, 0, width - 1)
                    out[row, column] += weight * image[i_in, j_in]
    return out


@pytest.mark.parametrize(("degrees", "size"), [(15, (28, 28)), (60, (9, 14)), (-20, (9, 14))])
def test_rotated_images_are_bilinear(degrees, size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = rotated_literally(image, degrees)
    difference = np.abs(rotate(image, degrees) - expected)
    assert np.percentile(difference, 98) <= 1  # of 255: rounding
    # At the very rim a rounding error decides whether a pixel is in or out.
    assert (difference > 1.01).mean() < 0.02


def test_a_quarter_turn_is_counter_clockwise():
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert (rotate(image, 90) == np.rot90(image)).all()
    assert (rotate(image, 0) == image).all()


def test_corners_are_black():
    rotated = rotate(np.full((28, 28, 3), 255, np.uint8), 45)
    assert not rotated[0, 0].any() and not rotated[-1, -1].any() and (rotated[14, 14] == 255).all()


def test_only_test_images_are_rotated():
    upright = build_data(DataConfig("digits", augment=False), seed=0)
    rotated = build_data(DataConfig("digits", augment=False, rotation=30), seed=0)
    assert rotated.test.names == upright.test.names
    for part in ("train", "holdout"):
        mine, theirs = getattr(rotated, part)[3], getattr(upright, part)[3]
        assert torch.equal(mine[0], theirs[0])
    shown = rotated.test.image(5)
    assert (shown == rotate(upright.test.image(5), 30)).all()
    image, label = rotated.test[5]
    np.testing.assert_allclose(image[0].numpy(), (shown[..., 0] / 255 - 0.5) / 0.5, atol=1e-6)
    assert label == upright.test[5][1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fog:3", [("fog", 3)]),
        ("fog", [("fog", 3)]),
        ("fog:1,3,5, snow:2,contrast", [("fog", 1), ("fog", 3), ("fog", 5), ("snow", 2),
                                        ("contrast", 3)]),
        ("all", [(name, 3) for name in CORRUPTIONS]),
        ("all:1,5", [(name, s) for s in (1, 5) for name in CORRUPTIONS]),
        ("fog,all", [("fog", 3), *((name, 3) for name in CORRUPTIONS if name != "fog")]),
        ("rotation:45,-7.5", [("rotation", 45.0), ("rotation", -7.5)]),
        ("domain:sketch,domain:art", [("domain", "sketch"), ("domain", "art")]),
    ],
)  # fmt: skip
def test_shifts_by_name(text, expected):
    shifts = parse_shifts(text)
    assert [(shift.name, shift.value) for shift in shifts] == expected
    assert parse_shifts(",".join(map(str, shifts))) == shifts


def test_shifts_that_there_are_not():
    for text, word in (
        ("", "gaussian_noise"),
        ("fogg", "fogg"),
        *((text, "severity") for text in ("fog:6", "fog:0", "fog:1.5", "fog:1,9", "all:x")),
        ("fog,4", "fog:4"),
        ("fog:", "value"),
        ("rotation", "degrees"),
        ("rotation:nan", "degrees"),
        ("domain", "domain:NAME"),
        ("3", "'3'"),
    ):
        with pytest.raises(ValueError, match=word):
            parse_shifts(text)


@pytest.mark.parametrize("name", ["scenes", "digits"])
@pytest.mark.parametrize("shift", [Shift(name, 4) for name in ("fog", "snow", "jpeg")], ids=str)
def test_labels_and_other_parts_stay(name, shift):
    config = DataConfig(name, augment=False, limit=3)
    data = build_data(config, seed=0)
    test = build_shifted(data, config, shift).test
    assert test.names == data.test.names and len(test) == 3
    for index in (2, 0):
        (image, label), (clean, expected) = test[index], data.test[index]
        assert torch.equal(label, expected) and image.shape == clean.shape
        assert not torch.equal(image, clean)
        shown = torch.from_numpy(test.image(index).copy()).permute(2, 0, 1)
        torch.testing.assert_close(image, (shown / 255 - 0.5) / 0.5)
        name_of, part = test.names[index], data.test
        expected_image = shift.apply(part.image(index), key=name_of)
        assert (test.image(index) == expected_image).all()
    assert torch.equal(data.test[0][0], build_data(config, seed=0).test[0][0])


def test_severity_0_is_the_clean_part():
    data = build_data(DataConfig("scenes", limit=2), seed=0)
    clean = shifted_part(data.test.part, Shift("snow", 0))
    for index in data.test.indices:
        (image, label), (same, expected) = clean.read(index), data.test.part.read(index)
        assert (image == same).all() and (label == expected).all()


def test_what_is_random_in_a_shift_depends_on_the_image_not_on_its_place():
    few = DataConfig("scenes", limit=3)
    data = build_data(few, seed=0)
    whole = build_data(DataConfig("scenes"), seed=7)
    noise = Shift("gaussian_noise", 2)
    mine = build_shifted(data, few, noise).test
    place = whole.test.names.index(data.test.names[1])
    assert torch.equal(mine[1][0], build_shifted(whole, few, noise).test[place][0])


def test_shifts_that_do_not_fit():
    for name, shift, word in (
        ("scenes", Shift("rotation", 15), "masks"),
        ("digits", Shift("domain", "art"), "pacs"),
    ):
        config = DataConfig(name)
        with pytest.raises(ValueError, match=word):
            build_shifted(build_data(config, seed=0), config, shift)


@pytest.mark.parametrize("factor", [10, 100])
def test_imbalance_follows_the_paper(factor):
    classes = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 5000))
    chosen = imbalanced(classes, num_classes=10, factor=factor, seed=0)
    counts = np.bincount(classes[chosen])
    assert counts.tolist() == [int(5000 * factor ** (-c / 9)) for c in range(10)]
    assert counts[0] == 5000 and counts[9] == 5000 // factor
    assert len(set(chosen)) == len(chosen) and (np.diff(chosen) > 0).all()
    again = imbalanced(classes, num_classes=10, factor=factor, seed=0)
    other = imbalanced(classes, num_classes=10, factor=factor, seed=1)
    assert (again == chosen).all() and set(other) != set(chosen)


def test_imbalanced_digits_have_a_balanced_test_set():
    full = build_data(DataConfig("digits"), seed=0)
    data = build_data(DataConfig("digits", imbalance=10, augment=False), seed=3)
    classes = [int(part[i][1]) for part in (data.train, data.holdout) for i in range(len(part))]
    counts = np.bincount(classes, minlength=10)
    smallest = counts[0]  # of all classes before, because the first keeps as many
    assert counts.tolist() == [int(smallest * 10 ** (-c / 9)) for c in range(10)]
    assert data.test.names == full.test.names
    assert not set(data.train.names) & set(data.holdout.names)
    again = build_data(DataConfig("digits", imbalance=10), seed=4)
    assert again.train.names == data.train.names  # whatever the seed of the training


def test_imbalanced_cifar(tmp_path, monkeypatch):
    """Each of the five files has one image of class 1 and one of class 7, and no other class."""
    write_cifar(tmp_path, hundred=False)
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    config = DataConfig("cifar10", root=str(tmp_path), imbalance=10)
    with pytest.raises(ValueError, match=r"at most 0, the size of the smallest class, but got 10"):
        build_data(config, seed=0)


def test_options_that_do_not_fit():
    for options, word in (
        ({"name": "digits", "imbalance": 0.5}, "at least 1"),
        ({"name": "digits", "imbalance": 1e4}, "at most 1"),
        ({"name": "scenes", "rotation": 15}, "data.rotation"),
        ({"name": "scenes", "imbalance": 10}, "data.imbalance"),
        ({"name": "digits", "domain": "art"}, "pacs"),
        ({"name": "digits", "train_domain": "others"}, "data.train_domain"),
    ):
        with pytest.raises(ValueError, match=word):
            build_data(DataConfig(**options))
