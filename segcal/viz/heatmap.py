"""The calibration gap of one image: the array, and its colours on top of the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor

from segcal.files import is_distribution
from segcal.viz.figure import OVER, UNDER

LIMIT = 0.5  # the gap at which the colour is full
_STRENGTH = 0.85  # opacity of the full colour: the image stays visible under it
GROUND = 236  # the grey used where there is no image
_DARKEST = 125  # the grey that black becomes below the colours
_HATCH_PERIOD, _HATCH_LINE = 6, 2  # pixels
_HATCH_LIGHT, _HATCH_DARK = 214, 184


def calibration_gap(
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    ignore_index: int = 255,
    sigma: float | None = None,
) -> NDArray[np.float64]:
    """(H, W) confidence minus local accuracy, in -1..1: positive is over-confident.

    A single pixel is right or wrong, so accuracy needs a neighbourhood. Confidence and correctness
    are averaged over the valid pixels with the same Gaussian window, whose weights sum to 1 also at
    borders and beside ignored pixels, and subtracted:

        gap(x) = sum_v g(x - v) (max_c p_c(v) - 1[argmax_c p_c(v) = y(v)]) / sum_v g(x - v)

    Args:
        probs: (C, H, W) probabilities.
        labels: (H, W) integer labels.
        ignore_index: the label that means "do not count this pixel".
        sigma: standard deviation of the window in pixels, cut off at 3 sigma; by default 1/32 of
            the longer side, at least 1.

    Returns:
        float64, NaN where the label is ignored.
    """
    seen = predictions(probs, labels, ignore_index=ignore_index)
    return gap_of(*seen, ignore_index=ignore_index, sigma=sigma)


def gap_of(
    confidence: NDArray[np.float32],
    predicted: NDArray[np.int64],
    target: NDArray[np.int64],
    *,
    ignore_index: int,
    sigma: float | None = None,
) -> NDArray[np.float64]:
    """`calibration_gap` of what `predictions` gives."""
    valid = target != ignore_index
    if sigma is None:
        sigma = max(max(valid.shape) / 32, 1.0)
    if not sigma > 0:
        raise ValueError(f"Expected sigma above 0, but got {sigma}")

    def smooth(values: NDArray[Any]) -> NDArray[np.float64]:
        return gaussian_filter(values.astype(np.float64), sigma, mode="constant", truncate=3.0)

    weight = smooth(valid)
    excess = smooth(np.where(valid, confidence - (predicted == target), 0.0))
    return np.divide(excess, weight, out=np.full(valid.shape, np.nan), where=valid)


def calibration_overlay(
    image: ArrayLike | Tensor | None,
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    ignore_index: int = 255,
    sigma: float | None = None,
    limit: float = LIMIT,
) -> NDArray[np.uint8]:
    """(H, W, 3) RGB: the signed calibration gap, drawn on a pale grey version of the image.

    Red is over-confident and blue is under-confident; the colour is stronger where the gap is
    larger, and absent where it is zero. Ignored pixels are hatched in grey.

    Args:
        image: (H, W, 3) or (H, W), uint8 or floating in 0..1; None for a light grey background.
        probs: (C, H, W) probabilities.
        labels: (H, W) integer labels.
        ignore_index: the label that means "do not count this pixel".
        sigma: see `calibration_gap`.
        limit: the absolute gap at which the colour is full.
    """
    if not limit > 0:
        raise ValueError(f"Expected limit above 0, but got {limit}")
    gap = calibration_gap(probs, labels, ignore_index=ignore_index, sigma=sigma)
    return draw_gap(image, gap, limit)


def draw_gap(
    image: ArrayLike | Tensor | None, gap: NDArray[np.floating[Any]], limit: float = LIMIT
) -> NDArray[np.uint8]:
    """`calibration_overlay` of a gap that is known."""
    colored = gap_colors(gap, pale_image(image, gap.shape)[..., None], limit)
    return np.where(np.isnan(gap)[..., None], hatching(gap.shape), colored)


def gap_colors(
    gap: NDArray[np.floating[Any]], ground: NDArray[Any], limit: float = LIMIT
) -> NDArray[np.uint8]:
    """(H, W, 3) the colours of `gap` (H, W) on top of `ground` (0..255, broadcast to RGB)."""
    opacity = _STRENGTH * np.clip(np.abs(np.nan_to_num(gap)) / limit, 0, 1)[..., None]
    over, under = 255 * np.array(to_rgb(OVER)), 255 * np.array(to_rgb(UNDER))
    color = np.where(gap[..., None] > 0, over, under)  # (H, W, 3)
    return np.round((1 - opacity) * ground + opacity * color).astype(np.uint8)


def hatching(shape: Sequence[int]) -> NDArray[np.uint8]:
    """(H, W, 1) grey diagonal stripes, for ignored pixels."""
    rows, columns = np.indices(tuple(shape))
    stripe = (rows + columns) % _HATCH_PERIOD < _HATCH_LINE
    return np.where(stripe, _HATCH_DARK, _HATCH_LIGHT).astype(np.uint8)[..., None]


def predictions(
    probs: ArrayLike | Tensor, labels: ArrayLike | Tensor, *, ignore_index: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """(H, W) confidence, predicted class and label of one image, after checks.

    Raises:
        ValueError: shapes do not fit, values are not probabilities, or labels are out of range.
    """
    p, y = _array(probs), _array(labels)
    if p.ndim != 3 or y.shape != p.shape[1:]:
        raise ValueError(
            "Expected probabilities of shape (C, H, W) and labels of shape (H, W), "
            f"but got {p.shape} and {y.shape}"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"Expected labels of an integer dtype, but got {y.dtype}")
    valid = y != ignore_index
    bad = y[valid & ((y < 0) | (y >= len(p)))]
    if bad.size:
        raise ValueError(
            f"Expected labels in 0..{len(p) - 1} or {ignore_index}, but got {int(bad[0])}"
        )
    # They may have passed through any dtype on their way here.
    values = torch.from_numpy(p.astype(np.float32, copy=False))
    good = is_distribution(values, 0, rounded_to=torch.bfloat16)
    if (~good.numpy() & valid).any():
        counted, total = p[:, valid], p.sum(0, dtype=np.float64)[valid]
        raise ValueError(
            "Expected probabilities, which are in 0..1 and sum to 1 over the classes, but got "
            f"values {counted.min():.4g}..{counted.max():.4g} with sums "
            f"{total.min():.4g}..{total.max():.4g}; for logits pass logits.softmax(0)"
        )
    confidence, predicted = values.max(0)
    return confidence.numpy(), predicted.numpy(), y.astype(np.int64)


def pale_image(image: ArrayLike | Tensor | None, shape: Sequence[int]) -> NDArray[np.float64]:
    """(H, W) luminance of an image (see `rgb_image`), made so light that colours show on it."""
    if image is None:
        return np.full(shape, float(GROUND))
    luminance = rgb_image(image, shape) @ np.array([0.299, 0.587, 0.114])
    return _DARKEST + (255 - _DARKEST) * luminance / 255


def rgb_image(image: ArrayLike | Tensor, shape: Sequence[int]) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB of an image given as uint8 or as floating in 0..1.

    Raises:
        ValueError: the image has another size than `shape` (H, W), or other values.
    """
    pixels = _array(image)
    if pixels.shape not in ((*shape,), (*shape, 1), (*shape, 3)):
        raise ValueError(
            f"Expected an image of shape {(*shape, 3)} or {(*shape,)}, but got {pixels.shape}"
        )
    if np.issubdtype(pixels.dtype, np.floating):
        if not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(
                "Expected a floating image in 0..1 (undo the normalisation), "
                f"but got {pixels.min():.4g}..{pixels.max():.4g}"
            )
        pixels = np.round(pixels * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"Expected an image of uint8 or floating dtype, but got {pixels.dtype}")
    pixels = pixels.reshape(*shape, -1)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*shape, 3)))


def _array(values: ArrayLike | Tensor) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float().numpy() if values.is_floating_point() else values.numpy()
    return np.asarray(values)
