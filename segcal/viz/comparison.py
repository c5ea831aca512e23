"""The place for the table that compares entries: its cells, the best of them, and it as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from segcal.metrics import Report, rows
from segcal.metrics.rows import Column
from segcal.viz.entry import Entry, distinct

_HIGHER_IS_BETTER = {"accuracy", "miou", "auroc"}


@dataclass(frozen=True)
class Cell:
    """A number in a table: as text, its interval as text ("" if none), and whether it is best."""

    value: float
    text: str
    interval: str = ""
    best: bool = False


def comparison_columns(reports: Sequence[Report]) -> list[Column]:
    """The scores that are compared: all of `rows`, and the image-averaged ECE where it exists."""
    kept = any(report.images is not None for report in reports)
    return [*rows.COLUMNS, *[rows.IMAGE_COLUMN] * kept]


def comparison_cells(reports: Sequence[Report]) -> list[list[Cell]]:
    """One row a report, one cell a column of `comparison_columns`."""
    by_column = [_cells(reports, column) for column in comparison_columns(reports)]
    return [list(row) for row in zip(*by_column, strict=True)]


def comparison_markdown(entries: Sequence[Entry]) -> str:
    """A Markdown table: one row an entry, units in the header, intervals, the best in bold."""
    entries = distinct(entries)
    reports = [entry.report for entry in entries]
    columns = comparison_columns(reports)
    lines = [
        "| model | " + " | ".join(column.heading for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for entry, cells in zip(entries, comparison_cells(reports), strict=True):
        texts = [f"**{cell.text}**" if cell.best else cell.text for cell in cells]
        texts = [f"{text} {cell.interval}".strip() for text, cell in zip(texts, cells, strict=True)]
        name = " ".join(entry.name.split()).replace("|", "\\|")
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    lines += ["", *dict.fromkeys(rows.describe(report) for report in reports)]
    return "\n".join(lines) + "\n"


def comparison_csv(entries: Sequence[Entry]) -> str:
    """CSV: one row an entry, units in the header, intervals and protocol in their own columns."""
    return rows.to_csv({entry.name: entry.report for entry in distinct(entries)})


def best_of(values: Sequence[float], digits: int, *, higher: bool = False) -> set[int]:
    """Which of the values are best as printed with `digits`; none if they all print alike."""
    printed = [None if math.isnan(value) else round(value, digits) for value in values]
    known = {value for value in printed if value is not None}
    if len(known) < 2:
        return set()
    best = max(known) if higher else min(known)
    return {index for index, value in enumerate(printed) if value == best}


def number(value: float, digits: int) -> str:
    """A number as tables print it."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _cells(reports: Sequence[Report], column: Column) -> list[Cell]:
    values = [getattr(report, column.score) * column.scale for report in reports]
    best = best_of(values, column.digits, higher=column.score in _HIGHER_IS_BETTER)
    cells = []
    for index, (report, value) in enumerate(zip(reports, values, strict=True)):
        interval = report.intervals.get(column.score)
        text = ""
        if interval is not None and not math.isnan(interval.low):
            low, high = interval.low * column.scale, interval.high * column.scale
            text = f"[{low:.{column.digits}f}, {high:.{column.digits}f}]"
        cells.append(Cell(value, number(value, column.digits), text, index in best))
    return cells
