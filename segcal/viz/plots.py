"""Diagrams of reports with matplotlib: reliability, confidence, classes, risk, training, shifts.

ax = segcal.viz.reliability_diagram(report)          # on new axes, or on `ax=`
ax.figure.savefig("reliability.png", dpi=160)

A function takes one report, or several by name. It draws on `ax`, or on the axes of a new figure,
in the style that is set; `themed` sets the project's own. No global setting is changed.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from segcal.files import atomic_write
from segcal.metrics import BinTable, Report
from segcal.metrics.report import Detection, FineHistogram
from segcal.metrics.scores import SCORES, risk_at_coverage
from segcal.metrics.uncertainty import UNCERTAINTIES
from segcal.viz.style import LIGHT, OVER, UNDER, run_style
from segcal.viz.tables import class_names, counted

COVERAGES = [i / 200 for i in range(1, 201)]  # where curves of risk are drawn
Reports = Report | Mapping[str, Report]
History = Sequence[Mapping[str, Any]]  # the lines of a log.jsonl

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
}
_BAR = "#8b98ab"  # a grey blue that is visible on white and on black
_SHADE = 0.75  # opacity of the gaps
_LEAST = 0.003  # per cent; the lower end of the logarithmic scale of shares
_STRIP = 0.17  # height of the strip of shares, as a fraction of the diagram's


# Figures ----------------------------------------------------------------------------------------


@contextmanager
def themed() -> Iterator[None]:
    """Draw figures in the project's style, whatever style the user has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """A figure, sized in inches, that pyplot does not know of."""
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def figure_png(draw: Callable[[], Axes | Figure], *, dpi: int = 160) -> bytes:
    """What `draw` draws, in the project's style, as PNG; the same always gives the same bytes."""
    with themed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks the script of a name
        drawn = draw()
        figure = drawn.figure if isinstance(drawn, Axes) else drawn
        assert isinstance(figure, Figure)
        buffer = io.BytesIO()
        quick = {"compress_level": 4}  # half the time of level 6, for 3 % more bytes
        figure.savefig(buffer, dpi=dpi, metadata={"Software": None}, pil_kwargs=quick)
    return buffer.getvalue()


def write_figures(
    reports: Mapping[str, Report], folder: str | os.PathLike[str], *, history: History = ()
) -> list[Path]:
    """Draw the diagrams of reports, which have the same classes, into `folder`; the paths.

    `history` is the log.jsonl of a single report, whose ECE is drawn over training.
    """
    one = next(iter(reports.values())) if len(reports) == 1 else None
    shown: Reports = reports if one is None else one
    drawings: dict[str, Callable[[], Axes | Figure]] = {
        "reliability": lambda: reliability_diagram(shown),
        "confidence_histogram": lambda: confidence_histogram(shown),
        "wrong_confidence": lambda: wrong_confidence(shown),
        "risk_coverage": lambda: risk_coverage(shown),
    }
    if not all(report.top_only for report in reports.values()):
        drawings["classwise_reliability"] = lambda: classwise_reliability(shown)
    if one is not None and one.detection:
        drawings["risk_by_uncertainty"] = lambda: risk_by_uncertainty(one)
    if any(line.get("holdout/ece") is not None for line in history):
        drawings["convergence_ece"] = lambda: convergence(history)
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = {Path(folder) / f"{name}.png": draw for name, draw in drawings.items()}
    for path, draw in paths.items():
        with atomic_write(path, "wb") as file:
            file.write(figure_png(draw))
    return [*paths]


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


def _named(report: Reports) -> Mapping[str, Report]:
    """Reports by name; a single report gets the empty name. Their classes must be the same."""
    reports = report if isinstance(report, Mapping) else {"": report}
    if not reports:
        raise ValueError("Expected at least one report, but got none.")
    sizes = {each.protocol.num_classes for each in reports.values()}
    if len(sizes) > 1:
        raise ValueError(f"Expected reports of the same classes, but got {sorted(sizes)} classes")
    names = dict.fromkeys(each.class_names for each in reports.values() if each.class_names)
    if len(names) > 1:
        pairs = zip(*list(names)[:2], strict=True)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"Expected reports of the same classes, but got {one!r} and {other!r}")
    return reports


