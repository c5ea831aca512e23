"""Statistics over images: intervals of the scores, debiased scores, the worst images.

The pixels of an image are not independent, so the images are the sample, or their groups where they
have any: slices of a patient, frames of a video. An interval is for the large-sample value of a
score: its value on infinitely many such images.

Scores are ratios of sums over images, and their intervals are t intervals with the standard error
of the jackknife (`t_margins`). A calibration error is a sum of absolute gaps, and noise in the gaps
adds to it. Two estimates take that into account: one is at most the true error on average, the
other about at least the true error (`error_range`). The interval reaches from the first minus a
margin to the second plus a margin, where a bootstrap of the images tells which signs the gaps may
have (`combine`). docs/intervals.md has the measured coverage.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import betaincinv, stdtrit  # scipy.stats takes as long to import as torch

from segcal.metrics import scores
from segcal.metrics.report import BinGap, ImageStatistics, ImageTable, Interval
from segcal.metrics.scores import Array
from segcal.metrics.sums import Sums

LEVEL = 0.95
LISTED = 10_000  # images in the table of a report
BIN_IMAGES = 3  # images named for each bin
MIN_LABELLED = 2  # images that must show a class for an interval of mIoU
_FADE = 0.5  # standard errors within which the sign of a gap fades to 0
_PATTERNS = 0.95  # quantile of the margins over the resampled signs
_BLOCK = 100  # resamples at a time, which bounds memory
ImageArrays = dict[str, Array]  # the sums of I images by name; see `sorted_sums`


class Estimate(NamedTuple):
    """A score of the images, and the ends of a range for its large-sample value."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> Interval:
        """The range, of which only 0 to 1 is possible."""
        low, high = (float(min(max(end, 0.0), 1.0)) for end in (self.low, self.high))
        return Interval(low, high)


def image_statistics(
    images: Sums,
    names: Sequence[str],
    groups: Sequence[str] = (),
    *,
    resamples: int = 1000,
    seed: int = 0,
    raters: int = 1,
    outside: Sequence[int] = (),
) -> ImageStatistics:
    """Statistics over I images; those without pixels are left out.

    `groups` are the units of intervals and of debiased scores, with "" for an image that is one by
    itself. The labels of all `raters` are in the sums. Classes `outside` do not count.
    """
    names, sums = sorted_sums(images, names, groups)
    sums["predicted"][:, outside] = 0
    sums["shown"] = (sums["truth"] > 0).astype(np.float64)  # (I, K)
    sums["ace"] = np.where(sums["shown"], sums["class_ace"], 0.0)
    first = int(images["pixels"].ndim == 1)  # sigmoid outputs have no background
    units, unit = unit_sums(sums), "group" if any(groups) else "image"
    number = len(units["pixels"])
    model = ImageScores(units, unit) if number > 1 else None
    ends: dict[str, Interval] = {}
    by_class: dict[str, tuple[Interval, ...]] = {}
    withheld: dict[str, str] = {}
    if model is not None and resamples > 0:
        found = combine([model], [1.0], resamples=resamples, seed=seed, classes=True)
        ends = {name: estimate.interval for name, estimate in found.items()}
        by_class = {
            "class_ece": tuple(ends.pop(_class_key(c)) for c in range(model.num_classes)),
            "class_dice": _class_intervals(*_overlap(units), units["shown"], plain=True),
            "class_ace": _class_intervals(units["ace"], units["shown"], units["shown"]),
        }
        ends |= {"bias": _bias_interval(units), **_mean_intervals(units, first)}
        ends = {name: end for name, end in ends.items() if not math.isnan(end.low)}
        withheld = dict(model.withheld)
        if "miou" in withheld:  # Dice for the same reason
            missing = {"dice", "foreground_dice"} - ends.keys()
            withheld |= dict.fromkeys(sorted(missing), withheld["miou"])
    elif number == 1 and resamples > 0:
        withheld = dict.fromkeys(("accuracy", "miou", "ece", "sce"), f"there is only one {unit}")
    ace, shown, pixels = sums["ace"], sums["shown"], sums["pixels"]
    ece = np.abs(sums["top_gap"]).sum(1) / pixels  # (I,)
    return ImageStatistics(
        ece=float(ece.mean()) if len(ece) else math.nan,
        ece_debiased=math.nan if model is None else model.ranges["ece"].low,
        sce_debiased=math.nan if model is None else model.ranges["sce"].low,
        ace=float(scores.ratio(ace.sum(), shown.sum())),
        foreground_ace=float(scores.ratio(ace[:, first:].sum(), shown[:, first:].sum())),
        class_ace=tuple(scores.ratio(ace.sum(0), shown.sum(0)).tolist()),
        intervals=ends,
        class_intervals=by_class,
        withheld=withheld,
        resamples=resamples,
        seed=seed,
        bins=_bin_gaps(sums, units, names, intervals=bool(ends)),
        table=_image_table(sums, names, ece, raters),
        groups=number if any(groups) else None,
    )


