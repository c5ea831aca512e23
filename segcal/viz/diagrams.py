"""Diagrams of reports: reliability, confidence, classes, risk against coverage, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from segcal.metrics import Report
from segcal.metrics.report import BinTable, OperatingPoint
from segcal.metrics.rows import pixels_or_decisions
from segcal.metrics.scores import SCORES, risk_at_coverage
from segcal.viz.figure import (
    OVER,
    UNDER,
    axes_or_new,
    grid_color,
    ink,
    legend_above,
    new_figure,
    paper,
    plain,
    run_style,
)


def named(report: Report | Mapping[str, Report]) -> Mapping[str, Report]:
    """Reports by name; a single report gets the empty name.

    Raises:
        ValueError: there are no reports, or their classes differ.
    """
    reports = report if isinstance(report, Mapping) else {"": report}
    if not reports:
        raise ValueError("Expected at least one report, but got none")
    sizes = {each.protocol.num_classes for each in reports.values()}
    if len(sizes) > 1:
        raise ValueError(f"Expected reports of the same classes, but got {sorted(sizes)} classes")
    names = dict.fromkeys(each.class_names for each in reports.values() if each.class_names)
    if len(names) > 1:
        pairs = zip(*list(names)[:2], strict=True)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"Expected reports of the same classes, but got {one!r} and {other!r}")
    return reports


def class_names(report: Report) -> list[str]:
    """The K names of the classes; their numbers if the report has no names."""
    return list(report.class_names or map(str, range(report.protocol.num_classes)))


def worst_classes(report: Report, limit: int) -> list[int]:
    """The `limit` classes with the largest class-j-ECE, by number."""
    if limit < 1:
        raise ValueError(f"Expected limit to be at least 1, but got {limit}")
    order = np.argsort(-report.class_ece, kind="stable")[:limit]  # NaN comes last
    return sorted(int(c) for c in order)


def share(count: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B,) counts divided by their sum; zeros if all are zero."""
    return count / max(int(count.sum()), 1)


def counted(report: Report) -> str:
    """What is counted: "pixels", or "samples" where each image is one (classification).

    For sigmoid outputs it is "decisions", one per pixel and class.
    """
    one_each = report.protocol.pixels <= report.protocol.images
    return "samples" if one_each else pixels_or_decisions(report)


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


def _axes(ax: Axes | None, reports: Mapping[str, Report], height: float = 4.9) -> Axes:
    """`ax`, or new axes with room for a legend of several reports."""
    legend = 0.2 * len(reports) if len(reports) > 1 else 0.0
    return axes_or_new(ax, 4.4, height + legend)


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
    strip.set(yscale="log", ylim=(_LEAST, 130))
    strip.set_ylabel(ylabel, loc="top")  # which may be longer than the strip is high
    strip.yaxis.set_major_locator(FixedLocator([0.01, 1, 100]))
    strip.yaxis.set_minor_locator(NullLocator())
    strip.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    strip.tick_params(labelbottom=False, bottom=False)


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


_COVERAGES = np.linspace(0.005, 1, 200)


def risk_coverage(report: Report | Mapping[str, Report], ax: Axes | None = None) -> Axes:
    """Share of wrong predictions against the share accepted, most confident first.

    Operating points are marked at their measured risk and coverage, with intervals.

    Args:
        report: one report, or several by name.
        ax: axes to draw on; those of a new figure if None.
    """
    reports = named(report)
    ax = _axes(ax, reports, height=3.9)
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


History = Sequence[Mapping[str, Any]]  # the lines of a log.jsonl


def convergence(
    history: History | Mapping[str, History],
    ax: Axes | None = None,
    *,
    score: str = "ece",
) -> Axes:
    """A score on the hold-out against the epoch, from the lines of log.jsonl.

    A ring marks the epoch whose weights were kept, which the log calls "best".

    Args:
        history: the lines of one run, or of several runs by name. Epochs without the score are
            skipped.
        ax: axes to draw on; those of a new figure if None.
        score: a name in `metrics.scores.SCORES` that the log has.
    """
    if score not in SCORES:
        raise ValueError(f"Expected score to be one of {', '.join(SCORES)}, but got {score!r}")
    printed, logged = SCORES[score], f"holdout/{score}"
    histories = history if isinstance(history, Mapping) else {"": history}
    ax = axes_or_new(ax, 4.4, 3.2)
    for index, (name, lines) in enumerate(histories.items()):
        points = [
            (line["epoch"], printed.scale * line[logged], line.get("best", False))
            for line in lines
            if line.get(logged) is not None
        ]
        if not points:
            continue
        epochs, values, best = zip(*points, strict=True)
        style = run_style(index)
        ax.plot(epochs, values, label=plain(name) or None, markersize=3, **style)
        kept = [at for at, is_best in enumerate(best) if is_best][-1:]  # the last epoch called best
        for at in kept:
            where = [epochs[at]], [values[at]]
            ax.plot(*where, marker="o", markersize=9, fillstyle="none", color=style["color"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(ylim=(0, None), xlabel="epoch", ylabel=f"{printed.heading} on holdout")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax
