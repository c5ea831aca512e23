"""The place where two models are compared on the same images, with an interval of the difference.

What is hard in an image is hard for both models, so their difference varies less over images than
their scores do. Two intervals that overlap say nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from segcal.metrics.bootstrap import LEVEL, TAIL, Sums, resample, sorted_sums
from segcal.metrics.meter import CalibrationMeter
from segcal.metrics.scores import Array, Score

_Drawn = tuple[float, Array]  # a score, and (R,) what noise added to it in each resample


@dataclass(frozen=True)
class Difference:
    """A score of the second model less that of the first, with its interval of level `level`."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def sure(self) -> bool:
        """Whether the interval leaves out 0: the models differ beyond the choice of images."""
        return self.low > 0 or self.high < 0

    def texts(self, score: Score) -> tuple[str, str]:
        """The difference and its interval as `score` is printed, with a star if it is `sure`."""
        ends = (self.value, self.low, self.high)
        value, low, high = (f"{end * score.scale:+.{score.digits}f}" for end in ends)
        return f"{value}{'*' if self.sure else ''}", f"{low} to {high}"


def paired_differences(
    first: Sequence[CalibrationMeter],
    second: Sequence[CalibrationMeter],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Difference]:
    """How the second model's ece, sce, accuracy and miou differ from the first's.

    A model trained with several seeds has a meter for each; its score is their mean. Every resample
    draws images with replacement, the same for all meters, and shows what noise adds to the
    difference; the interval is the difference less that. What noise adds to a calibration error is
    told by `bootstrap.Gaps`. docs/conventions.md has the measured coverage.

    Args:
        first: meters with `per_image=True` that counted the same pixels of the same images.
        second: the other model's.
        resamples: of the bootstrap over images.
        seed: of the resampling.

    Raises:
        ValueError: no meters, other settings, no sums of images, fewer than two images, or other
            pixels.
    """
    if not (first and second):
        raise ValueError(f"Expected meters of two models, but got {len(first)} and {len(second)}")
    drawn = resample(_same_images([*first, *second]), resamples=resamples, seed=seed)
    noise = [model.noise() for model in drawn]
    before, after = (_mean_over_seeds(n) for n in (noise[: len(first)], noise[len(first) :]))
    return {name: _difference(before[name], after[name]) for name in before}


def _mean_over_seeds(seeds: Sequence[Mapping[str, _Drawn]]) -> dict[str, _Drawn]:
    return {
        name: (
            float(np.mean([scores[name][0] for scores in seeds])),
            np.mean([scores[name][1] for scores in seeds], 0),
        )
        for name in seeds[0]
    }


def _difference(before: _Drawn, after: _Drawn) -> Difference:
    value = after[0] - before[0]
    low, high = value - np.quantile(after[1] - before[1], [1 - TAIL, TAIL])
    return Difference(value, float(low), float(high))


def _same_images(meters: Sequence[CalibrationMeter]) -> list[Sums]:
    """The sums of each meter, in the order of the images' names."""
    for meter in meters:
        meters[0].settings.require_equal(meter.settings)
    if not meters[0].settings.per_image:
        raise ValueError("Expected meters with per_image=True, but got one without sums of images")
    found = [sorted_sums(meter.image_sums(), meter.names) for meter in meters]
    names, sums = found[0]
    for other, theirs in found:
        if other != names:
            odd = sorted(set(names) ^ set(other)) or ["images of the same name"]
            raise ValueError(f"Expected meters of the same images, but {odd[0]!r} is in one alone")
        if (theirs["pixels"] != sums["pixels"]).any():
            raise ValueError(
                "Expected meters that counted the same pixels, but their numbers differ"
            )
    if len(names) < 2:
        raise ValueError(f"Expected at least two images to resample, but got {len(names)}")
    return [sums for _, sums in found]
