"""Diagrams of every class: a grid of reliability diagrams, and a heat map of the gaps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from segcal.metrics import Report
from segcal.metrics.scores import SCORES
from segcal.viz.figure import axes_or_new, grid_color, new_figure, paper, plain
from segcal.viz.palette import OVER, UNDER
from segcal.viz.reading import class_names, named, worst_classes
from segcal.viz.reliability import draw_bars, draw_line, finish_square

_FULL = 30  # percentage points of gap at which the colour is full


def classwise_reliability(report: Report | Mapping[str, Report], *, limit: int = 100) -> Figure:
    """A reliability diagram of every class: how often c is the label where p_c = x, against x.

    Every pixel counts for every class, as in SCE. The gaps of one report are shaded, red where p_c
    is too high and blue where it is too low. Several reports are drawn as lines.

    Args:
        report: one report, or several by name, with the same classes.
        limit: largest number of classes; those with the largest class-j-ECE in the first report.

    Returns:
        A new figure.
    """
    reports = named(report)
    first = next(iter(reports.values()))
    chosen = worst_classes(first, limit)
    columns = _columns(len(chosen))
    rows = -(-len(chosen) // columns)
    several = len(reports) > 1
    figure = _grid_figure(rows, columns, head=0.5 if several else 0.05)
    axes = figure.subplots(rows, columns, squeeze=False)
    names = class_names(first)
    for ax, c in zip(axes.flat, chosen, strict=False):
        for index, (name, each) in enumerate(reports.items()):
            bins = each.classes[c]
            if several:
                draw_line(ax, bins, index, plain(name), markersize=2.5)
            else:
                draw_bars(ax, bins)
        finish_square(ax, ticks=(0, 50, 100))
        score = "" if several else f"\n{SCORES['class_ece'].brief(first.class_ece[c])}"
        ax.set_title(plain(names[c], 18) + score, fontsize=8.5, pad=3)
        ax.tick_params(labelsize=7.5)
        ax.label_outer()
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    for ax in axes.flat[len(chosen) - columns : len(chosen)]:  # the last of each column
        ax.tick_params(labelbottom=True)
    figure.supxlabel("probability of the class (%)", fontsize=9.5)
    figure.supylabel("frequency of the class (%)", fontsize=9.5)
    if several:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=min(len(labels), 4))
    return figure


def gap_heatmap(report: Report, ax: Axes | None = None, *, limit: int = 100) -> Axes:
    """A heat map of mean p_c minus frequency of class c: one row per class, one column per bin.

    Red is too high, blue is too low; the colour is full from 30 percentage points. Bins without
    pixels are hatched.

    Args:
        report: one report.
        ax: axes to draw on; those of a new figure if None.
        limit: largest number of classes; those with the largest class-j-ECE.

    Returns:
        The axes drawn on.
    """
    chosen = worst_classes(report, limit)
    bins = report.classes
    gap = 100 * (bins.confidence - bins.accuracy)[chosen]  # (K, B)
    ax = axes_or_new(ax, 7.2, 0.2 * len(chosen) + 1.5)
    colors = LinearSegmentedColormap.from_list("gap", [UNDER, paper(), OVER])
    rows = np.arange(len(chosen) + 1)
    mesh = ax.pcolormesh(
        100 * bins.edges,
        rows,
        np.ma.masked_invalid(gap),
        cmap=colors,
        vmin=-_FULL,
        vmax=_FULL,
        edgecolor=paper(),
        linewidth=0.8,
    )
    ax.grid(False)
    ax.patch.set(facecolor=grid_color(), hatch="////", edgecolor=paper(), linewidth=0)
    names = class_names(report)
    labels = [plain(names[c], 22) for c in chosen]
    ax.set_yticks(rows[:-1] + 0.5, labels=labels, fontsize=8.5)
    ax.tick_params(left=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.invert_yaxis()
    ax.set(xlabel="probability of the class (%)", xlim=(0, 100))
    bar = ax.figure.colorbar(mesh, ax=ax, location="top", extend="both", aspect=45, pad=0.02)
    bar.set_label("probability − frequency (points)")
    bar.outline.set_visible(False)
    return ax


def _columns(panels: int) -> int:
    """The number of columns: a grid a little wider than high, with few empty places."""
    if panels <= 7:
        return panels
    wanted = min(np.sqrt(1.6 * panels), 10)
    choices = range(round(wanted) - 1, round(wanted) + 3)
    return min(choices, key=lambda columns: (-panels % columns, abs(columns - wanted)))


def _grid_figure(rows: int, columns: int, head: float) -> Figure:
    """A figure for a grid of small squares, with room for labels (sizes in inches).

    The layout is computed here: for a hundred axes matplotlib's takes longer than the drawing.
    """
    side, across, down = 1.25, 0.22, 0.5
    left, right, bottom = 0.72, 0.12, 0.62
    width = left + columns * side + (columns - 1) * across + right
    height = bottom + rows * side + rows * down + head  # each square has its title above
    figure = new_figure(width, height, layout=None)
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - (head + down) / height,
        wspace=across / side,
        hspace=down / side,
    )
    return figure
