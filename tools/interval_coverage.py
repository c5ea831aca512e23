"""Measure how often intervals hold, and how often equal models are called different.

nice -n 10 python tools/interval_coverage.py                     # the tables of docs/conventions.md
nice -n 10 python tools/interval_coverage.py --images 2 3 5 10 --sources 0.8751
nice -n 10 python tools/interval_coverage.py --triage            # operating points and class sets
nice -n 10 python tools/interval_coverage.py --bands             # of the reliability diagram
python tools/interval_coverage.py --population A.npz B.npz       # images of your own evaluations

Many data sets are drawn from a source whose true scores are known from a large sample. An interval
holds if it contains the true score. Prints Markdown tables; all numbers are in %.

The sources are a network of 4 classes on images of 256 pixels that is calibrated if its logits are
multiplied by 1, and scenes of which each shows a few of many classes. Labels are independent, or
correlated: then half the variance of what decides a label is common to all pixels of an image.
`--population` draws images, with replacement, from states that `segcal eval --save-state` saved.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal import CalibrationMeter, Report
from segcal.metrics.intervals import Estimate, ImageArrays, ImageScores, combine, sorted_sums
from segcal.metrics.report import FineHistogram
from segcal.metrics.scores import SCORES
from segcal.metrics.triage import AcceptedPixels, MissRates, Target, accepted, choose_threshold

_IGNORE = 255
PIXELS = 256
ROUNDING = 1e-6
SHOWN = ("ece", "sce", "accuracy", "miou")
ModelPair = list[ImageArrays]  # of two models on the same images
Found = tuple[Estimate, float] | None
Draw = Callable[[int, torch.Generator], ModelPair]


class Trial(NamedTuple):
    """Interval and true value by score, or None without interval, of one data set."""

    first: dict[str, Found]
    second: dict[str, Found]
    difference: dict[str, Found]


def draw_calibrated(
    n: int,
    generator: torch.Generator,
    *,
    pixels: int = PIXELS,
    correlated: bool = False,
    hard: bool = False,
) -> tuple[Tensor, Tensor]:
    """(N, 4, P) logits of a calibrated network, and (N, P) labels that are drawn from them.

    Args:
        n: number of images.
        generator: of the random numbers.
        pixels: of each image.
        correlated: whether the labels of an image are correlated.
        hard: whether some images are harder than others.
    """
    logits = 2 * torch.randn(n, 4, pixels, generator=generator)
    if hard:
        logits = logits * (0.5 * torch.randn(n, 1, 1, generator=generator)).exp()
    shared = 0.5 if correlated else 0.0
    decides = torch.randn(n, 1, pixels, generator=generator) * (1 - shared) ** 0.5
    decides += torch.randn(n, 1, 1, generator=generator) * shared**0.5
    return logits, (logits.softmax(1).cumsum(1) < torch.special.ndtr(decides)).sum(1).clamp(max=3)


def network(
    factors: tuple[float, float],
    *,
    correlated: bool = False,
    shaken: float = 0.0,
    uneven: bool = False,
) -> Draw:
    """Two models that multiply the logits of a calibrated network by factors.

    Args:
        factors: by which the logits of the two models are too large.
        correlated: whether the labels of an image are correlated.
        shaken: noise added to the logits of the second model.
        uneven: whether images differ in size, the largest having a hundred times the pixels.
    """

    def draw(n: int, generator: torch.Generator) -> ModelPair:
        pixels = 8 * PIXELS if uneven else PIXELS
        logits, labels = draw_calibrated(n, generator, pixels=pixels, correlated=correlated)
        if uneven:
            sizes = PIXELS * torch.randn(n, 1, generator=generator).exp()
            labels[torch.arange(pixels) >= sizes.clamp(pixels / 100)] = _IGNORE
        noise = shaken * torch.randn(logits.shape, generator=generator)
        return [
            image_sums(factors[0] * logits, labels),
            image_sums(factors[1] * (logits + noise), labels),
        ]

    return draw


def rare_classes(num_classes: int, rarity: float) -> Draw:
    """Images that show a few of many classes, class c as often as c^-rarity; some are hard.

    The second model is the first with noise in its logits.
    """
    weights = torch.arange(1, num_classes, dtype=torch.float) ** -rarity

    def draw(n: int, generator: torch.Generator) -> ModelPair:
        shown = torch.multinomial(weights, 4 * n, replacement=True, generator=generator) + 1
        shown = shown.view(n, 4)
        shown[torch.rand(n, 4, generator=generator) < 0.5] = 0
        which = torch.randint(4, (n, PIXELS), generator=generator)
        labels = shown.gather(1, which)
        hits = torch.nn.functional.one_hot(labels, num_classes).movedim(-1, 1)
        ease = 2.5 + 1.5 * torch.randn(n, num_classes, 1, generator=generator)
        logits = torch.randn(n, num_classes, PIXELS, generator=generator) + ease * hits
        noise = 0.5 * torch.randn(logits.shape, generator=generator)
        return [image_sums(logits, labels), image_sums(logits + noise, labels)]

    return draw


def population(paths: Sequence[str]) -> tuple[Draw, ModelPair]:
    """Images drawn with replacement from two saved states of the same images, and all of them."""
    meters = [CalibrationMeter.load(path) for path in (*paths, paths[0])[:2]]
    whole = [sorted_sums(meter.image_sums(), meter.names)[1] for meter in meters]

    def draw(n: int, generator: torch.Generator) -> ModelPair:
        chosen = torch.randint(len(whole[0]["pixels"]), (n,), generator=generator).numpy()
        return [{name: sums[chosen] for name, sums in model.items()} for model in whole]

    return draw, whole


def image_sums(logits: Tensor, labels: Tensor) -> ImageArrays:
    """The sums of each image."""
    meter = CalibrationMeter(logits.shape[1], ignore_index=_IGNORE, per_image=True)
    meter.update(logits, labels)
    return sorted_sums(meter.image_sums(), meter.names)[1]


@functools.cache
def large_sample(draw: Draw, images: int = 40_000) -> ModelPair:
    """Many images of the source."""
    generator = torch.Generator().manual_seed(1)
    parts = [draw(1000, generator) for _ in range(images // 1000)]
    return [
        {name: np.concatenate([part[i][name] for part in parts]) for name in parts[0][i]}
        for i in (0, 1)
    ]


class Truth:
    """The true scores of two models.

    Args:
        whole: the sums of very many images.
        exact: whether these are all images there are; a large sample has a little noise instead.
    """

    def __init__(self, whole: ModelPair, *, exact: bool) -> None:
        models = [ImageScores(sums) for sums in whole]
        self._scores = [
            {name: r.value if exact else r.low for name, r in model.ranges.items()}
            for model in models
        ]
        self._iou = [_class_iou(sums) for sums in whole]

    def of(self, pair: ModelPair) -> list[dict[str, float]]:
        """The true scores of both models and their differences; mIoU over the pair's classes."""
        found = []
        for scores, iou, sums in zip(self._scores, self._iou, pair, strict=True):
            miou = float(np.mean(iou[~np.isnan(_class_iou(sums))]))
            found.append({**{name: scores[name] for name in SHOWN}, "miou": miou})
        return [*found, {name: found[1][name] - found[0][name] for name in SHOWN}]


