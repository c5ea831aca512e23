"""The place for what sums kept per image tell: intervals by bootstrap, and the worst images.

Pixels of one image are not independent, so the unit that is resampled is the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from segcal.metrics import scores
from segcal.metrics.scores import Array
from segcal.metrics.sums import ImageSums
from segcal.metrics.tables import ImageScore, ImageStatistics, Interval

LEVEL = 0.95
WORST = 20  # images listed in a report
_BLOCK = 100  # resamples at a time, which bounds memory


def image_statistics(
    images: ImageSums, names: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> ImageStatistics:
    """Image-averaged ECE, 95 % intervals and the worst images; images without pixels are left out.

    The result does not depend on the order of the images if their names differ.

    Args:
        images: the sums of I images.
        names: I names.
        resamples: bootstrap resamples; 0 for no intervals.
        seed: of the resampling.
    """
    pixels = images.pixels.numpy()
    order = [i for i in sorted(range(len(names)), key=names.__getitem__) if pixels[i]]
    sums = {name: tensor.numpy()[order] for name, tensor in images.tensors().items()}
    ece = np.abs(sums["top_gap"]).sum(1) / sums["pixels"]  # (I,)
    worst = np.argsort(-ece, kind="stable")[:WORST]
    return ImageStatistics(
        ece=float(ece.mean()) if len(ece) else math.nan,
        intervals=_intervals(sums, resamples, seed),
        worst=tuple(
            ImageScore(names[order[i]], float(ece[i]), int(sums["pixels"][i])) for i in worst
        ),
        resamples=resamples,
        seed=seed,
    )


def _intervals(sums: dict[str, Array], resamples: int, seed: int) -> dict[str, Interval]:
    n = len(sums["pixels"])
    if n < 2 or resamples < 1:
        return {}
    generator = np.random.default_rng(seed)
    estimate = _scores(sums, np.ones((1, n)))
    draws: dict[str, list[Array]] = {name: [] for name in estimate}
    for start in range(0, resamples, _BLOCK):
        block = min(_BLOCK, resamples - start)
        weights = generator.multinomial(n, np.full(n, 1 / n), size=block).astype(np.float64)
        for name, values in _scores(sums, weights).items():
            draws[name].append(values)
    return {
        name: _basic_interval(float(estimate[name][0]), np.concatenate(draws[name]))
        for name in estimate
    }


def _scores(sums: dict[str, Array], weights: Array) -> dict[str, Array]:
    """(R,) each score of R resamples; weights (R, I) say how often each image was drawn."""
    total = {name: np.tensordot(weights, array, 1) for name, array in sums.items()}
    pixels = total["pixels"]
    return {
        "ece": np.abs(total["top_gap"]).sum(1) / pixels,
        "sce": np.abs(total["class_gap"]).sum(2).mean(1) / pixels,
        "accuracy": total["intersection"].sum(1) / pixels,
        "miou": scores.miou(total["intersection"], total["predicted"], total["truth"]),
    }


def _basic_interval(estimate: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(
        max(2 * estimate - float(high), 0.0), min(2 * estimate - float(low), 1.0), LEVEL
    )
