"""Colours of diagrams, pictures and pages. Nothing is told by colour alone where it matters."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
from numpy.typing import NDArray

OVER = "#cf1f38"  # confidence above accuracy
UNDER = "#1a70c4"  # confidence below accuracy; colour-blind readers can tell the two apart
LIGHT = {"ink": "#1d2430", "quiet": "#5a6472", "grid": "#e6e8ec", "paper": "#fefefe"}
DARK = {"ink": "#e8eaee", "quiet": "#a3acba", "grid": "#2c333d", "paper": "#171b21"}

# Okabe and Ito (2008), for colour-blind readers; without yellow, which is too pale on white. Line
# style and marker change together with the colour, so that nothing depends on colour alone.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def run_style(index: int) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for the `index`-th model of a comparison."""
    return {
        "color": _COLORS[index % len(_COLORS)],
        "linestyle": (0, _DASHES[index % len(_DASHES)]),
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def class_palette(num_classes: int) -> NDArray[np.uint8]:
    """(num_classes, 3) RGB: distinct colours for any number of classes, the first one grey.

    Hues advance by the golden ratio and lightness alternates, so that neighbours in the list differ
    in both. Class 0 is grey because it is the background in most data sets.
    """
    colors = [(0.80, 0.81, 0.83)]
    for index in range(1, num_classes):
        hue = (0.58 + index * 0.6180339887498949) % 1.0
        lightness, saturation = ((0.46, 0.70), (0.66, 0.62), (0.34, 0.60))[index % 3]
        colors.append(colorsys.hls_to_rgb(hue, lightness, saturation))
    return np.round(np.array(colors[:num_classes]).reshape(-1, 3) * 255).astype(np.uint8)
