"""report.html: one file that contains everything it shows and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

import segcal
from segcal.files import atomic_write
from segcal.metrics.rows import cells_of, columns_of, more_columns_of, part_tables
from segcal.metrics.scores import SCORES
from segcal.viz.drawings import (
    Drawing,
    Drawings,
    entry_drawings,
)
from segcal.viz.entry import Entry, Overlay, distinct
from segcal.viz.figure import adaptive_svg
from segcal.viz.shifts import mean_table, score_tables, shifted, shifts_of
from segcal.viz.views import (
    class_columns,
    class_ece_table,
    class_rows,
    facts,
    tiles,
    worst_images,
)
from segcal.viz.words import headline, verdict

_MAX_CLASSES = 24  # in the diagrams of the page; its tables have all classes
_QUALITY = 88  # WEBP quality of overlays, which may be photographs


def write_page(
    entries: Sequence[Entry],
    path: str | os.PathLike[str],
    *,
    title: str = "Calibration report",
    drawings: Drawings | None = None,
) -> None:
    """Write one self-contained HTML file about one entry, or a comparison of several.

    Styles, script and pictures are inside. A content security policy in the file forbids the
    browser to fetch anything and to run any other script. All names are escaped.

    Args:
        entries: at least one; repeated names get a number.
        path: the file, written completely or not at all.
        title: the page's heading.
        drawings: of the entries, if they are at hand.
    """
    text = render_page(entries, title=title, drawings=drawings)
    with atomic_write(path) as file:
        file.write(text)


def render_page(
    entries: Sequence[Entry],
    *,
    title: str = "Calibration report",
    drawings: Drawings | None = None,
) -> str:
    """The page of `write_page` as text."""
    entries = distinct(entries)
    drawings = drawings or Drawings.of(entries)
    reports = [entry.report for entry in entries]
    script = _part("sort.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("segcal.viz", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=title,
        version=segcal.__version__,
        style=Markup(_part("style.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        headline=headline(entries),
        scores=[
            {"columns": columns, "rows": cells_of(reports, columns)}
            for columns in (columns_of(reports), more_columns_of(reports))
        ],
        intervals=any(report.intervals for report in reports),
        figures=[_figure(drawing) for drawing in drawings.together["comparison"]],
        training=[_figure(drawing) for drawing in drawings.together["training"]],
        class_ece=class_ece_table(entries) if len(entries) > 1 else None,
        shift=_shift_view(entries, drawings.together["shift"]),
        class_columns=class_columns(reports[0]),
        ece_heading=SCORES["ece"].heading,
        entries=[_view(*pair) for pair in zip(entries, drawings.own, strict=True)],
    )


def _shift_view(entries: Sequence[Entry], drawings: Sequence[Drawing]) -> dict[str, Any] | None:
    """What the template shows of models under shift; None if none was evaluated there."""
    if not shifted(entries):
        return None
    figures = [_figure(drawing) for drawing in drawings]
    return {
        "count": len(shifts_of(entries)),
        "means": mean_table(entries),
        "tables": score_tables(entries),
        "figures": [figure for figure in figures if not figure["wide"]],
        "wide_figures": [figure for figure in figures if figure["wide"]],
        "overlays": [
            {"model": entry.name, **_overlay(entry.shift_overlay)}
            for entry in entries
            if entry.shift_overlay is not None
        ],
    }


def _view(entry: Entry, drawings: Sequence[Drawing]) -> dict[str, Any]:
    """The values that the template shows of one entry."""
    if entry.report.protocol.num_classes > _MAX_CLASSES:  # its wide diagrams would be too large
        smaller = entry_drawings(entry, max_classes=_MAX_CLASSES)
        drawings = [small if small.wide else d for d, small in zip(drawings, smaller, strict=True)]
    figures = [_figure(drawing) for drawing in drawings]
    return {
        "name": entry.name,
        "verdict": verdict(entry.report),
        "ece": SCORES["ece"].brief(entry.report.ece),
        "report": entry.report,
        "tiles": tiles(entry.report),
        "figures": [figure for figure in figures if not figure["wide"]],
        "wide_figures": [figure for figure in figures if figure["wide"]],
        "classes": class_rows(entry.report),
        "parts": part_tables(entry.report),
        "overlays": [_overlay(overlay) for overlay in entry.overlays],
        "worst": worst_images(entry.report),
        "skipped": entry.skipped,
        "facts": facts(entry.report),
        "config": entry.config,
    }


def _figure(drawing: Drawing) -> dict[str, Any]:
    width, height = (round(96 * inches) for inches in drawing.figure.get_size_inches())
    return {
        "title": drawing.title,
        "caption": drawing.caption,
        "wide": drawing.wide,
        "uri": _uri(adaptive_svg(drawing.svg), "image/svg+xml"),
        "width": width,
        "height": height,
    }


def _overlay(overlay: Overlay) -> dict[str, Any]:
    ece = SCORES["ece"]
    image = Image.open(io.BytesIO(overlay.png)).convert("RGB")
    buffer = io.BytesIO()
    # For a photograph WEBP takes a quarter of the size of PNG.
    image.save(buffer, "WEBP", quality=_QUALITY, method=4)
    return {
        "name": overlay.name,
        "ece": None if overlay.ece is None or math.isnan(overlay.ece) else ece.brief(overlay.ece),
        "uri": _uri(buffer.getvalue(), "image/webp"),
        "width": image.width,
        "height": image.height,
    }


def _uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _part(name: str) -> str:
    return (files("segcal.viz") / "page" / name).read_text(encoding="utf-8")