def _overlap(units: ImageArrays) -> tuple[Array, Array]:
    """(I, K) numerators and denominators of the Dice of each class."""
    return 2.0 * units["intersection"], 1.0 * units["predicted"] + units["truth"]


def _ratio_interval(numerators: Array, denominators: Array, *, plain: bool = False) -> Interval:
    """The interval of the mean over the columns (I, n) of their ratios of sums."""
    value = (numerators.sum(0) / denominators.sum(0)).mean()
    (down,), (up,) = t_margins(_mean_influence(numerators, denominators), plain=plain)
    return Estimate(value, value - down, value + up).interval


def _class_intervals(
    numerators: Array, denominators: Array, shown: Array, *, plain: bool = False
) -> tuple[Interval, ...]:
    """The interval of the ratio of each class; NaN for one that few images show."""
    often = (shown > 0).sum(0) >= MIN_LABELLED  # (K,)
    return tuple(
        _ratio_interval(numerators[:, [c]], denominators[:, [c]], plain=plain)
        if often[c]
        else Interval(math.nan, math.nan)
        for c in range(len(often))
    )


def _mean_intervals(units: ImageArrays, first: int) -> dict[str, Interval]:
    """The intervals of mean Dice and ACE, of all classes and of the foreground from `first` on."""
    hits, areas = _overlap(units)
    often = (units["shown"] > 0).sum(0) >= MIN_LABELLED  # (K,)
    counted = np.flatnonzero(areas.sum(0) > 0)
    found = {}
    for dice, ace, start in (
        ("dice", "image_ace", 0),
        ("foreground_dice", "foreground_ace", first),
    ):
        total, number = (units[name][:, start:].sum(1, keepdims=True) for name in ("ace", "shown"))
        if (number > 0).sum() >= MIN_LABELLED:
            found[ace] = _ratio_interval(total, number)
        classes = counted[counted >= start]
        if len(classes) and often[classes].all():
            found[dice] = _ratio_interval(hits[:, classes], areas[:, classes], plain=True)
    return found


def _bias_interval(units: ImageArrays) -> Interval:
    """The interval of mean confidence − accuracy, between -1 and 1."""
    gap, pixels = units["top_gap"].sum(1), units["pixels"]  # (I,)
    value = float(gap.sum() / pixels.sum())
    (down,), (up,) = t_margins(_ratio_influence(gap[None], pixels))
    return Interval(max(value - float(down), -1.0), min(value + float(up), 1.0))


def _bin_gaps(
    sums: ImageArrays, units: ImageArrays, names: Sequence[str], *, intervals: bool
) -> tuple[BinGap, ...]:
    gap, pixels = sums["top_gap"], sums["pixels"]  # (I, B), (I,)
    if not len(pixels):
        return ()
    value = gap.sum(0) / pixels.sum()  # (B,)
    down = up = np.full(len(value), math.nan)
    if intervals:
        down, up = t_margins(_ratio_influence(units["top_gap"].T, units["pixels"]))
    most = np.argsort(-np.abs(gap), axis=0, kind="stable")[:BIN_IMAGES]  # (3, B)
    bins = []
    for b, order in enumerate(most.T):
        images = tuple((names[i], float(gap[i, b] / pixels.sum())) for i in order if gap[i, b])
        bins.append(BinGap(float(value[b] - down[b]), float(value[b] + up[b]), images))
    return tuple(bins)


