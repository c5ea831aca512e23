"""Diagrams of the predicted class: reliability, confidence, and confidence of wrong predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from segcal.metrics import Report
from segcal.metrics.scores import SCORES
from segcal.metrics.tables import BinTable
from segcal.viz.figure import axes_or_new, ink, legend_above, paper, plain
from segcal.viz.palette import OVER, UNDER, run_style
from segcal.viz.reading import counted, named, share

_BAR = "#8b98ab"  # a grey blue that is visible on white and on black
_SHADE = 0.75  # opacity of the gaps
_LEAST = 0.003  # per cent; the lower end of the logarithmic scale of shares
_STRIP = 0.17  # height of the strip of shares, as a fraction of the diagram's


def reliability_diagram(
    report: Report | Mapping[str, Report], ax: Axes | None = None, *, counts: bool = True
) -> Axes:
    """Accuracy against confidence of the predicted class; on the diagonal it is calibrated.

    One report is drawn as bars. The gap between accuracy and mean confidence of a bin is shaded,
    red if over-confident and blue if under-confident. Several reports are drawn as lines. A strip
    above shows the share of pixels in each bin, on a logarithmic scale.

    Args:
        report: one report, or several by name.
        ax: axes to draw on; those of a new figure if None.
        counts: whether to draw the strip.

    Returns:
        The axes drawn on.
    """
    reports = named(report)
    first, several = next(iter(reports.values())), len(reports) > 1
    ax = _axes(ax, reports)
    if several:
        for index, (name, each) in enumerate(reports.items()):
            draw_line(ax, each.top, index, f"{plain(name)}: ECE {SCORES['ece'].brief(each.ece)}")
        legend_above(ax, 1.06 + _STRIP if counts else 1.0)
    else:
        draw_bars(ax, first.top)
        _write_scores(ax, first)
    finish_square(ax)
    ax.set(xlabel="confidence (%)", ylabel=SCORES["accuracy"].heading)
    if counts:
        _draw_strip(ax, [each.top for each in reports.values()], f"{counted(first)} (%)")
    return ax


def confidence_histogram(report: Report | Mapping[str, Report], ax: Axes | None = None) -> Axes:
    """Share of pixels against confidence of the predicted class, with the paper's two lines.

    The dashed lines are mean confidence and accuracy. They lie apart if the network is over- or
    under-confident overall. Several reports are drawn as outlines, without these lines.

    Args:
        report: one report, or several by name.
        ax: axes to draw on; those of a new figure if None.

    Returns:
        The axes drawn on.
    """
    reports = named(report)
    first, several = next(iter(reports.values())), len(reports) > 1
    ax = _axes(ax, reports)
    if several:
        for index, (name, each) in enumerate(reports.items()):
            _draw_outline(ax, each.top.edges, share(each.top.count), index, plain(name))
    else:
        ax.stairs(100 * share(first.top.count), 100 * first.top.edges, fill=True, color=_BAR)
        for score, value, color, dashes in (
            ("mean_confidence", first.mean_confidence, OVER, (4, 2)),
            ("accuracy", first.accuracy, UNDER, (1.5, 1.5)),
        ):
            label = f"{SCORES[score].label} {SCORES[score].brief(value)}"
            ax.axvline(100 * value, color=color, linestyle=(0, dashes), linewidth=1.8, label=label)
    _finish_histogram(ax, f"{counted(first)} (%)")
    return ax


def wrong_confidence(report: Report | Mapping[str, Report], ax: Axes | None = None) -> Axes:
    """Share of the wrong predictions against their confidence, which should be low.

    Args:
        report: one report, or several by name.
        ax: axes to draw on; those of a new figure if None.

    Returns:
        The axes drawn on.
    """
    reports = named(report)
    ax = _axes(ax, reports)
    for index, (name, each) in enumerate(reports.items()):
        wrong = each.top.count - each.top.hits
        label = f"{plain(name)}: " * bool(name) + f"{SCORES['error'].brief(each.error)} wrong"
        _draw_outline(ax, each.top.edges, share(wrong), index, label)
    _finish_histogram(ax, "wrong predictions (%)")
    return ax


def draw_bars(ax: Axes, bins: BinTable) -> None:
    """Bars of accuracy, and the gap to the mean confidence in the colour of its sign."""
    edges, accuracy, confidence = (100 * x for x in (bins.edges, bins.accuracy, bins.confidence))
    low, high = np.minimum(accuracy, confidence), np.maximum(accuracy, confidence)
    ax.stairs(low, edges, fill=True, color=_BAR)
    for color, wanted in ((OVER, confidence > accuracy), (UNDER, confidence < accuracy)):
        ax.stairs(
            np.where(wanted, high, np.nan),
            edges,
            baseline=np.where(wanted, low, np.nan),
            fill=True,
            color=color,
            alpha=_SHADE,
            linewidth=0,
        )
    ax.vlines(edges[1:-1], 0, 100, color=paper(), linewidth=0.8)  # separates the bars


def draw_line(ax: Axes, bins: BinTable, index: int, label: str, markersize: float = 4.5) -> None:
    """Accuracy against mean confidence of the bins that hold pixels, in the style of a run."""
    held = bins.count > 0
    x, y = (100 * values[held] for values in (bins.confidence, bins.accuracy))
    ax.plot(x, y, label=label, markersize=markersize, clip_on=False, **run_style(index))


def finish_square(ax: Axes, ticks: Sequence[int] = range(0, 101, 20)) -> None:
    """Axes in per cent, and the diagonal of perfect calibration."""
    ax.plot([0, 100], [0, 100], color=ink(), linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    ax.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xticks=ticks, yticks=ticks)


def _axes(ax: Axes | None, reports: Mapping[str, Report]) -> Axes:
    """`ax`, or new axes; all diagrams of the same reports have the same size."""
    legend = 0.2 * len(reports) if len(reports) > 1 else 0.0
    return axes_or_new(ax, 4.4, 4.9 + legend)


def _draw_outline(ax: Axes, edges: np.ndarray, shares: np.ndarray, index: int, label: str) -> None:
    style = run_style(index)
    style.pop("marker")
    ax.stairs(100 * shares, 100 * edges, linewidth=1.6, label=label, **style)


def _finish_histogram(ax: Axes, ylabel: str) -> None:
    ax.set(xlim=(0, 100), ylim=(0, None), xlabel="confidence (%)", ylabel=ylabel)
    legend_above(ax)


def _write_scores(ax: Axes, report: Report) -> None:
    lines = [
        f"ECE {SCORES['ece'].brief(report.ece)}",
        f"confidence {SCORES['mean_confidence'].brief(report.mean_confidence)}",
        f"accuracy {SCORES['accuracy'].brief(report.accuracy)}",
    ]
    patches = [
        Patch(color=OVER, alpha=_SHADE, linewidth=0, label="over-confident"),
        Patch(color=UNDER, alpha=_SHADE, linewidth=0, label="under-confident"),
    ]
    ax.legend(
        handles=patches,
        loc="upper left",
        title="\n".join(lines),
        alignment="left",
        frameon=True,
        facecolor=paper(),
        edgecolor="none",
        framealpha=0.8,
    )


def _draw_strip(ax: Axes, tables: list[BinTable], ylabel: str) -> None:
    """The share of each bin, above the diagram; logarithmic, as few bins hold most pixels."""
    strip = ax.inset_axes((0.0, 1.04, 1.0, _STRIP), sharex=ax)
    for index, bins in enumerate(tables):
        shares = np.where(bins.count > 0, np.maximum(100 * share(bins.count), 1.3 * _LEAST), np.nan)
        if len(tables) == 1:
            strip.stairs(shares, 100 * bins.edges, baseline=_LEAST, fill=True, color=_BAR)
            strip.vlines(100 * bins.edges[1:-1], _LEAST, 130, color=paper(), linewidth=0.8)
        else:
            style = run_style(index)
            style.pop("marker")
            strip.stairs(shares, 100 * bins.edges, baseline=None, **style)
    strip.set(yscale="log", ylim=(_LEAST, 130), ylabel=ylabel)
    strip.yaxis.set_major_locator(FixedLocator([0.01, 1, 100]))
    strip.yaxis.set_minor_locator(NullLocator())
    strip.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    strip.tick_params(labelbottom=False, bottom=False)
