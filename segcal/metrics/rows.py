"""Reports as text: in one line, and as tables with units in the header and the protocol below."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from segcal.metrics.protocols import PROTOCOL_SCORES, describe_protocol
from segcal.metrics.report import Interval
from segcal.metrics.scores import LOGGED, SCORES, Score, number

if TYPE_CHECKING:
    from segcal.metrics.report import Report

THRESHOLD_DIGITS = 8  # significant ones
FEW_IMAGES = 20  # fewer may all lack what is rare
_POSTHOC = (SCORES["sce"], SCORES["ece"])
PART_SCORES = tuple(SCORES[name] for name in PROTOCOL_SCORES)


class TableCell(NamedTuple):
    """A number in a table.

    Attributes:
        value: in the unit of the table.
        text: the value as printed.
        interval: its 95 % interval as printed; "" if there is none.
        best: whether it is the best of its column.
    """

    value: float
    text: str
    interval: str = ""
    best: bool = False


def describe_scores(scores: Mapping[str, Any], prefix: str = "") -> str:
    """Those of `scores` that are logged, in one line, with their units."""
    found = [(score, scores.get(prefix + score.name)) for score in LOGGED]
    return ", ".join(f"{s.label} {s.text(value)}" for s, value in found if value is not None)


def describe_report(report: Report) -> str:
    """The scores of a report in one line."""
    dense = report.protocol.pixels > report.protocol.images  # not one label per image
    return describe_scores({n: v for n, v in report.scores.items() if dense or not SCORES[n].dense})


def to_markdown(reports: Mapping[str, Report]) -> str:
    """Two Markdown tables with one row per report, the best in bold; then each protocol used.

    The first table has the main scores, the second one all others. Tables of `part_tables` follow.
    """
    every = list(reports.values())
    tables = []
    for columns in (columns_of(every), more_columns_of(every)):
        rows = [
            (name, [cell_markdown(cell) for cell in cells])
            for name, cells in zip(reports, cells_of(every, columns), strict=True)
        ]
        tables.append(markdown_table([score.heading for score in columns], rows))
    parts: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    for name, report in reports.items():
        for _, headings, part_rows in part_tables(report):
            parts.setdefault(tuple(headings), []).extend(
                (
                    f"{name}, {part}" if len(reports) > 1 else part,
                    [*map(cell_markdown, cells), note],
                )
                for part, cells, note in part_rows
            )
    for (corner, *names), found in parts.items():
        tables.append(markdown_table(names, found, corner=corner))
    protocols = dict.fromkeys(protocol_sentence(report) for report in every)
    return "\n".join([*tables, *protocols]) + "\n"


class PartTable(NamedTuple):
    """A table of parts of one report.

    Attributes:
        title: a few words.
        headings: of the names of the rows, of the cells, and of the notes.
        rows: name, cells and note of each part.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[TableCell], str]]


def part_tables(report: Report) -> list[PartTable]:
    """The tables of regions, protocols of averaging, operating points and class sets, if any."""
    parts = {report.protocol.region: report, **report.regions} if report.regions else {}
    scores = [score.heading for score in PART_SCORES]
    accuracy = SCORES["accuracy"]
    tables = [
        PartTable(
            "Regions",
            ["region", *scores, pixels_or_decisions(report)],
            [
                (name, cells_of([part], PART_SCORES)[0], f"{part.protocol.pixels:,}")
                for name, part in parts.items()
            ],
        ),
        PartTable(
            "Protocols",
            ["protocol", *scores, "what it is"],
            [
                (name, [cell_of(s, found[s.name]) for s in PART_SCORES], describe_protocol(name))
                for name, found in report.protocols.items()
            ],
        ),
        PartTable(
            "Operating points",
            [
                *("target", "threshold", "coverage on the hold-out (%)"),
                f"{accuracy.label} on the hold-out ({accuracy.unit})",
                *("coverage (%)", accuracy.heading, "the target is"),
            ],
            [
                (
                    point.target,
                    [
                        TableCell(point.threshold, threshold_text(point.threshold)),
                        cell_of(accuracy, point.holdout_coverage),
                        cell_of(accuracy, point.holdout_accuracy),
                        cell_of(accuracy, point.coverage, point.intervals.get("coverage")),
                        cell_of(accuracy, point.accuracy, point.intervals.get("accuracy")),
                    ],
                    point.verdict,
                )
                for point in report.operating_points
            ],
        ),
        PartTable(
            "Class sets",
            [
                *("promised miss rate", "λ", "miss rate on the hold-out (%)", "miss rate (%)"),
                *("classes in a set", "empty sets (%)", "images of the hold-out"),
            ],
            [
                (
                    f"miss={sets.miss:g}",
                    [
                        TableCell(sets.lam, threshold_text(sets.lam)),
                        cell_of(accuracy, sets.holdout_miss),
                        cell_of(accuracy, sets.miss_rate, sets.interval),
                        TableCell(sets.set_size, number(sets.set_size, 2)),
                        cell_of(accuracy, sets.empty),
                    ],
                    f"{sets.holdout_images:,}",
                )
                for sets in report.class_sets
            ],
        ),
    ]
    return [table for table in tables if table.rows]


