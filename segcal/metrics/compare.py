"""The difference between two models on the same images, with an interval.

What is hard in an image is hard for both models, so their difference varies less over images than
their scores do. Whether two intervals overlap says nothing about it.

A model that is trained again with another seed has other scores. So a claim about models ("this
loss calibrates better") rests on an interval over images and over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np

from segcal.metrics.intervals import ImageArrays, ImageScores, combine, sorted_sums, unit_sums
from segcal.metrics.meter import CalibrationMeter, say_once
from segcal.metrics.report import Interval
from segcal.metrics.scores import SCORES, Array

_SCORES = ("ece", "sce", "accuracy", "miou")
_ROUNDING = 1e-12  # what sums of equal numbers in another order may differ by
ONE_SEED = "one seed: images only"
FIXED = "these networks: images only"

Seed = CalibrationMeter | Sequence[CalibrationMeter]  # one meter, or one for each shift


@dataclass(frozen=True)
class Difference:
    """A score of the second model minus that of the first, with a 95 % interval."""

    value: float
    low: float  # NaN if there is no interval
    high: float
    withheld: str = ""  # why there is no interval
    # What chance the interval leaves out: "" if it is over images and seeds, `ONE_SEED` if a model
    # has one seed, `FIXED` if the claim is about these very networks
    note: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval excludes 0 and holds all the chance that the claim is subject to."""
        excludes = self.low > _ROUNDING or self.high < -_ROUNDING
        return excludes and self.note != ONE_SEED


def paired_differences(
    first: Sequence[Seed],
    second: Sequence[Seed],
    *,
    same_trainings: bool = False,
    fixed: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Difference]:
    """How the second model's ece, sce, accuracy and miou differ from the first's.

    paired_differences([nll_0, nll_1, nll_2], [fl_0, fl_1, fl_2])             # trained apart
    paired_differences([nll_0, nll_1], [nll_0_ts, nll_1_ts], same_trainings=True)
    paired_differences([network], [other], fixed=True)                        # not retrained

    A model has one entry for each seed, and its score is their mean. An entry is a meter, or a list
    of meters, one for each shift of the images in the same order everywhere; the score of the seed
    is then the mean over shifts. The images of the meters are matched by name, or by order where
    they have no names; where they have groups, these are the units of the interval.

    Args:
        first: meters with `per_image=True` that counted the same images.
        second: the meters of the other model, which counted the same pixels.
        same_trainings: the k-th entries of both models are from the same training, such as before
            and after a calibrator. Otherwise the trainings are independent.
        fixed: the claim is about these very networks, not about others that are trained alike, so
            that the interval is over images alone.
        resamples: how often images are drawn to resample the signs of the gaps, with `seed`.
    """
    if not (first and second):
        raise ValueError(f"Expected meters of two models, but got {len(first)} and {len(second)}")
    if same_trainings and len(first) != len(second):
        raise ValueError(
            f"Expected a meter of both models for each training, but got {len(first)} "
            f"and {len(second)}"
        )
    sums, models, unit = _by_seed([*first, *second])
    parts = models[: len(first)], models[len(first) :]  # (seeds, shifts) of each side
    # In a bin where the models of a pair are equal, they differ by exactly 0, whatever the images.
    apart = not (same_trainings or fixed) and len(models) > 2
    pairs = [models] if apart or len(first) != len(second) else np.stack(parts, 1)
    equal = True  # whether all of them predict the same classes
    for pair in pairs:
        for at_shift in pair.T.tolist():
            for name in ("intersection", "predicted"):
                first_one, *others = (sums[m][name] for m in at_shift)
                equal = equal and all(np.array_equal(first_one, other) for other in others)
            for name in ("top_gap", "class_gap"):
                gaps = [sums[m][name] for m in at_shift]
                differs = np.any([(gap != gaps[0]).any(0) for gap in gaps], 0)
                for m, gap in zip(at_shift, gaps, strict=True):
                    sums[m] = {**sums[m], name: gap * differs}
    trainings = [part.tolist() for part in parts]
    if same_trainings:
        trainings = [np.hstack(parts).tolist()]
    note = FIXED if fixed else ONE_SEED if min(map(len, trainings)) < 2 else ""
    scored = [ImageScores(each, unit) for each in sums]
    factors = np.repeat([-1 / parts[0].size, 1 / parts[1].size], [p.size for p in parts]).tolist()
    trainings = [] if note else trainings
    found = combine(scored, factors, resamples=resamples, seed=seed, trainings=trainings)
    differences = {}
    for name in _SCORES:
        if equal and name in ("accuracy", "miou"):  # without rounding, and with any classes
            differences[name] = Difference(0.0, 0.0, 0.0, note=note)
        elif name in found:
            value, low, high = found[name]
            differences[name] = Difference(value, max(low, -1.0), min(high, 1.0), note=note)
        else:
            value = sum(f * m.ranges[name].value for f, m in zip(factors, scored, strict=True))
            why = next(model.withheld[name] for model in scored if name in model.withheld)
            differences[name] = Difference(value, math.nan, math.nan, withheld=why, note=note)
    return differences


