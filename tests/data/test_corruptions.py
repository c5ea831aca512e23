"""Laws of every corruption, and the numbers of the literature measured in what comes out."""

import colorsys
import io
import multiprocessing

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from segcal.data import corruptions
from segcal.data.corruptions import CORRUPTIONS, LARGE, SEVERITIES, SMALL, corrupt
from segcal.data.shift import Shift

NAMES = list(CORRUPTIONS)


@pytest.fixture(scope="module")
def photographs():
    """Six square crops of two real photographs."""
    from sklearn.datasets import load_sample_images  # here, so that children start quickly

    found = load_sample_images().images  # (427, 640, 3) uint8
    return [image[top : top + 300, left : left + 300] for image in found
            for top, left in ((0, 0), (120, 170), (100, 340))]  # fmt: skip


def resized(images, side):
    box = Image.Resampling.BOX
    return [np.asarray(Image.fromarray(image).resize((side, side), box)) for image in images]


def distance(image, other):
    return np.abs(image.astype(float) - other.astype(float)).mean()


@pytest.mark.parametrize("name", NAMES)
def test_severity_0_is_clean_and_others_are_not(name, photographs):
    image = photographs[0]
    assert (corrupt(image, name, 0, key="a") == image).all()
    for severity in SEVERITIES:
        before = image.copy()
        changed = corrupt(image, name, severity, key="a")
        assert changed.dtype == np.uint8 and changed.shape == image.shape
        assert (changed != image).any() and (image == before).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [SMALL, 100])
def test_distance_from_the_clean_image_rises_with_severity(name, side, photographs):
    images = resized(photographs, side)
    repeats = range({"fog": 24, "motion_blur": 12, "snow": 8, "frost": 6}.get(name, 2))
    mean = np.array([
        np.mean([distance(corrupt(image, name, severity, key=f"{i} {n}"), image)
                 for i, image in enumerate(images) for n in repeats])
        for severity in SEVERITIES
    ])  # fmt: skip
    rises = np.diff(mean) > 0
    # ImageNet-C has two pairs of severities about level.
    level = {"snow": 2, "fog": 3}.get(name) if side == 100 else None
    if level is not None:
        assert mean[level] == pytest.approx(mean[level - 1], rel=0.1)
        rises = np.delete(rises, level - 1)
    assert rises.all(), mean


@pytest.mark.parametrize("name", NAMES)
def test_random_by_key_name_and_severity_alone(name, photographs):
    image = resized(photographs, 48)[0]
    first = corrupt(image, name, 3, key="a")
    other = corrupt(image, name, 3, key="b")
    np.random.default_rng().random()
    np.random.seed(5)
    assert (corrupt(image, name, 3, key="a") == first).all()
    drawn = name not in ("defocus_blur", "brightness", "contrast", "jpeg", "pixelate")
    assert (other != first).any() == drawn


def in_child(arguments):
    image, name, key = arguments
    return corrupt(image, name, 4, key=key)