def cell_of(score: Score, value: float, interval: Interval | None = None) -> TableCell:
    """A fraction as `score` is printed."""
    return TableCell(value * score.scale, score.number(value), _interval_text(score, interval))


def threshold_text(value: float) -> str:
    """A threshold of probability, to be copied: exact for those of the fine histogram."""
    return "–" if math.isnan(value) else f"{value:.{THRESHOLD_DIGITS}g}"


def posthoc_markdown(reports: Mapping[tuple[str, str], Report]) -> str:
    """A Markdown table with one row per network and one column per post-hoc method.

    It has SCE and ECE, as the paper's comparison of train-time and post-hoc calibration does. The
    best method of each row is in bold, if any is better as printed.

    Args:
        reports: by (name of the network, short name of the method).
    """
    networks = list(dict.fromkeys(network for network, _ in reports))
    methods = list(dict.fromkeys(method for _, method in reports))
    rows = []
    for network in networks:
        found = [reports.get((network, method)) for method in methods]
        cells = [cell for score in _POSTHOC for cell in _cells(found, score)]
        rows.append((network, [cell_markdown(cell._replace(interval="")) for cell in cells]))
    return markdown_table([f"{s.heading} {method}" for s in _POSTHOC for method in methods], rows)


def to_csv(reports: Mapping[str, Report]) -> str:
    """CSV with one row per report: all scores in the units of the header, then the protocol."""
    every = list(reports.values())
    columns = [*columns_of(every), *more_columns_of(every)]
    intervals = [c for c in columns if any(c.name in r.intervals for r in reports.values())]
    protocol = ("region", "average", "num_bins", "edge_rule", "ignore_index", "images", "pixels")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["model", *(c.heading for c in columns)]
        + [f"{c.heading} 95% {end}" for c in intervals for end in ("low", "high")]
        + [*protocol, "segcal version"]
    )
    for name, report in reports.items():
        row: list[object] = [
            name,
            *(csv_number(getattr(report, c.name) * c.scale) for c in columns),
        ]
        for column in intervals:
            interval = report.intervals.get(column.name)
            ends = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
            row += [csv_number(end * column.scale) for end in ends]
        row += [getattr(report.protocol, key) for key in (*protocol, "version")]
        writer.writerow(row)
    return text.getvalue()


def protocol_sentence(report: Report) -> str:
    """The protocol of `report` in one sentence."""
    p = report.protocol
    bins = "(lo, hi]" if p.edge_rule == "right" else "[lo, hi)"
    intervals = "".join(f"; {note}" for note in interval_notes(report))
    return (
        f"{p.average.capitalize()}-averaged over {p.pixels:,} {pixels_or_decisions(report)} of "
        f"{p.images:,} images, "
        f"region {p.region}, {p.num_classes} classes, {p.num_bins} equal bins {bins}, "
        f"label {p.ignore_index} ignored{intervals}; segcal {p.version}."
    )


def pixels_or_decisions(report: Report) -> str:
    """What a report counts: pixels, or decisions, one per pixel and sigmoid output."""
    return "decisions" if report.protocol.multilabel else "pixels"