def _image_table(sums: ImageArrays, names: Sequence[str], ece: Array, raters: int) -> ImageTable:
    kept = np.sort(np.argsort(-ece, kind="stable")[:LISTED])
    pixels = sums["pixels"][kept]
    bias = sums["top_gap"][kept].sum(1) / pixels
    return ImageTable(
        names=tuple(names[i] for i in kept),
        pixels=tuple(round(n / raters) for n in pixels.tolist()),
        correct=tuple(round(n / raters) for n in sums["hits"][kept].tolist()),
        ece=tuple(np.round(ece[kept], 6).tolist()),
        bias=tuple(np.round(bias, 6).tolist()),
    )


def sorted_sums(
    images: Sums, names: Sequence[str], groups: Sequence[str] = ()
) -> tuple[list[str], ImageArrays]:
    """Names and sums of the images that have pixels, in the order of their names.

    The sums are the arrays of `sums.no_images`, and four more: "pixels" (I,), "class_pixels"
    (I, K) that a class's gaps are of, "hits" (I,) predicted right, and "unit" (I,), equal numbers
    for images of one group.
    """
    counted = images["pixels"].numpy()
    counted = counted if counted.ndim == 1 else counted.sum(1)
    order = [i for i in sorted(range(len(names)), key=names.__getitem__) if counted[i]]
    sums = {name: tensor.numpy()[order] for name, tensor in images.items()}
    pixels, hits = sums["pixels"], sums["intersection"]
    if pixels.ndim == 2:  # decisions of each class; "absent" is right where neither says "present"
        hits = pixels - sums["predicted"] - sums["truth"] + 2 * hits
        sums["class_pixels"], sums["pixels"] = pixels, pixels.sum(1)
    else:
        sums["class_pixels"] = np.broadcast_to(pixels[:, None], hits.shape)
    sums["hits"] = hits.sum(1, dtype=np.int64)
    first: dict[str | int, int] = {}  # of each group, its first image
    keys = [groups[i] or i for i in order] if groups else order
    sums["unit"] = np.array([first.setdefault(key, n) for n, key in enumerate(keys)], np.int64)
    return [names[i] for i in order], sums


def unit_sums(sums: ImageArrays) -> ImageArrays:
    """The sums of each group, in the order of their first images; of each image without groups."""
    order = np.argsort(sums["unit"], kind="stable")
    unit, starts = np.unique(sums["unit"][order], return_index=True)
    if len(unit) == len(order):
        return sums
    return {
        name: np.add.reduceat(
            array[order], starts, 0, array.dtype if array.dtype.kind == "f" else np.int64
        )
        for name, array in sums.items()
        if name != "unit"
    }


def looks_like_sequence(names: Sequence[str]) -> bool:
    """Whether most names are a common stem and a counter of regular steps, as frames of a video.

    `0016E5_07959.png, 0016E5_07989.png, …`, `patient3_slice_01, patient3_slice_02, …` and
    `frame_0001.png, frame_0002.png, …` do; `2007_000032, 2007_000129, …` of VOC, plain numbers, and
    another stem that is numbered from 0 or 1 on (`img000, img001, …`), as any folder of images may
    be, do not.
    """
    counters = defaultdict(list)
    for name in names:
        found = re.fullmatch(r"(.*\D)(\d+)(\D*)", name.rpartition(".")[0] or name)
        if found:
            counters[found[1], found[3]].append(int(found[2]))
    regular = 0
    for numbers in counters.values():
        steps = Counter(b - a for a, b in pairwise(sorted(numbers)))
        if len(numbers) > 2 and 2 * max(steps.values()) > len(numbers):
            regular += len(numbers)
    if len(counters) == 1 and regular and min(numbers) < 2:
        stem = next(iter(counters))[0]
        ours = stem in ("train-", "holdout-", "test-")  # names of the scenes
        if ours or max(numbers) <= len(names):
            return bool(re.search("frame|slice|video|scan|seq", stem, re.IGNORECASE))
    return 2 * regular > len(names)


