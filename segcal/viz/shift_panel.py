"""The panel of one image under shift: a row a shift, with what the network makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from segcal.viz.figure import new_figure, plain, png, themed
from segcal.viz.heatmap import calibration_overlay, predictions, rgb_image
from segcal.viz.palette import class_palette

_WIDTH, _TALLEST = 1.7, 2.6  # inches, of a picture
_GAP, _HEAD, _SIDE = 0.06, 0.26, 1.25


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
        views: a row each, the clean image first.
        labels: (H, W) integer labels, the same for all.
        palette: (C or more, 3) uint8 colours of the classes; `class_palette` unless told.
        ignore_index: the label that means "do not count this pixel"; those are hatched.
        name: of the image; kept in the file as its title, not drawn.
    """
    methods = list(views[0].probs)
    colors = class_palette(len(views[0].probs[methods[0]])) if palette is None else palette
    colors = np.asarray(colors, dtype=np.uint8)
    headings = ["image", "prediction"]
    headings += ["gap" if m == methods[0] else f"gap, {m.upper()}" for m in methods]
    height, width = labels.shape
    w, h = _WIDTH, min(_WIDTH * height / width, _TALLEST)
    total_w = _SIDE + len(headings) * (w + _GAP)
    total_h = _HEAD + len(views) * (h + _GAP)
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
            bottom = total_h - _HEAD - (row + 1) * h - row * _GAP
            for column, picture in enumerate(pictures):
                left = _SIDE + column * (w + _GAP)
                ax = figure.add_axes((left / total_w, bottom / total_h, w / total_w, h / total_h))
                ax.axis("off")
                if picture is not None:
                    ax.imshow(
                        picture, interpolation="nearest" if max(labels.shape) < 200 else "auto"
                    )
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
