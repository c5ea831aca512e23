"""Every score: its formula, its unit, its direction, and how it is printed, declared here only.

The functions are pure: numpy sums in, fractions out. A bin table is three arrays with the B bins on
the last axis: `count` of pixels, `hits` among them (pixels where the predicted event occurred) and
`confidence`, the sum of their probabilities. Leading axes (classes, resamples) are kept. The fine
histogram of the predicted class is (F,) arrays by rising confidence: `correct` and `wrong` pixels,
and the sum of the `confidence` of both. Scores that read it are approximate: the pixels of a fine
bin count as equal, and docs/conventions.md reports the error. A score of no pixels is NaN.

`ScoreTable` at the end lists the scores. To add one, add an entry there: `Report` gets it as an
attribute, and report.json, tables, page, log and docs/conventions.md follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.fft import dct, idct
from scipy.special import digamma

if TYPE_CHECKING:
    from segcal.metrics.report import Report

Array = NDArray[Any]


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
    return mean_of_known(ece(count, hits, confidence))


def mce(count: Array, hits: Array, confidence: Array) -> Array:
    """Maximum calibration error: the largest |acc_b - conf_b| over bins that hold pixels."""
    gap = np.abs(ratio(confidence - hits, count))
    worst = np.where(count > 0, gap, -np.inf).max(-1)
    return np.where(np.isinf(worst), np.nan, worst)


def rms_ce(count: Array, hits: Array, confidence: Array) -> Array:
    """Root mean square calibration error: sqrt(Σ_b n_b/n (acc_b - conf_b)²)."""
    squares = np.nan_to_num(ratio((confidence - hits) ** 2, count))
    return np.sqrt(ratio(squares.sum(-1), count.sum(-1)))


def overconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins with confidence above accuracy; the rest is `underconfidence`."""
    return ratio(np.maximum(confidence - hits, 0).sum(-1), count.sum(-1))


def underconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins with confidence below accuracy."""
    return ratio(np.maximum(hits - confidence, 0).sum(-1), count.sum(-1))


def class_iou(intersection: Array, predicted: Array, truth: Array) -> Array:
    """(..., K) intersection over union; NaN for a class neither predicted nor in the truth."""
    return ratio(intersection, predicted + truth - intersection)


def miou(intersection: Array, predicted: Array, truth: Array) -> Array:
    """Mean IoU over the classes that are predicted or in the truth; others do not count."""
    return mean_of_known(class_iou(intersection, predicted, truth))


def class_dice(intersection: Array, predicted: Array, truth: Array) -> Array:
    """(..., K) Dice, 2 intersection / (predicted + truth); NaN for a class in neither."""
    return ratio(2 * intersection, predicted + truth)


def mean_of_known(values: Array) -> Array:
    """The mean over the last axis of what is not NaN."""
    return ratio(np.nansum(values, -1), (~np.isnan(values)).sum(-1))


def adaptive_ece(correct: Array, wrong: Array, confidence: Array, num_bins: int) -> float:
    """ECE with `num_bins` bins of equal mass (Nguyen & O'Connor 2015), from the fine histogram.

    A quantile inside a fine bin splits its pixels, hits and confidence in proportion.
    """
    count = _cumulate(correct + wrong)
    total = count[-1]
    if total == 0:
        return float("nan")
    cuts = np.linspace(0, total, num_bins + 1)
    gap = np.interp(cuts, count, _cumulate(confidence - correct))
    return float(np.abs(np.diff(gap)).sum() / total)


def smece(correct: Array, wrong: Array, confidence: Array) -> float:
    """Smooth ECE (Błasiok & Nakkiran 2024), from the fine histogram.

    The residual confidence - correctness is smoothed along the confidence with a Gaussian of width
    σ that is reflected at 0 and 1; smECE_σ is the integral of its absolute value. σ is the least
    multiple of 2⁻¹⁰, from 2⁻⁹ on, with smECE_σ <= σ.

    Grids and steps are those of the authors' package relplot.
    """
    count = correct + wrong
    if not count.any():
        return float("nan")
    held = count > 0
    place = confidence[held] / count[held]
    masses = np.stack([(confidence - correct)[held], count[held].astype(np.float64)])
    low, high = 1, 1024
    while high - low > 1:
        middle = (low + high) // 2
        if _smoothed_error(place, masses, middle / 1024) <= middle / 1024:
            high = middle
        else:
            low = middle
    return _smoothed_error(place, masses, high / 1024)


def _smoothed_error(place: Array, masses: Array, width: float) -> float:
    """smECE_σ of (2, F) masses of residual and of pixels at (F,) places in [0, 1]."""
    points = max(2000, round(20 / width)) // 2 + 1
    cell = np.minimum((place * (points - 1)).astype(np.int64), points - 2)
    part = place * (points - 1) - cell
    ends = np.concatenate([cell, cell + 1])
    shares = np.concatenate([1 - part, part])
    on_grid = np.stack([np.bincount(ends, shares * np.tile(mass, 2), points) for mass in masses])
    grid = np.linspace(0, 1, points)
    kernel = np.exp(-((grid / width) ** 2) / 2) * (grid <= 0.5)
    # Cosine transforms: what they convolve is reflected at both ends.
    smooth = idct(dct(on_grid, type=1) * dct(kernel, type=1), type=1)
    mesh = np.linspace(0, 1, max(200, round(10 / width)))
    residual, density = (np.interp(mesh, grid, row) for row in smooth)
    return float(np.abs(residual).sum() / density.sum())


def ks(correct: Array, wrong: Array, confidence: Array) -> float:
    """Kolmogorov-Smirnov calibration error (Gupta et al. 2021), from the fine histogram.

    The largest |Σ (confidence - correctness)| / n over the pixels up to any confidence.
    """
    return float(ratio(np.abs(_cumulate(confidence - correct)).max(), (correct + wrong).sum()))


def auroc(correct: Array, wrong: Array) -> float:
    """Area under the ROC curve of confidence as a detector of errors, from the fine histogram.

    The probability that a correct pixel has higher confidence than a wrong one; ties count one
    half. NaN without correct or wrong pixels.
    """
    pairs = float(correct.sum()) * float(wrong.sum())
    below = _cumulate(wrong)[:-1] + wrong / 2
    return float((correct * below).sum() / pairs) if pairs else float("nan")


def average_precision(positive: Array, negative: Array) -> float:
    """Area under the precision-recall curve: Σ (recall_b − recall_(b−1)) precision_b.

    Takes (F,) counts whose first bins are found first.
    """
    found = np.cumsum(positive, dtype=np.float64)
    precision = ratio(found, found + np.cumsum(negative, dtype=np.float64))
    return float(ratio(np.nansum(positive * precision), positive.sum()))


def fpr_at_tpr(correct: Array, wrong: Array, rate: float) -> float:
    """The share of wrong pixels accepted where a share `rate` of the right ones is."""
    accepted = np.cumsum(correct[::-1], dtype=np.float64)
    if not accepted[-1]:
        return float("nan")
    last = int(np.flatnonzero(accepted >= rate * accepted[-1])[0])
    return float(ratio(wrong[::-1][: last + 1].sum(), wrong.sum()))


def prr(correct: Array, wrong: Array) -> float:
    """Prediction rejection ratio (Malinin & Gales 2021): (R − A) / (R − O), from `aurc`.

    A is the AURC, R that of a random order, and O that of an order with all wrong pixels last.
    """
    right, errors = int(correct.sum()), int(wrong.sum())
    best = aurc(np.array([0, right]), np.array([errors, 0]))
    rest = float(ratio(errors, right + errors)) - best
    return 1 - float(ratio(aurc(correct, wrong) - best, rest))


def aurc(correct: Array, wrong: Array) -> float:
    """Area under the risk-coverage curve (Geifman & El-Yaniv 2017), from the fine histogram.

    The mean over m = 1..n of the error rate among the m most confident pixels; the expected value,
    as pixels of a fine bin are in random order.
    """
    count, errors = cumulative_errors(correct, wrong)
    if len(count) == 1:
        return float("nan")
    # Within a bin of error rate r the expected risk at m is r + (errors - before r) / m, and the
    # sum of 1/m over m = before+1 .. before+count is a difference of digammas.
    rate = np.diff(errors) / np.diff(count)
    harmonic = np.diff(digamma(count + 1))
    rest = (errors - np.append(rate, 0) * count)[:-1]
    return float((np.diff(errors) + rest * harmonic).sum() / count[-1])


def augrc(correct: Array, wrong: Array) -> float:
    """Area under the generalised risk-coverage curve (Traub et al. 2024), from the fine histogram.

    The mean over m = 1..n of the share of all pixels that are wrong and among the m most confident.
    """
    count, errors = cumulative_errors(correct, wrong)
    size, new = np.diff(count), np.diff(errors)
    return float(ratio((size * errors[:-1] + new * (size + 1) / 2).sum(), count[-1] ** 2))


def risk_at_coverage(correct: Array, wrong: Array, coverage: float) -> float:
    """The error rate among the most confident pixels, a share `coverage` in (0, 1] of all."""
    count, errors = cumulative_errors(correct, wrong)
    accepted = coverage * count[-1]
    return float(ratio(np.interp(accepted, count, errors), accepted))


def coverage_at_risk(correct: Array, wrong: Array, risk: float) -> float:
    """The largest share of pixels, most confident first, with an error rate of at most `risk`."""
    count, errors = cumulative_errors(correct, wrong)
    if len(count) == 1:
        return float("nan")
    excess = errors - risk * count
    last = int(np.flatnonzero(excess <= 0)[-1])
    if last == len(count) - 1:
        return 1.0
    # The excess is linear within a bin, so it passes 0 once in the bin after the last good edge.
    reached = np.interp(0, excess[last : last + 2], count[last : last + 2])
    return float(reached / count[-1])


def cumulative_errors(correct: Array, wrong: Array) -> tuple[Array, Array]:
    """(G + 1,) most confident pixels down to each filled fine bin, and the wrong ones of them."""
    count = (correct + wrong)[::-1]
    return _cumulate(count[count > 0]), _cumulate(wrong[::-1][count > 0])


def _mean(total: ArrayLike, count: Array) -> float:
    return float(ratio(np.sum(total), count.sum()))


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
    "points": Unit(100.0, " points"),  # a difference of two values in %
    "nats": Unit(1.0, ""),
    "0-2": Unit(1.0, ""),  # a range, for a score that is not a fraction
}


@contextmanager
def in_percent() -> Iterator[None]:
    """Inside, scores whose unit is 1e-3 are printed in %, with a digit more."""
    changed = [score for score in SCORES.values() if score.unit == "1e-3"]
    for score in changed:
        vars(score).update(unit="%", digits=score.digits + 1)
    try:
        yield
    finally:
        for score in changed:
            vars(score).update(unit="1e-3", digits=score.digits - 1)


def number(value: float, digits: int) -> str:
    """A number as tables print it; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def signed(value: float, digits: int) -> str:
    """A difference as tables print it, with its sign; 0 has none, NaN is a dash."""
    text = number(abs(value), digits)
    if math.isnan(value) or not float(text):
        return text
    return ("-" if value < 0 else "+") + text


@dataclass(frozen=True)
class Score:
    """One score of a report: how it is computed and how it is printed.

    In `ScoreTable` it is a descriptor: `report.ece` computes the score of that report, a fraction.
    """

    label: str  # what tables and texts call it
    unit: str  # a key of `UNITS`; values are printed in it and headings name it
    of: Callable[[Report], Any]  # the score of a report: a number, or (K,) one for each class
    definition: str  # one line for docs/conventions.md
    better: Literal["lower", "higher", "neither"] = "lower"  # which values are better
    digits: int = 2  # after the decimal point, in tables and in the log
    brief_digits: int | None = None  # the same in sentences and diagrams, if fewer
    signed: bool = False  # whether it is a difference, printed with its sign
    # "pixels" for one number of all pixels, "classes" for (K,) numbers, "images" for a number that
    # exists only where the sums of each image were kept, "calibrator" for one that exists only
    # after a calibrator
    scope: Literal["pixels", "classes", "images", "calibrator"] = "pixels"
    # Whether it is left out of lines about classification, where a label is one number
    dense: bool = False
    # Whether the first table has a column for it; the others are in a second one
    table: bool = False
    log: int = 0  # its place in the lines of the training log; 0 if it is not logged
    # Its name in `ScoreTable`, on `Report`, in report.json and in log.jsonl
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __get__(self, report: Report | None, owner: type) -> Any:
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

    def number(self, value: float, digits: int | None = None) -> str:
        """The value in the unit, without it: "7.23"; a dash for NaN."""
        digits = self.digits if digits is None else digits
        return (signed if self.signed else number)(value * self.scale, digits)

    def difference(self, value: float) -> str:
        """A difference of two values in the unit, without it: "-0.81"."""
        return signed(value * self.scale, self.digits)

    def text(self, value: float, digits: int | None = None) -> str:
        """The value with its unit, as exact as in tables: "7.23 %"."""
        return self.number(value, digits) + ("" if math.isnan(value) else UNITS[self.unit].suffix)

    def brief(self, value: float) -> str:
        """The value with its unit, as exact as a sentence or a diagram needs."""
        return self.text(value, self.brief_digits)


def _of_images(name: str) -> Callable[[Report], float]:
    return lambda r: math.nan if r.images is None else getattr(r.images, name)


def _risk_at(percent: int) -> Score:
    return Score(
        f"risk at {percent} % coverage",
        "%",
        lambda report: risk_at_coverage(report.fine.correct, report.fine.wrong, percent / 100),
        f"error rate of the {percent} % most confident pixels; from the fine histogram",
    )


def _coverage_at(percent: int) -> Score:
    return Score(
        f"coverage at {percent} % risk",
        "%",
        lambda report: coverage_at_risk(report.fine.correct, report.fine.wrong, percent / 100),
        f"the largest share of pixels, most confident first, with an error rate of {percent} % at "
        "most",
        better="higher",
    )


class ScoreTable:
    """The scores, in the order of tables. `Report` inherits them as attributes.

    Inside a lambda a name such as `ece` is the function of this module, not the entry.
    """

    # A score takes two to four lines, so that the table is read at once.
    # fmt: off
    accuracy = Score("accuracy", "%", lambda r: _mean(r.top.hits, r.top.count),
        "fraction of pixels whose predicted class is the label",
        better="higher", brief_digits=1, table=True, log=1)
    error = Score("test error", "%", lambda r: 1 - r.accuracy,
        "1 − `accuracy`", brief_digits=1)
    miou = Score("mIoU", "%", lambda r: float(miou(*r.overlap)),
        "mean of `class_iou` over the classes that occur in prediction or truth",
        better="higher", dense=True, table=True, log=2)
    dice = Score("Dice", "%", lambda r: float(mean_of_known(class_dice(*r.overlap))),
        "mean of `class_dice` over the classes that occur in prediction or truth",
        better="higher", dense=True, table=True)
    ece = Score("ECE", "%", lambda r: float(ece(*r.top.sums)),
        "Σ_b n_b/n · |accuracy_b − confidence_b| over bins of the largest probability",
        table=True, log=4)
    sce = Score("SCE", "1e-3", lambda r: float(sce(*r.classes.sums)),
        "mean of `class_ece` over all K classes, absent ones included", table=True, log=5)
    mce = Score("MCE", "%", lambda r: float(mce(*r.top.sums)),
        "the largest |accuracy_b − confidence_b| of a bin that is not empty", table=True)
    adaptive_ece = Score("adaptive ECE", "%",
        lambda r: adaptive_ece(*r.fine.sums, r.protocol.num_bins),
        "`ece` with B bins of equal mass; from the fine histogram", table=True)
    smece = Score("smECE", "%", lambda r: smece(*r.fine.sums),
        "the integral of |confidence − correctness| after smoothing by a reflected Gaussian of "
        "width σ = smECE; from the fine histogram", table=True)
    mask_changed = Score("changes the mask", "%",
        lambda r: float(ratio(math.nan if r.changed is None else r.changed, r.protocol.pixels)),
        "fraction of pixels whose predicted class a calibrator changes; NaN without a calibrator",
        scope="calibrator", table=True)
    rms_ce = Score("RMS-CE", "%", lambda r: float(rms_ce(*r.top.sums)),
        "root of Σ_b n_b/n · (accuracy_b − confidence_b)²")
    ks = Score("KS error", "%", lambda r: ks(*r.fine.sums),
        "the largest |Σ (confidence − correctness)| / n over pixels up to any confidence; from "
        "the fine histogram")
    overconfidence = Score("over-confidence", "%", lambda r: float(overconfidence(*r.top.sums)),
        "the part of `ece` from bins with confidence above accuracy")
    underconfidence = Score("under-confidence", "%", lambda r: float(underconfidence(*r.top.sums)),
        "the part of `ece` from bins with confidence below accuracy")
    mean_confidence = Score("mean confidence", "%",
        lambda r: _mean(r.top.confidence_sum, r.top.count),
        "mean probability of the predicted class", better="neither", brief_digits=1)
    bias = Score("confidence − accuracy", "points", lambda r: r.mean_confidence - r.accuracy,
        "`mean_confidence` − `accuracy`: above 0 if the network is over-confident overall",
        better="neither", brief_digits=1, signed=True)
    nll = Score("NLL", "nats", lambda r: _mean(r.nll_sum, r.top.count),
        "mean −log p_y", digits=4, table=True, log=3)
    brier = Score("Brier", "0-2", lambda r: _mean(r.brier_sum, r.top.count),
        "mean Σ_c (p_c − [y = c])²", digits=4, table=True)
    auroc = Score("error AUROC", "%", lambda r: auroc(r.fine.correct, r.fine.wrong),
        "probability that a correct prediction has higher confidence than a wrong one; from the "
        "fine histogram", better="higher", table=True)
    aupr_errors = Score("AUPR of errors", "%",
        lambda r: average_precision(r.fine.wrong, r.fine.correct),
        "average precision of finding wrong predictions by low confidence; from the fine "
        "histogram", better="higher")
    aupr_successes = Score("AUPR of successes", "%",
        lambda r: average_precision(r.fine.correct[::-1], r.fine.wrong[::-1]),
        "average precision of finding right predictions by confidence; from the fine histogram",
        better="higher")
    fpr_95 = Score("FPR at 95 % TPR", "%", lambda r: fpr_at_tpr(r.fine.correct, r.fine.wrong, 0.95),
        "share of the wrong predictions that are accepted where 95 % of the right ones are; from "
        "the fine histogram")
    prr = Score("PRR", "%", lambda r: prr(r.fine.correct, r.fine.wrong),
        "(R − A) / (R − O), where A is `aurc`, R that of a random order and O that of an order "
        "with all wrong predictions last", better="higher")
    aurc = Score("AURC", "1e-3", lambda r: aurc(r.fine.correct, r.fine.wrong),
        "mean error rate among the m most confident pixels, m = 1..n; from the fine histogram")
    augrc = Score("AUGRC", "1e-3", lambda r: augrc(r.fine.correct, r.fine.wrong),
        "mean over m = 1..n of the share of all pixels that are wrong and among the m most "
        "confident; from the fine histogram")
    risk_at_coverage_80 = _risk_at(80)
    risk_at_coverage_90 = _risk_at(90)
    risk_at_coverage_95 = _risk_at(95)
    coverage_at_risk_1 = _coverage_at(1)
    coverage_at_risk_5 = _coverage_at(5)
    image_ece = Score("image-averaged ECE", "%", _of_images("ece"),
        "mean over images of the ECE of each image; larger than `ece`, as few pixels make a noisy"
        " ECE", scope="images", table=True)
    ece_debiased = Score("debiased ECE", "%", _of_images("ece_debiased"),
        "`ece` with each gap of an image signed by the other images, so that noise adds nothing: "
        "on average 0 for a calibrated network, and at most the true ECE; may be negative",
        better="neither", scope="images")
    sce_debiased = Score("debiased SCE", "1e-3", _of_images("sce_debiased"),
        "`sce` with gaps signed in the same way", better="neither", scope="images")
    image_ace = Score("ACE by image and class", "%", _of_images("ace"),
        "mean over the pairs of an image and a class that it shows of their ACE: the mean over "
        "the bins of p_c that are not empty of |mean p_c − frequency of c|, all bins alike",
        scope="images")
    foreground_dice = Score("Dice without class 0", "%",
        lambda r: float(mean_of_known(class_dice(*r.overlap)[r.foreground :])),
        "`dice` without class 0, which is background in medical data; of sigmoid outputs with all "
        "classes", better="higher", dense=True)
    foreground_ace = Score("ACE without class 0", "%", _of_images("foreground_ace"),
        "`image_ace` without class 0, likewise", scope="images")
    class_ece = Score("class-j-ECE", "%", lambda r: ece(*r.classes.sums),
        "`ece` of p_c against [label = c], for each class c", scope="classes")
    class_ace = Score("ACE of the class by image", "%",
        lambda r: np.array(
            (r.images and r.images.class_ace) or [math.nan] * r.protocol.num_classes),
        "mean over the images that show the class of their ACE, as in `image_ace`; NaN where the "
        "sums of each image were not kept", scope="classes")
    class_bias = Score("bias", "points",
        lambda r: ratio((r.classes.confidence_sum - r.classes.hits).sum(1), r.classes.count.sum(1)),
        "mean p_c − frequency of the label c, for each class c",
        better="neither", signed=True, scope="classes")
    class_iou = Score("IoU", "%", lambda r: class_iou(*r.overlap),
        "intersection over union of each class; NaN where it is neither predicted nor in the "
        "truth", better="higher", scope="classes")
    class_dice = Score("Dice of the class", "%", lambda r: class_dice(*r.overlap),
        "2 · intersection / (predicted + truth) of each class; NaN where it is neither predicted "
        "nor in the truth", better="higher", scope="classes")
    # fmt: on


SCORES: dict[str, Score] = {
    name: entry for name, entry in vars(ScoreTable).items() if isinstance(entry, Score)
}
LOGGED = tuple(sorted((s for s in SCORES.values() if s.log), key=lambda s: s.log))
# What the predicted class and its probability do not tell.
NEED_ALL_CLASSES = (
    *("sce", "nll", "brier", "sce_debiased", "image_ace", "foreground_ace"),
    *("class_ece", "class_ace", "class_bias"),
)
