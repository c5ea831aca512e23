"""Colours of classes, of runs, and of over- and under-confidence."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
from numpy.typing import NDArray

OVER = "#cf1f38"  # confidence above accuracy
UNDER = "#1a70c4"  # confidence below accuracy; colour-blind readers can tell the two apart

# Okabe and Ito (2008), for colour-blind readers; without yellow, which is too pale on white. Line
# style and marker change together with the colour, so that nothing depends on colour alone.
_RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_RUN_DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
)
_RUN_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_GOLDEN = 0.6180339887498949  # steps of this size keep neighbouring hues far apart


def run_style(index: int) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for the `index`-th run of a comparison."""
    return {
        "color": _RUN_COLORS[index % len(_RUN_COLORS)],
        "linestyle": _RUN_DASHES[index % len(_RUN_DASHES)],
        "marker": _RUN_MARKERS[index % len(_RUN_MARKERS)],
    }


def class_palette(num_classes: int) -> NDArray[np.uint8]:
    """(num_classes, 3) RGB: distinct colours for any number of classes, the first one grey.

    Hues advance by the golden ratio and lightness alternates, so that neighbours in the list differ
    in both. Class 0 is grey because it is the background in most data sets.
    """
    colors = [(0.80, 0.81, 0.83)]
    for index in range(1, num_classes):
        hue = (0.58 + index * _GOLDEN) % 1.0
        lightness = (0.46, 0.66, 0.34)[index % 3]
        saturation = (0.70, 0.62, 0.60)[index % 3]
        colors.append(colorsys.hls_to_rgb(hue, lightness, saturation))
    return np.round(np.array(colors[:num_classes]).reshape(-1, 3) * 255).astype(np.uint8)
