"""What the interactive page reads: the numbers of reports, as JSON, and the plot library.

Each number comes from a report; the script of the page adds and divides sums, and prints them with
the digits and units of `segcal.metrics.scores`, which are part of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from segcal.metrics import Report
from segcal.metrics.operating import OperatingPoint
from segcal.metrics.rows import THRESHOLD_DIGITS
from segcal.metrics.scores import SCORES, UNITS, Array
from segcal.metrics.sums import CLASS_STEP
from segcal.metrics.tables import BinTable, without_nan
from segcal.viz.diagrams import class_names, counted
from segcal.viz.entry import Entry
from segcal.viz.figure import DARK, LIGHT, OVER, UNDER, run_style
from segcal.viz.planes import coding, inspected

_BUNDLES = ("bokeh.min.js", "bokeh-api.min.js")  # no widgets, tables or WebGL
_PART_SCORES = ("accuracy", "mean_confidence", "ece", "sce", "miou")


def plot_library() -> list[str]:
    """The scripts of BokehJS that the page needs, minified."""
    from bokeh.util.paths import bokehjs_path  # only an interactive page needs it

    folder = bokehjs_path() / "js"
    return [(folder / name).read_text(encoding="utf-8") for name in _BUNDLES]


def to_json(data: Any) -> str:
    """JSON that is safe inside a script element, whatever names it holds; null for NaN."""
    text = json.dumps(without_nan(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_numbers(entries: Sequence[Entry]) -> dict[str, Any]:
    """All that the script of the page knows of the entries."""
    edges = max((entry.report.fine.edges for entry in entries), key=len)
    return {
        "scores": {
            name: {
                "label": score.label,
                "unit": score.unit,
                "scale": score.scale,
                "digits": score.digits,
                "suffix": UNITS[score.unit].suffix,
                "signed": score.signed,
            }
            for name, score in SCORES.items()
        },
        "theme": {"light": LIGHT, "dark": DARK, "over": OVER, "under": UNDER},
        "fineEdges": edges.tolist(),
        "step": CLASS_STEP,
        "thresholds": _thresholds(entries, edges),
        "thresholdDigits": THRESHOLD_DIGITS,
        "coding": coding(),
        "inspected": inspected(entries),
        "entries": [_entry(entry, index, edges) for index, entry in enumerate(entries)],
    }


def _entry(entry: Entry, index: int, edges: Array) -> dict[str, Any]:
    report = entry.report
    return {
        "name": entry.name,
        "color": run_style(index)["color"],
        "counted": counted(report),
        "classes": class_names(report),
        "parts": {
            report.protocol.region: _part(report, edges),
            **{name: _part(part, edges) for name, part in report.regions.items()},
        },
        "protocols": {name: dict(found) for name, found in report.protocols.items()},
        "points": [_point(point) for point in report.operating_points],
        "accepted": _accepted(report),
        "images": _images(report),
    }


def _part(report: Report, edges: Array) -> dict[str, Any]:
    """The sums of one region, its fine histogram on the given edges, and its scores."""
    fine = report.fine.on(edges)
    held = np.flatnonzero(fine.correct + fine.wrong)
    return {
        "pixels": report.protocol.pixels,
        "images": report.protocol.images,
        "edges": report.top.edges.tolist(),
        "top": _table(report.top),
        "byClass": [_table(report.classes[c]) for c in range(report.protocol.num_classes)],
        "fine": {  # of the bins that hold pixels
            "bin": held.tolist(),
            "correct": fine.correct[held].tolist(),
            "wrong": fine.wrong[held].tolist(),
            "confidence": _short(fine.confidence_sum[held]),
        },
        "scores": {name: getattr(report, name) for name in _PART_SCORES},
        "bins": [] if report.images is None else [gap.to_dict() for gap in report.images.bins],
    }


def _table(table: BinTable) -> dict[str, Any]:
    return {
        "count": table.count.tolist(),
        "hits": table.hits.tolist(),
        "confidence": _short(table.confidence_sum),
    }


def _short(sums: Array) -> list[float]:
    """The sums to ten digits: more than any mean of them shows."""
    return [float(f"{value:.10g}") for value in sums.tolist()]


def _thresholds(entries: Sequence[Entry], edges: Array) -> list[float]:
    """Where the slider stops: at the edges that are known by class, and at operating points."""
    points = {point.threshold for entry in entries for point in entry.report.operating_points}
    return sorted({*edges[:-1:CLASS_STEP].tolist(), *points.intersection(edges.tolist())})


def _accepted(report: Report) -> list[dict[str, Any]] | None:
    """Right and wrong pixels of each predicted class, of the bins of `class_fine` that hold any."""
    table = report.class_fine
    if table is None:
        return None
    found = []
    for correct, wrong in zip(table.correct, table.wrong, strict=True):
        held = np.flatnonzero(correct + wrong)
        found.append(
            {
                "bin": held.tolist(),
                "correct": correct[held].tolist(),
                "wrong": wrong[held].tolist(),
            }
        )
    return found


def _point(point: OperatingPoint) -> dict[str, Any]:
    return {
        "target": point.target,
        "threshold": point.threshold,
        "coverage": point.coverage,
        "accuracy": point.accuracy,
        "verdict": point.verdict,
    }


def _images(report: Report) -> dict[str, Any]:
    """The table of images; of reports of earlier versions, what they have of the worst."""
    found = report.images
    if found is None:
        return {"total": report.protocol.images, "names": []}
    table = found.table
    if table is not None:
        return {"total": report.protocol.images, **vars(table)}
    return {
        "total": report.protocol.images,
        "names": [image.name for image in found.worst],
        "pixels": [image.pixels for image in found.worst],
        "ece": [image.ece for image in found.worst],
    }
