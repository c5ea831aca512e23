"""The place for reports as text: one row a report, units in the header, protocol stated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from segcal.metrics.report import Report


class Column(NamedTuple):
    """A score in a table: its name in `Report`, its heading, and value × scale to digits."""

    score: str
    heading: str
    scale: float
    digits: int
    higher: bool = False  # whether more is better


class Cell(NamedTuple):
    """A number in a table: as text, its interval as text ("" if none), and whether it is best."""

    value: float
    text: str
    interval: str = ""
    best: bool = False


COLUMNS = (
    Column("accuracy", "accuracy (%)", 100, 2, higher=True),
    Column("miou", "mIoU (%)", 100, 2, higher=True),
    Column("ece", "ECE (%)", 100, 2),
    Column("sce", "SCE (1e-3)", 1000, 2),
    Column("mce", "MCE (%)", 100, 2),
    Column("adaptive_ece", "adaptive ECE (%)", 100, 2),
    Column("nll", "NLL (nats)", 1, 4),
    Column("brier", "Brier (0-2)", 1, 4),
    Column("auroc", "error AUROC (%)", 100, 2, higher=True),
)
IMAGE_COLUMN = Column("image_ece", "image-averaged ECE (%)", 100, 2)


def to_markdown(reports: Mapping[str, Report]) -> str:
    """A Markdown table, one row a report, the best in bold; under it each protocol used."""
    every = list(reports.values())
    columns = columns_of(every)
    lines = [
        "| model | " + " | ".join(column.heading for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, cells in zip(reports, cells_of(every), strict=True):
        texts = [f"**{cell.text}**" if cell.best else cell.text for cell in cells]
        texts = [f"{text} {cell.interval}".strip() for text, cell in zip(texts, cells, strict=True)]
        lines.append(f"| {_escape(name)} | " + " | ".join(texts) + " |")
    lines += ["", *dict.fromkeys(describe(report) for report in every)]
    return "\n".join(lines) + "\n"


def to_csv(reports: Mapping[str, Report]) -> str:
    """CSV, one row a report; the scores in the units of the header, then the protocol."""
    columns = columns_of(list(reports.values()))
    intervals = [c for c in columns if any(c.score in r.intervals for r in reports.values())]
    protocol = ("region", "average", "num_bins", "edge_rule", "ignore_index", "images", "pixels")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["model", *(c.heading for c in columns)]
        + [f"{c.heading} 95% {end}" for c in intervals for end in ("low", "high")]
        + [*protocol, "segcal version"]
    )
    for name, report in reports.items():
        row: list[object] = [name, *(_number(getattr(report, c.score) * c.scale) for c in columns)]
        for column in intervals:
            interval = report.intervals.get(column.score)
            ends = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
            row += [_number(end * column.scale) for end in ends]
        row += [getattr(report.protocol, key) for key in (*protocol, "version")]
        writer.writerow(row)
    return text.getvalue()


def describe(report: Report) -> str:
    """The protocol of `report` in one sentence."""
    p = report.protocol
    bins = "(lo, hi]" if p.edge_rule == "right" else "[lo, hi)"
    intervals = ""
    if report.images is not None and report.images.intervals:
        intervals = f"; [95 % interval] by bootstrap over images ({report.images.resamples}×)"
    return (
        f"{p.average.capitalize()}-averaged over {p.pixels:,} pixels of {p.images:,} images, "
        f"region {p.region}, {p.num_classes} classes, {p.num_bins} equal bins {bins}, "
        f"label {p.ignore_index} ignored{intervals}; segcal {p.version}."
    )


def columns_of(reports: Sequence[Report]) -> list[Column]:
    """The columns of a table of these reports."""
    kept = any(report.images is not None for report in reports)
    return [*COLUMNS, *[IMAGE_COLUMN] * kept]


def cells_of(reports: Sequence[Report]) -> list[list[Cell]]:
    """One row a report, one cell a column of `columns_of`; the best of each column marked."""
    by_column = [_column_cells(reports, column) for column in columns_of(reports)]
    return [list(row) for row in zip(*by_column, strict=True)]


def best_of(values: Sequence[float], digits: int, *, higher: bool = False) -> set[int]:
    """Which of the values are best as printed with `digits`; none if they all print alike."""
    printed = [None if math.isnan(value) else round(value, digits) for value in values]
    known = {value for value in printed if value is not None}
    if len(known) < 2:
        return set()
    best = max(known) if higher else min(known)
    return {index for index, value in enumerate(printed) if value == best}


def number(value: float, digits: int) -> str:
    """A number as tables print it; a dash if there is none."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _column_cells(reports: Sequence[Report], column: Column) -> list[Cell]:
    values = [getattr(report, column.score) * column.scale for report in reports]
    best = best_of(values, column.digits, higher=column.higher)
    cells = []
    for index, (report, value) in enumerate(zip(reports, values, strict=True)):
        interval = report.intervals.get(column.score)
        text = ""
        if interval is not None and not math.isnan(interval.low):
            low, high = interval.low * column.scale, interval.high * column.scale
            text = f"[{low:.{column.digits}f}, {high:.{column.digits}f}]"
        cells.append(Cell(value, number(value, column.digits), text, index in best))
    return cells


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
