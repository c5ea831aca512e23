"""The rows of the tables on the page, from reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from segcal.metrics import Report
from segcal.metrics.rows import (
    TableCell,
    best_of,
    cells_of,
    interval_notes,
)
from segcal.metrics.scores import SCORES, Score, number
from segcal.viz.entry import Entry
from segcal.viz.reading import class_names, counted

_TILES = ("ece", "sce", "accuracy", "miou")
_CLASS_SCORES = tuple(
    SCORES[n] for n in ("class_iou", "class_dice", "accuracy", "class_ece", "class_ace")
)


class Heading(NamedTuple):
    """The heading of a sortable column, and the order that the first click gives."""

    text: str
    first: str = "descending"


def tiles(report: Report) -> list[tuple[Score, TableCell]]:
    """The four scores to see first, and their cells."""
    scores = [SCORES[name] for name in _TILES]
    return list(zip(scores, cells_of([report], scores)[0], strict=True))


def class_columns(report: Report) -> list[Heading]:
    """The columns of `class_rows` after the name."""
    return [
        Heading("no.", "ascending"),
        Heading(f"{counted(report)} (%)"),
        *(Heading(s.heading, "ascending" if s.higher else "descending") for s in _CLASS_SCORES),
        Heading("bias (points)"),
    ]


def class_rows(report: Report) -> list[dict[str, Any]]:
    """One row per class: name, cells, and its class-j-ECE relative to the largest one."""
    total = max(report.protocol.pixels, 1)
    truth = report.confusion.sum(1)
    right = report.confusion.diagonal()
    accuracy = np.divide(right, truth, out=np.full(len(truth), np.nan), where=truth > 0)
    bias = (report.classes.confidence_sum - report.classes.hits).sum(1) / total
    values = (report.class_iou, report.class_dice, accuracy, report.class_ece, report.class_ace)
    scored = list(zip(_CLASS_SCORES, values, strict=True))
    bars = np.nan_to_num(report.class_ece)
    bars = bars / max(bars.max(), 1e-12)
    rows = []
    for c, name in enumerate(class_names(report)):
        share = 100 * float(truth[c] / total)
        cells = [TableCell(c, str(c)), TableCell(share, number(share, 2))]
        cells += [_cell(score, float(of_class[c])) for score, of_class in scored]
        cells.append(TableCell(100 * bias[c], _signed(100 * bias[c])))
        rows.append({"name": name, "cells": cells, "bar": f"{bars[c]:.3f}"})
    return rows


def class_ece_table(entries: Sequence[Entry]) -> dict[str, Any]:
    """The class-j-ECE of every class (row) and entry (column), the best of each row marked."""
    names = class_names(entries[0].report)
    score = SCORES["class_ece"]
    table = np.stack([entry.report.class_ece for entry in entries], axis=1)  # (K, E)
    rows = []
    for name, values in zip(names, table.tolist(), strict=True):
        cells = [_cell(score, value) for value in values]
        best = best_of([cell.value for cell in cells], score.digits, higher=score.higher)
        cells = [cell._replace(best=index in best) for index, cell in enumerate(cells)]
        rows.append({"name": name, "cells": cells})
    return {"columns": [Heading(entry.name) for entry in entries], "rows": rows}


def worst_images(report: Report) -> list[tuple[str, str, str]]:
    """(name, ECE, pixels) of the worst calibrated images, as printed."""
    ece = SCORES["ece"]
    return [(each.name, ece.number(each.ece), f"{each.pixels:,}") for each in report.worst_images]


def facts(report: Report) -> list[tuple[str, str]]:
    """The protocol as (name, text) lines."""
    p = report.protocol
    rule = "(lo, hi], 0 in the first" if p.edge_rule == "right" else "[lo, hi), 1 in the last"
    what = counted(report)
    of = f" of {p.images:,} images" if what == "pixels" else ""
    lines = [
        ("counted", f"{p.pixels:,} {what}{of}"),
        ("region", p.region),
        ("averaged over", what if p.average == "pixel" else f"{p.average}s"),
        ("classes", str(p.num_classes)),
        ("bins", f"{p.num_bins} of equal width, {rule}"),
        ("ignored label", str(p.ignore_index)),
    ]
    lines += [("intervals", note) for note in interval_notes(report)]
    return [*lines, ("measured with", f"segcal {p.version}")]


def _cell(score: Score, value: float) -> TableCell:
    return TableCell(value * score.scale, score.number(value))


def _signed(value: float) -> str:
    """A number with its sign, but zero without."""
    text = f"{value:+.2f}".replace("-", "−")
    return text[1:] if float(f"{value:.2f}") == 0 else text