def interval_notes(report: Report) -> list[str]:
    """What to know about the intervals of `report`: how they came about, and which are missing."""
    notes = []
    if report.intervals and report.images is not None:
        notes.append(f"[95 % interval] by bootstrap over images ({report.images.resamples}×)")
        if report.protocol.images < FEW_IMAGES:
            notes.append(f"fewer than {FEW_IMAGES} images: an interval may be too short")
        intervals = report.intervals.items()
        above = [SCORES[name].label for name, i in intervals if getattr(report, name) > i.high]
        notes += [above_interval(above)] if above else []
    missing: dict[str, list[str]] = {}  # scores by reason
    for name, why in ({} if report.images is None else report.images.withheld).items():
        missing.setdefault(why, []).append(SCORES[name].label if name in SCORES else name)
    return notes + [f"no interval for {', '.join(n)}: {why}" for why, n in missing.items()]


def above_interval(labels: Iterable[str]) -> str:
    """Why printed calibration errors may lie above their intervals."""
    return (
        f"{', '.join(labels)} above the interval: noise adds to the printed error, and the "
        "interval is for the error on infinitely many images"
    )


def columns_of(reports: Sequence[Report]) -> list[Score]:
    """The columns of the first table of these reports."""
    return [score for score in _known(reports) if score.table]


def more_columns_of(reports: Sequence[Report]) -> list[Score]:
    """The columns of the second table: all scores that the first one does not have."""
    return [score for score in _known(reports) if not score.table]


def _known(reports: Sequence[Report]) -> list[Score]:
    kept = any(report.images is not None for report in reports)
    scopes = ("pixels", "images") if kept else ("pixels",)
    return [score for score in SCORES.values() if score.scope in scopes]


def cells_of(reports: Sequence[Report], columns: Sequence[Score]) -> list[list[TableCell]]:
    """One row per report, one cell per column; the best of each column marked."""
    by_column = [_cells(reports, score) for score in columns]
    return [list(row) for row in zip(*by_column, strict=True)]


def best_of(values: Sequence[float], digits: int, *, higher: bool = False) -> set[int]:
    """Which of the values are best as printed with `digits`; none if they all print alike."""
    printed = [None if math.isnan(value) else round(value, digits) for value in values]
    known = {value for value in printed if value is not None}
    if len(known) < 2:
        return set()
    best = max(known) if higher else min(known)
    return {index for index, value in enumerate(printed) if value == best}


def cells_of_values(values: Sequence[float], score: Score) -> list[TableCell]:
    """The cells of one score, one per value, a fraction; the best marked."""
    scaled = [value * score.scale for value in values]
    ranked = score.better != "neither"
    best = best_of(scaled, score.digits, higher=score.higher) if ranked else set()
    return [cell_of(score, v)._replace(best=index in best) for index, v in enumerate(values)]


def _cells(reports: Sequence[Report | None], score: Score) -> list[TableCell]:
    """The cells of one score, one per report; a dash where there is no report."""
    cells = cells_of_values(
        [math.nan if report is None else getattr(report, score.name) for report in reports], score
    )
    for index, report in enumerate(reports):
        interval = None if report is None else report.intervals.get(score.name)
        cells[index] = cells[index]._replace(interval=_interval_text(score, interval))
    return cells


def _interval_text(score: Score, interval: Interval | None) -> str:
    if interval is None or math.isnan(interval.low):
        return ""
    return f"[{score.number(interval.low)}, {score.number(interval.high)}]"


def cell_markdown(cell: TableCell) -> str:
    """A cell of a Markdown table, the best in bold."""
    text = f"**{cell.text}**" if cell.best else cell.text
    return f"{text} {cell.interval}".strip()


def markdown_table(
    headings: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, corner: str = "model"
) -> str:
    """A Markdown table of named rows; `corner` is the heading of their names."""
    shown = " | ".join(_escape(heading) for heading in headings)
    lines = [f"| {corner} | {shown} |", "|---|" + "---:|" * len(headings)]
    lines += [f"| {_escape(name)} | " + " | ".join(cells) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def csv_number(value: float) -> str:
    """A number as CSV holds it, exactly; nothing for NaN."""
    return "" if math.isnan(value) else repr(value)


def _escape(name: str) -> str:
    return " ".join(name.split()).replace("|", "\\|")
