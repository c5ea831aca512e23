"""Uncertainty beside confidence, and how well each kind finds errors.

Five maps of uncertainty are compared, all declared in `UNCERTAINTIES`. Two of them say how much
the members of an ensemble differ. Each is counted in a histogram on the grid of the fine histogram
of confidence, for right and for wrong pixels, so memory does not grow with the pixels; the scores
of `SCORES` that read such a histogram say how well it finds errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.metrics.intervals import resampled_weights
from segcal.metrics.report import Detection, Interval
from segcal.metrics.scores import SCORES, Array
from segcal.metrics.sums import CLASS_STEP, FINE_BINS, fine_edges
from segcal.metrics.triage import ImageCounts, histograms
from segcal.pixels import flatten, multilabel_labels

LEVEL = 0.95  # of the intervals
DETECTION = ("auroc", "aupr_errors", "aupr_successes", "fpr_95", "aurc", "prr")  # among SCORES
_MOST_IMAGES = 64  # counted at a time
_STEP = CLASS_STEP  # so many bins of the grid are one where each image has a histogram
_COARSE = -(-FINE_BINS // _STEP)


@dataclass(frozen=True)
class Uncertainty:
    """One kind of uncertainty of a pixel."""

    label: str  # what tables call it
    definition: str  # its formula
    # (N, C, *S) probabilities to the (N, *S) uncertainty; None: the members tell it
    of: Callable[[Tensor], Tensor] | None
    most: Callable[[int], float]  # the largest value there can be with C classes


def entropy(probs: Tensor) -> Tensor:
    """(N, *S) entropy −Σ_c p_c log p_c of (N, C, *S) probabilities, in nats."""
    return torch.special.entr(probs).sum(1)


UNCERTAINTIES = {
    "confidence": Uncertainty(
        "1 − confidence", "1 − max_c p_c", lambda probs: 1 - probs.amax(1).double(), lambda _: 1.0
    ),
    "entropy": Uncertainty("entropy", "−Σ_c p_c log p_c", entropy, math.log),
    "margin": Uncertainty(
        "1 − margin",
        "1 − (largest p_c − second largest p_c)",
        lambda probs: 1 + probs.topk(2, dim=1).values.diff(dim=1).squeeze(1),
        lambda _: 1.0,
    ),
    "mutual_information": Uncertainty(
        "mutual information",
        "entropy of the mean of the members − mean of their entropies",
        None,
        math.log,
    ),
    "variance": Uncertainty(
        "variance of the members",
        "variance over the members of the probability of the class that their mean predicts",
        None,
        lambda _: 0.25,
    ),
}


class ErrorDetection(ImageCounts):
    """Histograms of each uncertainty, for right and for wrong pixels, of a stream of batches.

    Values are divided by the largest possible one, and counted on the grid of the fine histogram
    of confidence, whose steps are 1/1024 and become finer towards certainty.

    With `multilabel`, the decisions of C sigmoid outputs are counted, each a problem of two
    classes. With `per_image`, a coarser histogram of each image is kept for intervals: 6 kB.
    """

    width, dtype = 1 + len(UNCERTAINTIES) * _COARSE * 2, torch.int32

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = None,
        *,
        multilabel: bool = False,
        per_image: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = 2 if multilabel else num_classes
        self.ignore_index, self.multilabel = ignore_index, multilabel
        self.per_image = per_image
        # Right and wrong pixels.
        self._total = torch.zeros(len(UNCERTAINTIES), FINE_BINS, 2, dtype=torch.int64)

    def update(
        self,
        probs: Tensor,
        labels: Tensor,
        spread: Mapping[str, Tensor] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        """Count (N, C, *S) probabilities and (N, *S) labels; (N, C, *S) of sigmoid outputs.

        `spread` holds maps of the labels' shape for "mutual_information" and "variance". `groups`
        are N names of what the images belong to: the units of intervals, by default the images.
        """
        probs = probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
        if self.multilabel:
            labels = multilabel_labels(probs, labels)
            probs = torch.stack([1 - probs, probs], 1)  # (N, 2, C, *S)
        spread = spread or {}
        edges = fine_edges()[1:-1].to(probs.device)
        for first in range(0, len(probs), _MOST_IMAGES):
            some = slice(first, first + _MOST_IMAGES)
            pixels = flatten(probs[some], labels[some], self.ignore_index)
            n = len(pixels.target)
            wrong = pixels.dense.argmax(1) != pixels.target  # (N, L)
            counts = pixels.target.new_zeros(n, *self._total.shape)
            for at, (name, kind) in enumerate(UNCERTAINTIES.items()):
                if kind.of is not None:
                    found = kind.of(pixels.dense)
                elif name in spread:
                    found = spread[name][some].to(probs.device).reshape(wrong.shape)
                else:
                    continue
                certain = 1 - found.double() / kind.most(self.num_classes)
                cell = torch.bucketize(certain, edges) * 2 + wrong
                cell = cell.masked_fill(~pixels.valid, 2 * FINE_BINS)
                counts[:, at] = histograms(cell, 2 * FINE_BINS + 1)[:, :-1].view(n, FINE_BINS, 2)
            self._total = self._total.to(counts.device) + counts.sum(0)
            if self.per_image:
                padded = torch.nn.functional.pad(counts, (0, 0, 0, -FINE_BINS % _STEP))
                coarse = padded.view(n, -1, _STEP, 2).sum(2).view(n, -1)
                labelled = pixels.valid.sum(1, keepdim=True)
                names = None if groups is None else groups[some]
                self._keep(torch.cat([labelled, coarse], 1), names)

    def sync(self) -> None:
        """Sum over all ranks."""
        super().sync()
        self._total = distributed.total(self._total)

    def compute(
        self, *, resamples: int = 1000, seed: int = 0, raters: int = 1
    ) -> tuple[Detection, ...]:
        """How well each uncertainty finds errors.

        Intervals are those of resampled images or groups: the percentiles of the scores of coarser
        histograms, moved to the score of the fine one. Numbers of pixels are divided by the number
        of `raters`, whose labels were all counted.
        """
        units = np.zeros((0, self.width - 1))
        if resamples:
            units = self.by_group(self.counts()[:, 1:]) / raters
            # In an order of their own: ranks and folders may bring images in any.
            units = units[sorted(range(len(units)), key=lambda unit: units[unit].tobytes())]
        drawn = list(resampled_weights(len(units), resamples if len(units) > 1 else 0, seed))
        tables = units.reshape(len(units), len(UNCERTAINTIES), _COARSE * 2)
        found = []
        for at, (name, counts) in enumerate(zip(UNCERTAINTIES, self._total.cpu(), strict=True)):
            if not counts.any():
                continue
            correct, wrong = counts.numpy().T / raters
            intervals: dict[str, Interval] = {}
            if drawn:
                scores, table = _scores(correct, wrong), tables[:, at]
                coarse = _scores(*table.sum(0).reshape(-1, 2).T)
                resampled = np.concatenate([weights @ table for weights in drawn])
                each = [_scores(*one.reshape(-1, 2).T) for one in resampled]
                for score, value in scores.items():
                    values = np.array([one[score] for one in each]) - coarse[score] + value
                    if np.isfinite(values).all():
                        low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                        intervals[score] = Interval(float(low), float(high))
            found.append(Detection(name, correct, wrong, intervals))
        return tuple(found)


def _scores(correct: Array, wrong: Array) -> dict[str, float]:
    detection: Any = Detection("", correct, wrong, {})  # scores read its `fine`
    return {name: SCORES[name].of(detection) for name in DETECTION}
