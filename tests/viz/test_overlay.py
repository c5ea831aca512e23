"""The calibration gap of an image: its array, its colours, and the panel."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from segcal.viz import calibration_gap, calibration_overlay, make_overlay
from segcal.viz.overlay import Overlay, hatching
from tests.support.synthetic_reports import SHAPE, predictor


def with_confidence(probs, confidence):
    """The same predictions, made with another confidence."""
    top = probs == probs.max(0)
    return np.where(top, confidence, (1 - confidence) / (len(probs) - 1))


def literal_gap(probs, labels, sigma, ignore_index=255):
    """The formula, pixel by pixel."""
    _, height, width = probs.shape
    gap = np.full((height, width), np.nan)
    reach = int(3 * sigma + 0.5)
    for y in range(height):
        for x in range(width):
            excess = weight = 0.0
            for v in range(max(y - reach, 0), min(y + reach + 1, height)):
                for u in range(max(x - reach, 0), min(x + reach + 1, width)):
                    if labels[v, u] == ignore_index:
                        continue
                    g = math.exp(-((v - y) ** 2 + (u - x) ** 2) / (2 * sigma**2))
                    p = probs[:, v, u]
                    excess += g * (p.max() - (p.argmax() == labels[v, u]))
                    weight += g
            if labels[y, x] != ignore_index:
                gap[y, x] = excess / weight
    return gap


def test_gap_is_the_formula():
    probs, labels = predictor(0.7, shape=(11, 14))
    labels[3:6, 2:9] = 255
    labels[0, 0] = 255
    np.testing.assert_allclose(
        calibration_gap(probs, labels, sigma=1.5), literal_gap(probs, labels, 1.5), atol=1e-6
    )


def test_gap_of_a_calibrated_predictor_is_near_zero():
    ramp = np.linspace(0.3, 1.0, SHAPE[1])
    gap = calibration_gap(*predictor(ramp), sigma=10.0)
    # A Gaussian mean of n = 4 pi sigma^2 coin tosses has standard deviation <= 0.5 / sqrt(n).
    assert np.abs(gap).max() < 5 * 0.5 / math.sqrt(4 * math.pi * 100)
    assert abs(gap.mean()) < 0.01


def test_over_confident_is_above_zero_and_red_under_confident_below_and_blue():
    probs, labels = predictor(0.7)
    for confidence, sign in ((0.99, 1), (0.4, -1)):
        changed = with_confidence(probs, confidence)
        gap = calibration_gap(changed, labels, sigma=10.0)
        assert (sign * gap > 0).all()
        overlay = calibration_overlay(None, changed, labels, sigma=10.0).astype(int)
        assert (sign * (overlay[..., 0] - overlay[..., 2]) > 0).all()


def test_left_over_right_under():
    probs, labels = predictor(0.7)
    half = SHAPE[1] // 2
    confidence = np.where(np.arange(SHAPE[1]) < half, 0.99, 0.4)
    overlay = calibration_overlay(None, with_confidence(probs, confidence), labels, sigma=4.0)
    red_minus_blue = overlay[..., 0].astype(int) - overlay[..., 2]
    assert red_minus_blue[:, : half - 16].mean() > 30
    assert red_minus_blue[:, half + 16 :].mean() < -30


def test_no_gap_leaves_the_image_alone_but_for_its_colours():
    rng = np.random.default_rng(0)
    image = rng.integers(256, size=(*SHAPE, 3), dtype=np.uint8)
    labels = rng.integers(3, size=SHAPE)
    probs = np.eye(3)[labels].transpose(2, 0, 1)  # sure, and right everywhere
    overlay = calibration_overlay(image, probs, labels).astype(float)
    assert (np.ptp(overlay, axis=-1) == 0).all()
    luminance = image @ np.array([0.299, 0.587, 0.114])
    assert np.corrcoef(overlay[..., 0].ravel(), luminance.ravel())[0, 1] > 0.999


def test_ignored_pixels_are_nan_grey_and_without_influence():
    probs, labels = predictor(0.7)
    labels[:, 40:80] = 255
    other = probs.copy()
    other[:, :, 40:80] = np.array([1.0, 0.0, 0.0, 0.0])[:, None, None]
    gap = calibration_gap(probs, labels)
    assert np.isnan(gap[:, 40:80]).all()
    assert np.isfinite(gap[:, :40]).all() and np.isfinite(gap[:, 80:]).all()
    np.testing.assert_array_equal(gap, calibration_gap(other, labels))
    overlay = calibration_overlay(None, probs, labels)
    stripes = overlay[:, 40:80]
    assert (np.ptp(stripes.astype(int), axis=-1) == 0).all()
    assert len(np.unique(stripes)) == 2  # hatched


def test_all_ignored_is_all_hatched():
    probs, _ = predictor(0.7)
    labels = np.full(SHAPE, 255)
    assert np.isnan(calibration_gap(probs, labels)).all()
    overlay = calibration_overlay(None, probs, labels)
    assert len(np.unique(overlay)) == 2
    labels[0, 0] = 0
    np.testing.assert_array_equal(overlay[1:], calibration_overlay(None, probs, labels)[1:])


def test_another_ignore_index():
    probs, labels = predictor(0.7)
    labels = labels.astype(np.int64)
    labels[:10] = -1
    assert np.isnan(calibration_gap(probs, labels, ignore_index=-1)[:10]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_are_taken_as_they_come(dtype):
    probs, labels = predictor(0.7)
    expected = calibration_gap(probs, labels)
    tensor = torch.from_numpy(probs).to(dtype).requires_grad_()
    given = calibration_gap(tensor, torch.from_numpy(labels).long())
    np.testing.assert_allclose(given, expected, atol=0.005)


def test_floating_and_grey_images_are_the_same_image():
    probs, labels = predictor(0.9)
    grey = np.random.default_rng(0).integers(256, size=SHAPE, dtype=np.uint8)
    rgb = np.repeat(grey[..., None], 3, axis=-1)
    expected = calibration_overlay(rgb, probs, labels)
    for image in (grey, grey[..., None], rgb / 255.0, torch.from_numpy(rgb)):
        np.testing.assert_array_equal(calibration_overlay(image, probs, labels), expected)


PROBS, LABELS = predictor(0.7)


def test_what_does_not_fit_is_said():
    for change, words in [
        ({"probs": PROBS[None]}, r"\(C, H, W\).*\(1, 4, 96, 128\)"),
        ({"labels": LABELS[:, :5]}, r"\(H, W\).*\(96, 5\)"),
        ({"labels": LABELS / 1.0}, "integer dtype, but got float64"),
        ({"labels": LABELS + 4}, r"labels in 0\.\.3"),
        ({"probs": np.log(PROBS)}, r"softmax\(0\)"),
        ({"probs": np.full_like(PROBS, np.nan)}, "sum to 1"),
        ({"image": np.zeros((3, *SHAPE), np.uint8)}, r"\(96, 128, 3\).*got \(3, 96, 128\)"),
        ({"image": np.full((*SHAPE, 3), -1.7)}, r"0\.\.1 \(undo the normalisation\)"),
        ({"image": np.zeros((*SHAPE, 3), np.int64)}, "uint8 or floating"),
        ({"sigma": 0.0}, "sigma is 0"),
        ({"limit": 0.0}, "limit is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            calibration_overlay(**{"image": None, "probs": PROBS, "labels": LABELS, **change})


def panel_pixels(png):
    """(H, W, 3) of a panel."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_panel_hatches_what_is_not_counted():
    """Three of the six pictures have labels in them: labels, errors and gap."""
    counted = panel_pixels(make_overlay(None, PROBS, LABELS).png())
    ignored = panel_pixels(make_overlay(None, PROBS, np.full(SHAPE, 255)).png())
    for stripe in np.unique(hatching(SHAPE)):
        grey = np.array([stripe] * 3)
        pictures = 3 * np.mean(hatching(SHAPE) == stripe) / 6
        share = [(pixels == grey).all(-1).mean() for pixels in (counted, ignored)]
        assert share[1] - share[0] == pytest.approx(pictures, rel=0.4)


