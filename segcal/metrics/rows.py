"""The place for reports as text: one row a report, units in the header, protocol stated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from segcal.metrics.report import Report


class Column(NamedTuple):
    """A score in a table: its name in `Report`, its heading, and value × scale to digits."""

    score: str
    heading: str
    scale: float
    digits: int


COLUMNS = (
    Column("accuracy", "accuracy (%)", 100, 2),
    Column("miou", "mIoU (%)", 100, 2),
    Column("ece", "ECE (%)", 100, 2),
    Column("sce", "SCE (1e-3)", 1000, 2),
    Column("mce", "MCE (%)", 100, 2),
    Column("adaptive_ece", "adaptive ECE (%)", 100, 2),
    Column("nll", "NLL (nats)", 1, 4),
    Column("brier", "Brier (0-2)", 1, 4),
    Column("auroc", "error AUROC (%)", 100, 2),
)
IMAGE_COLUMN = Column("image_ece", "image-averaged ECE (%)", 100, 2)


def to_markdown(reports: Mapping[str, Report]) -> str:
    """A Markdown table, one row a report, and under it each protocol that was used."""
    columns = _columns(reports)
    lines = [
        "| model | " + " | ".join(column.heading for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, report in reports.items():
        cells = [_cell(report, column) for column in columns]
        lines.append(f"| {_escape(name)} | " + " | ".join(cells) + " |")
    lines += ["", *dict.fromkeys(describe(report) for report in reports.values())]
    return "\n".join(lines) + "\n"


def to_csv(reports: Mapping[str, Report]) -> str:
    """CSV, one row a report; the scores in the units of the header, then the protocol."""
    columns = _columns(reports)
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


def _columns(reports: Mapping[str, Report]) -> tuple[Column, ...]:
    kept = any(report.images is not None for report in reports.values())
    return (*COLUMNS, IMAGE_COLUMN) if kept else COLUMNS


def _cell(report: Report, column: Column) -> str:
    value = getattr(report, column.score) * column.scale
    if math.isnan(value):
        return "–"
    text = f"{value:.{column.digits}f}"
    interval = report.intervals.get(column.score)
    if interval is None or math.isnan(interval.low):
        return text
    low, high = interval.low * column.scale, interval.high * column.scale
    return f"{text} [{low:.{column.digits}f}, {high:.{column.digits}f}]"


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