def mean_intervals(
    meters: Sequence[Seed], *, fixed: bool = False, resamples: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Intervals of the mean scores of a model over its seeds, by the score's name.

    They are over images and seeds; with one seed, or for these very networks (`fixed`), over images
    alone. A score without an interval is left out. Arguments are those of `paired_differences`.
    """
    sums, models, unit = _by_seed(meters)
    found = combine(
        [ImageScores(each, unit) for each in sums],
        [1 / len(sums)] * len(sums),
        resamples=resamples,
        seed=seed,
        trainings=[] if fixed else [models.tolist()],
    )
    return {name: estimate.interval for name, estimate in found.items()}


@dataclass(frozen=True)
class Comparison:
    """How models differ from the first of them, each with all its seeds."""

    seeds: Mapping[str, int]  # by model, in order, how many trainings it stands for
    differences: Mapping[str, Mapping[str, Difference]]  # of each model but the first, by score
    best: Mapping[str, str]  # by score, the model that is surely better than every other


def compare_models(
    models: Mapping[str, Sequence[Seed]],
    *,
    trainings: Mapping[str, Sequence[Hashable]] | None = None,
    fixed: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compare every model with the first one, and the best of each score with all others.

    Each of at least two models has a name and its seeds, as for `paired_differences`. `trainings`
    names, by model, the training of each seed: two models of the same trainings in the same order,
    such as before and after a calibrator, are compared in pairs.
    """
    first, *others = models

    @cache
    def between(one: str, other: str) -> dict[str, Difference]:
        same = trainings is not None and [*trainings[one]] == [*trainings[other]]
        # A calibrator of one network is judged on that network, whatever other trainings give.
        network = same and len(models[one]) == 1
        return paired_differences(
            models[one],
            models[other],
            same_trainings=same,
            fixed=fixed or network,
            resamples=resamples,
            seed=seed,
        )

    differences = {other: between(first, other) for other in others}
    best = {}
    for name in _SCORES:
        from_first = {first: 0.0, **{n: found[name].value for n, found in differences.items()}}
        sign = 1 if SCORES[name].higher else -1
        leader = max(from_first, key=lambda model: sign * from_first[model])
        found = [between(rival, leader)[name] for rival in models if rival != leader]
        if all(one.sure and sign * one.value > 0 for one in found):
            best[name] = leader
    return Comparison({name: len(seeds) for name, seeds in models.items()}, differences, best)


def _by_seed(seeds: Sequence[Seed]) -> tuple[list[ImageArrays], Array, str]:
    """The sums of all meters, their indices (seeds, shifts), and what is summed: images or groups.

    Every meter counted the same images, and the meters of one shift the same labels.
    """
    nested = [[seed] if isinstance(seed, CalibrationMeter) else [*seed] for seed in seeds]
    shifts = sorted({len(meters) for meters in nested})
    if len(shifts) != 1 or not shifts[0]:
        raise ValueError(f"Expected equally many shifts for each seed, but got {shifts}")
    meters = [*chain(*nested)]
    for meter in meters:
        meters[0].settings.require_equal(meter.settings)
    if not meters[0].settings.per_image:
        raise ValueError("Expected meters with per_image=True, but got one without sums of images")
    found = [sorted_sums(meter.image_sums(), meter.names, meter.groups) for meter in meters]
    names, first = found[0]
    for other, each in found:
        if other != names:
            odd = sorted(set(names) ^ set(other)) or ["images of the same name"]
            raise ValueError(f"Expected meters of the same images, but {odd[0]!r} is in one alone")
        if not np.array_equal(each["unit"], first["unit"]):
            raise ValueError("Expected the same groups of images in all meters, but got others")
    if "" in names:
        say_once("images without names: they are matched in the order in which they were counted")
    models = np.arange(len(found)).reshape(len(nested), -1)
    for at_shift in models.T.tolist():
        for label in ("truth", "class_pixels"):  # (I, K) of each class
            alike = [found[m][1][label] for m in at_shift]
            for i in np.flatnonzero(np.any([(m != alike[0]).any(1) for m in alike], 0)).tolist():
                which = (
                    repr(names[i])
                    if names[i]
                    else f"number {i + 1}, without a name to match it by,"
                )
                raise ValueError(
                    f"Expected meters that counted the same pixels, but image {which} has other "
                    "labels"
                )
    sums = [unit_sums(each) for _, each in found]
    number, unit = len(sums[0]["pixels"]), "image" if sums[0] is first else "group"
    if number < 2:
        raise ValueError(f"Expected at least two {unit}s to resample, but got {number}")
    return sums, models, unit
