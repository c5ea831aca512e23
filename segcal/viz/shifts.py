"""Tables and curves of a model under shift."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from segcal.data.shift import Shift
from segcal.metrics import Report
from segcal.metrics.rows import cell_markdown, cells_of_values, csv_number, markdown_table
from segcal.metrics.scores import SCORES
from segcal.viz.entry import Heading, PageRow, shifted
from segcal.viz.figure import axes_or_new, ink, new_figure, plain, run_style

CLEAN, MEAN = "clean", "mean over shifts"
SHIFT_SCORES = tuple(
    SCORES[name]
    for name in ("ece", "sce", "accuracy", "overconfidence", "underconfidence", "mean_confidence")
)


def shifts_of(entries: Sequence[PageRow]) -> list[Shift]:
    """All shifts of the entries, kinds in the order they were asked for, each by severity."""
    found = list(dict.fromkeys(shift for entry in entries for shift in entry.shifts))
    kinds = list(dict.fromkeys(shift.name for shift in found))

    def place(shift: Shift) -> tuple[int, float]:
        return kinds.index(shift.name), 0 if isinstance(shift.value, str) else shift.value

    return sorted(found, key=place)


def mean_over_shifts(entry: PageRow, score: str) -> float:
    """The plain mean of a score over all shifts of an entry, without the clean images."""
    return float(np.mean([getattr(report, score) for report in entry.shifts.values()]))


def shift_records(entries: Sequence[PageRow]) -> list[dict[str, Any]]:
    """The scores of every model, clean, under each shift, and in the mean; fractions."""
    records: list[dict[str, Any]] = []
    for entry in shifted(entries):
        records.append(_record(entry, CLEAN, 0, _scores(entry.report)))
        for shift in shifts_of([entry]):
            label = shift.name if shift.severity is not None else str(shift)
            records.append(_record(entry, label, shift.severity, _scores(entry.shifts[shift])))
        means = {score.name: mean_over_shifts(entry, score.name) for score in SHIFT_SCORES}
        records.append(_record(entry, MEAN, None, means))
    return records


def _record(
    entry: PageRow, shift: str, severity: int | None, scores: dict[str, float]
) -> dict[str, Any]:
    return {"model": entry.name, "shift": shift, "severity": severity, **scores}


def _scores(report: Report) -> dict[str, float]:
    return {score.name: getattr(report, score.name) for score in SHIFT_SCORES}


def shift_csv(entries: Sequence[PageRow]) -> str:
    """CSV: one row per model and shift, the scores in the units of the header."""
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


def shift_markdown(entries: Sequence[PageRow]) -> str:
    """Markdown: the means over shifts, then one table per score, with one row per shift."""
    parts = [_markdown(mean_table(entries), "model")]
    for table in score_tables(entries):
        parts.append(f"**{table['score']}**\n\n" + _markdown(table, "shift"))
    return "\n".join(parts)


def shift_text(entries: Sequence[PageRow]) -> str:
    """Lines for a terminal, one per model: accuracy; ECE, clean, under each shift and in the mean.

    Empty if no entry was evaluated under shift.
    """
    entries = shifted(entries)
    if not entries:
        return ""
    accuracy, ece = SCORES["accuracy"], SCORES["ece"]
    shifts = shifts_of(entries)
    lines = [
        ["", accuracy.heading, ece.heading] + [""] * (len(shifts) + 1),
        ["model", CLEAN, CLEAN, *map(str, shifts), MEAN],
    ]
    for entry in entries:
        under = [entry.shifts.get(shift) for shift in shifts]
        eces = [getattr(report, ece.name, math.nan) for report in (entry.report, *under)]
        eces.append(mean_over_shifts(entry, ece.name))
        lines.append([entry.name, accuracy.number(entry.report.accuracy), *map(ece.number, eces)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )


def _markdown(table: dict[str, Any], corner: str) -> str:
    rows = [(row["name"], [cell_markdown(cell) for cell in row["cells"]]) for row in table["rows"]]
    return markdown_table([column.text for column in table["columns"]], rows, corner=corner)


def mean_table(entries: Sequence[PageRow]) -> dict[str, Any]:
    """One row per model: ECE on clean images, then every score in the mean over shifts."""
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


def score_tables(entries: Sequence[PageRow]) -> list[dict[str, Any]]:
    """One table per score: rows are clean images, each shift, and the mean; columns are models.

    The best of each row is marked.
    """
    entries = shifted(entries)
    tables = []
    for score in SHIFT_SCORES:
        rows = [(CLEAN, [getattr(entry.report, score.name) for entry in entries])]
        for shift in shifts_of(entries):
            under = [entry.shifts.get(shift) for entry in entries]
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


_COLUMNS, _CELL = 4, 2.3  # small diagrams in a row, and their width in inches


def kinds_and_severities(entries: Sequence[PageRow]) -> tuple[list[str], list[int]]:
    """The corruptions that all entries met at the same severities, and these severities."""
    entries = shifted(entries)
    shifts = [s for s in shifts_of(entries) if s.severity is not None]
    severities = sorted({s.severity for s in shifts if s.severity is not None})
    kinds = [
        kind
        for kind in dict.fromkeys(shift.name for shift in shifts)
        if all(sum(s.name == kind for s in e.shifts) == len(severities) for e in entries)
    ]
    return kinds, severities if kinds else []


def _expected_kinds(entries: Sequence[PageRow]) -> tuple[list[str], list[int]]:
    kinds, severities = kinds_and_severities(entries)
    if not kinds:
        raise ValueError("Expected corruptions of the same severities, but got none")
    return kinds, severities


def severity_curve(
    entries: Sequence[PageRow], ax: Axes | None = None, *, score: str = "ece"
) -> Axes:
    """A score against severity, 0 being the clean images: the mean over corruptions.

    Args:
        entries: with shifts; those without are left out.
        ax: axes to draw on; those of a new figure if None.
        score: ece, sce, accuracy, overconfidence, underconfidence or mean_confidence.
    """
    kinds, severities = _expected_kinds(entries)
    ax = axes_or_new(ax, 4.4, 3.2)
    _curves(ax, entries, kinds, severities, score)
    ax.set(ylabel=SCORES[score].heading, xlabel="severity (0: clean)")
    ax.legend()
    return ax


def severity_curves(entries: Sequence[PageRow], *, score: str = "ece") -> Figure:
    """The same for each corruption, in small diagrams of one scale."""
    kinds, severities = _expected_kinds(entries)
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
    ax: Axes,
    entries: Sequence[PageRow],
    kinds: Sequence[str],
    severities: Sequence[int],
    score: str,
) -> None:
    scale = SCORES[score].scale
    for index, entry in enumerate(shifted(entries)):
        at = {(s.name, s.severity): getattr(report, score) for s, report in entry.shifts.items()}
        values = [getattr(entry.report, score)]
        values += [
            float(np.mean([at[kind, severity] for kind in kinds])) for severity in severities
        ]
        points = [0, *severities], [scale * value for value in values]
        ax.plot(*points, label=plain(entry.name), markersize=4, **run_style(index))
    ax.set_xticks([0, *severities])
    if score != "accuracy":
        ax.set_ylim(0, None)


def believed_accuracy(entries: Sequence[PageRow], ax: Axes | None = None) -> Axes:
    """Mean confidence under each shift against accuracy.

    One point per shift; the clean images have a ring.

    Args:
        entries: with shifts; those without are left out.
        ax: axes to draw on; those of a new figure if None.
    """
    ax = axes_or_new(ax, 4.4, 3.6)
    accuracy, confidence = SCORES["accuracy"], SCORES["mean_confidence"]
    low = top = accuracy.scale
    for index, entry in enumerate(shifted(entries)):
        reports = [entry.report, *entry.shifts.values()]
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
