"""The place where two models are compared on the same images, with an interval of the difference.

What is hard in an image is hard for both models, so their difference varies less over images than
their scores do. Two intervals that overlap say nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from segcal.metrics import scores
from segcal.metrics.bootstrap import LEVEL, TAIL, Gaps
from segcal.metrics.meter import CalibrationMeter
from segcal.metrics.scores import Array
from segcal.metrics.state import decode_names

_BLOCK = 100  # resamples at a time, which bounds memory
_Sums = Mapping[str, Array]  # images first


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
    names, sides = _same_images(first, second)
    n = len(names)
    generator = np.random.default_rng(seed)
    models = [[_Resampled(sums) for sums in side] for side in sides]
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        weights = generator.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)
        for model in (model for side in models for model in side):
            model.resample(weights)
    before, after = (_mean_over_seeds([model.scores() for model in side]) for side in models)
    return {name: _difference(before[name], after[name]) for name in before}


_Drawn = tuple[float, Array]  # a score, and (R,) what noise added to it in each resample


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


class _Resampled:
    """The scores of one meter over resamples of its images."""

    def __init__(self, sums: _Sums) -> None:
        self._sums = sums
        self._gaps = {
            name: Gaps(sums[f"{kind}_gap"], sums["pixels"])
            for name, kind in (("ece", "top"), ("sce", "class"))
        }
        everything = self._of_overlap(np.ones((1, len(sums["pixels"]))))
        self._estimates = {name: float(values[0]) for name, values in everything.items()}
        self._drawn: list[dict[str, Array]] = []

    def _of_overlap(self, weights: Array) -> dict[str, Array]:
        """(R,) of each score without bins, for R weightings (R, I) of the images."""
        names = ("intersection", "predicted", "truth")
        overlap = [weights @ self._sums[name] for name in names]  # each (R, K)
        accuracy = overlap[0].sum(1) / (weights @ self._sums["pixels"])
        return {"accuracy": accuracy, "miou": scores.miou(*overlap)}

    def resample(self, weights: Array) -> None:
        """Take in R resamples: how often each image was drawn (R, I)."""
        self._drawn.append(self._of_overlap(weights))
        pixels = weights @ self._sums["pixels"]
        for gap in self._gaps.values():
            gap.resample(weights, pixels)

    def scores(self) -> dict[str, _Drawn]:
        """Each score, and what noise added to it in all resamples taken in."""
        return {name: (gap.estimate, gap.added) for name, gap in self._gaps.items()} | {
            name: (value, np.concatenate([block[name] for block in self._drawn]) - value)
            for name, value in self._estimates.items()
        }


def _same_images(
    first: Sequence[CalibrationMeter], second: Sequence[CalibrationMeter]
) -> tuple[list[str], list[list[_Sums]]]:
    """The names of the images with pixels, in order, and the sums of each meter of each side."""
    if not (first and second):
        raise ValueError(f"Expected meters of two models, but got {len(first)} and {len(second)}")
    for meter in (*first, *second):
        first[0].settings.require_equal(meter.settings)
    sides = [[_sorted_sums(meter) for meter in side] for side in (first, second)]
    names, sums = sides[0][0]
    for other, theirs in (entry for side in sides for entry in side):
        if other != names:
            odd = sorted(set(names) ^ set(other)) or ["images of the same name"]
            raise ValueError(f"Expected meters of the same images, but {odd[0]!r} is in one alone")
        if (theirs["pixels"] != sums["pixels"]).any():
            raise ValueError(
                "Expected meters that counted the same pixels, but their numbers differ"
            )
    if len(names) < 2:
        raise ValueError(f"Expected at least two images to resample, but got {len(names)}")
    return names, [[sums for _, sums in side] for side in sides]


def _sorted_sums(meter: CalibrationMeter) -> tuple[list[str], _Sums]:
    if not meter.settings.per_image:
        raise ValueError("Expected meters with per_image=True, but got one without sums of images")
    state = meter.state_dict()
    names = decode_names(state["names"])
    sums = {k[6:]: v.numpy() for k, v in state.items() if k.startswith("image.")}
    order = [i for i in sorted(range(len(names)), key=names.__getitem__) if sums["pixels"][i]]
    return [names[i] for i in order], {name: array[order] for name, array in sums.items()}
