"""`Report`: the sums of an evaluation, the scores computed from them, and the protocol."""

from __future__ import annotations

import html
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from segcal.files import atomic_write
from segcal.metrics import scores
from segcal.metrics.regions import classes_outside
from segcal.metrics.scores import LOGGED, SCORES, Array, ScoreTable

_FORMAT = "segcal-report"
FORMAT_VERSION = 1
MOST_WORST = 20  # images that `Report.worst_images` lists
FROC_RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # false objects per image


@dataclass(frozen=True)
class Protocol:
    """How a report was measured. Numbers of different protocols cannot be compared."""

    num_classes: int
    num_bins: int
    edge_rule: str  # "right": bins are (lo, hi]; "left": [lo, hi)
    ignore_index: int
    average: str  # "pixel" or "decision": every one has the same weight
    region: str  # "all", or the name of the part of each image that was counted
    images: int  # with at least one counted pixel
    pixels: int
    version: str  # of segcal
    multilabel: bool = False  # K sigmoid outputs; `pixels` are decisions: K per pixel
    raters: int = 1  # R; counts of pixels are means over the raters, so they may be fractions


class _Arrays:
    """A frozen dataclass whose arrays are read-only copies: counts are int64, all else float64.

    Counts that are means over raters may be fractions; they are float64 then.
    """

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type] # of the subclasses, which are dataclasses
            if item.type == "Array":
                given = np.asarray(getattr(self, item.name))
                whole = given.dtype.kind != "f" or not (given % 1).any()
                counts = whole and item.name not in ("edges", "confidence_sum")
                array = np.array(given, np.int64 if counts else np.float64)
                array.setflags(write=False)
                object.__setattr__(self, item.name, array)


@dataclass(frozen=True, eq=False)
class BinTable(_Arrays):
    """The (..., B) sums behind a reliability diagram."""

    edges: Array  # (B + 1,) from 0 to 1
    count: Array  # (..., B) pixels in each bin
    hits: Array  # (..., B) those of them for which the predicted event occurred
    confidence_sum: Array  # (..., B) sum of their probabilities

    @property
    def accuracy(self) -> Array:
        """(..., B) fraction of hits; NaN in empty bins."""
        return scores.ratio(self.hits, self.count)

    @property
    def confidence(self) -> Array:
        """(..., B) mean probability; NaN in empty bins."""
        return scores.ratio(self.confidence_sum, self.count)

    @property
    def sums(self) -> tuple[Array, Array, Array]:
        """(count, hits, confidence_sum), the arguments of the functions in `scores`."""
        return self.count, self.hits, self.confidence_sum

    def __getitem__(self, index: int) -> BinTable:
        """The (B,) table of one class."""
        return BinTable(self.edges, self.count[index], self.hits[index], self.confidence_sum[index])


@dataclass(frozen=True, eq=False)
class FineHistogram(_Arrays):
    """Fine histogram of top-label confidence, for correct and for wrong predictions.

    The bins (lo, hi] are of unequal width and become finer towards 1.
    """

    edges: Array  # (F + 1,) from 0 to 1
    correct: Array  # (F,) correctly predicted pixels
    wrong: Array  # (F,) wrongly predicted pixels
    confidence_sum: Array  # (F,) sum of the confidence of both

    @property
    def sums(self) -> tuple[Array, Array, Array]:
        """(correct, wrong, confidence_sum), the arguments of the functions in `scores`."""
        return self.correct, self.wrong, self.confidence_sum


@dataclass(frozen=True, eq=False)
class ClassHistogram(_Arrays):
    """Fine histogram of top-label confidence by predicted class; every 16 bins of it are one.

    For sigmoid outputs, predictions are the decisions that the class is present.
    """

    edges: Array  # (G + 1,) from 0 to 1
    correct: Array  # (K, G) correctly predicted pixels
    wrong: Array  # (K, G) wrongly predicted pixels

    @property
    def accepted(self) -> Array:
        """(K, G) pixels predicted as class c with a confidence above edges[g]."""
        return (self.correct + self.wrong)[..., ::-1].cumsum(-1)[..., ::-1]

    @property
    def right(self) -> Array:
        """(K, G) those of them that are predicted correctly."""
        return self.correct[..., ::-1].cumsum(-1)[..., ::-1]


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class ImageScore:
    """The ECE of one image."""

    name: str
    ece: float
    pixels: int


