"""Measure how often 95 % intervals hold, and print the tables of docs/intervals.md.

nice python tools/interval_coverage.py scores --voc FOLDER  # one model, and two: 5 minutes
nice python tools/interval_coverage.py seeds                # models of several seeds: 10 minutes
nice python tools/interval_coverage.py groups               # correlated images: 1 minute
nice python tools/interval_coverage.py miou --voc FOLDER    # against other intervals: 1 minute
nice python tools/interval_coverage.py triage bands         # thresholds, bins: 5 minutes
nice python tools/interval_coverage.py scores --population A.npz B.npz    # your own two states

Every table draws many data sets, with replacement, from a population of images whose true scores
are known. An interval holds if it contains the true score. All numbers are in %.

Most populations are of a network of 4 classes on images of 256 pixels that is calibrated if its
logits are multiplied by 1. Where labels are correlated, half the variance of what decides a label
is common to all pixels of an image.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal import CalibrationMeter
from segcal.metrics.intervals import (
    Estimate,
    ImageArrays,
    ImageScores,
    combine,
    sorted_sums,
    t_margins,
    unit_sums,
)
from segcal.metrics.report import FineHistogram
from segcal.metrics.scores import Array
from segcal.metrics.triage import AcceptedPixels, MissRates, Target, accepted, choose_threshold

IGNORE = 255
PIXELS = 256
RESAMPLES = 100
SCORES = ("ece", "sce", "accuracy", "miou")
TITLE = "ECE / SCE / accuracy / mIoU"
Population = list[ImageArrays]  # of models on the same images


def draw_calibrated(
    n: int,
    generator: torch.Generator,
    *,
    pixels: int = PIXELS,
    correlated: bool = False,
    hard: bool = False,
    group: int = 1,
) -> tuple[Tensor, Tensor]:
    """(N, 4, P) logits of a calibrated network, and (N, P) labels that are drawn from them.

    If labels are correlated, half the variance of what decides them is common to an image; three
    quarters of that are common to a group of images. Some images may be harder than others.
    """

    def common() -> Tensor:
        of_groups = torch.randn(n // group, generator=generator).repeat_interleave(group)
        own = torch.randn(n, generator=generator)
        return (own if group == 1 else own / 2 + 0.75**0.5 * of_groups).view(n, 1, 1)

    logits = 2 * torch.randn(n, 4, pixels, generator=generator)
    if hard:
        logits = logits * (0.5 * common()).exp()
    decides = torch.randn(n, 1, pixels, generator=generator)
    if correlated:
        decides = 0.5**0.5 * (decides + common())
    return logits, (logits.softmax(1).cumsum(1) < torch.special.ndtr(decides)).sum(1).clamp(max=3)


def image_sums(logits: Tensor, labels: Tensor) -> ImageArrays:
    """The sums of each image."""
    meter = CalibrationMeter(logits.shape[1], ignore_index=IGNORE, per_image=True)
    meter.update(logits, labels)
    return sorted_sums(meter.image_sums(), meter.names)[1]


def joined(parts: Sequence[ImageArrays]) -> ImageArrays:
    """The images of all parts."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def two_models(
    factors: tuple[float, float],
    *,
    noise: float = 0.0,
    uneven: bool = False,
    correlated: bool = False,
    thousands: int = 20,
) -> Population:
    """Images seen by two models that multiply calibrated logits by factors.

    The second model adds noise to the logits. If images are uneven, the largest has a hundred
    times the pixels of the smallest.
    """
    generator = torch.Generator().manual_seed(1)
    parts: tuple[list[ImageArrays], list[ImageArrays]] = ([], [])
    for _ in range(thousands):
        pixels = 8 * PIXELS if uneven else PIXELS
        logits, labels = draw_calibrated(1000, generator, pixels=pixels, correlated=correlated)
        if uneven:
            sizes = PIXELS * torch.randn(1000, 1, generator=generator).exp()
            labels[torch.arange(pixels) >= sizes.clamp(pixels / 100)] = IGNORE
        parts[0].append(image_sums(factors[0] * logits, labels))
        logits = logits + noise * torch.randn(logits.shape, generator=generator)
        parts[1].append(image_sums(factors[1] * logits, labels))
    return [joined(part) for part in parts]