def combine(
    models: Sequence[ImageScores],
    factors: Sequence[float],
    *,
    resamples: int,
    seed: int,
    trainings: Sequence[Sequence[Sequence[int]]] = (),
    classes: bool = False,
) -> dict[str, Estimate]:
    """The sum of models' scores times factors, with the ends of its interval, by score name.

    One model with factor 1 gives its own scores; two with -1 and 1 give their difference.

    With the signs of all gaps given, calibration errors are ratios of sums like the other scores,
    and their margins follow in the same way. The signs of the gaps of resampled images are those
    that the true gaps may have, and a margin is the 95 % quantile of the margins with these signs.

    `trainings` are sets of trainings that differ by their seed alone; each training lists the
    indices of the models that it gave. Without them, only the choice of images is chance.
    """

    def ends(name: str) -> Array:
        """(2, M) what each model adds to the lower and the upper end, before the margins."""
        found = []
        for factor, model in zip(factors, models, strict=True):
            _, low, high = model.ranges[name]
            found.append([factor * end for end in ((low, high) if factor > 0 else (high, low))])
        return np.array(found).T

    blocks: dict[str, list[Array]] = defaultdict(list)

    def add(name: str, influences: Sequence[Array], *, plain: bool = False) -> None:
        seeds = []
        for same in trainings:
            if len(same) > 1:
                sums = np.stack([ends(name)[:, each].sum(1) for each in same])  # (S, 2)
                seeds.append((len(same) * sums.var(0, ddof=1), len(same) - 1))
        whole = sum(f * influence for f, influence in zip(factors, influences, strict=True))
        blocks[name].append(t_margins(np.asarray(whole), seeds, plain=plain))

    for name in ("accuracy", "miou"):
        if all(name in model.linear for model in models):
            add(name, [model.linear[name] for model in models], plain=name == "miou")
    for weights in resampled_weights(models[0].num_images, resamples, seed):
        for parts in zip(*(m.influences(weights, classes=classes) for m in models), strict=True):
            add(parts[0][0], [influence for _, influence in parts])
    found = {}
    for name, margins in blocks.items():
        down, up = np.quantile(np.concatenate(margins, 1), _PATTERNS, axis=1)
        low, high = map(math.fsum, ends(name))  # exactly 0 for equal models
        value = math.fsum(f * m.ranges[name].value for f, m in zip(factors, models, strict=True))
        found[name] = Estimate(value, float(low - down), float(high + up))
    return found


class ImageScores:
    """The scores of one model on at least two images, and the influence of each image on them.

    The influence of an image on a score is the score minus the score without the image.

    Attributes:
        ranges: by name ("ece", "sce", "accuracy", "miou" and the class-j-ECE of each class): the
            score, and a range for its large-sample value before the margins of the interval.
        linear: (1, I) influences on the scores that are no sums of absolute values.
        withheld: by name, why a score has no interval.
    """

    def __init__(self, sums: ImageArrays, unit: str = "image") -> None:
        self._top, self._classes = sums["top_gap"], sums["class_gap"]  # (I, B), (I, K, B)
        self._pixels, self._class_pixels = sums["pixels"], sums["class_pixels"]  # (I,), (I, K)
        self.num_images, self.num_classes, _ = self._classes.shape
        self._known = self._class_pixels.sum(0) > 0  # (K,) not so for a class that is all ignored
        class_ece = {
            c: error_range(self._classes[:, c], self._class_pixels[:, c])
            for c in np.flatnonzero(self._known).tolist()
        }
        unknown = Estimate(math.nan, 0.0, 1.0)
        self.ranges = {
            "ece": error_range(self._top, self._pixels),
            "sce": Estimate(*map(float, np.mean(list(class_ece.values()), 0))),
            **{_class_key(c): class_ece.get(c, unknown) for c in range(self.num_classes)},
        }
        self.linear: dict[str, Array] = {}
        self.withheld: dict[str, str] = {}
        right = sums["hits"].astype(np.float64)
        accuracy = float(right.sum() / self._pixels.sum())
        self.ranges["accuracy"] = Estimate(accuracy, accuracy, accuracy)
        self.linear["accuracy"] = _ratio_influence(right[None], self._pixels)
        # An IoU is a ratio of sums too; two images must show a class to tell how its IoU varies.
        hits, truth = (sums[name].astype(np.float64) for name in ("intersection", "truth"))
        union = sums["predicted"] + truth - hits  # (I, K)
        miou = float(scores.miou(hits.sum(0), sums["predicted"].sum(0), truth.sum(0)))
        self.ranges["miou"] = Estimate(miou, miou, miou)
        shown = (truth > 0).sum(0)  # (K,) images that show the class
        counted = np.flatnonzero(union.sum(0))
        rare = [c for c in counted if shown[c] < MIN_LABELLED]
        if rare:
            number = f"only one {unit}" if shown[rare[0]] else f"no {unit}"
            others = f", and {len(rare) - 1} more like it" if len(rare) > 1 else ""
            self.withheld["miou"] = f"class {rare[0]} is labelled in {number}{others}"
        else:
            self.linear["miou"] = _mean_influence(hits[:, counted], union[:, counted])

    def influences(self, weights: Array, *, classes: bool) -> Iterator[tuple[str, Array]]:
        """Names and (R, I) influences on the calibration errors, with the signs of R resamples.

        `weights` (R, I) say how often each resample holds each image.
        """
        top = np.sign(weights @ self._top)
        yield "ece", self._influences(top, self._top, self._pixels)
        signs = np.sign(weights @ self._classes.reshape(self.num_images, -1))
        signs = signs.reshape(len(weights), self.num_classes, -1)  # (R, K, B)
        total = np.zeros(weights.shape)
        for c in range(self.num_classes):
            influence = np.zeros(weights.shape)
            if self._known[c]:
                gap, pixels = self._classes[:, c], self._class_pixels[:, c]
                influence = self._influences(signs[:, c], gap, pixels)
            total += influence
            if classes:
                yield _class_key(c), influence
        yield "sce", total / self._known.sum()

    def _influences(self, signs: Array, gap: Array, pixels: Array) -> Array:
        # Not `signs @ gap.T`: threads of a matrix product wait for each other on a busy machine.
        return _ratio_influence(np.einsum("rb,ib->ri", signs, gap), pixels)


