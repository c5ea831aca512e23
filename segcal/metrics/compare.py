"""The difference between two models on the same images, with an interval.

What is hard in an image is hard for both models, so their difference varies less over images than
their scores do. Whether two intervals overlap says nothing about it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from segcal.metrics.intervals import LEVEL, ImageArrays, ImageScores, combine, sorted_sums
from segcal.metrics.meter import CalibrationMeter
from segcal.metrics.scores import SCORES, Array, Score
from segcal.metrics.tables import Interval

_SCORES = ("ece", "sce", "accuracy", "miou")
_ROUNDING = 1e-12  # what sums of equal numbers in another order may differ by
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """A score of the second model minus that of the first.

    Attributes:
        value: the difference of the printed scores.
        low: lower end of the interval of the large-sample difference; NaN if there is none.
        high: upper end.
        level: of the interval.
        withheld: why there is no interval; "" if there is one.
    """

    value: float
    low: float
    high: float
    level: float = LEVEL
    withheld: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval excludes 0: the models differ beyond the choice of images."""
        return self.low > _ROUNDING or self.high < -_ROUNDING

    def texts(self, score: Score) -> tuple[str, str]:
        """The difference and its interval as `score` is printed, with a star if it is `sure`."""
        ends = (self.value, self.low, self.high)
        value, low, high = map(score.difference, ends)
        interval = "no interval" if self.withheld else f"{low} to {high}"
        return f"{value}{'*' if self.sure else ''}", interval


def paired_differences(
    first: Sequence[CalibrationMeter],
    second: Sequence[CalibrationMeter],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Difference]:
    """How the second model's ece, sce, accuracy and miou differ from the first's.

    A model trained with several seeds has one meter for each; its score is their mean. The images
    of the meters are matched by name, or by order where they have no names. Lists of equal length
    may also hold one meter per shift of the images, in the same order: then the labels need only be
    the same in pairs. `intervals.combine` makes the intervals.

    Args:
        first: meters with `per_image=True` that counted the same images.
        second: the meters of the other model, which counted the same pixels.
        resamples: resamples of the bootstrap over images.
        seed: seed of the bootstrap.

    Raises:
        ValueError: no meters, other settings, no sums of images, fewer than two images, or other
            images.
    """
    if not (first and second):
        raise ValueError(f"Expected meters of two models, but got {len(first)} and {len(second)}")
    names, sums = _same_images([*first, *second])
    n = len(first)
    pairs = [[k, n + k] for k in range(n)] if n == len(second) else [list(range(len(sums)))]
    for pair in pairs:
        chosen = [sums[k] for k in pair]
        _require_same_labels(chosen, names)
        for k, differing in zip(pair, _differing_bins(chosen), strict=True):
            sums[k] = differing
    models = [ImageScores(each) for each in sums]
    factors = [-1 / len(first)] * len(first) + [1 / len(second)] * len(second)
    found = combine(models, factors, resamples=resamples, seed=seed)
    differences = {}
    for name in _SCORES:
        if name in found:
            differences[name] = Difference(*found[name])
        else:
            value = sum(f * m.ranges[name].value for f, m in zip(factors, models, strict=True))
            why = next(model.withheld[name] for model in models if name in model.withheld)
            end = math.nan
            if all(_same_predictions([sums[k] for k in pair]) for pair in pairs):
                value, end, why = 0.0, 0.0, ""
            differences[name] = Difference(value, end, end, withheld=why)
    return differences