@dataclass(frozen=True)
class ImageTable:
    """Every image that has pixels, as columns of equal length, in the order of names."""

    names: tuple[str, ...]
    pixels: tuple[int, ...]  # counted in each
    correct: tuple[int, ...]  # those of them that are predicted right
    ece: tuple[float, ...]  # the ECE of each image, to six decimals
    bias: tuple[float, ...]  # mean confidence minus accuracy of each image, to six decimals


@dataclass(frozen=True)
class BinGap:
    """The gap of one bin, (sum of confidence − hits) / pixels of all bins: its part of the ECE."""

    low: float  # lower end of its 95 % interval over images; NaN if there is none
    high: float  # upper end
    # Names of the images with the largest gaps in the bin, and these gaps
    images: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics that need the sums of each image."""

    # The mean over images of the ECE of each image. It is larger than the ECE over all pixels,
    # because the ECE of few pixels is noisy
    ece: float
    ece_debiased: float  # the ECE over all pixels, estimated such that noise adds nothing to it
    sce_debiased: float  # the SCE, estimated likewise
    ace: float  # the mean ACE over the pairs of an image and a class that it shows
    foreground_ace: float  # the same without class 0; of sigmoid outputs with all classes
    # For each class, the mean ACE over the images that show it; NaN if none does
    class_ace: tuple[float, ...]
    # By score name, such as "ece" or "miou", over images or their groups
    intervals: Mapping[str, Interval]
    # By score name ("class_ece", "class_dice", "class_ace"), for each class; empty without
    # intervals, and NaN where a class is labelled in fewer than two images
    class_intervals: Mapping[str, tuple[Interval, ...]]
    withheld: Mapping[str, str]  # by score name, why there is no interval
    resamples: int  # how often images were drawn to resample the signs of the gaps
    seed: int
    bins: tuple[BinGap, ...] = ()  # the gap of each bin of the top-label table
    table: ImageTable | None = None  # every image, or the worst 10,000; None in regions
    groups: int | None = None  # number of groups, where these are the units of the intervals


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold that was chosen on a hold-out, and what it gives on test images."""

    target: str  # such as "accuracy=0.99"; see `segcal.metrics.triage.Target`
    # Accept a pixel if its confidence is above; NaN if none reaches the target on the hold-out
    threshold: float
    holdout_images: int  # images of the hold-out
    holdout_coverage: float  # share of the pixels of the hold-out that are accepted
    holdout_accuracy: float  # share of these that are right
    coverage: float  # share of the test pixels that are accepted
    accuracy: float  # share of these that are right
    # For "coverage" and "accuracy", over the test images; none for fewer than two
    intervals: Mapping[str, Interval]

    @property
    def risk(self) -> float:
        """Share of the accepted test pixels that are wrong."""
        return 1 - self.accuracy

    @property
    def verdict(self) -> str:
        """Whether the target is reached on images like the test images, by the interval."""
        kind, _, value = self.target.partition("=")
        if math.isnan(self.threshold):
            return "no threshold reaches it on the hold-out"
        interval = self.intervals.get("coverage" if kind == "coverage" else "accuracy")
        least = 1 - float(value) if kind == "risk" else float(value)
        if interval is None:
            return "too few images to tell"
        if interval.low >= least:
            return "reached"
        return "not reached" if interval.high < least else "within the interval"


@dataclass(frozen=True)
class ClassSets:
    """Class sets with a promised miss rate, and what they are on test images."""

    miss: float  # α, the miss rate that is promised on average over images
    lam: float  # λ; the set of a pixel is {c: p_c >= 1 - λ}
    holdout_images: int  # images that λ was chosen on
    holdout_miss: float  # their mean miss rate
    miss_rate: float  # the mean miss rate of the test images
    interval: Interval | None  # for the miss rate, over the test images; None for fewer than two
    set_size: float  # mean number of classes in the set of a test pixel
    empty: float  # share of the test pixels whose set is empty


