"""The arrays of drawn images as PNG planes, from which the page reads a pixel's values.

One grey PNG holds the planes of an image under one model, one below the other, 8 bits each. Classes
are numbered among those that the image has; `_OTHER` stands for what does not fit.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcal.viz.diagrams import class_names
from segcal.viz.entry import Entry, Overlay
from segcal.viz.figure import class_palette

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


def inspected(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The images that can be looked into, each with the models that drew it; see `BUDGET`."""
    coarser = 1
    while True:
        found = _images(entries, coarser)
        size = sum(
            len(i["image"] or "") + sum(len(m["planes"]) for m in i["models"]) for i in found
        )
        if size <= BUDGET or coarser >= 8:
            return found
        coarser += 1


def _images(entries: Sequence[Entry], coarser: int) -> list[dict[str, Any]]:
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


def _planes(overlay: Overlay, entry: Entry, step: int) -> dict[str, Any]:
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
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _webp(image: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).convert("RGB").save(
        buffer, "WEBP", quality=_QUALITY, method=2
    )
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


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