def rare_classes(num_classes: int, rarity: float) -> Population:
    """10,000 images that show up to 4 of many classes, class c as often as c^-rarity.

    The second model is the first with noise in its logits.
    """
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(1, num_classes, dtype=torch.float) ** -rarity
    parts: tuple[list[ImageArrays], list[ImageArrays]] = ([], [])
    for _ in range(20):
        shown = torch.multinomial(weights, 4 * 500, replacement=True, generator=generator) + 1
        shown = shown.view(500, 4)
        shown[torch.rand(500, 4, generator=generator) < 0.5] = 0
        labels = shown.gather(1, torch.randint(4, (500, PIXELS), generator=generator))
        hits = torch.nn.functional.one_hot(labels, num_classes).movedim(-1, 1)
        ease = 2.5 + 1.5 * torch.randn(500, num_classes, 1, generator=generator)
        logits = torch.randn(500, num_classes, PIXELS, generator=generator) + ease * hits
        parts[0].append(image_sums(logits, labels))
        logits += 0.5 * torch.randn(logits.shape, generator=generator)
        parts[1].append(image_sums(logits, labels))
    return [joined(part) for part in parts]


def saved(paths: Sequence[str]) -> Population:
    """The images of two saved states, or of one taken twice."""
    meters = [CalibrationMeter.load(path) for path in (*paths, *paths[:1])[:2]]
    return [sorted_sums(meter.image_sums(), meter.names)[1] for meter in meters]


def seeds_of_a_network(spread: float, *, seeds: int = 48, images: int = 1500) -> Population:
    """A model for each seed: its own factor of the logits, bias of classes, and noise.

    Factor and bias differ by `spread` between seeds; the noise does not depend on it.
    """
    generator = torch.Generator().manual_seed(1)
    logits, labels = draw_calibrated(images, generator, correlated=True)
    found = []
    for _ in range(seeds):
        factor = 1.2 * (spread * torch.randn((), generator=generator)).exp()
        bias = 2 * spread * torch.randn(4, 1, generator=generator)
        noise = 0.3 * torch.randn(logits.shape, generator=generator)
        found.append(image_sums(factor * (logits + bias + noise), labels))
    return found


def voc(folder: Path) -> Population:
    """A real network on VOC, and the same with softer logits.

    logits33 (N, 33, 33, 21) are enlarged to the size of the labels.
    """
    meters = [CalibrationMeter(21, ignore_index=IGNORE, per_image=True) for _ in range(2)]
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            for logits, labels in zip(arrays["logits33"], arrays["labels"], strict=True):
                small = torch.from_numpy(logits.astype(np.float32)).movedim(-1, 0)[None]
                large = torch.nn.functional.interpolate(
                    small, size=labels.shape, mode="bilinear", align_corners=True
                )
                for meter, factor in zip(meters, (1.0, 0.7), strict=True):
                    meter.update(factor * large, torch.from_numpy(labels.astype(np.int64))[None])
    return [sorted_sums(meter.image_sums(), meter.names)[1] for meter in meters]


def objects(spread: float) -> ImageArrays:
    """10,000 images of 11 classes, six of them in some images alone; sizes vary by e^spread.

    Large objects are segmented better than small ones. There are no confidences.
    """
    rng = np.random.default_rng(1)
    shape = (10_000, 11)
    share = np.array([25, 20, 20, 10, 8, 5, 4, 3, 2, 1.5, 1])
    shown = rng.random(shape) < np.array([1, 1, 1, 1, 1, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2])
    sizes = shown * share * np.exp(rng.normal(size=shape) * np.where(share > 5, 0.8, spread))
    truth = np.round(sizes / sizes.sum(1, keepdims=True) * 20_000)
    right = np.array([0.95, 0.9, 0.9, 0.85, 0.8, 0.7, 0.65, 0.6, 0.5, 0.45, 0.4])
    ease = (
        np.log(right / (1 - right)) + rng.normal(size=shape) + rng.normal(size=(len(truth), 1)) / 2
    )
    ease += 0.5 * np.log(np.maximum(truth, 1) / truth.mean(0)) * shown
    hits = np.round(truth / (1 + np.exp(-ease)))
    false = share * np.exp(rng.normal(size=shape))
    false *= (truth - hits).sum(1, keepdims=True) / false.sum(1, keepdims=True)
    return {"intersection": hits, "predicted": hits + np.round(false), "truth": truth}


