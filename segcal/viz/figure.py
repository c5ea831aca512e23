"""The place for how figures look and how they become bytes; no global style is ever changed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LIGHT = {"ink": "#1d2430", "quiet": "#5a6472", "grid": "#e6e8ec", "paper": "#fefefe"}
_DARK = {"ink": "#e8eaee", "quiet": "#a3acba", "grid": "#2c333d", "paper": "#171b21"}
_STYLE: Any = {
    "text.color": _LIGHT["ink"],
    "axes.titlecolor": _LIGHT["ink"],
    "axes.labelcolor": _LIGHT["ink"],
    "axes.edgecolor": _LIGHT["quiet"],
    "axes.facecolor": _LIGHT["paper"],
    "xtick.color": _LIGHT["quiet"],
    "ytick.color": _LIGHT["quiet"],
    "grid.color": _LIGHT["grid"],
    "figure.facecolor": _LIGHT["paper"],
    "savefig.facecolor": _LIGHT["paper"],
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
    "svg.fonttype": "path",  # the same letters on every machine
    "svg.hashsalt": "segcal",  # the same names inside, every time
}


@contextmanager
def themed() -> Iterator[None]:
    """Within it, figures are drawn in the project's style, whatever style the user has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """A figure of its own, in inches, that no pyplot state knows of."""
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the only axes of a new figure."""
    return new_figure(width, height).subplots() if ax is None else ax


def ink() -> Any:
    """The colour of text in the style at hand: what lines that are no data are drawn in."""
    return mpl.rcParams["text.color"]


def paper() -> Any:
    """The colour behind the data in the style at hand."""
    return mpl.rcParams["axes.facecolor"]


def grid_color() -> Any:
    """The colour of grid lines in the style at hand: a step away from the paper."""
    return mpl.rcParams["grid.color"]


def legend_above(ax: Axes, bottom: float = 1.0) -> None:
    """A legend over the axes, where it covers nothing; `bottom` is in parts of their height."""
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, bottom), borderaxespad=0.2)


def png(figure: Figure, *, title: str = "", dpi: int = 160) -> bytes:
    """A figure drawn in `themed` as PNG, with a title in its metadata."""
    buffer = io.BytesIO()
    metadata = {"Software": None, **({"Title": title} if title else {})}
    with themed():  # ticks are made when they are drawn
        figure.savefig(buffer, format="png", dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """A figure drawn in `themed` as SVG; the same figure always gives the same bytes."""
    buffer = io.BytesIO()
    with themed():  # ticks are made when they are drawn
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def adaptive_svg(figure: Figure) -> bytes:
    """A figure drawn in `themed` as SVG that turns dark where the reader's screen is.

    Each colour of the light style becomes a variable with a value for either scheme. The paper is
    part of the picture, so it reads well even where it cannot turn.
    """
    text = svg(figure).decode()
    for name, color in _LIGHT.items():
        text = text.replace(color, f"var(--{name})")

    def values(colors: Mapping[str, str]) -> str:
        return ":root{" + ";".join(f"--{name}:{color}" for name, color in colors.items()) + "}"

    dark = f"@media (prefers-color-scheme:dark){{{values(_DARK)}}}"
    return text.replace("<defs>", f"<defs><style>{values(_LIGHT)}{dark}</style>", 1).encode()


def plain(name: str, limit: int = 28) -> str:
    """A name as matplotlib text: on one line, at most `limit` long, and taken literally.

    A long one loses its middle, for names often differ at the end. Dollars would otherwise start
    a formula, and a leading underscore hide a legend entry.
    """
    name = " ".join(name.split())
    if len(name) > limit:
        tail = limit // 3
        name = f"{name[: limit - tail - 1]}…{name[-tail:]}"
    return ("\u200b" * name.startswith("_") + name).replace("$", r"\$")
