"""Diagrams of models under shift: scores against severity, and believed against true accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from segcal.metrics.scores import SCORES
from segcal.viz.entry import Entry
from segcal.viz.figure import axes_or_new, ink, new_figure, plain
from segcal.viz.palette import run_style
from segcal.viz.shifts import shifted, shifts_of

_COLUMNS, _CELL = 4, 2.3  # small diagrams a row, and their width in inches


def kinds_and_severities(entries: Sequence[Entry]) -> tuple[list[str], list[int]]:
    """The corruptions that all entries met at the same severities, and these severities."""
    entries = shifted(entries)
    shifts = [s for s in shifts_of(entries) if s.severity is not None]
    severities = sorted({s.severity for s in shifts if s.severity is not None})
    met = [{under.shift for under in entry.shifts} for entry in entries]
    kinds = [
        kind
        for kind in dict.fromkeys(shift.name for shift in shifts)
        if all(len([s for s in found if s.name == kind]) == len(severities) for found in met)
    ]
    return kinds, severities if kinds else []


def severity_curve(entries: Sequence[Entry], ax: Axes | None = None, *, score: str = "ece") -> Axes:
    """A score against severity, 0 being the clean images: the mean over corruptions.

    Args:
        entries: with shifts; those without are left out.
        ax: where to draw; a new figure unless given.
        score: ece, sce, accuracy, overconfidence, underconfidence or mean_confidence.

    Returns:
        The axes drawn on.
    """
    kinds, severities = kinds_and_severities(entries)
    if not kinds:
        raise ValueError("Expected corruptions of the same severities, but got none")
    ax = axes_or_new(ax, 4.4, 3.2)
    _curves(ax, entries, kinds, severities, score)
    ax.set(ylabel=SCORES[score].heading, xlabel="severity (0: clean)")
    ax.legend()
    return ax


def severity_curves(entries: Sequence[Entry], *, score: str = "ece") -> Figure:
    """The same for each corruption by itself, in small diagrams of one scale."""
    kinds, severities = kinds_and_severities(entries)
    rows = math.ceil(len(kinds) / _COLUMNS)
    columns = min(len(kinds), _COLUMNS)
    figure = new_figure(_CELL * columns + 0.4, 1.75 * rows + 0.6)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, ax in enumerate(axes.ravel()):
        if index >= len(kinds):
            ax.axis("off")
            continue
        _curves(ax, entries, [kinds[index]], severities, score)
        ax.set_title(plain(kinds[index]), fontsize=9)
    figure.supylabel(SCORES[score].heading, fontsize=9.5)
    figure.supxlabel("severity (0: clean)", fontsize=9.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4)
    return figure


def _curves(
    ax: Axes, entries: Sequence[Entry], kinds: Sequence[str], severities: Sequence[int], score: str
) -> None:
    scale = SCORES[score].scale
    for index, entry in enumerate(shifted(entries)):
        at = {(u.shift.name, u.shift.severity): getattr(u.report, score) for u in entry.shifts}
        values = [getattr(entry.report, score)]
        values += [
            float(np.mean([at[kind, severity] for kind in kinds])) for severity in severities
        ]
        points = [0, *severities], [scale * value for value in values]
        ax.plot(*points, label=plain(entry.name), markersize=4, **run_style(index))
    ax.set_xticks([0, *severities])
    if score != "accuracy":
        ax.set_ylim(0, None)


def believed_accuracy(entries: Sequence[Entry], ax: Axes | None = None) -> Axes:
    """Mean confidence, the accuracy that a model believes in, against its true accuracy.

    A point a shift; the clean images have a ring.

    Args:
        entries: with shifts; those without are left out.
        ax: where to draw; a new figure unless given.

    Returns:
        The axes drawn on.
    """
    ax = axes_or_new(ax, 4.4, 3.6)
    accuracy, confidence = SCORES["accuracy"], SCORES["mean_confidence"]
    low = top = accuracy.scale
    for index, entry in enumerate(shifted(entries)):
        reports = [entry.report, *(under.report for under in entry.shifts)]
        true = [top * report.accuracy for report in reports]
        believed = [top * report.mean_confidence for report in reports]
        low = min([low, *true, *believed])
        style = {**run_style(index), "linestyle": "none"}
        ax.plot(true, believed, label=plain(entry.name), markersize=4, **style)
        ring = {"marker": "o", "markersize": 10, "fillstyle": "none", "color": style["color"]}
        ax.plot(true[:1], believed[:1], linestyle="none", **ring)
    low = max(0.0, 10 * math.floor((low - 1) / 10))
    ax.plot([low, top], [low, top], color=ink(), linewidth=0.8, linestyle=(0, (4, 3)))
    ax.set(xlim=(low, top), ylim=(low, top + 1))
    ax.set(xlabel=f"true {accuracy.heading}", ylabel=confidence.heading)
    ax.legend(loc="lower right")
    return ax