def error_range(gap: Array, pixels: Array) -> Estimate:
    """A calibration error Σ_b |G_b| / N and a range for its large-sample value.

    G_b is the sum over images of their gaps g_ib. |G_b| is too large on average, because noise in
    G_b adds to it. If each image's gap takes the sign s_ib of the gap of the *other* images,

        low = Σ_b Σ_i s_ib g_ib / N,   s_ib = clip(2 (G_b - g_ib) / sqrt(Σ_{j≠i} g_jb²), -1, 1),

    then s_ib is independent of g_ib. So `low` is 0 on average where the true gaps are 0, and at
    most the true error in any case, as wrong signs make it smaller. It may be negative. The sign
    fades to 0 within half a standard error of 0; if it changed at once, `low` would be noisier.

    `high` is the mean of the error and `low`: about the jackknife's correction of bias. It is too
    large where the true gaps are 0, and never too small by more than 0.1 standard errors of a gap.
    """
    square = gap**2
    others = gap.sum(0) - gap  # (I, B)
    variance = square.sum(0) - square
    # If one image alone has pixels in a bin, the others have no sign, only rounding errors.
    known = variance > 1e-12 * square.sum(0)
    error = np.sqrt(np.where(known, variance, 1.0))
    sign = np.where(known, np.clip(others / (_FADE * error), -1, 1), 0.0)
    total = float(pixels.sum())
    value = float(np.abs(gap.sum(0)).sum()) / total
    low = float((sign * gap).sum()) / total
    return Estimate(value, low, (low + value) / 2)


def fraction_interval(
    numerators: Array, denominators: Array, *, trials: float | None = None
) -> Interval | None:
    """The interval over images of a fraction Σ numerators / Σ denominators that may be near 0 or 1.

    Near 0 and 1 a t interval is too short. This is the exact binomial interval (Clopper & Pearson)
    of as many trials as would vary alike (Korn & Graubard 1998), but at most `trials`, by default
    Σ denominators. Where nothing varies, every image is one trial. Images whose denominator is 0
    do not count, and fewer than two images have no interval.
    """
    held = denominators > 0
    numerators, denominators = (x[held].astype(np.float64) for x in (numerators, denominators))
    n = len(denominators)
    if n < 2:
        return None
    fraction = numerators.sum() / denominators.sum()
    influence = _ratio_influence(numerators[None], denominators)[0]
    variance = ((influence - influence.mean()) ** 2).sum() * n / (n - 1)
    most = denominators.sum() if trials is None else trials
    size = float(n)
    if variance > 1e-12:  # not rounding alone
        known, wanted = stdtrit([n - 1, most - 1], (1 + LEVEL) / 2)
        size = min(fraction * (1 - fraction) / variance * (wanted / known) ** 2, most)
    hits, misses = fraction * size, (1 - fraction) * size
    tail = (1 - LEVEL) / 2
    low = float(betaincinv(hits, misses + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - tail)) if misses > 0 else 1.0
    return Interval(low, high)


