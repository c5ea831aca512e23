"""Scores of models under shift: their mean over shifts, and tables of shift, severity and model."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from segcal.data.shift import Shift
from segcal.metrics import Report
from segcal.metrics.rows import cell_markdown, cells_of_values, csv_number, markdown_table
from segcal.metrics.scores import SCORES
from segcal.viz.entry import Entry
from segcal.viz.views import Heading

CLEAN, MEAN = "clean", "mean over shifts"
SHIFT_SCORES = tuple(
    SCORES[name]
    for name in (
        "ece",
        "sce",
        "accuracy",
        "overconfidence",
        "underconfidence",
        "mean_confidence",
    )
)


def shifted(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that were evaluated under shift."""
    return [entry for entry in entries if entry.shifts]


def shifts_of(entries: Sequence[Entry]) -> list[Shift]:
    """All shifts of the entries, kinds in the order they were asked for, each by severity."""
    found = list(dict.fromkeys(under.shift for entry in entries for under in entry.shifts))
    kinds = list(dict.fromkeys(shift.name for shift in found))
    numbers = [shift.value if isinstance(shift.value, int | float) else 0 for shift in found]
    order = sorted(range(len(found)), key=lambda i: (kinds.index(found[i].name), numbers[i]))
    return [found[i] for i in order]


def mean_over_shifts(entry: Entry, score: str) -> float:
    """The plain mean of a score over all shifts of an entry, without the clean images."""
    return float(np.mean([getattr(under.report, score) for under in entry.shifts]))


def shift_records(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The scores of every model, clean, under each shift, and in the mean; fractions."""
    records: list[dict[str, Any]] = []
    for entry in shifted(entries):
        reports = {under.shift: under.report for under in entry.shifts}
        records.append(_record(entry, CLEAN, 0, _scores(entry.report)))
        for shift in shifts_of([entry]):
            label = shift.name if shift.severity is not None else str(shift)
            records.append(_record(entry, label, shift.severity, _scores(reports[shift])))
        means = {score.name: mean_over_shifts(entry, score.name) for score in SHIFT_SCORES}
        records.append(_record(entry, MEAN, None, means))
    return records


def _record(
    entry: Entry, shift: str, severity: int | None, scores: dict[str, float]
) -> dict[str, Any]:
    return {"model": entry.name, "shift": shift, "severity": severity, **scores}


def _scores(report: Report) -> dict[str, float]:
    return {score.name: getattr(report, score.name) for score in SHIFT_SCORES}


def shift_csv(entries: Sequence[Entry]) -> str:
    """CSV: one row a model and shift, the scores in the units of the header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "shift", "severity", *(score.heading for score in SHIFT_SCORES)])
    for record in shift_records(entries):
        severity = "" if record["severity"] is None else record["severity"]
        writer.writerow(
            [record["model"], record["shift"], severity]
            + [csv_number(record[score.name] * score.scale) for score in SHIFT_SCORES]
        )
    return text.getvalue()


def shift_markdown(entries: Sequence[Entry]) -> str:
    """Markdown: the means over shifts, then a table a score with a row a shift."""
    parts = [_markdown(mean_table(entries), "model")]
    for table in score_tables(entries):
        parts.append(f"**{table['score']}**\n\n" + _markdown(table, "shift"))
    return "\n".join(parts)


def _markdown(table: dict[str, Any], corner: str) -> str:
    rows = [(row["name"], [cell_markdown(cell) for cell in row["cells"]]) for row in table["rows"]]
    return markdown_table([column.text for column in table["columns"]], rows, corner=corner)


def mean_table(entries: Sequence[Entry]) -> dict[str, Any]:
    """A row a model: ECE on clean images, then every score in the mean over shifts."""
    entries = shifted(entries)
    columns = [cells_of_values([entry.report.ece for entry in entries], SCORES["ece"])]
    columns += [
        cells_of_values([mean_over_shifts(entry, score.name) for entry in entries], score)
        for score in SHIFT_SCORES
    ]
    return {
        "columns": [
            Heading(f"{CLEAN} {SCORES['ece'].heading}"),
            *(Heading(score.heading) for score in SHIFT_SCORES),
        ],
        "rows": [
            {"name": entry.name, "cells": list(cells)}
            for entry, cells in zip(entries, zip(*columns, strict=True), strict=True)
        ],
    }


def score_tables(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A table a score: a row a shift, after the clean images and before the mean; a column a model.

    The best of each row is marked.
    """
    entries = shifted(entries)
    reports = [{under.shift: under.report for under in entry.shifts} for entry in entries]
    tables = []
    for score in SHIFT_SCORES:
        rows = [(CLEAN, [getattr(entry.report, score.name) for entry in entries])]
        for shift in shifts_of(entries):
            under = [found.get(shift) for found in reports]
            rows.append((str(shift), [getattr(report, score.name, math.nan) for report in under]))
        rows.append((MEAN, [mean_over_shifts(entry, score.name) for entry in entries]))
        tables.append(
            {
                "score": score.heading,
                "columns": [Heading(entry.name) for entry in entries],
                "rows": [
                    {"name": name, "cells": cells_of_values(values, score)} for name, values in rows
                ],
            }
        )
    return tables
