"""Pictures of one image: its calibration gap, and panels of input, labels and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor

from segcal.metrics.scores import SCORES
from segcal.pixels import is_distribution
from segcal.viz.figure import OVER, UNDER, class_palette, new_figure, plain, png, themed

_LIMIT = 0.5  # the gap at which the colour is full
_STRENGTH = 0.85  # opacity of the full colour: the image stays visible under it
_GROUND = 236  # the grey used where there is no image
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
    limit: float = _LIMIT,
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
    image: ArrayLike | Tensor | None, gap: NDArray[np.floating[Any]], limit: float = _LIMIT
) -> NDArray[np.uint8]:
    """`calibration_overlay` of a gap that is known."""
    colored = gap_colors(gap, pale_image(image, gap.shape)[..., None], limit)
    return np.where(np.isnan(gap)[..., None], hatching(gap.shape), colored)


def gap_colors(
    gap: NDArray[np.floating[Any]], ground: NDArray[Any], limit: float = _LIMIT
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
        return np.full(shape, float(_GROUND))
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


_WIDTH, _TALLEST = 2.7, 5.4  # inches, of a picture; three in a row
_MARGIN, _GAP, _TITLE, _KEY, _SCALE = 0.06, 0.12, 0.26, 0.24, 0.42  # inches
_SHOWN_CLASSES = 14
_FEW_PIXELS = 200  # images with shorter sides are drawn without smoothing
_WRONG = "#e66101"  # orange, to differ from the red and blue of the gap
_RIGHT = "#f4f5f7"
_FRAME = "#c4c8ce"
_CONFIDENCE_MAP = "bone"


def overlay_panel(
    image: ArrayLike | Tensor | None,
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    class_names: Sequence[str] | None = None,
    palette: ArrayLike | None = None,
    ignore_index: int = 255,
    name: str = "",
    sigma: float | None = None,
) -> bytes:
    """A PNG with six pictures: image, labels, prediction, confidence, errors and gap.

    Args:
        image: (H, W, 3) or (H, W), uint8 or floating in 0..1; None if it is not known.
        probs: (C, H, W) probabilities.
        labels: (H, W) integer labels.
        class_names: C names for the key; by default the numbers.
        palette: (C or more, 3) uint8 colours of the classes; by default `class_palette`.
        ignore_index: the label that means "do not count this pixel"; such pixels are hatched.
        name: name of the image; stored as the title of the file, not drawn.
        sigma: see `calibration_gap`.
    """
    seen = predictions(probs, labels, ignore_index=ignore_index)
    return draw_panel(
        image,
        *seen,
        gap_of(*seen, ignore_index=ignore_index, sigma=sigma),
        num_classes=np.shape(probs)[0],
        class_names=class_names,
        palette=palette,
        ignore_index=ignore_index,
        name=name,
    )


def draw_panel(
    image: ArrayLike | Tensor | None,
    confidence: NDArray[np.float32],
    predicted: NDArray[np.int64],
    target: NDArray[np.int64],
    gap: NDArray[np.float64],
    *,
    num_classes: int,
    class_names: Sequence[str] | None = None,
    palette: ArrayLike | None = None,
    ignore_index: int = 255,
    name: str = "",
) -> bytes:
    """`overlay_panel` of what `predictions` and `gap_of` give."""
    colors, names = _colors_and_names(num_classes, palette, class_names)
    valid = target != ignore_index
    stripes = hatching(target.shape)  # (H, W, 1)
    wrong = np.where(predicted != target, 1, 0)
    error_colors = np.round(255 * np.array([to_rgb(_RIGHT), to_rgb(_WRONG)])).astype(np.uint8)
    pictures = {
        "image": None if image is None else rgb_image(image, target.shape),
        "labels": np.where(valid[..., None], colors[np.where(valid, target, 0)], stripes),
        "prediction": colors[predicted],
        "confidence (%)": 100 * confidence,
        "errors": np.where(valid[..., None], error_colors[wrong], stripes),
        SCORES["bias"].heading: draw_gap(image, gap),
    }
    seen = _classes_seen(predicted, target[valid], len(colors))
    key = [Patch(facecolor=tuple(colors[c] / 255), label=plain(names[c], 16)) for c in seen]
    columns = _key_columns([str(patch.get_label()) for patch in key])
    with themed():
        figure, axes = _grid(pictures, key_rows=0 if image is None else -(-len(key) // columns))
        _add_scales(figure, axes)
        if image is None:
            axes[0].legend(handles=key, loc="center left", title="classes", alignment="left")
        else:
            _add_key(axes[0], key, columns)
        return png(figure, title=name)


def _colors_and_names(
    num_classes: int, palette: ArrayLike | None, class_names: Sequence[str] | None
) -> tuple[NDArray[np.uint8], list[str]]:
    colors = np.asarray(class_palette(num_classes) if palette is None else palette, dtype=np.uint8)
    if colors.ndim != 2 or colors.shape[1] != 3 or len(colors) < num_classes:
        raise ValueError(f"Expected a palette of shape ({num_classes}, 3), but got {colors.shape}")
    names = [str(c) for c in range(num_classes)] if class_names is None else list(class_names)
    if len(names) != num_classes:
        raise ValueError(f"Expected {num_classes} class names, but got {len(names)}")
    return colors[:num_classes], names


def _grid(pictures: Mapping[str, NDArray[Any] | None], key_rows: int) -> tuple[Figure, list[Axes]]:
    """Two rows of three pictures with their names above, and room for key and scales below."""
    height, width = next(p.shape[:2] for p in pictures.values() if p is not None)
    w, h = _WIDTH, min(_WIDTH * height / width, _TALLEST)
    key = key_rows * _KEY
    total_w = 2 * _MARGIN + 3 * w + 2 * _GAP
    total_h = 2 * (_TITLE + h) + key + _SCALE + 2 * _MARGIN
    figure = new_figure(total_w, total_h, layout=None)
    axes = []
    for index, (name, picture) in enumerate(pictures.items()):
        row, column = divmod(index, 3)
        left = _MARGIN + column * (w + _GAP)
        bottom = total_h - _MARGIN - (row + 1) * (_TITLE + h) - row * key
        ax = figure.add_axes((left / total_w, bottom / total_h, w / total_w, h / total_h))
        ax.set_anchor("NW")
        axes.append(ax)
        if picture is None:
            ax.axis("off")
            continue
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, color=_FRAME, linewidth=0.6)
        ax.set_title(name, fontsize=9.5, loc="left", pad=4)
        if picture.ndim == 2:
            ax.imshow(picture, cmap=_CONFIDENCE_MAP, vmin=0, vmax=100, interpolation="nearest")
        else:
            ax.imshow(picture, interpolation=_smoothing(picture))
    return figure, axes


def _add_scales(figure: Figure, axes: Sequence[Axes]) -> None:
    """Add the colour scales of confidence, errors and gap below the lower row."""
    confidence, errors, gap = axes[3:]
    ramp = np.linspace(-_LIMIT, _LIMIT, 255)[None]
    gap_map = ListedColormap(gap_colors(ramp, np.full((1, 1, 1), _GROUND))[0] / 255)
    bound = round(100 * _LIMIT)
    _add_scale(figure, confidence, _CONFIDENCE_MAP, 0, 100, ["0", "50", "100"])
    _add_scale(figure, gap, gap_map, -bound, bound, [f"under ≤ −{bound}", "0", f"over ≥ {bound}"])
    swatches = [
        Patch(facecolor=_WRONG, label="wrong"),
        Patch(facecolor=_RIGHT, edgecolor=_FRAME, label="right"),
        Patch(facecolor="#d6d6d6", hatch="////", edgecolor="#b8b8b8", label="not counted"),
    ]
    _add_key(errors, swatches, columns=3)


def _add_key(ax: Axes, patches: Sequence[Patch], columns: int) -> None:
    """Add a key of colours below the axes, as wide as it needs to be."""
    ax.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(-0.02, 0.0),
        ncols=columns,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _key_columns(labels: Sequence[str]) -> int:
    """The number of columns of labels that fit the width of three pictures."""
    widest = 0.42 + 0.07 * max(map(len, labels), default=1)  # inches: swatch, then letters
    return max(1, min(int(3 * _WIDTH / widest), 7))


def _add_scale(
    figure: Figure, ax: Axes, cmap: str | Colormap, low: int, high: int, ticks: Sequence[str]
) -> None:
    inch = 1 / (ax.get_position().height * figure.get_figheight())  # 1 is the height of the axes
    bar = ax.inset_axes((0.0, -0.19 * inch, 1.0, 0.1 * inch))
    colorbar = figure.colorbar(
        ScalarMappable(Normalize(low, high), cmap), cax=bar, orientation="horizontal"
    )
    colorbar.outline.set_visible(False)
    colorbar.set_ticks([low, (low + high) / 2, high], labels=ticks)
    bar.tick_params(length=0, labelsize=8, pad=2)
    first, _, last = bar.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")


def _classes_seen(
    predicted: NDArray[np.int64], target: NDArray[np.int64], num_classes: int
) -> list[int]:
    """The classes with the most pixels in labels and prediction, by number."""
    count = np.bincount(predicted.ravel(), minlength=num_classes)
    count += np.bincount(target, minlength=num_classes)
    most = np.argsort(-count, kind="stable")[:_SHOWN_CLASSES]
    return sorted(int(c) for c in most if count[c])


def _smoothing(picture: NDArray[Any]) -> str:
    return "nearest" if max(picture.shape[:2]) < _FEW_PIXELS else "auto"


_SMALL_WIDTH, _SMALL_TALLEST = 1.7, 2.6  # inches, of a picture
_SMALL_GAP, _HEAD, _SIDE = 0.06, 0.26, 1.25


@dataclass(frozen=True)
class ShiftView:
    """One image under one shift.

    Attributes:
        name: of the shift.
        image: (H, W, 3) uint8; None if there is none.
        probs: (C, H, W) by name of the post-hoc method; the first decides the prediction shown.
    """

    name: str
    image: np.ndarray | None
    probs: Mapping[str, np.ndarray]


def shift_panel(
    views: Sequence[ShiftView],
    labels: np.ndarray,
    *,
    palette: ArrayLike | None = None,
    ignore_index: int = 255,
    name: str = "",
) -> bytes:
    """PNG of one image under shifts: image, prediction, and the gap after each post-hoc method.

    Args:
        views: one per row, the clean image first.
        labels: (H, W) integer labels, the same for all.
        palette: (C or more, 3) uint8 colours of the classes; by default `class_palette`.
        ignore_index: the label that means "do not count this pixel"; such pixels are hatched.
        name: name of the image; stored as the title of the file, not drawn.
    """
    methods = list(views[0].probs)
    colors = class_palette(len(views[0].probs[methods[0]])) if palette is None else palette
    colors = np.asarray(colors, dtype=np.uint8)
    headings = ["image", "prediction"]
    headings += ["gap" if m == methods[0] else f"gap, {m.upper()}" for m in methods]
    height, width = labels.shape
    w, h = _SMALL_WIDTH, min(_SMALL_WIDTH * height / width, _SMALL_TALLEST)
    total_w = _SIDE + len(headings) * (w + _SMALL_GAP)
    total_h = _HEAD + len(views) * (h + _SMALL_GAP)
    with themed():
        figure = new_figure(total_w, total_h, layout=None)
        for row, view in enumerate(views):
            _, predicted, _ = predictions(view.probs[methods[0]], labels, ignore_index=ignore_index)
            pictures = [
                None if view.image is None else rgb_image(view.image, labels.shape),
                colors[predicted],
            ]
            pictures += [
                calibration_overlay(view.image, view.probs[m], labels, ignore_index=ignore_index)
                for m in methods
            ]
            bottom = total_h - _HEAD - (row + 1) * h - row * _SMALL_GAP
            for column, picture in enumerate(pictures):
                left = _SIDE + column * (w + _SMALL_GAP)
                ax = figure.add_axes((left / total_w, bottom / total_h, w / total_w, h / total_h))
                ax.axis("off")
                if picture is not None:
                    ax.imshow(picture, interpolation=_smoothing(picture))
                if row == 0:
                    ax.set_title(headings[column], fontsize=9.5, loc="left", pad=4)
            figure.text(
                0.06 / total_w,
                (bottom + h / 2) / total_h,
                plain(view.name, 20),
                va="center",
                fontsize=9,
            )
        return png(figure, title=name, dpi=120)
