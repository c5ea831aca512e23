"""The risk-coverage curve: what is wrong among the predictions that are accepted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from segcal.metrics import Report
from segcal.metrics.operating import OperatingPoint
from segcal.metrics.scores import risk_at_coverage
from segcal.viz.figure import axes_or_new, legend_above, plain
from segcal.viz.palette import run_style
from segcal.viz.reading import counted, named

_COVERAGES = np.linspace(0.005, 1, 200)


def risk_coverage(report: Report | Mapping[str, Report], ax: Axes | None = None) -> Axes:
    """Share of wrong predictions against the share accepted, most confident first.

    Operating points are marked where they turned out, with their intervals.

    Args:
        report: one report, or several by name.
        ax: axes to draw on; those of a new figure if None.

    Returns:
        The axes drawn on.
    """
    reports = named(report)
    legend = 0.2 * len(reports) if len(reports) > 1 else 0.0
    ax = axes_or_new(ax, 4.4, 3.9 + legend)
    for index, (name, each) in enumerate(reports.items()):
        style = run_style(index)
        marker = style.pop("marker")
        fine = each.fine
        risk = [risk_at_coverage(fine.correct, fine.wrong, c) for c in _COVERAGES.tolist()]
        ax.plot(100 * _COVERAGES, 100 * np.array(risk), label=plain(name) or None, **style)
        for point in each.operating_points:
            _mark(ax, point, marker=marker, color=style["color"], named=len(reports) == 1)
    what = counted(next(iter(reports.values())))
    ax.set(xlim=(0, 100), ylim=(0, None), xlabel=f"coverage: {what} accepted (%)")
    ax.set_ylabel(f"risk: accepted {what} that are wrong (%)")
    if len(reports) > 1:
        legend_above(ax)
    return ax


def _mark(ax: Axes, point: OperatingPoint, *, marker: str, color: str, named: bool) -> None:
    """A point of the plane, with its intervals and the name of its target."""
    if np.isnan(point.risk):
        return
    at = 100 * point.coverage, 100 * point.risk
    intervals = point.intervals
    across, along = intervals.get("coverage"), intervals.get("accuracy")
    if across is not None:
        ax.plot([100 * across.low, 100 * across.high], [at[1]] * 2, color=color, linewidth=1)
    if along is not None:
        ends = [100 - 100 * along.low, 100 - 100 * along.high]
        ax.plot([at[0]] * 2, ends, color=color, linewidth=1)
    ax.plot(*at, marker=marker, color=color, linestyle="none", clip_on=False)
    if named:
        ax.annotate(point.target, at, xytext=(-6, 5), textcoords="offset points", ha="right")
