"""The style of figures, their colours, their PNG and SVG; no matplotlib setting is changed."""

from __future__ import annotations

import base64
import colorsys
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

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


LIGHT = {"ink": "#1d2430", "quiet": "#5a6472", "grid": "#e6e8ec", "paper": "#fefefe"}
DARK = {"ink": "#e8eaee", "quiet": "#a3acba", "grid": "#2c333d", "paper": "#171b21"}
_STYLE: Any = {
    "text.color": LIGHT["ink"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["quiet"],
    "axes.facecolor": LIGHT["paper"],
    "xtick.color": LIGHT["quiet"],
    "ytick.color": LIGHT["quiet"],
    "grid.color": LIGHT["grid"],
    "figure.facecolor": LIGHT["paper"],
    "savefig.facecolor": LIGHT["paper"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlepad": 8,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",  # the same glyphs on every machine
    "svg.hashsalt": "segcal",  # the same ids every time
}


@contextmanager
def themed() -> Iterator[None]:
    """Draw figures in the project's style, whatever style the user has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """A figure, sized in inches, that pyplot does not know of."""
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the only axes of a new figure."""
    return new_figure(width, height).subplots() if ax is None else ax


def ink() -> Any:
    """The colour of text in the active style, also used for lines that are not data."""
    return mpl.rcParams["text.color"]


def paper() -> Any:
    """The colour behind the data in the active style."""
    return mpl.rcParams["axes.facecolor"]


def grid_color() -> Any:
    """The colour of grid lines in the active style, close to that of the paper."""
    return mpl.rcParams["grid.color"]


def legend_above(ax: Axes, bottom: float = 1.0) -> None:
    """A legend above the axes, from `bottom` on (1 is the top of the axes)."""
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, bottom), borderaxespad=0.2)


def png(figure: Figure, *, title: str = "", dpi: int = 160) -> bytes:
    """A figure drawn in `themed` as PNG, with `title` in its metadata."""
    metadata = {"Software": None, **({"Title": title} if title else {})}
    faster = {"compress_level": 4}  # half the time of level 6, for 3 % more bytes
    return _saved(figure, format="png", dpi=dpi, metadata=metadata, pil_kwargs=faster)


def svg(figure: Figure) -> bytes:
    """A figure drawn in `themed` as SVG; the same figure always gives the same bytes."""
    return _saved(figure, format="svg", metadata={"Date": None, "Creator": None})


def _saved(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with themed():  # matplotlib makes ticks only when it draws them
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def svg_size(drawn: bytes) -> tuple[int, int]:
    """The width and height of an SVG of `svg`, in pixels of a page."""
    sizes = re.search(rb'<svg[^>]* width="([\d.]+)pt" height="([\d.]+)pt"', drawn)
    assert sizes is not None
    return round(float(sizes[1]) * 96 / 72), round(float(sizes[2]) * 96 / 72)


def adaptive_svg(drawn: bytes) -> bytes:
    """An SVG of `svg` that follows the light or dark scheme of the reader.

    Each colour of the light style becomes a CSS variable with a value for either scheme. The
    background is part of the picture, so it stays readable where the scheme is not known.
    """
    text = drawn.decode()
    for name, color in LIGHT.items():
        text = text.replace(color, f"var(--{name})")

    def values(colors: Mapping[str, str]) -> str:
        return ":root{" + ";".join(f"--{name}:{color}" for name, color in colors.items()) + "}"

    dark = f"@media (prefers-color-scheme:dark){{{values(DARK)}}}"
    return text.replace("<defs>", f"<defs><style>{values(LIGHT)}{dark}</style>", 1).encode()


def data_uri(data: bytes, kind: str) -> str:
    """Data as part of a page."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def webp_uri(image: Image.Image, quality: int) -> str:
    """An image as part of a page; for a photograph WEBP takes a quarter of the size of PNG."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=quality, method=2)
    return data_uri(buffer.getvalue(), "image/webp")


def plain(name: str, limit: int = 28) -> str:
    """A name as matplotlib text: one line of at most `limit` characters, without markup.

    A long name loses its middle, because names often differ at the end. Without the escapes a
    dollar would start a formula and a leading underscore would hide a legend entry.
    """
    name = " ".join(name.split())
    if len(name) > limit:
        tail = limit // 3
        name = f"{name[: limit - tail - 1]}…{name[-tail:]}"
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")