def _shares(count: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B,) the share of each bin, in per cent."""
    return 100 * count / max(int(count.sum()), 1)


def _axes(ax: Axes | None, names: Sequence[Any], height: float = 4.9) -> Axes:
    """`ax`, or new axes with room for a legend of several names."""
    if ax is not None:
        return ax
    return new_figure(4.4, height + (0.2 * len(names) if len(names) > 1 else 0)).subplots()


def _legend_above(ax: Axes, bottom: float = 1.0) -> None:
    """A legend above the axes, from `bottom` on (1 is the top of the axes)."""
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, bottom), borderaxespad=0.2)


def _lines(index: int) -> dict[str, Any]:
    return {name: value for name, value in run_style(index).items() if name != "marker"}


# Reliability and confidence ---------------------------------------------------------------------


def reliability_diagram(report: Reports, ax: Axes | None = None, *, counts: bool = True) -> Axes:
    """Accuracy against confidence of the predicted class; on the diagonal it is calibrated.

    One report is drawn as bars. The gap between accuracy and mean confidence of a bin is shaded,
    red if over-confident and blue if under-confident. Several reports are drawn as lines. With
    `counts`, a strip above shows the share of pixels in each bin, on a logarithmic scale.
    """
    reports = _named(report)
    first = next(iter(reports.values()))
    ax = _axes(ax, list(reports))
    if len(reports) > 1:
        for index, (name, each) in enumerate(reports.items()):
            _draw_line(ax, each.top, index, f"{plain(name)}: ECE {SCORES['ece'].brief(each.ece)}")
        _legend_above(ax, 1.06 + _STRIP if counts else 1.0)
    else:
        _draw_bars(ax, first.top)
        scores = {"ECE": "ece", "confidence": "mean_confidence", "accuracy": "accuracy"}
        lines = [f"{n} {SCORES[s].brief(getattr(first, s))}" for n, s in scores.items()]
        ax.legend(
            handles=[
                Patch(color=OVER, alpha=_SHADE, linewidth=0, label="over-confident"),
                Patch(color=UNDER, alpha=_SHADE, linewidth=0, label="under-confident"),
            ],
            loc="upper left",
            title="\n".join(lines),
            alignment="left",
            frameon=True,
            facecolor=mpl.rcParams["axes.facecolor"],
            edgecolor="none",
            framealpha=0.8,
        )
    _finish_square(ax)
    ax.set(xlabel="confidence (%)", ylabel=SCORES["accuracy"].heading)
    if counts:
        _draw_strip(ax, [each.top for each in reports.values()], f"{counted(first)} (%)")
    return ax


def confidence_histogram(report: Reports, ax: Axes | None = None) -> Axes:
    """Share of pixels against confidence of the predicted class, with the paper's two lines.

    The dashed lines are mean confidence and accuracy. They lie apart if the network is over- or
    under-confident overall. Several reports are drawn as outlines, without these lines.
    """
    reports = _named(report)
    first = next(iter(reports.values()))
    ax = _axes(ax, list(reports))
    if len(reports) > 1:
        for index, (name, each) in enumerate(reports.items()):
            _draw_outline(ax, each.top, each.top.count, index, plain(name))
    else:
        ax.stairs(_shares(first.top.count), 100 * first.top.edges, fill=True, color=_BAR)
        for score, color, dashes in (
            ("mean_confidence", OVER, (4, 2)),
            ("accuracy", UNDER, (1.5, 1.5)),
        ):
            value = getattr(first, score)
            label = f"{SCORES[score].label} {SCORES[score].brief(value)}"
            ax.axvline(100 * value, color=color, linestyle=(0, dashes), linewidth=1.8, label=label)
    return _finish_shares(ax, f"{counted(first)} (%)")


def wrong_confidence(report: Reports, ax: Axes | None = None) -> Axes:
    """Share of the wrong predictions against their confidence, which should be low."""
    reports = _named(report)
    ax = _axes(ax, list(reports))
    for index, (name, each) in enumerate(reports.items()):
        label = f"{plain(name)}: " * bool(name) + f"{SCORES['error'].brief(each.error)} wrong"
        _draw_outline(ax, each.top, each.top.count - each.top.hits, index, label)
    return _finish_shares(ax, "wrong predictions (%)")


def _draw_outline(
    ax: Axes, bins: BinTable, count: NDArray[np.int64], index: int, label: str
) -> None:
    ax.stairs(_shares(count), 100 * bins.edges, linewidth=1.6, label=label, **_lines(index))


def _finish_shares(ax: Axes, ylabel: str) -> Axes:
    ax.set(xlim=(0, 100), ylim=(0, None), xlabel="confidence (%)", ylabel=ylabel)
    _legend_above(ax)
    return ax


def _draw_bars(ax: Axes, bins: BinTable) -> None:
    """Bars of accuracy, and the gap to the mean confidence in the colour of its sign."""
    edges, accuracy, confidence = (100 * x for x in (bins.edges, bins.accuracy, bins.confidence))
    low, high = np.minimum(accuracy, confidence), np.maximum(accuracy, confidence)
    ax.stairs(low, edges, fill=True, color=_BAR)
    for color, wanted in ((OVER, confidence > accuracy), (UNDER, confidence < accuracy)):
        top, bottom = (np.where(wanted, ends, np.nan) for ends in (high, low))
        ax.stairs(top, edges, baseline=bottom, fill=True, color=color, alpha=_SHADE, linewidth=0)
    # Lines in the colour of the paper separate the bars.
    ax.vlines(edges[1:-1], 0, 100, color=mpl.rcParams["axes.facecolor"], linewidth=0.8)


def _draw_line(ax: Axes, bins: BinTable, index: int, label: str, markersize: float = 4.5) -> None:
    """Accuracy against mean confidence of the bins that hold pixels."""
    held = bins.count > 0
    x, y = (100 * values[held] for values in (bins.confidence, bins.accuracy))
    ax.plot(x, y, label=label, markersize=markersize, clip_on=False, **run_style(index))


def _finish_square(ax: Axes, ticks: Sequence[int] = range(0, 101, 20)) -> None:
    """Axes in per cent, and the diagonal of perfect calibration."""
    color = mpl.rcParams["text.color"]
    ax.plot([0, 100], [0, 100], color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    ax.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xticks=ticks, yticks=ticks)


def _draw_strip(ax: Axes, tables: Sequence[BinTable], ylabel: str) -> None:
    """The share of each bin, above the diagram; logarithmic, as few bins hold most pixels."""
    strip = ax.inset_axes((0.0, 1.04, 1.0, _STRIP), sharex=ax)
    for index, bins in enumerate(tables):
        shares = np.maximum(_shares(bins.count), 1.3 * _LEAST)
        shares = np.where(bins.count > 0, shares, np.nan)
        if len(tables) == 1:
            strip.stairs(shares, 100 * bins.edges, baseline=_LEAST, fill=True, color=_BAR)
            paper = mpl.rcParams["axes.facecolor"]
            strip.vlines(100 * bins.edges[1:-1], _LEAST, 130, color=paper, linewidth=0.8)
        else:
            strip.stairs(shares, 100 * bins.edges, baseline=None, **_lines(index))
    strip.set(yscale="log", ylim=(_LEAST, 130))
    strip.set_ylabel(ylabel, loc="top")  # which may be longer than the strip is high
    strip.yaxis.set_major_locator(FixedLocator([0.01, 1, 100]))
    strip.yaxis.set_minor_locator(NullLocator())
    strip.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    strip.tick_params(labelbottom=False, bottom=False)


def compared_shares(
    shares: Mapping[str, Sequence[float]], names: Sequence[str], xlabel: str
) -> Axes:
    """Horizontal bars: for each of the names, its share in each of `shares`, in per cent."""
    height = 0.8 / len(shares)
    ax = _axes(None, list(shares), height=1.2 + 0.3 * len(names))
    for index, (name, values) in enumerate(shares.items()):
        at = np.arange(len(names)) + (index - (len(shares) - 1) / 2) * height
        color = run_style(index)["color"]
        ax.barh(at, 100 * np.asarray(values), height, color=color, label=name)
    ax.set(yticks=range(len(names)), yticklabels=[plain(n) for n in names], xlabel=xlabel)
    ax.set(ylim=(len(names) - 0.5, -0.5))
    ax.grid(False, axis="y")
    _legend_above(ax)
    return ax


# Classes ----------------------------------------------------------------------------------------


def classwise_reliability(report: Reports, *, limit: int = 100) -> Figure:
    """A reliability diagram of every class: how often c is the label where p_c = x, against x.

    Every pixel counts for every class, as in SCE. The gaps of one report are shaded, red where p_c
    is too high and blue where it is too low. Several reports are drawn as lines.

    Args:
        report: one report, or several by name, with the same classes.
        limit: largest number of classes; those with the largest class-j-ECE in the first report.

    Returns:
        A new figure.
    """
    reports = _named(report)
    first = next(iter(reports.values()))
    if limit < 1:
        raise ValueError(f"Expected limit to be at least 1, but got {limit}")
    worst = np.argsort(-first.class_ece, kind="stable")[:limit]  # NaN comes last
    chosen, names = sorted(worst.tolist()), class_names(first)
    columns = len(chosen)
    if columns > 7:  # a grid a little wider than high, with few empty places
        wanted = min(math.sqrt(1.6 * len(chosen)), 10)
        choices = range(round(wanted) - 1, round(wanted) + 3)
        columns = min(choices, key=lambda c: (-len(chosen) % c, abs(c - wanted)))
    rows, several = -(-len(chosen) // columns), len(reports) > 1
    # The layout is computed here: for a hundred axes matplotlib's takes longer than the drawing.
    side, across, down, head = 1.25, 0.22, 0.5, 0.5 if several else 0.05  # inches
    left, right, bottom = 0.72, 0.12, 0.62
    width = left + columns * side + (columns - 1) * across + right
    height = bottom + rows * (side + down) + head  # each square has its title above
    figure = new_figure(width, height, layout=None)
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - (head + down) / height,
        wspace=across / side,
        hspace=down / side,
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    for ax, c in zip(axes.flat, chosen, strict=False):
        for index, (name, each) in enumerate(reports.items()):
            if several:
                _draw_line(ax, each.classes[c], index, plain(name), markersize=2.5)
            else:
                _draw_bars(ax, each.classes[c])
        _finish_square(ax, ticks=(0, 50, 100))
        score = "" if several else f"\n{SCORES['class_ece'].brief(first.class_ece[c])}"
        ax.set_title(plain(names[c], 18) + score, fontsize=8.5, pad=3)
        ax.tick_params(labelsize=7.5)
        ax.label_outer()
    for ax in axes.flat[len(chosen) - columns : len(chosen)]:  # the last of each column
        ax.tick_params(labelbottom=True)
    figure.supxlabel("probability of the class (%)", fontsize=9.5)
    figure.supylabel("frequency of the class (%)", fontsize=9.5)
    if several:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=min(len(labels), 4))
    return figure


# Risk, training, shifts -------------------------------------------------------------------------


def risk_coverage(report: Reports, ax: Axes | None = None) -> Axes:
    """Share of wrong predictions against the share accepted, most confident first.

    Operating points are marked at their measured risk and coverage, with intervals.
    """
    reports = _named(report)
    ax = _axes(ax, list(reports), height=3.9)
    for index, (name, each) in enumerate(reports.items()):
        _draw_risk(ax, each.fine, index, plain(name))
        style = {**run_style(index), "linestyle": "none"}
        thin = {"color": style["color"], "linewidth": 1}
        for point in each.operating_points:
            if np.isnan(point.risk):
                continue
            x, y = 100 * point.coverage, 100 * point.risk
            if across := point.intervals.get("coverage"):
                ax.plot([100 * across.low, 100 * across.high], [y, y], **thin)
            if along := point.intervals.get("accuracy"):
                ax.plot([x, x], [100 - 100 * along.low, 100 - 100 * along.high], **thin)
            ax.plot(x, y, clip_on=False, **style)
            if len(reports) == 1:
                ax.annotate(point.target, (x, y), (-6, 5), textcoords="offset points", ha="right")
    return _finish_risk(ax, counted(next(iter(reports.values()))), legend=len(reports) > 1)


def risk_by_uncertainty(report: Report) -> Axes:
    """Share of wrong predictions against the share accepted, by each kind of uncertainty."""
    labels = [UNCERTAINTIES[one.name].label for one in report.detection]
    ax = _axes(None, labels, height=3.9)
    for index, (label, one) in enumerate(zip(labels, report.detection, strict=True)):
        _draw_risk(ax, one, index, label)
    return _finish_risk(ax, counted(report), legend=True)


def _draw_risk(ax: Axes, counts: FineHistogram | Detection, index: int, label: str) -> None:
    risk = [risk_at_coverage(counts.correct, counts.wrong, c) for c in COVERAGES]
    x, y = 100 * np.array(COVERAGES), 100 * np.array(risk)
    ax.plot(x, y, label=label or None, **_lines(index))


def _finish_risk(ax: Axes, what: str, *, legend: bool) -> Axes:
    ax.set(xlim=(0, 100), ylim=(0, None), xlabel=f"coverage: {what} accepted (%)")
    ax.set_ylabel(f"risk: accepted {what} that are wrong (%)")
    if legend:
        _legend_above(ax)
    return ax


def convergence(
    history: History | Mapping[str, History], ax: Axes | None = None, *, score: str = "ece"
) -> Axes:
    """A score on the hold-out against the epoch, from the lines of log.jsonl of one or more runs.

    Epochs without the score are skipped. A ring marks the epoch whose weights were kept, which the
    log calls "best".
    """
    if score not in SCORES:
        raise ValueError(f"Expected score to be one of {', '.join(SCORES)}, but got {score!r}")
    histories = history if isinstance(history, Mapping) else {"": history}
    ax = _axes(ax, "", height=3.2)
    for index, (name, lines) in enumerate(histories.items()):
        known = [line for line in lines if line.get(f"holdout/{score}") is not None]
        points = [(line["epoch"], SCORES[score].scale * line[f"holdout/{score}"]) for line in known]
        if not points:
            continue
        style = run_style(index)
        ax.plot(*zip(*points, strict=True), label=plain(name) or None, markersize=3, **style)
        # The last epoch called best.
        for point in [p for p, line in zip(points, known, strict=True) if line.get("best")][-1:]:
            ax.plot(*point, marker="o", markersize=9, fillstyle="none", color=style["color"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(ylim=(0, None), xlabel="epoch", ylabel=f"{SCORES[score].heading} on the hold-out")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax


def severity_curve(
    means: Mapping[str, Mapping[int, float]], ax: Axes | None = None, *, score: str
) -> Axes:
    """A score against severity, 0 being the clean images: by model, the fraction at each."""
    ax = _axes(ax, "", height=3.2)
    for index, (name, values) in enumerate(means.items()):
        heights = [SCORES[score].scale * value for value in values.values()]
        ax.plot(list(values), heights, label=plain(name), markersize=4, **run_style(index))
    ax.set(xlabel="severity (0: clean)", ylabel=SCORES[score].heading)
    ax.set_xticks(sorted({grade for values in means.values() for grade in values}))
    if score != "accuracy":
        ax.set_ylim(0, None)
    ax.legend()
    return ax