def trials(draw: Draw, truth: Truth, images: int, data_sets: int) -> Iterator[Trial]:
    """What the intervals of many data sets say, and the truth."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(data_sets):
        pair = draw(images, generator)
        models = [ImageScores(sums) for sums in pair]
        choices = [([model], [1.0]) for model in models] + [(models, [-1.0, 1.0])]
        found = [combine(*choice, resamples=200, seed=seed) for choice in choices]
        yield Trial(
            *(
                {name: (f[name], t[name]) if name in f else None for name in SHOWN}
                for f, t in zip(found, truth.of(pair), strict=True)
            )
        )


def _class_iou(sums: ImageArrays) -> np.ndarray:
    hits, predicted, truth = (sums[n].sum(0) for n in ("intersection", "predicted", "truth"))
    union = predicted + truth - hits
    return np.divide(hits, union, out=np.full(len(union), np.nan), where=union > 0)


def held(found: Sequence[Found]) -> str:
    """In how many % of the data sets that gave an interval it held; in brackets, how many did."""
    given = [f for f in found if f is not None]
    if not given:
        return "–"
    percent = 100 * np.mean([e.low - ROUNDING <= t <= e.high + ROUNDING for e, t in given])
    share = "" if len(given) == len(found) else f" ({100 * len(given) / len(found):.0f})"
    return f"{percent:.0f}{share}"


def called(found: Sequence[Found], equal: bool) -> str:
    """In how many % of the data sets the models were called different, and how many falsely."""
    given = [f for f in found if f is not None]
    right = 100 * np.mean([not equal and (e.low > 0 if t > 0 else e.high < 0) for e, t in given])
    sure = 100 * np.mean([e.low > 0 or e.high < 0 for e, _ in given])
    return f"{sure - right:.1f}" if equal else f"{sure:.0f} ({sure - right:.1f})"


def single_cell(every: Sequence[Trial], model: int) -> str:
    """How often the intervals of a model's scores held."""
    return " / ".join(held([o[model][name] for o in every]) for name in SHOWN)


def difference_cell(every: Sequence[Trial]) -> str:
    """How often the intervals of the differences held."""
    return " / ".join(held([o.difference[name] for o in every]) for name in SHOWN)


