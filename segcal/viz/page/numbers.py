"""What the scripts of the page read: the numbers of reports, and the pixels of drawn images.

Each number comes from a report; the scripts add and divide sums, and print them with the digits and
units of `segcal.metrics.scores`, which are part of the JSON.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from segcal.metrics import BinTable, Report
from segcal.metrics.report import ObjectReport, to_plain
from segcal.metrics.scores import SCORES, UNITS, Array, risk_at_coverage
from segcal.metrics.sums import CLASS_STEP
from segcal.metrics.uncertainty import UNCERTAINTIES
from segcal.viz.overlay import RIGHT, WRONG, Overlay
from segcal.viz.plots import COVERAGES
from segcal.viz.style import DARK, LIGHT, OVER, UNDER, run_style
from segcal.viz.tables import class_names, counted, severity

if TYPE_CHECKING:
    from segcal.viz.page import PageRow

_PART_SCORES = ("accuracy", "mean_confidence", "ece", "sce", "miou")
_SHIFT_SCORES = ("ece", "sce", "accuracy", "mean_confidence")
LONGEST = 512  # pixels of the longer side; of larger images, every second or third pixel is kept
BUDGET = 6_000_000  # characters of all images of a page
# The planes of an image under one model are one grey PNG, one below the other, 8 bits each. Classes
# are numbered among those that the image has; `OTHER` stands for what does not fit.
IGNORED, OTHER = 255, 254
GAP_ZERO, GAP_SCALE = 128, 127  # of the local gap, in -1..1


def page_numbers(rows: Sequence[PageRow]) -> dict[str, Any]:
    """All that the scripts of the page know of the rows."""
    edges = rows[0].report.fine.edges  # the same for all
    points = {p.threshold for row in rows for p in row.report.operating_points}
    # The slider stops at the edges that are known by class, and at operating points.
    stops = sorted({*edges[:-1:CLASS_STEP].tolist(), *points.intersection(edges.tolist())})
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
        "theme": {
            **{"light": LIGHT, "dark": DARK, "over": OVER, "under": UNDER},
            **{"wrong": WRONG, "right": RIGHT},
        },
        "fineEdges": edges.tolist(),
        "step": CLASS_STEP,
        "thresholds": stops,
        "coding": {"ignored": IGNORED, "other": OTHER, "gap": [GAP_ZERO, GAP_SCALE]},
        "inspected": inspected(rows),
        "entries": [_entry(row, index) for index, row in enumerate(rows)],
    }


def _entry(row: PageRow, index: int) -> dict[str, Any]:
    report, fine = row.report, row.report.class_fine
    images: dict[str, Any] = {"total": report.protocol.images, "names": []}
    if report.images is not None and report.images.table is not None:
        images |= vars(report.images.table)
    parts = {report.protocol.region: report, **report.regions}
    return {
        "name": row.name,
        **_line_style(index),
        "counted": counted(report),
        "classes": class_names(report),
        "parts": {name: _part(part) for name, part in parts.items()},
        "protocols": {name: dict(found) for name, found in report.protocols.items()},
        "points": [vars(point) | {"verdict": point.verdict} for point in report.operating_points],
        "accepted": [_held(*counts) for counts in zip(fine.correct, fine.wrong, strict=True)],
        "objects": [_objects(of) for of in report.objects],
        "images": images,
        "detection": [
            {
                "label": UNCERTAINTIES[one.name].label,
                **_line_style(kind),
                "coverage": COVERAGES,
                "risk": _short([risk_at_coverage(one.correct, one.wrong, c) for c in COVERAGES]),
            }
            for kind, one in enumerate(report.detection)
        ],
        "history": [
            {"epoch": line.get("epoch"), "best": bool(line.get("best"))}
            | {s: line.get(f"holdout/{s}") for s in ("ece", "sce", "accuracy", "miou")}
            for line in row.history
        ],
        "shifts": [
            {"name": shift, "kind": shift.partition(":")[0], "severity": severity(shift)}
            | {score: getattr(found, score) for score in _SHIFT_SCORES}
            for shift, found in row.shifts.items()
        ],
        "clean": {score: getattr(report, score) for score in _SHIFT_SCORES},
    }


def _line_style(index: int) -> dict[str, Any]:
    style = run_style(index)
    return {"color": style["color"], "dash": [round(2 * part) for part in style["linestyle"][1]]}


def _objects(of: ObjectReport) -> dict[str, Any]:
    """The sums of the objects of a report, and the thresholds that were chosen for them."""
    return {
        "calibration": of.calibration,
        "images": of.images,
        "truth": of.whole.truth,
        "top": _table(of.whole.top),
        "fine": _held(of.fine.correct, of.fine.wrong),
        "points": [vars(point) | {"verdict": point.verdict} for point in of.points],
    }


def _part(report: Report) -> dict[str, Any]:
    """The sums of one region, its fine histogram, and its scores."""
    fine = report.fine
    held = np.flatnonzero(fine.correct + fine.wrong)
    return {
        "pixels": report.protocol.pixels,
        "images": report.protocol.images,
        "edges": report.top.edges.tolist(),
        "top": _table(report.top),
        "byClass": [_table(report.classes[c]) for c in range(report.protocol.num_classes)],
        "fine": {
            **_held(fine.correct, fine.wrong),
            "confidence": _short(fine.confidence_sum[held]),
        },
        "scores": {name: getattr(report, name) for name in _PART_SCORES},
        "bins": [] if report.images is None else [vars(gap) for gap in report.images.bins],
    }


def _held(correct: Array, wrong: Array) -> dict[str, list[int]]:
    """The counts of the bins that hold pixels, and which these are."""
    held = np.flatnonzero(correct + wrong)
    counts = {"correct": correct[held].tolist(), "wrong": wrong[held].tolist()}
    return {"bin": held.tolist(), **counts}


def _table(table: BinTable) -> dict[str, Any]:
    return {
        "count": table.count.tolist(),
        "hits": table.hits.tolist(),
        "confidence": _short(table.confidence_sum),
    }


def _short(sums: Iterable[float]) -> list[float]:
    """The sums to ten digits: more than any mean of them shows."""
    return [float(f"{value:.10g}") for value in sums]


def inspected(rows: Sequence[PageRow]) -> list[dict[str, Any]]:
    """The images that can be looked into, each with the models that drew it; see `BUDGET`."""
    for coarser in range(1, 9):
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for index, row in enumerate(rows):
            for overlay in row.overlays:
                labels = overlay.labels
                step = coarser * -(-max(labels.shape) // LONGEST)
                key = (overlay.name, labels.shape, labels.tobytes())
                if key not in groups:
                    image = overlay.image
                    uri = None
                    if image is not None:
                        small = np.ascontiguousarray(image[::step, ::step])
                        uri = data_uri(webp(Image.fromarray(small), 80), "image/webp")
                    about = {"name": overlay.name, "of": overlay.of, "step": step, "image": uri}
                    groups[key] = {**about, "size": labels.shape[::-1], "models": []}
                planes = _planes(overlay, step)
                groups[key]["models"].append({"model": index, "ece": overlay.ece, **planes})
        found = list(groups.values())
        size = sum(
            len(g["image"] or "") + sum(len(m["planes"]) for m in g["models"]) for g in found
        )
        if size <= BUDGET:
            break
    return found


def _planes(overlay: Overlay, step: int) -> dict[str, Any]:
    """The planes of an image under a model, and the classes that their numbers stand for."""
    names = ("labels", "prediction", "confidence", "gap")
    labels, predicted, confidence, gap = (getattr(overlay, n)[::step, ::step] for n in names)
    ignored = np.isnan(gap)
    kept = np.unique(np.concatenate([labels[~ignored], predicted.ravel()]))[:OTHER]
    slots = np.full(len(overlay.class_names), OTHER, np.uint8)
    slots[kept] = np.arange(len(kept))
    # The square root is finer where confidence is high: it is exact to 0.004, at 0.99 to 0.0004.
    sharp = 255 * np.sqrt(1 - np.clip(confidence.astype(np.float64), 0, 1))
    signed = (GAP_ZERO + GAP_SCALE * np.nan_to_num(gap)).round().clip(1, 255)
    stack = [
        np.where(ignored, IGNORED, slots[np.where(ignored, 0, labels)]),
        slots[predicted],
        sharp.round(),
        np.where(ignored, 0, signed),
    ]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(stack).astype(np.uint8)).save(buffer, "PNG", compress_level=4)
    return {
        "planes": data_uri(buffer.getvalue(), "image/png"),
        "classes": [overlay.class_names[c] for c in kept],
        "colors": overlay.colors[kept].tolist(),
    }


def to_json(data: Any) -> str:
    """JSON that is safe inside a script element, whatever names it holds; null for NaN."""
    text = json.dumps(to_plain(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def data_uri(data: bytes, kind: str) -> str:
    """Data as part of a page."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def webp(image: Image.Image, quality: int) -> bytes:
    """A picture as WEBP."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
