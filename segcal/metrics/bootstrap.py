"""The place for what sums kept per image tell: intervals by bootstrap, and the worst images.

Pixels of one image are not independent, so the unit that is resampled is the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from segcal.metrics import scores
from segcal.metrics.scores import Array
from segcal.metrics.sums import ImageSums
from segcal.metrics.tables import ImageScore, ImageStatistics, Interval

LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
WORST = 20  # images listed in a report
_BLOCK = 100  # resamples at a time, which bounds memory
Sums = Mapping[str, Array]  # sums of images by their names in `ImageSums`, images first


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
    names, sums = sorted_sums(images, names)
    ece = np.abs(sums["top_gap"]).sum(1) / sums["pixels"]  # (I,)
    worst = np.argsort(-ece, kind="stable")[:WORST]
    intervals: dict[str, Interval] = {}
    if len(ece) > 1 and resamples > 0:
        (drawn,) = resample([sums], resamples=resamples, seed=seed)
        intervals = drawn.intervals()
    return ImageStatistics(
        ece=float(ece.mean()) if len(ece) else math.nan,
        intervals=intervals,
        worst=tuple(ImageScore(names[i], float(ece[i]), int(sums["pixels"][i])) for i in worst),
        resamples=resamples,
        seed=seed,
    )


def sorted_sums(images: ImageSums, names: Sequence[str]) -> tuple[list[str], Sums]:
    """Names and sums of the images that have pixels, in the order of their names."""
    pixels = images.pixels.numpy()
    order = [i for i in sorted(range(len(names)), key=names.__getitem__) if pixels[i]]
    return (
        [names[i] for i in order],
        {name: tensor.numpy()[order] for name, tensor in images.tensors().items()},
    )


def resample(models: Sequence[Sums], *, resamples: int, seed: int) -> list[Resampled]:
    """The scores of models over resamples of their images, which are drawn alike for all.

    Args:
        models: sums of the same images, at least two, in the same order.
        resamples: how often as many images are drawn, with replacement.
        seed: of the draws.
    """
    n = len(models[0]["pixels"])
    generator = np.random.default_rng(seed)
    found = [Resampled(sums) for sums in models]
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        weights = generator.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)
        for model in found:
            model.take(weights)
    return found


class Resampled:
    """The scores of one model over resamples of its images: ece, sce, accuracy and miou."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._gaps = {
            "ece": Gaps(sums["top_gap"], sums["pixels"]),
            "sce": Gaps(sums["class_gap"], sums["pixels"]),
        }
        self._drawn: list[dict[str, Array]] = []

    def _of_overlap(self, weights: Array) -> dict[str, Array]:
        """(R,) of each score without bins, for R weightings (R, I) of the images."""
        names = ("intersection", "predicted", "truth")
        overlap = [weights @ self._sums[name] for name in names]  # each (R, K)
        accuracy = overlap[0].sum(1) / (weights @ self._sums["pixels"])
        return {"accuracy": accuracy, "miou": scores.miou(*overlap)}

    def take(self, weights: Array) -> None:
        """Take in R resamples: how often each image was drawn (R, I)."""
        self._drawn.append(self._of_overlap(weights))
        pixels = weights @ self._sums["pixels"]
        for gap in self._gaps.values():
            gap.resample(weights, pixels)

    def _draws(self) -> dict[str, Array]:
        return {
            name: np.concatenate([block[name] for block in self._drawn])
            for name in ("accuracy", "miou")
        }

    def intervals(self) -> dict[str, Interval]:
        """The interval of each score, from all resamples taken in."""
        return {
            **{name: gap.interval() for name, gap in self._gaps.items()},
            **{name: _percentile_interval(draws) for name, draws in self._draws().items()},
        }

    def noise(self) -> dict[str, tuple[float, Array]]:
        """Each score of all images, and (R,) what noise added to it in each resample."""
        whole = self._of_overlap(np.ones((1, len(self._sums["pixels"]))))
        return {
            **{name: (gap.estimate, gap.added) for name, gap in self._gaps.items()},
            **{n: (float(whole[n][0]), draws - whole[n]) for n, draws in self._draws().items()},
        }


def _percentile_interval(draws: Array) -> Interval:
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Interval(float(low), float(high), LEVEL)


class Gaps:
    """A calibration error, a sum of absolute gaps, and its interval from resamples of the images.

    Absolute values grow with any noise inside them. The estimate is too large for that reason, and
    a resample, noisy twice, is larger still: plain percentiles can lie wholly above the truth. So
    the lower end is the estimate less what noise can add to it, where noise is added to the gaps
    that differ from 0 by two standard errors; other gaps are taken as 0, where noise adds most.
    The upper end is the percentile of the resamples less their bias.
    docs/conventions.md has the measured coverage.

    Args:
        gap: (I, B) or (I, K, B) gaps of each image.
        pixels: (I,) pixels of each image.
    """

    def __init__(self, gap: Array, pixels: Array) -> None:
        n = len(gap)
        self._classes = gap[0].size // gap.shape[-1]
        self._gap = gap.reshape(n, -1)
        self._mean = self._gap.sum(0) / pixels.sum()
        # Resamples of n images vary a little less than samples of n images do.
        self._widen = math.sqrt(n / (n - 1))
        rest = self._gap - pixels[:, None] * self._mean
        error = self._widen * np.sqrt((rest**2).sum(0)) / pixels.sum()
        self._sure = np.where(np.abs(self._mean) > 2 * error, self._mean, 0)
        self._resampled: list[Array] = []
        self._added: list[Array] = []

    def _error(self, gap: Array) -> Array:
        return np.abs(gap).sum(-1) / self._classes

    @property
    def estimate(self) -> float:
        """The error of all images."""
        return float(self._error(self._mean))

    @property
    def added(self) -> Array:
        """(R,) what noise added to the error in each resample taken in."""
        return np.concatenate(self._added)

    def resample(self, weights: Array, pixels: Array) -> None:
        """Take in R resamples: how often each image was drawn (R, I), and their pixels (R,)."""
        noise = ((weights @ self._gap) / pixels[:, None] - self._mean) * self._widen
        self._resampled.append(self._error(self._mean + noise))
        self._added.append(self._error(self._sure + noise) - self._error(self._sure))

    def interval(self) -> Interval:
        """The interval, from all resamples taken in."""
        resampled = np.concatenate(self._resampled)
        low = self.estimate - float(np.quantile(self.added, 1 - TAIL))
        bias = float(resampled.mean()) - self.estimate
        high = float(np.quantile(resampled, 1 - TAIL)) - bias
        return Interval(max(low, 0.0), min(high, 1.0), LEVEL)