def called_cell(every: Sequence[Trial], equal: bool) -> str:
    """How often the models were called different."""
    return " / ".join(called([o.difference[n] for o in every], equal) for n in ("ece", "sce"))


def true_ece(every: Sequence[Trial], part: int) -> str:
    """The true ECE of a model, or the true difference."""
    found = every[0][part]["ece"]
    assert found is not None
    ece = SCORES["ece"]
    return ece.difference(found[1]) if part == 2 else ece.number(found[1])


class Simulation(NamedTuple):
    """What draws data sets, what draws the sample for the truth, and whether errors are equal."""

    draw: Draw
    truth: Draw
    equal: bool = False


EQUAL, UNEQUAL = network((1.15, 0.8751)), network((1.3, 1.0))
OTHER = network((1.1, 1.0), shaken=0.5)
SOME_RARE, MOST_RARE = rare_classes(10, 0.7), rare_classes(30, 1.0)
SOURCES = {
    "× 1.15, × 0.8751": Simulation(EQUAL, EQUAL, equal=True),
    "× 1.15, × 0.8751, correlated": Simulation(
        network((1.15, 0.8751), correlated=True), EQUAL, equal=True
    ),
    "× 1.15, × 0.8751, uneven sizes": Simulation(
        network((1.15, 0.8751), uneven=True), EQUAL, equal=True
    ),
    "× 1.3, × 1": Simulation(UNEQUAL, UNEQUAL),
    "× 1.3, × 1, correlated": Simulation(network((1.3, 1.0), correlated=True), UNEQUAL),
    "× 1.1, other logits": Simulation(OTHER, OTHER),
    "10 classes, some rare": Simulation(SOME_RARE, SOME_RARE),
    "30 classes, most rare": Simulation(MOST_RARE, MOST_RARE),
}


TRIAGE = {  # images of a network whose logits are too large by 1.15
    "independent labels": {},
    "correlated labels": {"correlated": True},
    "some images hard": {"hard": True},
    "some images hard, correlated labels": {"hard": True, "correlated": True},
}
_TARGETS = [Target("accuracy", value) for value in (0.8, 0.95, 0.99)] + [Target("coverage", 0.5)]
_HOLDOUT = 60  # images
MISSES = (0.05, 0.1, 0.3)


def triage_images(n: int, generator: torch.Generator, **kind: bool) -> tuple[Tensor, Tensor]:
    """Logits and labels of an over-confident network."""
    logits, labels = draw_calibrated(n, generator, **kind)
    return 1.15 * logits, labels


def fine_histogram(logits: Tensor, labels: Tensor) -> FineHistogram:
    """The fine histogram of confidences."""
    meter = CalibrationMeter(logits.shape[1], ignore_index=_IGNORE)
    meter.update(logits, labels)
    return meter.compute().fine


def operating_cell(whole: FineHistogram, images: int, data_sets: int, **kind: bool) -> str:
    """How often the intervals of accuracy and coverage held at each target."""
    cells = []
    for target in _TARGETS:
        generator = torch.Generator().manual_seed(0)
        held = []
        for _ in range(data_sets):
            holdout = fine_histogram(*triage_images(_HOLDOUT, generator, **kind))
            counts = AcceptedPixels(choose_threshold(holdout, target), _IGNORE)
            counts.update(*triage_images(images, generator, **kind))
            found = counts.point(target, holdout, _HOLDOUT).intervals
            if "accuracy" in found:
                coverage, accuracy = accepted(whole, counts.threshold)
                truth = {"accuracy": accuracy, "coverage": coverage}
                held.append([found[n].low <= value <= found[n].high for n, value in truth.items()])
        accuracy, coverage = 100 * np.mean(held, 0)
        cells.append(f"{accuracy:.0f}, {coverage:.0f}")
    return " / ".join(cells)


def miss_cell(whole: MissRates, images: int, data_sets: int, **kind: bool) -> str:
    """The mean true miss rate at the chosen λ in %, for each that is promised."""
    true = whole.means()
    cells = []
    for alpha in MISSES:
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(data_sets):
            rates = MissRates(_IGNORE)
            rates.update(*triage_images(images, generator, **kind))
            lam, _ = rates.choose(alpha)
            found.append(true[1 - lam])
        cells.append(f"{100 * np.mean(found):.1f}")
    return " / ".join(cells)


