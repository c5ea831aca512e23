"""The place for scores: pure functions of a meter's sums, in numpy, fractions throughout.

A bin table is three arrays with the B bins on the last axis: `count` of pixels, `hits` among them
(pixels where the event the probability speaks of came true) and `confidence`, the sum of the
probability. Leading axes (classes, resamples) are kept. A score of no pixels is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma

Array = NDArray[Any]


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    """The quotient, NaN where the denominator is 0."""
    denominator = np.asarray(denominator, np.float64)
    return np.asarray(numerator) / np.where(denominator == 0, np.nan, denominator)


def ece(count: Array, hits: Array, confidence: Array) -> Array:
    """Expected calibration error: Σ_b n_b/n |acc_b - conf_b| = Σ_b |hits_b - confidence_b| / n.

    Guo et al. 2017, with the top-label table; with the class table, the classwise ECE of each
    class ("class-j-ECE").
    """
    return ratio(np.abs(confidence - hits).sum(-1), count.sum(-1))


def sce(count: Array, hits: Array, confidence: Array) -> Array:
    """Static calibration error (Nixon et al. 2019): the mean over all K classes of their ECE.

    Takes the (..., K, B) class table; classes that never occur count too.
    """
    return ece(count, hits, confidence).mean(-1)


def mce(count: Array, hits: Array, confidence: Array) -> Array:
    """Maximum calibration error: the largest |acc_b - conf_b| of a bin with any pixel."""
    gap = np.abs(ratio(confidence - hits, count))
    worst = np.where(count > 0, gap, -np.inf).max(-1)
    return np.where(np.isinf(worst), np.nan, worst)


def overconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins more confident than accurate; with `underconfidence` it is ECE."""
    return ratio(np.maximum(confidence - hits, 0).sum(-1), count.sum(-1))


def underconfidence(count: Array, hits: Array, confidence: Array) -> Array:
    """The part of ECE from bins less confident than accurate."""
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
    """Mean IoU over the classes that are predicted or in the truth; the others are left out."""
    iou = class_iou(intersection, predicted, truth)
    return ratio(np.nansum(iou, -1), (~np.isnan(iou)).sum(-1))


def adaptive_ece(correct: Array, wrong: Array, confidence: Array, num_bins: int) -> float:
    """ECE with `num_bins` bins of equal mass (Nguyen & O'Connor 2015), from the fine histogram.

    Approximate: pixels of one fine bin are taken as alike, so a quantile that falls inside a fine
    bin divides its pixels, hits and confidence in proportion. docs/conventions.md has the error.

    Args:
        correct: (F,) pixels predicted right in each fine bin of confidence, least first.
        wrong: (F,) pixels predicted wrong.
        confidence: (F,) sum of confidence of both.
        num_bins: bins of equal mass.
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

    The chance that a pixel predicted right has more confidence than one predicted wrong, ties
    counting half. Approximate: pixels of one fine bin are ties. NaN unless there are both kinds.

    Args:
        correct: (F,) pixels predicted right in each fine bin of confidence, least first.
        wrong: (F,) pixels predicted wrong.
    """
    pairs = float(correct.sum()) * float(wrong.sum())
    below = _cumulate(wrong)[:-1] + wrong / 2
    return float((correct * below).sum() / pairs) if pairs else float("nan")


def aurc(correct: Array, wrong: Array) -> float:
    """Area under the risk-coverage curve (Geifman & El-Yaniv 2017), from the fine histogram.

    The mean over m = 1..n of the error rate among the m most confident pixels. Approximate:
    pixels of one fine bin are ties, taken in random order (the expected value is returned).

    Args:
        correct: (F,) pixels predicted right in each fine bin of confidence, least first.
        wrong: (F,) pixels predicted wrong.
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
    """(F + 1,) running sums as float64, from 0."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