@dataclass(frozen=True, eq=False)
class Detection(_Arrays):
    """How well one kind of uncertainty finds errors; see `segcal.metrics.uncertainty`."""

    name: str  # a key of `segcal.metrics.uncertainty.UNCERTAINTIES`
    correct: Array  # (F,) right pixels on the grid of the fine histogram, from uncertain to certain
    wrong: Array  # (F,) wrong pixels
    intervals: Mapping[str, Interval]  # by score name, over images

    @property
    def fine(self) -> Detection:
        """Itself: scores read the histogram of a report under this name."""
        return self


@dataclass(frozen=True)
class Raters:
    """How far R raters of the same images agree.

    A report is against all of them, who count 1/R each; `regions` has "rater 1" and so on.
    """

    # Share of the pixels with labels of two raters or more to which all of these give the same
    # label
    agreement: float
    # (R,) of each rater against the others: the share of equal labels among those that both give,
    # where all pairs of labels count the same
    accuracy: tuple[float, ...]
    ceiling: float  # the same of all raters together: the accuracy to expect of one more rater


@dataclass(frozen=True, eq=False)
class ObjectScores:
    """The scores of objects; see `segcal.metrics.objects`."""

    name: str  # all, or which class or size
    truth: int  # true objects
    found: int  # those of them that a predicted object matches
    top: BinTable  # (B,) table of the predicted objects by confidence; hits are the real ones
    brier: float  # mean (confidence − real)² over the predicted objects
    auroc: float  # probability that a real one has more confidence than a false one
    # For "precision", "recall", "brier", "ece" and "auroc", over images
    intervals: Mapping[str, Interval]

    @property
    def predicted(self) -> int:
        """Predicted objects."""
        return int(self.top.count.sum())

    @property
    def precision(self) -> float:
        """Share of the predicted objects that are real."""
        return float(scores.ratio(self.top.hits.sum(), self.predicted))

    @property
    def recall(self) -> float:
        """Share of the true objects that are found."""
        return float(scores.ratio(self.found, self.truth))

    @property
    def confidence(self) -> float:
        """Mean confidence of the predicted objects."""
        return float(scores.ratio(self.top.confidence_sum.sum(), self.predicted))

    @property
    def ece(self) -> float:
        """Expected calibration error of the confidence of objects."""
        return float(scores.ece(*self.top.sums))


@dataclass(frozen=True, eq=False)
class ObjectReport:
    """What is known of the objects in the images; see `segcal.metrics.objects`."""

    calibration: str  # the post-hoc method of the confidence of objects, or "none"
    rule: str  # what an object is and when it is real, as text
    images: int  # images, those without any object too
    whole: ObjectScores  # the scores of all objects
    parts: tuple[ObjectScores, ...]  # those by class and by size, in pixels
    # Fine histogram of the confidence of real (correct) and false (wrong) objects
    fine: FineHistogram
    # Thresholds of confidence that were chosen on a hold-out; their `coverage` is the recall, their
    # `accuracy` the precision
    points: tuple[OperatingPoint, ...] = ()

    @property
    def false_per_image(self) -> float:
        """False objects per image."""
        return float(scores.ratio(self.fine.wrong.sum(), self.images))

    def above(self, threshold: float) -> tuple[float, float]:
        """(precision, recall) of the objects above a threshold that is an edge of `fine`."""
        kept = self.fine.edges[:-1] >= threshold
        real, false = int(self.fine.correct[kept].sum()), int(self.fine.wrong[kept].sum())
        precision = float(scores.ratio(real, real + false))
        return precision, float(scores.ratio(real, self.whole.truth))

    def recall_at(self, false_per_image: float) -> float:
        """FROC: the largest recall with at most so many false objects per image on average."""
        false = self.fine.wrong[::-1].cumsum()
        real = self.fine.correct[::-1].cumsum()[false <= false_per_image * self.images]
        return float(scores.ratio(real[-1] if len(real) else 0, self.whole.truth))


