"""Pictures of one image: its calibration gap, and panels of input, labels and prediction."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, maximum_filter, minimum_filter
from torch import Tensor

from segcal.files import utf8
from segcal.metrics.objects import Crop
from segcal.metrics.scores import SCORES
from segcal.pixels import is_distribution, resolve_ignore_index
from segcal.viz.style import LIGHT, OVER, UNDER, class_palette

_LIMIT = 0.5  # the gap at which the colour is full
_STRENGTH = 0.85  # opacity of the full colour: the image stays visible under it
_GROUND = 236  # the grey used where there is no image
_DARKEST = 125  # the grey that black becomes below the colours
_HATCH_PERIOD, _HATCH_LINE = 6, 2  # pixels
_HATCH_LIGHT, _HATCH_DARK = 214, 184
WRONG, RIGHT = "#e66101", "#f4f5f7"  # orange, to differ from the red and blue of the gap


def calibration_overlay(
    image: ArrayLike | Tensor | None,
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    ignore_index: int | None = None,
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
        ignore_index: the label that means "do not count this pixel"; by default 255, or -100
            beyond 255 classes.
        sigma: see `calibration_gap`.
        limit: the absolute gap at which the colour is full.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit}, but the colour needs a gap above 0 to be full at.")
    gap = calibration_gap(probs, labels, ignore_index=ignore_index, sigma=sigma)
    return draw_gap(image, gap, limit)


def calibration_gap(
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    ignore_index: int | None = None,
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
        ignore_index: as for `calibration_overlay`.
        sigma: standard deviation of the window in pixels, cut off at 3 sigma; by default 1/32 of
            the longer side, at least 1.

    Returns:
        float64, NaN where the label is ignored.
    """
    return _gap(*_predictions(probs, labels, ignore_index), sigma)


def _gap(
    confidence: NDArray[np.float32],
    predicted: NDArray[np.int64],
    target: NDArray[np.int64],
    valid: NDArray[np.bool_],
    sigma: float | None = None,
) -> NDArray[np.float64]:
    if sigma is None:
        sigma = max(max(valid.shape) / 32, 1.0)
    if not sigma > 0:
        raise ValueError(f"sigma is {sigma}, but the width of the window must be above 0.")

    def smooth(values: NDArray[Any]) -> NDArray[np.float64]:
        return gaussian_filter(values.astype(np.float64), sigma, mode="constant", truncate=3.0)

    weight = smooth(valid)
    excess = smooth(np.where(valid, confidence - (predicted == target), 0.0))
    return np.divide(excess, weight, out=np.full(valid.shape, np.nan), where=valid)


def draw_gap(
    image: ArrayLike | Tensor | None, gap: NDArray[np.floating[Any]], limit: float = _LIMIT
) -> NDArray[np.uint8]:
    """The picture of `calibration_overlay` for a gap (H, W) that is known; NaN is hatched."""
    ground = np.full(gap.shape, float(_GROUND))
    if image is not None:  # so pale that colours show on it
        luminance = rgb_image(image, gap.shape) @ np.array([0.299, 0.587, 0.114])
        ground = _DARKEST + (255 - _DARKEST) * luminance / 255
    colored = _gap_colors(gap, ground[..., None], limit)
    return np.where(np.isnan(gap)[..., None], hatching(gap.shape), colored)


def _gap_colors(
    gap: NDArray[np.floating[Any]], ground: NDArray[Any], limit: float = _LIMIT
) -> NDArray[np.uint8]:
    """(H, W, 3) the colours of `gap` (H, W) on top of `ground` (0..255, broadcast to RGB)."""
    opacity = _STRENGTH * np.clip(np.abs(np.nan_to_num(gap)) / limit, 0, 1)[..., None]
    over, under = np.array(ImageColor.getrgb(OVER)), np.array(ImageColor.getrgb(UNDER))
    color = np.where(gap[..., None] > 0, over, under)  # (H, W, 3)
    return np.round((1 - opacity) * ground + opacity * color).astype(np.uint8)


def hatching(shape: Sequence[int]) -> NDArray[np.uint8]:
    """(H, W, 1) grey diagonal stripes, for ignored pixels."""
    rows, columns = np.indices(tuple(shape))
    stripe = (rows + columns) % _HATCH_PERIOD < _HATCH_LINE
    return np.where(stripe, _HATCH_DARK, _HATCH_LIGHT).astype(np.uint8)[..., None]


def _predictions(
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    ignore_index: int | None,
    *,
    top_only: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """(H, W) confidence, predicted class, label, and whether it counts, of one image, checked."""
    p, y = _array(probs), _array(labels)
    if p.ndim != 3 or y.shape != p.shape[1:]:
        raise ValueError(
            "Expected probabilities of shape (C, H, W) and labels of shape (H, W), "
            f"but got {p.shape} and {y.shape}"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"Expected labels of an integer dtype, but got {y.dtype}")
    ignore_index = resolve_ignore_index(ignore_index, len(p))
    valid = y != ignore_index
    bad = y[valid & ((y < 0) | (y >= len(p)))]
    if bad.size:
        raise ValueError(
            f"Expected labels in 0..{len(p) - 1} or {ignore_index}, but got {int(bad[0])}"
        )
    # They may have passed through any dtype on their way here.
    values = torch.from_numpy(p.astype(np.float32, copy=False))
    good = is_distribution(values, 0, rounded_to=torch.bfloat16, partial=top_only)
    if (~good.numpy() & valid).any():
        counted, total = p[:, valid], p.sum(0, dtype=np.float64)[valid]
        raise ValueError(
            "Expected probabilities, which are in 0..1 and sum to 1 over the classes, but got "
            f"values {counted.min():.4g}..{counted.max():.4g} with sums "
            f"{total.min():.4g}..{total.max():.4g}; for logits pass logits.softmax(0)"
        )
    confidence, predicted = values.max(0)
    return confidence.numpy(), predicted.numpy(), y.astype(np.int64), valid


def rgb_image(image: ArrayLike | Tensor, shape: Sequence[int]) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB of an image of `shape` (H, W), given as uint8 or as floating in 0..1."""
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


# Panels -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Overlay:
    """What the pictures of one image are drawn from.

    Pooled members have two maps more, as shares of the largest entropy there can be: the entropy of
    their mean, and the part of it that is mutual information, by which the members differ.
    """

    name: str  # what is shown: the name of the image, or of a plane or a class of it
    labels: NDArray[Any]  # (H, W) integers
    prediction: NDArray[Any]  # (H, W) predicted class
    confidence: NDArray[Any]  # (H, W) its probability
    gap: NDArray[Any]  # (H, W) `calibration_gap`; NaN where the label is ignored
    image: NDArray[np.uint8] | None  # (H, W, 3) or (H, W)
    palette: NDArray[np.uint8] | None  # (C, 3) colours of the classes; None: `class_palette`
    class_names: Sequence[str]
    ece: float | None = None  # of what is shown
    of: str = ""  # the name of the image, if `name` is another
    total: NDArray[Any] | None = None  # (H, W)
    epistemic: NDArray[Any] | None = None  # (H, W)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", utf8(self.name))
        object.__setattr__(self, "of", utf8(self.of) or self.name)
        object.__setattr__(self, "class_names", tuple(map(utf8, self.class_names)))
        shape, classes = self.labels.shape, len(self.class_names)
        spread = [each for each in (self.total, self.epistemic) if each is not None]
        maps = (self.labels, self.prediction, self.confidence, self.gap, *spread)
        if not (
            len(shape) == 2
            and all(each.shape == shape for each in maps)
            and self.labels.dtype.kind in "iu"
            and self.prediction.dtype.kind in "iu"
            and _within(self.labels[~np.isnan(self.gap)], classes - 1)
            and _within(self.prediction, classes - 1)
            and all(_within(share, 1) for share in (self.confidence, *spread))
            and len(spread) != 1
            and _are_colors(self.image, (*shape,), (*shape, 3))
            and _are_colors(self.palette, (classes, 3))
        ):
            raise ValueError(f"The arrays of the overlay {self.name!r} do not fit together.")

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, without those that are None: what a file has to keep."""
        return {name: each for name, each in vars(self).items() if isinstance(each, np.ndarray)}

    @property
    def colors(self) -> NDArray[np.uint8]:
        """(C, 3) the colours of the classes."""
        return class_palette(len(self.class_names)) if self.palette is None else self.palette

    def png(self) -> bytes:
        """Six pictures with their keys: image, labels, prediction, confidence, errors and gap.

        Of pooled members there are three more: total, aleatoric and epistemic uncertainty.
        """
        return _draw_panel(self)


def _within(values: NDArray[Any], most: float) -> bool:
    return bool(((values >= 0) & (values <= most)).all())


def _are_colors(array: NDArray[Any] | None, *shapes: tuple[int, ...]) -> bool:
    return array is None or (array.dtype == np.uint8 and array.shape in shapes)


def make_overlay(
    image: ArrayLike | Tensor | None,
    probs: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    *,
    class_names: Sequence[str] | None = None,
    palette: ArrayLike | None = None,
    ignore_index: int | None = None,
    name: str = "",
    ece: float | None = None,
    of: str = "",
    information: ArrayLike | Tensor | None = None,
    top_only: bool = False,
) -> Overlay:
    """The overlay of one image; `overlay.png()` draws it.

    Args:
        image: (H, W, 3) or (H, W), uint8 or floating in 0..1; None if it is not known.
        probs: (C, H, W) probabilities.
        labels: (H, W) integer labels.
        class_names: C names; by default the numbers.
        palette: (C or more, 3) uint8 colours of the classes; by default `class_palette`.
        ignore_index: as for `calibration_overlay`.
        name: what the page calls it.
        ece: its ECE, if known.
        of: the name of the image, if `name` names a part of it.
        information: (H, W) mutual information of pooled members, in nats.
        top_only: the probabilities are 0 but for the predicted class.
    """
    p = _array(probs)
    confidence, predicted, target, valid = _predictions(p, labels, ignore_index, top_only=top_only)
    names = [str(c) for c in range(len(p))] if class_names is None else list(class_names)
    if len(names) != len(p):
        raise ValueError(f"Expected {len(p)} class names, but got {len(names)}")
    colors = None if palette is None else np.asarray(palette, np.uint8)
    if colors is not None:
        if colors.shape[1:] != (3,) or len(colors) < len(p):
            raise ValueError(f"Expected a palette of shape ({len(p)}, 3), but got {colors.shape}")
        colors = colors[: len(p)]
    total = epistemic = None
    if information is not None:
        most = np.log(len(p))  # nats
        entropy = torch.special.entr(torch.from_numpy(p)).sum(0).numpy()
        total = np.clip(entropy / most, 0, 1).astype(np.float32)
        epistemic = np.clip(_array(information) / most, 0, total).astype(np.float32)
    return Overlay(
        name=name,
        labels=target,
        prediction=predicted,
        confidence=confidence,
        gap=_gap(confidence, predicted, target, valid).astype(np.float32),
        image=None if image is None else rgb_image(image, target.shape),
        palette=colors,
        class_names=names,
        ece=ece,
        of=of,
        total=total,
        epistemic=epistemic,
    )


_WIDTH, _TALLEST = 430, 860  # pixels of a picture; three in a row
_GAP, _LINE = 18, 24  # between pictures; height of a line of text
_KEY = 190  # width of a class in the key
_FEW_PIXELS = 200  # images with shorter sides are drawn without smoothing
_SHOWN_CLASSES = 14


def _pictures(overlay: Overlay) -> dict[str, NDArray[np.uint8] | None]:
    """The pictures of a panel by title, (H, W, 3) or (H, W, 1) each; three in a row."""
    labels, valid = overlay.labels, ~np.isnan(overlay.gap)[..., None]
    colors, stripes = overlay.colors, hatching(labels.shape)  # (H, W, 1)
    sides = np.array([ImageColor.getrgb(RIGHT), ImageColor.getrgb(WRONG)], np.uint8)
    wrong = (overlay.prediction != labels).astype(np.intp)
    pictures = {
        "image": None if overlay.image is None else rgb_image(overlay.image, labels.shape),
        "labels": np.where(valid, colors[np.where(valid[..., 0], labels, 0)], stripes),
        "prediction": colors[overlay.prediction],
        "confidence (%)": _grey(overlay.confidence),
        "errors": np.where(valid, sides[wrong], stripes),
        SCORES["bias"].heading: draw_gap(overlay.image, overlay.gap),
    }
    if overlay.total is not None and overlay.epistemic is not None:
        aleatoric = overlay.total - overlay.epistemic
        pictures["total uncertainty (% of the largest)"] = _grey(overlay.total)
        pictures["aleatoric: shared by the members"] = _grey(aleatoric)
        pictures["epistemic: members differ"] = _grey(overlay.epistemic)
    return pictures


def _grey(shares: NDArray[Any]) -> NDArray[np.uint8]:
    return np.repeat(np.round(255 * shares).astype(np.uint8)[..., None], 3, 2)


def _draw_panel(overlay: Overlay) -> bytes:
    pictures, colors = _pictures(overlay), overlay.colors
    count = np.bincount(overlay.prediction.ravel(), minlength=len(colors))
    known = overlay.labels[~np.isnan(overlay.gap)].astype(np.int64)
    count += np.bincount(known, minlength=len(colors))
    most = np.argsort(-count, kind="stable")[:_SHOWN_CLASSES]
    shown = sorted(most[count[most] > 0].tolist())
    rows, columns = overlay.labels.shape
    scale = min(_WIDTH / columns, _TALLEST / rows)
    width, height = max(1, round(columns * scale)), max(1, round(rows * scale))
    column = width + _GAP
    across = max(1, (3 * column - _GAP) // _KEY)  # classes in a line of their key
    second = 2 * _LINE + height + -(-len(shown) // across) * _LINE
    third = second + 2 * _LINE + height + 2 * _LINE
    bottom = third + _LINE if len(pictures) == 6 else third + 2 * _LINE + height
    canvas, draw = _canvas(3 * column + _GAP, bottom)
    for index, (title, picture) in enumerate(pictures.items()):
        left = _GAP + index % 3 * column
        top = (0, second, third)[index // 3] + _LINE
        draw.text((left, top - 4), title, LIGHT["ink"], _font(16), anchor="ls")
        if picture is not None:
            _paste(canvas, picture, (left, top), (width, height))
    for index, c in enumerate(shown):
        place = _GAP + index % across * _KEY, _LINE + height + 8 + index // across * _LINE
        _swatch(draw, place, tuple(colors[c].tolist()), _short(overlay.class_names[c], 18))
    below = second + _LINE + height + 8
    signed = _gap_colors(np.linspace(-_LIMIT, _LIMIT, width)[None], np.full((1, 1, 1), _GROUND))
    bound = round(100 * _LIMIT)
    for left, bar, texts in (
        (_GAP, _grey(np.linspace(0, 1, width)[None]), ("0", "50", "100")),
        (_GAP + 2 * column, signed, (f"under ≤ −{bound}", "0", f"over ≥ {bound}")),
    ):
        _paste(canvas, bar, (left, below), (width, 12))
        for text, at, anchor in zip(texts, (0, width // 2, width), ("lt", "mt", "rt"), strict=True):
            draw.text((left + at, below + 18), text, LIGHT["quiet"], _font(14), anchor=anchor)
    verdicts = ((WRONG, "wrong"), (RIGHT, "right"), ("#c6c6c6", "not counted"))
    for index, (shade, text) in enumerate(verdicts):
        _swatch(draw, (_GAP + column + 100 * index, below), shade, text)
    return _png(canvas)


PREDICTED, TRUTH = "#e66101", "#1f9ed1"
_CROP, _CROP_GAP, _ACROSS = 150, 12, 6
Tile = tuple[Crop, NDArray[np.uint8] | None]  # with the (h, w, 3) or (h, w) part of the image


def draw_crops(false: Sequence[Tile], missed: Sequence[Tile]) -> bytes:
    """PNG of the most confident false objects and of the largest missed ones."""
    groups = {
        "False objects, the most confident first": (false, "{:.3f}"),
        "Missed objects, the largest first": (missed, "{:,.0f} px"),
    }
    groups = {title: group for title, group in groups.items() if group[0]}
    step = _CROP + _LINE + _CROP_GAP
    rows = [-(-len(tiles) // _ACROSS) for tiles, _ in groups.values()]
    width = _ACROSS * (_CROP + _CROP_GAP) + _CROP_GAP
    canvas, draw = _canvas(width, sum(2 * _LINE + n * step for n in rows) + 2 * _LINE)
    top = _CROP_GAP
    for (title, (tiles, text)), n in zip(groups.items(), rows, strict=True):
        draw.text((_CROP_GAP, top + _LINE), title, LIGHT["ink"], _font(16), anchor="ls")
        for k, (crop, image) in enumerate(tiles):
            left = _CROP_GAP + k % _ACROSS * (_CROP + _CROP_GAP)
            above = top + 2 * _LINE - 6 + k // _ACROSS * step
            canvas.paste(_tile(crop, image, PREDICTED if tiles is false else TRUTH), (left, above))
            rank = text.format(crop.rank)
            name, most = " ".join(crop.image.split()), 17 - len(rank)  # names differ at the end
            said = f"{rank}  {name if len(name) <= most else '…' + name[1 - most :]}"
            draw.text((left, above + _CROP + 16), said, LIGHT["quiet"], _font(13), anchor="ls")
        top += 2 * _LINE + n * step
    _swatch(draw, (_CROP_GAP, top + 4), PREDICTED, "predicted")
    _swatch(draw, (_CROP_GAP + 130, top + 4), TRUTH, "true")
    return _png(canvas)


def _tile(crop: Crop, image: NDArray[np.uint8] | None, marked: str) -> Image.Image:
    """The crop in a square, with outlines; that of its object, of the colour `marked`, is bold."""
    h, w = crop.predicted.shape
    scale = _CROP / max(h, w)
    size = max(1, round(w * scale)), max(1, round(h * scale))
    shown = np.full((h, w, 3), 236, np.uint8) if image is None else rgb_image(image, (h, w))
    tile = np.array(Image.fromarray(shown).resize(size, Image.Resampling.BICUBIC))
    for mask, color in ((crop.truth, TRUTH), (crop.predicted, PREDICTED)):
        large = Image.fromarray(mask.astype(np.int32)).resize(size, Image.Resampling.NEAREST)
        ids = np.array(large)
        line = (ids > 0) & (minimum_filter(ids, 3) != maximum_filter(ids, 3))
        if color == marked:
            line |= (ids == crop.number) & (minimum_filter(ids, 7) != maximum_filter(ids, 7))
        tile[line] = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    square = Image.new("RGB", (_CROP, _CROP), LIGHT["grid"])
    square.paste(Image.fromarray(tile))
    return square


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (width, height), LIGHT["paper"])
    return canvas, ImageDraw.Draw(canvas)


def _paste(
    canvas: Image.Image, picture: NDArray[Any], place: tuple[int, int], size: tuple[int, int]
) -> None:
    few = max(picture.shape[:2]) < _FEW_PIXELS
    smooth = Image.Resampling.NEAREST if few else Image.Resampling.BOX
    image = Image.fromarray(np.ascontiguousarray(picture, np.uint8))
    canvas.paste(image.resize(size, smooth), place)


def _swatch(draw: ImageDraw.ImageDraw, place: tuple[int, int], color: Any, text: str) -> None:
    left, top = place
    draw.rectangle((left, top, left + 14, top + 14), color, "#c4c8ce")
    draw.text((left + 21, top + 7), text, LIGHT["ink"], _font(14), anchor="lm")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)


def _short(text: str, length: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()
