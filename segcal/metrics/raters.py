"""How far several raters of the same images agree: the ceiling of what a network can reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segcal import distributed
from segcal.metrics.report import Raters
from segcal.metrics.scores import ratio


class RaterAgreement:
    """Counts of equal labels, of a stream of batches. A rater's ignored pixels do not count."""

    def __init__(self, raters: int, ignore_index: int, *, multilabel: bool = False) -> None:
        self._ignored, self._axis = ignore_index, 2 if multilabel else 1
        self._pairs = torch.zeros(2, raters, raters, dtype=torch.int64)  # equal, and both labelled
        self._pixels = torch.zeros(2, dtype=torch.int64)  # of one label, and of two raters or more

    def update(self, logits: Tensor, labels: Tensor, groups: Sequence[str] | None = None) -> None:
        """Count (N, R, *S) or (N, K, R, *S) labels; see `segcal.pixels.each_rater`."""
        labels = labels.movedim(self._axis, 0).flatten(1).cpu()  # (R, P)
        known = labels != self._ignored
        for r, (one, held) in enumerate(zip(labels, known, strict=True)):
            both = known & held
            self._pairs[0, r] += (both & (labels == one)).sum(1)
            self._pairs[1, r] += both.sum(1)
        several = known.sum(0) > 1
        low = labels.where(known, torch.iinfo(torch.int64).max).amin(0)
        high = labels.where(known, torch.iinfo(torch.int64).min).amax(0)
        self._pixels += torch.stack([(several & (low == high)).sum(), several.sum()])

    def sync(self) -> None:
        """Sum over all ranks."""
        self._pairs, self._pixels = map(distributed.total, (self._pairs, self._pixels))

    def compute(self) -> Raters:
        equal, both = (self._pairs * (1 - torch.eye(len(self._pairs[0])).long())).cpu().numpy()
        same, several = self._pixels.tolist()
        return Raters(
            agreement=float(ratio(same, several)),
            accuracy=tuple(ratio(equal.sum(1), both.sum(1)).tolist()),
            ceiling=float(ratio(equal.sum(), both.sum())),
        )