@dataclass(frozen=True, eq=False)
class Report(_Arrays, ScoreTable):
    """The calibration and accuracy of one model on one data set.

    It holds sums, and every score of `scores.ScoreTable` is an attribute: a fraction computed from
    them.

    Attributes:
        protocol: how the numbers were measured.
        top: (B,) table of the predicted class: its probability, and how often it is the label.
        classes: (K, B) table of every class: its probability, and how often it is the label.
        fine: fine histogram of top-label confidence, for correct and for wrong predictions.
        class_fine: the same by predicted class.
        confusion: (K, K) pixels of label (row) and prediction (column); for `multilabel`
            (K, 2, 2), of each class by itself.
        nll_sum: sum over pixels of -log p_y.
        brier_sum: sum over pixels of |p - onehot(y)|².
        class_names: K names, or None.
        images: statistics over images, or None if the sums of each image were not kept.
        regions: reports of regions of the same images, by name.
        protocols: scores of the same predictions under other protocols, by the name of the protocol
            and of the score; see `segcal.metrics.protocols`.
        operating_points: thresholds of confidence that were chosen on a hold-out.
        class_sets: class sets whose miss rate was promised on a hold-out.
        detection: how well each kind of uncertainty finds errors, if that was counted.
        raters: how far several raters agree; None for one.
        objects: the scores of objects, if they were counted: as they are, and calibrated.
        changed: pixels whose predicted class a calibrator changed; None without one.
    """

    protocol: Protocol
    top: BinTable
    classes: BinTable
    fine: FineHistogram
    class_fine: ClassHistogram
    confusion: Array
    nll_sum: float
    brier_sum: float
    class_names: tuple[str, ...] | None = None
    images: ImageStatistics | None = None
    regions: Mapping[str, Report] = field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    operating_points: tuple[OperatingPoint, ...] = ()
    class_sets: tuple[ClassSets, ...] = ()
    detection: tuple[Detection, ...] = ()
    raters: Raters | None = None
    objects: tuple[ObjectReport, ...] = ()
    changed: float | None = None

    @property
    def scores(self) -> dict[str, float]:
        """Every score of all pixels by name, as fractions."""
        scopes = ("pixels",) if self.changed is None else ("pixels", "calibrator")
        return {name: getattr(self, name) for name, s in SCORES.items() if s.scope in scopes}

    @property
    def top_only(self) -> bool:
        """Whether only the top class and its confidence are known; other scores are NaN."""
        return self.protocol.pixels > 0 and not self.classes.count.any()

    @property
    def foreground(self) -> int:
        """The first class of the foreground: 1, or 0 of sigmoid outputs: none is background."""
        return 0 if self.protocol.multilabel else 1

    @property
    def overlap(self) -> tuple[Array, Array, Array]:
        """(K,) pixels of each class: correctly predicted, predicted, and in the truth."""
        if self.protocol.multilabel:
            present = self.confusion[:, 1]  # (K, 2)
            return present[:, 1], self.confusion[:, :, 1].sum(1), present.sum(1)
        predicted = self.confusion.sum(0)
        predicted[classes_outside(self.protocol.region, self.protocol.num_classes)] = 0
        return self.confusion.diagonal(), predicted, self.confusion.sum(1)

    @property
    def intervals(self) -> Mapping[str, Interval]:
        """Confidence intervals by score name; empty unless the sums of each image were kept."""
        return {} if self.images is None else self.images.intervals

    @property
    def worst_images(self) -> list[ImageScore]:
        """The images with the largest ECE, worst first; empty unless their sums were kept."""
        if self.images is None or self.images.table is None:
            return []
        table = self.images.table
        images = map(ImageScore, table.names, table.ece, table.pixels)
        return sorted(images, key=lambda image: -image.ece)[:MOST_WORST]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        scores = ", ".join(f"{s.label} {s.text(getattr(self, s.name))}" for s in LOGGED)
        return f"Report({self.protocol.images} images: {scores})"

    def _repr_html_(self) -> str:
        """The main scores and the protocol, as notebooks show a report."""
        p, rows = self.protocol, []
        of_images = "" if self.images is None else "images"
        known = [s for s in SCORES.values() if s.name in self.scores or s.scope == of_images]
        for score in (score for score in known if score.table):
            ends, interval = "", self.intervals.get(score.name)
            if interval is not None:
                ends = f"{score.number(interval.low)} to {score.number(interval.high)}"
            value, heading = score.number(getattr(self, score.name)), html.escape(score.heading)
            rows.append(f"<tr><th>{heading}</th><td>{value}</td><td>{ends}</td>")
        kind = "decisions" if p.multilabel else "pixels"
        about = (
            f"{p.pixels:,} {kind} of {p.images:,} images, {p.num_classes} classes, "
            f"{p.num_bins} bins, region {p.region}"
        )
        return (
            "<table><thead><tr><th>score</th><th>value</th><th>95 % interval</th></tr></thead>"
            f"<tbody>{'</tr>'.join(rows)}</tr></tbody></table><p>{html.escape(about)}</p>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings. NaN becomes None, as JSON has no NaN."""
        by_class = {
            name.removeprefix("class_"): getattr(self, name).tolist()
            for name, score in SCORES.items()
            if score.scope == "classes"
        }
        return {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            # For readers of the file; `from_dict` computes the scores again from the sums.
            "scores": to_plain(self.scores),
            "class_scores": to_plain(by_class),
            **{item.name: to_plain(getattr(self, item.name)) for item in fields(self)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`; a ValueError if `data` is something else."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"Expected a report with format {_FORMAT!r}, but got something else")
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"Expected format_version {FORMAT_VERSION}, but got {data.get('format_version')!r}"
            )
        try:
            report: Report = from_plain(cls, data)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"Expected a complete report, but got {error!r:.200}") from None
        report._check_shapes()
        return report

    def _check_shapes(self) -> None:
        """Raise a ValueError unless all tables have the sizes that the protocol states."""
        k, b, f = self.protocol.num_classes, self.protocol.num_bins, self.fine.correct.size
        table = self.class_fine
        expected: list[tuple[str, tuple[int, ...], Sequence[Array]]] = [
            ("edges", (b + 1,), [self.top.edges, self.classes.edges]),
            ("top", (b,), self.top.sums),
            ("classes", (k, b), self.classes.sums),
            ("confusion", (k, 2, 2) if self.protocol.multilabel else (k, k), [self.confusion]),
            ("fine", (f,), [*self.fine.sums, self.fine.edges[1:]]),
            ("class_fine", (k, table.edges.size - 1), [table.correct, table.wrong]),
        ]
        for found in self.detection:
            expected.append((f"detection of {found.name}", (f,), [found.correct, found.wrong]))
        for name, shape, arrays in expected:
            for array in arrays:
                if array.shape != shape:
                    raise ValueError(f"Expected {name} tables of {shape}, but got {array.shape}")
        rows: list[tuple[str, int, Any]] = [("class_names", k, self.class_names)]
        if self.images is not None:
            rows += [("class_ace", k, self.images.class_ace), ("bins", b, self.images.bins)]
        for name, length, row in rows:
            if row and len(row) != length:
                raise ValueError(f"Expected {length} {name}, but got {len(row)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, completely or not at all."""
        with atomic_write(path) as file:
            json.dump(self.to_dict(), file, allow_nan=False)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote; a ValueError names the file if it is none."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings, sequences and arrays as JSON has them; NaN and infinity are None."""
    if isinstance(value, Report):
        return value.to_dict()
    if is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(kind: Any, data: Any) -> Any:
    """The inverse of `to_plain` for data of a type; else a KeyError, TypeError or ValueError."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {f.name: from_plain(hints[f.name], data[f.name]) for f in fields(kind)}
        return cast(type, kind)(**values)
    if origin in (Union, types.UnionType):  # always `X | None` here
        return None if data is None else from_plain(parts[0], data)
    if origin in (np.ndarray, NDArray):  # the latter from numpy 2.5 on
        return np.array(data)
    if origin is tuple and parts[-1] is Ellipsis:
        return tuple(from_plain(parts[0], item) for item in data)
    if origin is tuple:
        return tuple(from_plain(part, item) for part, item in zip(parts, data, strict=True))
    if origin is not None:  # a mapping by text
        return {str(key): from_plain(parts[1], item) for key, item in data.items()}
    if kind is float:
        return math.nan if data is None else float(data)
    if type(data) is not kind:
        raise TypeError(f"{data!r:.60} where {kind.__name__} is expected")
    return data
