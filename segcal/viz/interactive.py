"""What the interactive page reads: numbers of reports and drawn images, and the plot library.

Each number comes from a report; the script of the page adds and divides sums, and prints them with
the digits and units of `segcal.metrics.scores`, which are part of the JSON.

The arrays of a drawn image are PNG planes, from which the page reads a pixel's values. One grey PNG
holds the planes of an image under one model, one below the other, 8 bits each. Classes are numbered
among those that the image has; `_OTHER` stands for what does not fit.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcal.metrics import Report
from segcal.metrics.report import BinTable, OperatingPoint, to_plain
from segcal.metrics.rows import THRESHOLD_DIGITS
from segcal.metrics.scores import SCORES, UNITS, Array
from segcal.metrics.sums import CLASS_STEP
from segcal.viz.diagrams import class_names, counted
from segcal.viz.entry import Overlay, PageRow
from segcal.viz.figure import DARK, LIGHT, OVER, UNDER, class_palette, data_uri, run_style, webp_uri

_BUNDLES = ("bokeh.min.js", "bokeh-api.min.js")  # no widgets, tables or WebGL
_PART_SCORES = ("accuracy", "mean_confidence", "ece", "sce", "miou")

LONGEST = 512  # pixels of the longer side; of larger images, every second or third pixel is kept
BUDGET = 6_000_000  # characters of all planes and images of a page
# Confidence has 10 bits, in steps of equal size of its logit: a trained network lives at 0.99.
LOGIT_LOW, LOGIT_HIGH, LEVELS = -7.0, 13.0, 1023
RUNNER_UP = 127  # levels of the second and third probability, in steps of their square root
GAP_ZERO, GAP_SCALE = 128, 127  # of the local gap, in -1..1; 0 where the label is ignored
# How far from the truth what the page says of a pixel may be, as fractions.
PRECISION = {"confidence": 0.005, "second and third probability": 0.01, "gap": 0.005}
_IGNORED, _OTHER = 255, 254
_QUALITY = 80  # WEBP quality of the images
_PLANES = ("label", "prediction", "second", "third", "high", "low", "p2", "p3", "gap")


def plot_library() -> list[str]:
    """The scripts of BokehJS that the page needs, minified."""
    from bokeh.util.paths import bokehjs_path  # only an interactive page needs it

    folder = bokehjs_path() / "js"
    return [(folder / name).read_text(encoding="utf-8") for name in _BUNDLES]


def to_json(data: Any) -> str:
    """JSON that is safe inside a script element, whatever names it holds; null for NaN."""
    text = json.dumps(to_plain(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_numbers(entries: Sequence[PageRow]) -> dict[str, Any]:
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


def _entry(entry: PageRow, index: int, edges: Array) -> dict[str, Any]:
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
    fine = report.fine
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
        "bins": [] if report.images is None else [vars(gap) for gap in report.images.bins],
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


def _thresholds(entries: Sequence[PageRow], edges: Array) -> list[float]:
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
            {"bin": held.tolist(), "correct": correct[held].tolist(), "wrong": wrong[held].tolist()}
        )
    return found


def _point(point: OperatingPoint) -> dict[str, Any]:
    names = ("target", "threshold", "coverage", "accuracy", "verdict")
    return {name: getattr(point, name) for name in names}


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


def inspected(entries: Sequence[PageRow]) -> list[dict[str, Any]]:
    """The images that can be looked into, each with the models that drew it; see `BUDGET`."""
    coarser = 1
    while True:
        found = _looked_into(entries, coarser)
        size = sum(
            len(i["image"] or "") + sum(len(m["planes"]) for m in i["models"]) for i in found
        )
        if size <= BUDGET or coarser >= 8:
            return found
        coarser += 1


def _looked_into(entries: Sequence[PageRow], coarser: int) -> list[dict[str, Any]]:
    shown = [
        (index, overlay, overlay.arrays)
        for index, entry in enumerate(entries)
        for overlay in entry.overlays
        if overlay.arrays is not None
    ]
    steps = [coarser * -(-max(a["labels"].shape) // LONGEST) for *_, a in shown]
    with ThreadPoolExecutor() as pool:  # compressing holds no lock of the interpreter
        planes = list(pool.map(lambda s, step: _planes(s[1], entries[s[0]], step), shown, steps))
    groups: list[tuple[NDArray[Any], dict[str, Any]]] = []
    for (index, overlay, arrays), step, found in zip(shown, steps, planes, strict=True):
        labels = arrays["labels"]
        group = next(
            (g for seen, g in groups if g["name"] == overlay.name and _equal(seen, labels)), None
        )
        if group is None:
            image = arrays.get("image")
            group = {
                "name": overlay.name,
                "of": overlay.image,
                "step": step,
                "size": [labels.shape[1], labels.shape[0]],
                "image": None if image is None else _webp(image[::step, ::step]),
                "models": [],
            }
            groups.append((labels, group))
        group["models"].append({"model": index, "ece": overlay.ece, **found})
    return [group for _, group in groups]


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _planes(overlay: Overlay, entry: PageRow, step: int) -> dict[str, Any]:
    """The planes of an image under a model, and the classes that their numbers stand for."""
    assert overlay.arrays is not None
    arrays = {
        name: array[..., ::step, ::step]
        for name, array in overlay.arrays.items()
        if name not in ("image", "palette")
    }
    labels, predicted, gap = arrays["labels"], arrays["prediction"], arrays["gap"]
    ignored = np.isnan(gap)
    names = list(overlay.class_names) or class_names(entry.report)
    classes = [predicted, *arrays["top_classes"][1:]] if "top_classes" in arrays else [predicted]
    seen = np.unique(np.concatenate([labels[~ignored], *(c.ravel() for c in classes)]))
    slots = np.full(len(names), _OTHER, np.uint8)
    kept = seen[:_OTHER]
    slots[kept] = np.arange(len(kept))
    level = confidence_levels(arrays["confidence"], entry.report.top.edges)
    absent = np.full(labels.shape, _IGNORED, np.uint8)
    zero = np.zeros(labels.shape, np.uint8)
    planes = {
        "label": np.where(ignored, _IGNORED, slots[np.where(ignored, 0, labels)]),
        "high": level >> 8,
        "low": level & 255,
        "gap": np.where(
            ignored, 0, np.round(GAP_ZERO + GAP_SCALE * np.nan_to_num(gap)).clip(1, 255)
        ),
    }
    for name, array in zip(("prediction", "second", "third"), classes, strict=False):
        planes[name] = slots[array]
    for name, array in zip(("p2", "p3"), arrays.get("top_probs", [])[1:], strict=False):
        planes[name] = np.round(RUNNER_UP * np.sqrt(np.clip(2 * array.astype(np.float32), 0, 1)))
    stack = [
        planes.get(name, zero if name.startswith("p") else absent).astype(np.uint8)
        for name in _PLANES
    ]
    palette = overlay.arrays.get("palette", class_palette(len(names)))
    return {
        "planes": _png(np.concatenate(stack)),
        "classes": [names[c] for c in kept],
        "colors": [[int(x) for x in palette[c]] for c in kept],
    }


def confidence_levels(confidence: NDArray[Any], edges: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The level of each confidence, the nearest that lies in the same bin (lo, hi] as it does."""
    p = np.clip(confidence.astype(np.float64), 1e-9, 1 - 1e-9)
    scale = LEVELS / (LOGIT_HIGH - LOGIT_LOW)
    level = np.round(scale * (np.log(p / (1 - p)) - LOGIT_LOW)).clip(0, LEVELS).astype(np.int64)
    values = 1 / (1 + np.exp(-(LOGIT_LOW + np.arange(LEVELS + 1) / scale)))
    inner = edges[1:-1]
    of_level = np.searchsorted(inner, values)
    wanted = np.searchsorted(inner.astype(confidence.dtype), confidence)
    for _ in range(2):
        level = (level + np.sign(wanted - of_level[level])).clip(0, LEVELS)
    return level.astype(np.uint16)


def _png(plane: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    # Half the time of level 6, for 2 % more bytes.
    Image.fromarray(plane).save(buffer, "PNG", compress_level=4)
    return data_uri(buffer.getvalue(), "image/png")


def _webp(image: NDArray[np.uint8]) -> str:
    return webp_uri(Image.fromarray(np.ascontiguousarray(image)), _QUALITY)


def coding() -> Mapping[str, Any]:
    """How the script of the page reads the planes."""
    return {
        "planes": _PLANES,
        "logit": [LOGIT_LOW, LOGIT_HIGH, LEVELS],
        "runnerUp": RUNNER_UP,
        "gap": [GAP_ZERO, GAP_SCALE],
        "ignored": _IGNORED,
        "other": _OTHER,
    }