def chosen(population: Population, rows: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The same models on some of the images."""
    return [{name: array[rows] for name, array in model.items()} for model in population]


def class_iou(sums: ImageArrays) -> Array:
    """(K,) IoU of each class; NaN where there is none."""
    hits, predicted, truth = (sums[n].sum(0) for n in ("intersection", "predicted", "truth"))
    union = predicted + truth - hits
    return np.divide(hits, union, out=np.full(len(union), np.nan), where=union > 0)


def true_scores(population: ImageArrays) -> dict[str, float | Array]:
    """The scores of a whole population; of mIoU, those of its classes."""
    model = ImageScores(population)
    return {
        **{name: model.ranges[name].value for name in SCORES[:3]},
        "miou": class_iou(population),
    }


def true_in(sample: ImageArrays, true: Mapping[str, float | Array]) -> dict[str, float]:
    """The true scores, mIoU over the classes that the sample has."""
    iou = np.asarray(true["miou"])[~np.isnan(class_iou(sample))]
    return {**{name: float(true[name]) for name in SCORES[:3]}, "miou": float(iou.mean())}


class Held:
    """Counts how often intervals held, by score."""

    def __init__(self) -> None:
        self.held: dict[str, list[bool]] = {name: [] for name in SCORES}
        self.data_sets = 0

    def add(self, found: Mapping[str, Estimate], true: Mapping[str, float]) -> None:
        """Count a data set; scores without an interval are left out."""
        self.data_sets += 1
        for name in SCORES:
            if name in found:
                end = 1e-9  # of rounding
                held = found[name].low - end <= true[name] <= found[name].high + end
                self.held[name].append(held)

    def percent(self, name: str) -> str:
        """How often the interval held; in brackets, in how many data sets there was one."""
        held = self.held[name]
        if not held:
            return "–"
        share = 100 * len(held) / self.data_sets
        return f"{100 * np.mean(held):.0f}" + (f" ({share:.0f})" if share < 100 else "")

    def missed(self, name: str) -> str:
        """How often the interval did not hold."""
        return f"{100 - 100 * np.mean(self.held[name]):.1f}"

    def __str__(self) -> str:
        return " / ".join(map(self.percent, SCORES))


def sources(options: argparse.Namespace) -> Iterator[tuple[str, Population]]:
    """Populations that two models have seen."""
    if options.population:
        yield "saved states", saved(options.population)
        return
    if options.voc:
        yield "VOC: a network, × 0.7", voc(options.voc)
    yield "× 1.15 and × 0.8751", two_models((1.15, 0.8751))
    yield "× 1.15 and × 0.8751, correlated", two_models((1.15, 0.8751), correlated=True)
    yield "× 1.15 and × 0.8751, uneven sizes", two_models((1.15, 0.8751), uneven=True)
    yield "× 1 and × 1.3, correlated", two_models((1.0, 1.3), correlated=True)
    yield "× 1 and × 1.1, other logits", two_models((1.0, 1.1), noise=0.5)
    yield "10 classes, some rare", rare_classes(10, 0.7)
    yield "30 classes, most rare", rare_classes(30, 1.0)


def print_scores(options: argparse.Namespace) -> None:
    """One model, and the difference of two."""
    images = options.images or [5, 20, 60, 200]
    single, different = [], []
    for title, population in sources(options):
        true = [true_scores(sums) for sums in population]
        rng = np.random.default_rng(0)
        cells: tuple[list[str], list[str]] = ([], [])
        for n in images:
            scores, differences = Held(), Held()
            for seed in range(options.data_sets):
                rows = rng.integers(len(population[0]["pixels"]), size=n)
                sample = chosen(population, rows)
                models = [ImageScores(sums) for sums in sample]
                own, other = (true_in(s, t) for s, t in zip(sample, true, strict=True))
                scores.add(combine(models[:1], [1.0], resamples=RESAMPLES, seed=seed), own)
                found = combine(models, [-1.0, 1.0], resamples=RESAMPLES, seed=seed)
                differences.add(found, {name: other[name] - own[name] for name in SCORES})
            cells[0].append(str(scores))
            cells[1].append(str(differences))
        ece = [100 * float(t["ece"]) for t in true]
        single.append([title, f"{ece[0]:.2f}", *cells[0]])
        different.append([title, f"{ece[1] - ece[0]:+.2f}", *cells[1]])
    columns = [f"{n} images" for n in images]
    print_table(f"Interval of the first model's score held: {TITLE}", ["ECE", *columns], single)
    print_table(f"Interval of the difference held: {TITLE}", ["of ECE", *columns], different)


SPREADS = (0.0, 0.025, 0.05, 0.1)  # deviations of 0, 0.5, 1 and 2 points of ECE


def print_seeds(options: argparse.Namespace) -> None:
    """Two equal models of several seeds, and the mean of one."""
    images, seeds = options.images or [20, 60, 200], (2, 3, 5)
    falsely, means = {}, {}  # rows by seeds and spread
    for spread in SPREADS:
        population = seeds_of_a_network(spread)
        every = [true_scores(sums) for sums in population]
        deviation = 100 * np.std([float(t["ece"]) for t in every], ddof=1)
        true = {name: float(np.mean([t[name] for t in every])) for name in SCORES}
        zero = dict.fromkeys(SCORES, 0.0)
        rng = np.random.default_rng(0)
        for s in seeds:
            apart = [[[k] for k in range(s)], [[s + k] for k in range(s)]]
            falsely[s, spread] = [f"{s} seeds", f"{deviation:.1f}"]
            means[s, spread] = [*falsely[s, spread]]
            for n in images:
                crossed, fixed, mean = Held(), Held(), Held()
                for seed in range(options.data_sets):
                    rows = rng.integers(len(population[0]["pixels"]), size=n)
                    drawn = [population[m] for m in rng.integers(len(population), size=2 * s)]
                    models = [ImageScores(sums) for sums in chosen(drawn, rows)]
                    factors = [-1 / s] * s + [1 / s] * s
                    of = functools.partial(combine, resamples=RESAMPLES, seed=seed)
                    crossed.add(of(models, factors, trainings=apart), zero)
                    fixed.add(of(models, factors), zero)
                    mean.add(of(models[:s], factors[s:], trainings=apart[:1]), true)
                cell = " / ".join(map(crossed.missed, SCORES))
                falsely[s, spread].append(f"{cell} ({fixed.missed('ece')})")
                means[s, spread].append(str(mean))
    columns = ["deviation of ECE", *(f"{n} images" for n in images)]
    order = sorted(falsely)
    title = f"Equal models called different: {TITLE} (ECE, images only)"
    print_table(title, columns, [falsely[key] for key in order])
    print_table(f"Interval of the mean held: {TITLE}", columns, [means[key] for key in order])


def print_groups(options: argparse.Namespace) -> None:
    """Ten images in a group, which have most in common."""
    rows = []
    for title, kind in (
        ("alike in the group", {"correlated": True, "hard": True, "group": 10}),
        ("independent", {"correlated": True, "hard": True}),
    ):
        generator = torch.Generator().manual_seed(1)
        parts = [image_sums(*sharp(*draw_calibrated(1000, generator, **kind))) for _ in range(20)]
        population = joined(parts)
        true = true_scores(population)
        rng = np.random.default_rng(0)
        cells = []
        for groups in options.images or [6, 20, 60]:
            grouped, single = Held(), Held()
            for seed in range(options.data_sets):
                drawn = rng.integers(len(population["pixels"]) // 10, size=groups)
                images = (10 * drawn[:, None] + np.arange(10)).ravel()
                (sample,) = chosen([population], images)
                sample["unit"] = np.repeat(np.arange(groups), 10)
                for held, sums in ((grouped, unit_sums(sample)), (single, sample)):
                    found = combine([ImageScores(sums)], [1.0], resamples=RESAMPLES, seed=seed)
                    held.add(found, true_in(sample, true))
            cells += [str(grouped), str(single)]
        rows.append([title, *cells])
    columns = [
        f"{n} groups{of}" for n in options.images or [6, 20, 60] for of in ("", ", as images")
    ]
    print_table(f"Interval held, ten images in a group: {TITLE}", columns, rows)


def print_miou(options: argparse.Namespace) -> None:
    """The interval of mIoU against others that are used."""
    populations = dict(zip(options.population, saved(options.population), strict=False))
    if not populations:
        populations["11 classes, sizes vary by 2.2"] = objects(0.8)
        populations["11 classes, sizes vary by 4.5"] = objects(1.5)
    if options.voc:
        whole = voc(options.voc)[0]
        for least in (20, 10):
            common = np.flatnonzero((whole["truth"] > 0).sum(0) >= least)
            kept = {n: whole[n][:, common] for n in ("intersection", "predicted", "truth")}
            populations[f"VOC, {len(common)} classes in {least} images or more"] = kept
    rows = []
    images = options.images or [20, 40, 60]
    for title, population in populations.items():
        cells: dict[str, list[str]] = {}
        whole_iou = class_iou(population)
        rng = np.random.default_rng(0)
        for n in images:
            found: dict[str, list[tuple[bool, float]]] = {}
            for _ in range(options.data_sets):
                (sums,) = chosen([population], rng.integers(len(population["truth"]), size=n))
                sums = {name: array.astype(float) for name, array in sums.items()}
                if ((sums["truth"] > 0).sum(0) < 2).any():
                    continue  # our interval is withheld
                true, value = whole_iou.mean(), class_iou(sums).mean()
                for method, (low, high) in miou_intervals(sums, value, rng).items():
                    found.setdefault(method, []).append((low <= true <= high, high - low))
            for method, held in found.items():
                percent, length = 100 * np.mean(held, 0)
                cells.setdefault(method, []).append(f"{percent:.0f}, {length:.1f}")
        rows += [[f"{title}: {method}", *texts] for method, texts in cells.items()]
    print_table("Interval of mIoU held, and its length", [f"{n} images" for n in images], rows)


def miou_intervals(
    sums: ImageArrays, value: float, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """The interval of segcal and others, limited to 0 and 1."""
    hits, union = sums["intersection"], sums["predicted"] + sums["truth"] - sums["intersection"]
    rest = union.sum(0) - union
    without = np.divide(hits.sum(0) - hits, rest, out=np.zeros_like(rest), where=rest > 0)
    jackknife = (value - without.mean(1))[None]
    residual = hits - hits.sum(0) / union.sum(0) * union
    linear = (residual / union.sum(0)).mean(1)[None]
    weights = rng.multinomial(len(hits), np.full(len(hits), 1 / len(hits)), size=300)
    with np.errstate(invalid="ignore"):  # a class that was not drawn
        drawn = np.nanmean(weights @ hits / (weights @ union), 1)
    both = np.array([-1, 1])
    found = {
        "jackknife t (segcal)": both * t_margins(jackknife, plain=True)[:, 0],
        "jackknife t, skewness": both * t_margins(jackknife)[:, 0],
        "linearised t": both * t_margins(linear, plain=True)[:, 0],
        "percentile bootstrap": np.quantile(drawn, [0.025, 0.975]) - value,
    }
    return {n: tuple(np.clip(value + margins, 0, 1)) for n, margins in found.items()}


IMAGES: dict[str, dict[str, bool]] = {
    "independent labels": {},
    "correlated labels": {"correlated": True},
    "some images hard": {"hard": True},
    "some images hard, correlated labels": {"hard": True, "correlated": True},
}
TARGETS = [Target("accuracy", value) for value in (0.8, 0.95, 0.99)] + [Target("coverage", 0.5)]
HOLDOUT = 60  # images
MISSES = (0.05, 0.1, 0.3)


def sharp(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The predictions of an over-confident network."""
    return 1.15 * logits, labels


def fine_histogram(logits: Tensor, labels: Tensor) -> FineHistogram:
    """The fine histogram of confidences."""
    meter = CalibrationMeter(4, ignore_index=IGNORE)
    meter.update(logits, labels)
    return meter.compute().fine


def operating_cell(whole: FineHistogram, images: int, data_sets: int, **kind: bool) -> str:
    """How often the intervals of accuracy and coverage held at each target."""
    cells = []
    for target in TARGETS:
        generator = torch.Generator().manual_seed(0)
        held = []
        for _ in range(data_sets):
            holdout = fine_histogram(*sharp(*draw_calibrated(HOLDOUT, generator, **kind)))
            counts = AcceptedPixels(choose_threshold(holdout, target), IGNORE)
            counts.update(*sharp(*draw_calibrated(images, generator, **kind)))
            found = counts.point(target, holdout, HOLDOUT).intervals
            if "accuracy" in found:
                coverage, accuracy = accepted(whole, counts.threshold)
                true = {"accuracy": accuracy, "coverage": coverage}
                held.append([found[n].low <= value <= found[n].high for n, value in true.items()])
        accuracy, coverage = 100 * np.mean(held, 0)
        cells.append(f"{accuracy:.0f}, {coverage:.0f}")
    return " / ".join(cells)


def miss_cell(whole: MissRates, images: int, data_sets: int, **kind: bool) -> str:
    """The mean true miss rate at the chosen λ, for each that is promised."""
    true = whole.means()
    cells = []
    for alpha in MISSES:
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(data_sets):
            rates = MissRates(IGNORE)
            rates.update(*sharp(*draw_calibrated(images, generator, **kind)))
            lam, _ = rates.choose(alpha)
            found.append(true[1 - lam])
        cells.append(f"{100 * np.mean(found):.1f}")
    return " / ".join(cells)


def print_triage(options: argparse.Namespace) -> None:
    """Operating points and class sets."""
    images = options.images or [20, 60, 200]
    points, sets = [], []
    for title, kind in IMAGES.items():
        generator = torch.Generator().manual_seed(1)
        meter, rates = CalibrationMeter(4, ignore_index=IGNORE), MissRates(IGNORE)
        for _ in range(20):
            logits, labels = sharp(*draw_calibrated(1000, generator, **kind))
            meter.update(logits, labels)
            rates.update(logits, labels)
        whole = meter.compute().fine
        points.append(
            [title, *(operating_cell(whole, n, options.data_sets, **kind) for n in images)]
        )
        sets.append([title, *(miss_cell(rates, n, options.data_sets, **kind) for n in images)])
    columns = [f"{n} images" for n in images]
    targets = " / ".join(map(str, TARGETS))
    print_table(f"Interval held, accuracy and coverage: {targets}", columns, points)
    promises = " / ".join(f"{100 * alpha:g}" for alpha in MISSES)
    print_table(f"Mean miss rate, promised {promises}", columns, sets)


def print_bands(options: argparse.Namespace) -> None:
    """The bands of the reliability diagram.

    A band is what the page draws: the interval of the gap of a bin as a part of the ECE, divided by
    the share of pixels that the bin has here.
    """
    images = options.images or [20, 60, 200]
    rows = []
    for title, kind in IMAGES.items():
        generator = torch.Generator().manual_seed(1)
        whole = CalibrationMeter(4, ignore_index=IGNORE)
        for _ in range(20):
            whole.update(*sharp(*draw_calibrated(1000, generator, **kind)))
        top = whole.compute().top
        cells = []
        for n in images:
            generator = torch.Generator().manual_seed(0)
            counts, held = [], []
            for _ in range(options.data_sets):
                meter = CalibrationMeter(4, ignore_index=IGNORE, per_image=True)
                meter.update(*sharp(*draw_calibrated(n, generator, **kind)))
                report = meter.compute(resamples=1)  # which these intervals do not need
                assert report.images is not None
                low, high = np.array([(gap.low, gap.high) for gap in report.images.bins]).T
                part = (top.confidence - top.accuracy) * report.top.count / report.protocol.pixels
                counts.append(report.top.count)
                held.append((low - 1e-6 <= part) & (part <= high + 1e-6))
            count, inside = np.stack(counts), np.stack(held)
            many = count >= 5 * n
            some = [many, (count > 0) & ~many]
            cells.append(" / ".join(f"{100 * inside[which].mean():.0f}" for which in some))
        rows.append([title, *cells])
    columns = [f"{n} images" for n in images]
    print_table("Band held: bins of five pixels per image or more / of fewer", columns, rows)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    lines = [["", *columns], ["---", *["---:"] * len(columns)], *rows]
    print(f"{title}\n", *(f"| {' | '.join(cells)} |" for cells in lines), "", sep="\n", flush=True)


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "scores": print_scores,
    "seeds": print_seeds,
    "groups": print_groups,
    "miou": print_miou,
    "triage": print_triage,
    "bands": print_bands,
}


def main() -> None:
    """Measure and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--images", type=int, nargs="+", help="of a data set (groups: groups)")
    parser.add_argument("--data-sets", type=int, default=300, help="for each cell of the tables")
    parser.add_argument("--voc", type=Path, help="folder of npz with logits33 and labels of VOC")
    parser.add_argument(
        "--population", nargs="+", default=[], metavar="STATE", help="one state.npz, or two"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tables:
        TABLES[name](options)


if __name__ == "__main__":
    main()