def print_triage(images: Sequence[int], data_sets: int) -> None:
    """Measure operating points and class sets, and print."""
    points, sets = [], []
    for name, kind in TRIAGE.items():
        generator = torch.Generator().manual_seed(1)
        meter, rates = CalibrationMeter(4, ignore_index=_IGNORE), MissRates(_IGNORE)
        for _ in range(20):
            logits, labels = triage_images(1000, generator, **kind)
            meter.update(logits, labels)
            rates.update(logits, labels)
        whole = meter.compute().fine
        cells = [operating_cell(whole, n, data_sets, **kind) for n in images]
        points.append(_row([name, *cells]))
        sets.append(_row([name, *(miss_cell(rates, n, data_sets, **kind) for n in images)]))
    columns = [f"{n} images" for n in images]
    targets = " / ".join(map(str, _TARGETS))
    _print(f"Interval held, accuracy and coverage: {targets}", ["images", *columns], points)
    promises = " / ".join(f"{100 * alpha:g}" for alpha in MISSES)
    _print(f"Mean miss rate, promised {promises}", ["images", *columns], sets)


def bands_held(
    whole: Report, images: int, data_sets: int, **kind: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each data set, (B,) pixels by bin, and (B,) whether its band holds the true gap.

    A band is what the page draws: the interval of the gap of a bin as a part of the ECE, divided by
    the share of pixels that the bin has here.
    """
    true = whole.top.confidence - whole.top.accuracy
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(data_sets):
        meter = CalibrationMeter(4, ignore_index=_IGNORE, per_image=True)
        meter.update(*triage_images(images, generator, **kind))
        report = meter.compute(resamples=1)  # which these intervals do not need
        assert report.images is not None
        low, high = np.array([(gap.low, gap.high) for gap in report.images.bins]).T
        count = report.top.count
        part = true * count / report.protocol.pixels
        found.append((count, (low - ROUNDING <= part) & (part <= high + ROUNDING)))
    return found


def print_bands(images: Sequence[int], data_sets: int) -> None:
    """Measure the bands of the reliability diagram, and print."""
    rows = []
    for name, kind in TRIAGE.items():
        meter = CalibrationMeter(4, ignore_index=_IGNORE)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            meter.update(*triage_images(1000, generator, **kind))
        whole = meter.compute()
        cells = []
        for n in images:
            found = bands_held(whole, n, data_sets, **kind)
            count, held = np.stack([c for c, _ in found]), np.stack([h for _, h in found])
            many = count >= 5 * n  # five pixels per image
            rest = (count > 0) & ~many
            cells.append(" / ".join(f"{100 * held[some].mean():.0f}" for some in (many, rest)))
        rows.append(_row([name, *cells]))
    columns = [f"{n} images" for n in images]
    _print("Band held: bins of five pixels per image / of fewer", ["images", *columns], rows)


def main() -> None:
    """Measure and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, nargs="+", default=[20, 60, 200])
    parser.add_argument("--data-sets", type=int, default=300, help="for each cell of the tables")
    parser.add_argument("--sources", nargs="+", default=[""], help="parts of names of sources")
    parser.add_argument("--triage", action="store_true", help="operating points and class sets")
    parser.add_argument("--bands", action="store_true", help="of the reliability diagram")
    parser.add_argument("--population", nargs="+", metavar="STATE", help="one state, or two")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.triage:
        print_triage(options.images, options.data_sets)
        return
    if options.bands:
        print_bands(options.images, options.data_sets)
        return
    single, difference, different = [], [], []
    for name, (draw, whole, equal) in sources_of(options).items():
        cells = [list(trials(draw, whole, n, options.data_sets)) for n in options.images]
        for part, label in enumerate(("first", "second")):
            held_by = [single_cell(every, part) for every in cells]
            single.append(_row([f"{name}: {label}", true_ece(cells[0], part), *held_by]))
        true = "0" if equal else true_ece(cells[0], 2)
        difference.append(_row([name, true, *map(difference_cell, cells)]))
        different.append(_row([name, true, *(called_cell(every, equal) for every in cells)]))
    images = [f"{n} images" for n in options.images]
    what = " / ".join(("ECE", "SCE", "accuracy", "mIoU"))
    _print(f"Interval of a score held: {what}", ["model", "true ECE", *images], single)
    _print(f"Interval of a difference held: {what}", ["models", "true", *images], difference)
    _print("Called different: ECE / SCE (falsely)", ["models", "true", *images], different)


def sources_of(options: argparse.Namespace) -> dict[str, tuple[Draw, Truth, bool]]:
    """The sources that were asked for, with the truth about each."""
    if options.population:
        draw, whole = population(options.population)
        return {"population": (draw, Truth(whole, exact=True), False)}
    chosen = {n: s for n, s in SOURCES.items() if any(part in n for part in options.sources)}
    return {
        n: (s.draw, Truth(large_sample(s.truth), exact=False), s.equal) for n, s in chosen.items()
    }


def _print(title: str, headings: Sequence[str], rows: Sequence[str]) -> None:
    print(f"{title}\n\n{_row(headings)}\n|---|{'---:|' * (len(headings) - 1)}")
    print(*rows, sep="\n", end="\n\n")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