def test_other_processes_and_orders_give_the_same(photographs):
    image = resized(photographs, 40)[1]
    jobs = [(image, name, key) for name in NAMES for key in ("x", "ü/\udc80")]
    here = [in_child(job) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.map(in_child, jobs[::-1])[::-1]
    assert all((mine == theirs).all() for mine, theirs in zip(here, there, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_size_and_extreme_values(name):
    for size in ((1, 1), (1, 9), (7, 2), (33, 50), (84, 85), (101, 87), (90, 400)):
        image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        for shown in (image, 0 * image, 0 * image + 255):
            for severity in (1, 5):
                with np.errstate(divide="raise", invalid="raise", over="raise"):
                    changed = corrupt(shown, name, severity, key="a")
                assert changed.shape == shown.shape and changed.dtype == np.uint8


def grey(side, value=128):
    return np.full((side, side, 3), value, np.uint8)


@pytest.mark.parametrize(("side", "table"), [(SMALL, "small"), (84, "small"), (85, "large")])
def test_noise_is_as_strong_as_the_literature_says(side, table):
    for severity in SEVERITIES:
        std, photons, share = (
            getattr(CORRUPTIONS[name], table)[severity - 1][0]
            for name in ("gaussian_noise", "shot_noise", "impulse_noise")
        )
        images = [grey(side)] * (40 if side == SMALL else 6)
        gaussian = [
            corrupt(x, "gaussian_noise", severity, key=str(i)) for i, x in enumerate(images)
        ]
        inside = np.clip(np.random.default_rng(0).normal(128 / 255, std, 10**6), 0, 1).std()
        assert np.std(gaussian) / 255 == pytest.approx(inside, rel=0.02)
        shot = [corrupt(grey(side, 64), "shot_noise", severity, key=str(i)) for i in range(20)]
        if photons >= 12:  # of fewer, some would leave 0..1
            assert np.var(shot) / 255**2 == pytest.approx(64 / 255 / photons, rel=0.05)
        impulse = np.array(
            [corrupt(x, "impulse_noise", severity, key=str(i)) for i, x in enumerate(images)]
        )
        assert (impulse == 0).mean() == pytest.approx(share / 2, rel=0.15)
        assert (impulse == 255).mean() == pytest.approx(share / 2, rel=0.15)


def test_brightness_against_colorsys():
    image = np.random.default_rng(1).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    image[0, 0] = 0
    changed = corrupt(image, "brightness", 3, key="a")
    for pixel, new in zip(image.reshape(-1, 3), changed.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.15, 1))
        np.testing.assert_allclose(new, np.array(expected) * 255, atol=0.51)


def test_contrast_jpeg_and_pixelate_by_hand(photographs):
    image = resized(photographs, LARGE)[2]
    mean = image.mean((0, 1))
    contrast = corrupt(image, "contrast", 2, key="a")
    np.testing.assert_allclose(contrast, mean + 0.3 * (image - mean), atol=0.51)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=10)
    assert (corrupt(image, "jpeg", 4, key="a") == np.asarray(Image.open(file))).all()
    pixelate = corrupt(image, "pixelate", 5, key="a")  # a quarter: blocks of four
    blocks = image.reshape(56, 4, 56, 4, 3).mean((1, 3))
    np.testing.assert_allclose(pixelate[::4, ::4], blocks, atol=1.01)
    assert (pixelate == np.repeat(np.repeat(pixelate[::4, ::4], 4, 0), 4, 1)).all()


@pytest.mark.parametrize(("side", "radius"), [(LARGE, 10), (2 * LARGE, 20), (SMALL, 1.5), (64, 3)])
def test_a_point_out_of_focus_is_a_disk_that_grows_with_the_image(side, radius):
    image = np.zeros((side, side, 3), np.uint8)
    middle = side // 2
    image[middle - 1 : middle + 2, middle - 1 : middle + 2] = 255
    light = corrupt(image, "defocus_blur", 5, key="a")[..., 0].astype(float)
    row, column = np.indices(light.shape)
    away = np.hypot(row - middle, column - middle)
    assert light[away > radius + 4].max() == 0
    # A disk has a second moment of radius squared over 4 along each axis; the square adds 2/3.
    if side >= 2 * SMALL:
        expected = radius**2 / 4 + 2 / 3
        assert (light * (row - middle) ** 2).sum() / light.sum() == pytest.approx(
            expected, rel=0.15
        )


def test_motion_leaves_a_trail_on_one_side():
    image = np.zeros((LARGE, LARGE, 3), np.uint8)
    image[110:114, 110:114] = 255
    light = corrupt(image, "motion_blur", 5, key="a")[..., 0].astype(float)
    rows, columns = np.nonzero(light)
    width, height = np.ptp(columns), np.ptp(rows)
    assert 25 < width < 50 and height <= width + 6  # at most 45 degrees to the horizontal
    assert min(113 - columns.min(), columns.max() - 110) <= 6  # nothing on the other side
    assert light.sum() == pytest.approx(16 * 255, rel=0.1)


def test_fog_is_a_fractal_over_the_image():
    image = grey(LARGE, 255)
    image[::2] = 0
    changed = corrupt(image, "fog", 1, key="a").astype(float)
    assert (changed[..., 0] == changed[..., 1]).all()
    # (x + 1.5 f) / 2.5: white pixels are 255 / 2.5 = 102 brighter than black ones beside them.
    step = changed[::2][1:, :, 0] - (changed[1::2][1:, :, 0] + changed[1::2][:-1, :, 0]) / 2
    assert step.mean() == pytest.approx(-102, abs=2)
    density = changed[::2] / 255 * 2.5 / 1.5
    assert 0 <= density.min() < 0.2 and 0.8 < density.max() <= 1.01


def test_tables_have_five_severities_for_both_sizes():
    for corruption in CORRUPTIONS.values():
        for table in (corruption.small, corruption.large):
            assert len(table) == len(set(table)) == 5 and len({len(row) for row in table}) == 1


def test_filters_equal_those_of_scipy():
    """Fourier and cosine transforms, against sums over neighbours; the border is mirrored."""
    rng = np.random.default_rng(0)
    layer, kernel = rng.random((40, 31)), rng.random((9, 5)).astype(np.float32)
    expected = ndimage.correlate(layer, kernel, mode="mirror")
    np.testing.assert_allclose(corruptions._filter(layer, kernel), expected, atol=1e-4)
    colours = np.stack([layer, layer.T[:31].T, 1 - layer], 2)
    found = corruptions._filter(colours, kernel)
    np.testing.assert_allclose(found[..., 0], expected, atol=1e-4)
    expected = ndimage.gaussian_filter(layer, 3.0, mode="reflect", truncate=8)
    np.testing.assert_allclose(corruptions._blur(layer, 3.0), expected, atol=1e-3)


def test_layers_grow_linearly_and_shrink_to_means_of_areas():
    layer = np.arange(12.0).reshape(3, 4)
    assert corruptions._resize(layer, (3, 2)).tolist() == [[0.5, 2.5], [4.5, 6.5], [8.5, 10.5]]
    grown = corruptions._resize(layer, (3, 8))[0]
    np.testing.assert_allclose(grown, [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3], atol=1e-6)
    rest = corruptions._resize(layer[:, :3], (3, 2))[0]  # 1.5 pixels each
    np.testing.assert_allclose(rest, [(0 + 0.5) / 1.5, (0.5 + 2) / 1.5], atol=1e-6)


def test_what_there_is_not():
    for arguments, word in ((("rain", 1), "rain"), (("fog", 6), "severity"), (("fog", -1), "-1")):
        with pytest.raises(ValueError, match=word):
            Shift(*arguments)