def mean_intervals(
    meters: Sequence[CalibrationMeter], *, resamples: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Intervals of the mean scores of several models on the same images, by the score's name.

    The models may be one network trained with several seeds, or one network under several shifts
    of the images. `intervals.combine` makes the intervals; a score without one is left out.

    Args:
        meters: with `per_image=True`, which counted the same images.
        resamples: resamples of the bootstrap over images.
        seed: seed of the bootstrap.

    Raises:
        ValueError: other settings, no sums of images, fewer than two images, or other images.
    """
    _, sums = _same_images(meters)
    models = [ImageScores(each) for each in sums]
    found = combine(models, [1 / len(models)] * len(models), resamples=resamples, seed=seed)
    return {name: estimate.interval for name, estimate in found.items()}


@dataclass(frozen=True)
class Comparison:
    """How models differ from the first of them, each with all its seeds.

    Attributes:
        seeds: by model, in order, how many trainings it stands for.
        differences: of each model but the first, by score.
        best: by score, the model that is better than every other beyond the choice of images.
    """

    seeds: Mapping[str, int]
    differences: Mapping[str, Mapping[str, Difference]]
    best: Mapping[str, str]


def compare_models(
    models: Mapping[str, Sequence[CalibrationMeter]], *, resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Compare every model with the first one, and the best of each score with all others.

    Args:
        models: at least two, by name; for each a meter of every seed, as for `paired_differences`.
        resamples: resamples of the bootstrap over images.
        seed: seed of the bootstrap.

    Raises:
        ValueError: as for `paired_differences`.
    """
    first, *others = models

    @cache
    def between(one: str, other: str) -> dict[str, Difference]:
        return paired_differences(models[one], models[other], resamples=resamples, seed=seed)

    differences = {other: between(first, other) for other in others}
    best = {}
    for name in _SCORES:
        from_first = {first: 0.0, **{n: found[name].value for n, found in differences.items()}}
        sign = 1 if SCORES[name].higher else -1
        leader = max(from_first, key=lambda model: sign * from_first[model])
        rivals = [model for model in models if model != leader]
        if all(_is_better(between(rival, leader)[name], sign) for rival in rivals):
            best[name] = leader
    return Comparison({name: len(meters) for name, meters in models.items()}, differences, best)


def _is_better(difference: Difference, sign: int) -> bool:
    return difference.sure and sign * difference.value > 0


def _same_images(meters: Sequence[CalibrationMeter]) -> tuple[list[str], list[ImageArrays]]:
    """The names of the images in order, and the sums of each meter in this order."""
    for meter in meters:
        meters[0].settings.require_equal(meter.settings)
    if not meters[0].settings.per_image:
        raise ValueError("Expected meters with per_image=True, but got one without sums of images")
    found = [sorted_sums(meter.image_sums(), meter.names) for meter in meters]
    names, _ = found[0]
    for other, _ in found:
        if other != names:
            odd = sorted(set(names) ^ set(other)) or ["images of the same name"]
            raise ValueError(f"Expected meters of the same images, but {odd[0]!r} is in one alone")
    if len(names) < 2:
        raise ValueError(f"Expected at least two images to resample, but got {len(names)}")
    if "" in names:
        log.warning(
            "images without names: they are matched in the order in which they were counted"
        )
    return names, [sums for _, sums in found]


def _require_same_labels(models: Sequence[ImageArrays], names: Sequence[str]) -> None:
    """Raise a ValueError unless every image has the same number of pixels of each class."""
    labels = ("truth", "class_pixels")
    differing = np.any(
        [(m[name] != models[0][name]).any(1) for m in models for name in labels], 0
    )  # (I,)
    for i in np.flatnonzero(differing).tolist():
        which = repr(names[i]) if names[i] else f"number {i + 1}, without a name to match it by,"
        raise ValueError(
            f"Expected meters that counted the same pixels, but image {which} has other labels"
        )


def _same_predictions(models: Sequence[ImageArrays]) -> bool:
    names = ("intersection", "predicted")
    return all(np.array_equal(m[name], models[0][name]) for m in models for name in names)


def _differing_bins(models: Sequence[ImageArrays]) -> list[ImageArrays]:
    """The sums without the gaps of bins in which all models are equal: they differ by exactly 0."""

    def cleared(gaps: Sequence[Array]) -> list[Array]:
        differs = np.any([(gap != gaps[0]).any(0) for gap in gaps], 0)
        return [gap * differs for gap in gaps]

    top, classes = (cleared([m[name] for m in models]) for name in ("top_gap", "class_gap"))
    return [
        {**model, "top_gap": t, "class_gap": c}
        for model, t, c in zip(models, top, classes, strict=True)
    ]