def _ratio_influence(numerators: Array, denominators: Array) -> Array:
    """(R, I) the ratio Σ_i numerator_i / Σ_i denominator_i minus that without each image."""
    total = denominators.sum()
    ratios = numerators.sum(1, keepdims=True) / total
    # An image that holds all there is of the denominator tells nothing about other images.
    rest = total - denominators
    change = numerators - ratios * denominators
    return np.divide(change, rest, out=np.zeros_like(change), where=rest > 0)


def _mean_influence(numerators: Array, denominators: Array) -> Array:
    """(1, I) the same of the mean over columns (I, n) of their ratios."""
    pairs = zip(numerators.T, denominators.T, strict=True)
    return np.mean([_ratio_influence(one[None], other) for one, other in pairs], 0)


def t_margins(
    influences: Array, seeds: Sequence[tuple[Array, int]] = (), *, plain: bool = False
) -> Array:
    """(2, R) margins of a t interval below and above, for R rows of influences (R, I).

    The standard error over images is that of the jackknife times I/(I - 1). Its I - 1 degrees of
    freedom shrink where a few images decide, and the side towards which the influences are skewed
    is longer (Johnson 1978).

    The variance over seeds is added. Sets of equally many trainings have the degrees of freedom of
    Welch (1947), and the quantile is the mean of those of Student's t for images and for seeds,
    weighted by their variances (Cochran & Cox 1957). Sets of different sizes are weighted in the
    same way. Other rules made intervals of two or three seeds too short; docs/intervals.md.

    Args:
        influences: (R, I) of each image, for R patterns of signs.
        seeds: for sets of trainings, the (2,) variances of both ends and their degrees of freedom.
        plain: without skewness and fewer degrees of freedom: of mIoU, because one image may hold
            most of a rare class, and the interval would be too long.
    """
    n = influences.shape[1]
    centred = influences - influences.mean(1, keepdims=True)
    variance = (centred**2).mean(1)
    error = n * np.sqrt(variance / (n - 1))
    freedom, skewed = np.full(len(influences), n - 1.0), np.zeros(len(influences))
    quantile = stdtrit(freedom, (1 + LEVEL) / 2)
    if not plain:
        standard = centred / np.sqrt(np.where(variance > 0, variance, 1.0))[:, None]
        square = standard**2
        skewness = np.einsum("ri,ri->r", square, standard) / n
        kurtosis = np.einsum("ri,ri->r", square, square) / n
        freedom = 1 / (1 / (n - 1) + np.maximum(kurtosis - 3, 0) / (2 * n))
        quantile = stdtrit(freedom, (1 + LEVEL) / 2)
        skewed = error * skewness * (2 * quantile**2 + 1) / (6 * math.sqrt(n))
    longer = np.maximum([-skewed, skewed], 0)
    over_seeds = sum((part for part, _ in seeds), np.zeros(2))
    if not over_seeds.any():
        return error * quantile + longer
    if len({few for _, few in seeds}) > 1:
        of_seeds = sum(part * stdtrit(few, (1 + LEVEL) / 2) for part, few in seeds)
    else:
        known = sum(part**2 / few for part, few in seeds)
        freedom_of_seeds = np.divide(over_seeds**2, known, out=np.ones(2), where=known > 0)
        of_seeds = over_seeds * stdtrit(freedom_of_seeds, (1 + LEVEL) / 2)
    total = error**2 + over_seeds[:, None]  # (2, R)
    return (error**2 * quantile + of_seeds[:, None]) / np.sqrt(total) + longer


def resampled_weights(n: int, resamples: int, seed: int) -> Iterator[Array]:
    """(R, n) how often each of n images is drawn, for blocks of R resamples."""
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        yield generator.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)


def _class_key(c: int) -> str:
    return f"class_ece/{c}"
