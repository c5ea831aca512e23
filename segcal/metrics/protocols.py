"""Protocols of published work: other ways to average a calibration error.

Every score of a report is over pooled pixels. Papers also print means over images or batches, and
leave out background. `PROTOCOLS` lists them; `scores_by_protocol` computes each from the sums of
one evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from segcal.metrics import scores
from segcal.metrics.intervals import sorted_sums
from segcal.metrics.scores import Array

if TYPE_CHECKING:
    from segcal.metrics.meter import CalibrationMeter
    from segcal.metrics.report import Report

PROTOCOLS = {
    "pooled": "all pixels together",
    "image": "mean over images of the score of each",
    "foreground": "all pixels together but those of class 0",
    "batch:N": "mean over batches of N images, in the order of their names, weighted by pixels",
}
FOREGROUND = "foreground"
PROTOCOL_SCORES = ("accuracy", "miou", "ece", "sce")


def check_protocols(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once; a ValueError for one that is not in `PROTOCOLS`."""
    names = tuple(dict.fromkeys(names))
    for name in names:
        if _split(name)[0] not in PROTOCOLS:
            raise ValueError(
                f"Expected protocols among {', '.join(PROTOCOLS)} with a number N, but got {name!r}"
            )
    return names


def describe_protocol(name: str) -> str:
    """What a protocol averages over."""
    kind, size = _split(name)
    return PROTOCOLS[kind].replace("N images", f"{size} images")


def _split(name: str) -> tuple[str, int]:
    """The key of `PROTOCOLS` and the number of images: ("batch:N", 8). An unknown key is empty."""
    kind, colon, number = name.partition(":")
    if colon:
        known = kind == "batch" and number.isdecimal() and int(number) > 0
        return ("batch:N", int(number)) if known else ("", 0)
    return name, 1


def need_image_sums(protocols: Sequence[str]) -> bool:
    """Whether one of the protocols needs the sums of each image."""
    return any(name == "image" or name.startswith("batch:") for name in protocols)


def scores_by_protocol(
    protocols: Sequence[str], report: Report, meter: CalibrationMeter
) -> dict[str, dict[str, float]]:
    """Accuracy, mIoU, ECE and SCE under each protocol, as fractions.

    The report has the region "foreground", and the meter sums of each image, if a protocol needs
    them.
    """
    found = {}
    for name in protocols:
        if name in ("pooled", FOREGROUND):
            pooled = report if name == "pooled" else report.regions[name]
            found[name] = {score: getattr(pooled, score) for score in PROTOCOL_SCORES}
        else:
            found[name] = _means(meter, _split(name)[1], weighted=name != "image")
    return found


def _means(meter: CalibrationMeter, size: int, *, weighted: bool) -> dict[str, float]:
    """The mean score of groups of `size` images; of each group by its pixels, if `weighted`.

    A group that has no score does not count: no class is present or predicted in it.
    """
    names, images = sorted_sums(meter.image_sums(), meter.names)
    starts = np.arange(0, len(names), size)
    if not len(starts):
        return dict.fromkeys(PROTOCOL_SCORES, math.nan)
    sums = {
        name: np.add.reduceat(array.astype(np.float64), starts) for name, array in images.items()
    }
    pixels = sums["pixels"]
    overlap = sums["intersection"], sums["predicted"], sums["truth"]
    class_ece = scores.ratio(np.abs(sums["class_gap"]).sum(2), sums["class_pixels"])
    by_group: dict[str, Array] = {
        "accuracy": scores.ratio(sums["hits"], pixels),
        "miou": scores.miou(*overlap),
        "ece": scores.ratio(np.abs(sums["top_gap"]).sum(1), pixels),
        "sce": scores.mean_of_known(class_ece),
    }
    means = {}
    for name in PROTOCOL_SCORES:
        known = ~np.isnan(by_group[name])
        weights = (pixels if weighted else np.ones(len(pixels))) * known
        means[name] = float(scores.ratio(np.nansum(by_group[name] * weights), weights.sum()))
    return means
