"""Augmentation: image and mask move together, padding is ignored, nothing has a memory."""

import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from segcal.data.samples import ArrayPart, Batches, Samples
from segcal.data.transforms import Augmentation, Augmenter, normalise, resize_square

RECIPE = Augmentation(base_size=40, scale=(0.5, 2.0), crop_size=36, flip=0.5)


def coordinates(h=50, w=60):
    """An image whose red is 4 times the column and whose green is 4 times the row of a pixel."""
    image = np.zeros((h, w, 3), np.uint8)
    image[..., 0], image[..., 1] = 4 * np.arange(w), 4 * np.arange(h)[:, None]
    return image


def test_image_and_mask_stay_aligned_to_half_a_pixel():
    """A mask of coordinates must name the pixel nearest to the one the image was sampled at."""
    augment = Augmenter(RECIPE, ignore_index=255)
    image = coordinates()
    for seed in range(40):
        for channel in (0, 1):
            out, mask = augment(image, image[..., channel] // 4, seed=(seed,))
            assert out.shape == (36, 36, 3) and mask.shape == (36, 36)
            kept = mask != 255
            distance = np.abs(out[..., channel] / 4 - mask)[kept]
            assert kept.sum() > 300 and distance.max() <= 0.5 + 1 / 8  # 1/8: colours are rounded


def test_padding_is_ignored_in_masks_and_black_in_images():
    augment = Augmenter(Augmentation(crop_size=50), ignore_index=200)
    image, mask = np.full((30, 44, 3), 9, np.uint8), np.full((30, 44), 3, np.uint8)
    out, out_mask = augment(image, mask, seed=(0,))
    assert (out_mask[:30, :44] == 3).all() and (out[:30, :44] == 9).all()
    assert (out_mask[30:] == 200).all() and (out_mask[:, 44:] == 200).all()
    assert (out[30:] == 0).all() and (out[:, 44:] == 0).all()


def test_short_side_is_uniform_in_the_scale_range():
    augment = Augmenter(Augmentation(base_size=20, scale=(0.5, 2.0)), ignore_index=255)
    image = np.zeros((30, 60, 3), np.uint8)
    sides = [augment(image, None, seed=(i,))[0].shape for i in range(400)]
    short = np.array([h for h, _, _ in sides])
    assert short.min() == 10 and short.max() == 40 and abs(short.mean() - 25) < 1.5
    assert all(abs(w - 2 * h) <= 1 for h, w, _ in sides)  # the aspect is kept


def test_flip_is_independent_of_the_scale():
    """Every step drawing from an equal stream of its own would flip exactly the small ones."""
    augment = Augmenter(Augmentation(base_size=20, scale=(0.5, 2.0), flip=0.5), ignore_index=255)
    image = np.zeros((30, 60, 3), np.uint8)
    image[:, :30] = 255
    flipped, small = [], []
    for i in range(400):
        out, _ = augment(image, None, seed=(i,))
        flipped.append(out[0, 0, 0] == 0)
        small.append(out.shape[0] < 25)
    assert 0.4 < np.mean(flipped) < 0.6
    assert abs(np.corrcoef(flipped, small)[0, 1]) < 0.15


def test_cifar_crop_is_a_shift_by_up_to_four():
    augment = Augmenter(Augmentation(pad=4, crop_size=8), ignore_index=255)
    image = np.arange(1, 65, dtype=np.uint8).reshape(8, 8, 1).repeat(3, axis=2)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    places = set()
    for i in range(600):
        out, _ = augment(image, None, seed=(i,))
        matches = [
            (y, x)
            for y in range(9)
            for x in range(9)
            if (padded[y : y + 8, x : x + 8] == out).all()
        ]
        assert len(matches) == 1
        places.update(matches)
    assert len(places) == 81  # every shift, the whole frame of padding included


def samples(seed=0):
    images = np.random.default_rng(1).integers(0, 256, (6, 30, 44, 3), dtype=np.uint8)
    part = ArrayPart(images, images[..., 0] // 16, [str(i) for i in range(6)])
    half = (0.5, 0.5, 0.5)
    augmenter = Augmenter(RECIPE, ignore_index=255)
    return Samples(part, range(6), mean=half, std=half, augmenter=augmenter, seed=seed)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    one, two = samples(), samples()
    _ = [two[(7, i)] for i in (3, 1, 4)]  # a past must not matter
    assert all(equal(one[(2, i)], two[(2, i)]) for i in (5, 0, 3))
    assert not equal(one[(2, 0)], one[(3, 0)])
    assert not equal(one[(2, 0)], samples(seed=1)[(2, 0)])
    assert equal(one[4], one[(0, 4)]) and equal(one[-2], one[4])
    with pytest.raises(IndexError):
        one[6]


def test_worker_processes_change_nothing():
    order = [(1, i) for i in (4, 2, 0, 5)]
    alone, shared = (
        list(DataLoader(samples(), sampler=order, batch_size=2, num_workers=n)) for n in (0, 2)
    )
    assert all(equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_images_are_read_here_if_their_preparation_cannot_be_sent():
    """As the functions of a FILE.py; from Python 3.14 on, workers are not forked by default."""

    class Prepared(list):
        prepare = staticmethod(lambda image: image)

    multiprocessing.set_start_method("spawn", force=True)
    try:
        (found,) = Batches(Prepared([torch.ones(2)]), workers=2, pin=False)
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert found.tolist() == [[1, 1]]


def test_normalise_against_the_formula():
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    got = normalise(image, mean, std)
    for c in range(3):
        expected = (image[..., c] / 255 - mean[c]) / std[c]
        np.testing.assert_allclose(got[c].numpy(), expected, atol=1e-6)
    assert got.is_contiguous() and got.dtype == torch.float32


def test_resize_square_averages_when_it_shrinks():
    image = np.zeros((4, 4, 3), np.uint8)
    image[::2, ::2] = 200
    assert (resize_square(image, 2) == 50).all()
    assert resize_square(image, 9).shape == (9, 9, 3)


def test_impossible_recipes_are_refused():
    for name, value in (
        ("scale", (2.0, 0.5)),
        ("scale", (0.0, 1.0)),
        ("crop_size", 0),
        ("base_size", -3),
        ("pad", -1),
        ("flip", 1.5),
    ):
        with pytest.raises(ValueError, match=name):
            Augmentation(**{name: value})