@pytest.mark.parametrize("image", [None, np.full((*SHAPE, 3), 90, np.uint8)])
def test_panel_is_the_same_png_when_its_arrays_are_read_again(image):
    names = ["<script>", "$x_{", "_hidden", "x" * 200]
    palette = np.arange(15, dtype=np.uint8).reshape(5, 3)
    made = make_overlay(image, PROBS, LABELS, class_names=names, palette=palette, name="a\nb")
    panel = Image.open(io.BytesIO(made.png()))
    assert panel.format == "PNG" and panel.width > 900
    np.testing.assert_array_equal(made.confidence, PROBS.max(0).astype(np.float32))
    np.testing.assert_allclose(made.gap, calibration_gap(PROBS, LABELS), atol=1e-6)
    arrays = {"image": None, **made.arrays}
    assert Overlay("a\nb", **arrays, class_names=names).png() == made.png()


def test_arrays_of_a_file_must_fit_together():
    made = make_overlay(None, PROBS, LABELS)
    for change in (
        {"labels": LABELS[:5]},
        {"prediction": np.full(SHAPE, 4)},
        {"labels": np.full(SHAPE, -1)},
        {"confidence": np.full(SHAPE, 1.5)},
        {"image": np.zeros(SHAPE, np.float32)},
        {"palette": np.zeros((2, 3), np.uint8)},
    ):
        arrays = {"image": None, "palette": None, **made.arrays, **change}
        with pytest.raises(ValueError, match="do not fit"):
            Overlay("a", **arrays, class_names=made.class_names)


def test_names_and_colours_must_fit_the_classes():
    with pytest.raises(ValueError, match="4 class names, but got 2"):
        make_overlay(None, PROBS, LABELS, class_names=["a", "b"])
    with pytest.raises(ValueError, match=r"palette of shape \(4, 3\)"):
        make_overlay(None, PROBS, LABELS, palette=np.zeros((2, 3), np.uint8))


def test_the_uncertainty_of_members_is_three_more_pictures():
    members = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 20, 30))  # (M, H, W, C)
    members = members.transpose(0, 3, 1, 2)
    probs, labels = members.mean(0), np.zeros((20, 30), np.int64)
    entropy = -(members * np.log(members)).sum(1).mean(0)
    information = -(probs * np.log(probs)).sum(0) - entropy
    plain = make_overlay(None, probs, labels)
    made = make_overlay(None, probs, labels, information=information)
    assert "total" not in plain.arrays
    np.testing.assert_allclose(made.total - made.epistemic, entropy / np.log(3), atol=1e-6)
    sizes = [Image.open(io.BytesIO(each.png())).size for each in (plain, made)]
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]
    again = Overlay("", **made.arrays, class_names=made.class_names, image=None, palette=None)
    assert again.png() == made.png()
