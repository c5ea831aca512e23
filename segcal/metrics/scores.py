"""Every score: its formula, its unit, its direction, and how it is printed, declared here only.

The functions are pure: numpy sums in, fractions out. A bin table is three arrays with the B bins on
the last axis: `count` of pixels, `hits` among them (pixels where the predicted event occurred) and
`confidence`, the sum of their probabilities. Leading axes (classes, resamples) are kept. A score of
no pixels is NaN.

`ScoreTable` at the end lists the scores. To add one, add an entry there: `Report` gets it as an
attribute, and report.json, tables, page, log and docs/conventions.md follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma

if TYPE_CHECKING:
    from segcal.metrics.report import Report

Array = NDArray[Any]
Value = TypeVar("Value", float, Array)  # of a score: one number, or (K,) one a class


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    """`numerator / denominator`, NaN where the denominator is 0."""
    denominator = np.asarray(denominator, np.float64)
    return np.asarray(numerator) / np.where(denominator == 0, np.nan, denominator)


def ece(count: Array, hits: Array, confidence: Array) -> Array:
    """Expected calibration error: Σ_b n_b/n |acc_b - conf_b| = Σ_b |hits_b - confidence_b| / n.

    The top-label table gives the ECE of Guo et al. 2017, the class table that of each class
    ("class-j-ECE").
    """
    return ratio(np.abs(confidence - hits).sum(-1), count.sum(-1))


def sce(count: Array, hits: Array, confidence: Array) -> Array:
    """Static calibration error (Nixon et al. 2019): the mean over all K classes of their ECE.

    Takes the (..., K, B) class table. Classes that never occur count as well.
    """
    return ece(count, hits, confidence).mean(-1)


def mce(count: Array, hits: Array, confidence: Array) -> Array:
    """Maximum calibration error: the largest |acc_b - conf_b| over bins that hold pixels."""
    gap = np.abs(ratio(confidence - hits, count))
    worst = np.where(count > 0, gap, -np.inf).max(-1)
    return np.where(np.isinf(worst), np.nan, worst)


def overconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins with confidence above accuracy; the rest is `underconfidence`."""
    return ratio(np.maximum(confidence - hits, 0).sum(-1), count.sum(-1))


def underconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins with confidence below accuracy."""
    return ratio(np.maximum(hits - confidence, 0).sum(-1), count.sum(-1))


def accuracy(count: Array, hits: Array) -> Array:
    """Σ hits / n of the top-label table."""
    return ratio(hits.sum(-1), count.sum(-1))


def mean_confidence(count: Array, confidence: Array) -> Array:
    """Σ confidence / n of the top-label table."""
    return ratio(confidence.sum(-1), count.sum(-1))


def class_iou(intersection: Array, predicted: Array, truth: Array) -> Array:
    """(..., K) intersection over union; NaN for a class neither predicted nor in the truth."""
    return ratio(intersection, predicted + truth - intersection)


def miou(intersection: Array, predicted: Array, truth: Array) -> Array:
    """Mean IoU over the classes that are predicted or in the truth; others do not count."""
    iou = class_iou(intersection, predicted, truth)
    return ratio(np.nansum(iou, -1), (~np.isnan(iou)).sum(-1))


def adaptive_ece(correct: Array, wrong: Array, confidence: Array, num_bins: int) -> float:
    """ECE with `num_bins` bins of equal mass (Nguyen & O'Connor 2015), from the fine histogram.

    Approximate: the pixels of a fine bin count as equal, so a quantile inside a fine bin splits its
    pixels, hits and confidence in proportion. docs/conventions.md reports the error.

    Args:
        correct: (F,) correctly predicted pixels of each fine bin, by rising confidence.
        wrong: (F,) wrongly predicted pixels.
        confidence: (F,) sum of the confidence of both.
        num_bins: number of bins of equal mass.
    """
    count = _cumulate(correct + wrong)
    total = count[-1]
    if total == 0:
        return float("nan")
    cuts = np.linspace(0, total, num_bins + 1)
    gap = np.interp(cuts, count, _cumulate(confidence - correct))
    return float(np.abs(np.diff(gap)).sum() / total)


def auroc(correct: Array, wrong: Array) -> float:
    """Area under the ROC curve of confidence as a detector of errors, from the fine histogram.

    The probability that a correct pixel has higher confidence than a wrong one; ties count one
    half. Approximate: the pixels of a fine bin are ties. NaN without correct or wrong pixels.

    Args:
        correct: (F,) correctly predicted pixels of each fine bin, by rising confidence.
        wrong: (F,) wrongly predicted pixels.
    """
    pairs = float(correct.sum()) * float(wrong.sum())
    below = _cumulate(wrong)[:-1] + wrong / 2
    return float((correct * below).sum() / pairs) if pairs else float("nan")


def aurc(correct: Array, wrong: Array) -> float:
    """Area under the risk-coverage curve (Geifman & El-Yaniv 2017), from the fine histogram.

    The mean over m = 1..n of the error rate among the m most confident pixels. Approximate: the
    pixels of a fine bin are ties in random order, and the expected value is returned.

    Args:
        correct: (F,) correctly predicted pixels of each fine bin, by rising confidence.
        wrong: (F,) wrongly predicted pixels.
    """
    wrong, count = wrong[::-1], (correct + wrong)[::-1]  # most confident first
    wrong, count = wrong[count > 0].astype(np.float64), count[count > 0].astype(np.float64)
    if not len(count):
        return float("nan")
    before, errors = _cumulate(count)[:-1], _cumulate(wrong)[:-1]
    # Within a bin of error rate r the expected risk at m is r + (errors - before r) / m, and the
    # sum of 1/m over m = before+1 .. before+count is a difference of digammas.
    rate = wrong / count
    harmonic = digamma(before + count + 1) - digamma(before + 1)
    return float((wrong + (errors - before * rate) * harmonic).sum() / count.sum())


def _cumulate(values: Array) -> Array:
    """(F + 1,) cumulative sums as float64, starting at 0."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


class Unit(NamedTuple):
    """How a fraction is printed: multiplied by `scale`, with `suffix` after it in a sentence."""

    scale: float
    suffix: str


UNITS = {
    "%": Unit(100.0, " %"),
    "1e-3": Unit(1000.0, "e-3"),
    "nats": Unit(1.0, ""),
    "0-2": Unit(1.0, ""),  # a range, for a score that is not a fraction
}


def number(value: float, digits: int) -> str:
    """A number as tables print it; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Score(Generic[Value]):
    """One score of a report: how it is computed and how it is printed.

    In `ScoreTable` it is a descriptor: `report.ece` computes the score of that report, a fraction.

    Attributes:
        label: what tables and texts call it.
        unit: a key of `UNITS`; values are printed in it and headings name it.
        of: the score of a report.
        definition: one line for docs/conventions.md.
        better: which values are better.
        digits: after the decimal point, in tables and in the log.
        brief_digits: the same in sentences and diagrams, if fewer.
        scope: "pixels" for one number of all pixels, "classes" for (K,) numbers, "images" for a
            number that exists only where the sums of each image were kept.
        dense: whether it is left out of lines about classification, where a label is one number.
        table: whether tables and the page have a column for it.
        log: its place in the lines of the training log; 0 if it is not logged.
        name: its name in `ScoreTable`, on `Report`, in report.json and in log.jsonl.
    """

    label: str
    unit: str
    of: Callable[[Report], Value]
    definition: str
    better: Literal["lower", "higher", "neither"] = "lower"
    digits: int = 2
    brief_digits: int | None = None
    scope: Literal["pixels", "classes", "images"] = "pixels"
    dense: bool = False
    table: bool = False
    log: int = 0
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @overload
    def __get__(self, report: None, owner: type) -> Score[Value]: ...

    @overload
    def __get__(self, report: Report, owner: type) -> Value: ...

    def __get__(self, report: Report | None, owner: type) -> Score[Value] | Value:
        return self if report is None else self.of(report)

    @property
    def higher(self) -> bool:
        """Whether higher values are better."""
        return self.better == "higher"

    @property
    def scale(self) -> float:
        """The factor from a fraction to the unit."""
        return UNITS[self.unit].scale

    @property
    def heading(self) -> str:
        """Label and unit: "ECE (%)"."""
        return f"{self.label} ({self.unit})"

    @property
    def title(self) -> str:
        """The label as the start of a line: "Accuracy", but "mIoU"."""
        is_word = self.label[:2].islower()
        return self.label[0].upper() + self.label[1:] if is_word else self.label

    def number(self, value: float) -> str:
        """The value in the unit, without it: "7.23"; a dash for NaN."""
        return number(value * self.scale, self.digits)

    def text(self, value: float) -> str:
        """The value with its unit, as exact as in tables: "7.23 %"."""
        return self._text(value, self.digits)

    def brief(self, value: float) -> str:
        """The value with its unit, as exact as a sentence or a diagram needs."""
        return self._text(value, self.digits if self.brief_digits is None else self.brief_digits)

    def _text(self, value: float, digits: int) -> str:
        return f"{value * self.scale:.{digits}f}{UNITS[self.unit].suffix}"


class ScoreTable:
    """The scores, in the order of tables. `Report` inherits them as attributes.

    Inside a lambda a name such as `ece` is the function of this module, not the entry.
    """

    accuracy = Score(
        "accuracy",
        "%",
        lambda report: float(accuracy(report.top.count, report.top.hits)),
        "fraction of pixels whose predicted class is the label",
        better="higher",
        brief_digits=1,
        table=True,
        log=1,
    )
    error = Score(
        "test error",
        "%",
        lambda report: 1 - report.accuracy,
        "1 − `accuracy`",
        brief_digits=1,
    )
    miou = Score(
        "mIoU",
        "%",
        lambda report: float(miou(*report.overlap)),
        "mean of `class_iou` over the classes that occur in prediction or truth",
        better="higher",
        dense=True,
        table=True,
        log=2,
    )
    ece = Score(
        "ECE",
        "%",
        lambda report: float(ece(*report.top.sums)),
        "Σ_b n_b/n · |accuracy_b − confidence_b| over bins of the largest probability",
        table=True,
        log=4,
    )
    sce = Score(
        "SCE",
        "1e-3",
        lambda report: float(sce(*report.classes.sums)),
        "mean of `class_ece` over all K classes, absent ones included",
        table=True,
        log=5,
    )
    mce = Score(
        "MCE",
        "%",
        lambda report: float(mce(*report.top.sums)),
        "the largest |accuracy_b − confidence_b| of a bin that is not empty",
        table=True,
    )
    adaptive_ece = Score(
        "adaptive ECE",
        "%",
        lambda report: adaptive_ece(
            report.fine.correct,
            report.fine.wrong,
            report.fine.confidence_sum,
            report.protocol.num_bins,
        ),
        "`ece` with B bins of equal mass; from the fine histogram",
        table=True,
    )
    overconfidence = Score(
        "over-confidence",
        "%",
        lambda report: float(overconfidence(*report.top.sums)),
        "the part of `ece` from bins with confidence above accuracy",
    )
    underconfidence = Score(
        "under-confidence",
        "%",
        lambda report: float(underconfidence(*report.top.sums)),
        "the part of `ece` from bins with confidence below accuracy",
    )
    mean_confidence = Score(
        "mean confidence",
        "%",
        lambda report: float(mean_confidence(report.top.count, report.top.confidence_sum)),
        "mean probability of the predicted class",
        better="neither",
        brief_digits=1,
    )
    nll = Score(
        "NLL",
        "nats",
        lambda report: float(ratio(report.nll_sum, report.protocol.pixels)),
        "mean −log p_y",
        digits=4,
        table=True,
        log=3,
    )
    brier = Score(
        "Brier",
        "0-2",
        lambda report: float(ratio(report.brier_sum, report.protocol.pixels)),
        "mean Σ_c (p_c − [y = c])²",
        digits=4,
        table=True,
    )
    auroc = Score(
        "error AUROC",
        "%",
        lambda report: auroc(report.fine.correct, report.fine.wrong),
        "probability that a correct prediction has higher confidence than a wrong one; "
        "from the fine histogram",
        better="higher",
        table=True,
    )
    aurc = Score(
        "AURC",
        "1e-3",
        lambda report: aurc(report.fine.correct, report.fine.wrong),
        "mean error rate among the m most confident pixels, m = 1..n; from the fine histogram",
    )
    image_ece = Score(
        "image-averaged ECE",
        "%",
        lambda report: math.nan if report.images is None else report.images.ece,
        "mean over images of the ECE of each image; larger than `ece`, as few pixels make a noisy "
        "ECE",
        scope="images",
        table=True,
    )
    class_ece = Score(
        "class-j-ECE",
        "%",
        lambda report: ece(*report.classes.sums),
        "`ece` of p_c against [label = c], for each class c",
        scope="classes",
    )
    class_iou = Score(
        "IoU",
        "%",
        lambda report: class_iou(*report.overlap),
        "intersection over union of each class; NaN where it is neither predicted nor in the truth",
        better="higher",
        scope="classes",
    )


SCORES: dict[str, Score] = {
    name: entry for name, entry in vars(ScoreTable).items() if isinstance(entry, Score)
}
LOGGED = tuple(sorted((s for s in SCORES.values() if s.log), key=lambda s: s.log))
