"""What to trust: thresholds of confidence that reach a target, and class sets that seldom miss.

*Operating points.* A pixel is accepted if its confidence is above a threshold. The threshold is
chosen on a hold-out and checked on test images, with intervals over the images.

*Class sets* (conformal risk control, Angelopoulos et al. 2024). The class set of a pixel is
{c: p_c >= 1 - λ}. An image's miss rate is the share of its labelled pixels whose set does not hold
the label. λ is the least on a grid with (n R(λ) + 1) / (n + 1) <= α, where R is the mean miss rate
of n images of a hold-out. Then the miss rate of another image like these is at most α on average,
whatever the network. Images are exchangeable and pixels are not, so the promise is about images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.metrics.counting import softmax
from segcal.metrics.intervals import fraction_interval
from segcal.metrics.report import ClassSets, FineHistogram, OperatingPoint
from segcal.metrics.scores import Array, ratio
from segcal.pixels import countable, flatten

OBJECT_PRECISION = "object-precision"
TARGETS = {
    "accuracy": "least share of accepted pixels that are right",
    "risk": "largest share of accepted pixels that are wrong",
    "coverage": "least share of pixels that are accepted",
    OBJECT_PRECISION: "least share of accepted objects that are real",
}
_OCTAVES, _STEPS = 18, 32  # every point of the grid is exact in float32
_MOST_CELLS = 2**22  # of a histogram by image and threshold, worked on at a time
_ROUNDING = 1e-12  # sums over ranks are added in another order


@dataclass(frozen=True)
class Target:
    """What a threshold shall reach: a key of `TARGETS`, and a value in (0, 1)."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in TARGETS or not 0 < self.value < 1:
            raise ValueError(
                f"Expected one of {', '.join(TARGETS)} with a value between 0 and 1, but got {self}"
            )

    def __str__(self) -> str:
        return f"{self.kind}={self.value:g}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target in a text such as accuracy=0.99."""
        kind, _, value = text.partition("=")
        with suppress(ValueError):
            return cls(kind.strip(), float(value))
        raise ValueError(
            f"Expected a target such as accuracy=0.99, with one of {', '.join(TARGETS)} and a "
            f"value between 0 and 1, but got {text!r}"
        )


def check_miss(text: str) -> float:
    """The α of a text such as miss=0.1, which is between 0 and 1."""
    kind, _, value = text.partition("=")
    with suppress(ValueError):
        if kind.strip() == "miss" and 0 < float(value) < 1:
            return float(value)
    raise ValueError(f"Expected miss=A with A between 0 and 1, but got {text!r}")


def probabilities(logits: Tensor) -> Tensor:
    """(N, C, L) softmax in float32 at least, rounded as the meter rounds it."""
    return softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), 1)[0]


def choose_threshold(fine: FineHistogram, target: Target) -> float | None:
    """The threshold that reaches the target with the most pixels; None if none does.

    For a coverage it is the one with the fewest pixels. It is the lower edge of a bin that holds
    pixels, so pixels less confident than all that were seen are not accepted.
    """
    held = np.flatnonzero(fine.correct + fine.wrong)[::-1]  # most confident first
    count, errors = np.cumsum((fine.correct + fine.wrong)[held]), np.cumsum(fine.wrong[held])
    if target.kind == "coverage":
        good = np.flatnonzero(count >= target.value * count[-1:])[:1]
    else:
        risk = target.value if target.kind == "risk" else 1 - target.value
        good = np.flatnonzero(errors <= risk * count)[-1:]
    return float(fine.edges[held[good[0]]]) if len(good) else None


def accepted(fine: FineHistogram, threshold: float | None) -> tuple[float, float]:
    """(coverage, accuracy) of the pixels above a threshold that is an edge of the histogram."""
    above = fine.edges[:-1] >= (math.inf if threshold is None else threshold)
    correct, wrong = int(fine.correct[above].sum()), int(fine.wrong[above].sum())
    total = int(fine.correct.sum() + fine.wrong.sum())
    return float(ratio(correct + wrong, total)), float(ratio(correct, correct + wrong))


def operating_point(
    target: str,
    threshold: float | None,
    holdout_images: int,
    holdout: tuple[float, float],
    coverage: tuple[Array, Array],
    accuracy: tuple[Array, Array],
) -> OperatingPoint:
    """The point of a threshold, from its (coverage, accuracy) on the hold-out and on test images.

    Those of the test images are fractions: (U,) numerators and denominators of images or groups.
    """
    found = {"coverage": coverage, "accuracy": accuracy}
    intervals = {name: fraction_interval(*sums) for name, sums in found.items()}
    return OperatingPoint(
        target=target,
        threshold=math.nan if threshold is None else threshold,
        holdout_images=holdout_images,
        holdout_coverage=holdout[0],
        holdout_accuracy=holdout[1],
        intervals={n: interval for n, interval in intervals.items() if interval is not None},
        **{n: float(ratio(part.sum(), whole.sum())) for n, (part, whole) in found.items()},
    )


def histograms(index: Tensor, size: int) -> Tensor:
    """(N, size) how often each of (N, L) indices occurs in its row."""
    zeros = index.new_zeros(len(index), size)
    return zeros.scatter_add_(1, index, torch.ones_like(index))


class ImageCounts:
    """Counts of each image, the first of which is that of its labelled pixels."""

    width: int  # how many counts an image has
    dtype = torch.int64

    def __init__(self) -> None:
        self._counts: list[Tensor] = []  # (N, width)
        self._groups: list[str | None] = []  # of each image

    def _keep(self, counts: Tensor, groups: Sequence[str] | None) -> None:
        self._counts.append(counts.to(self.dtype))
        self._groups += [None] * len(counts) if groups is None else groups

    def _all(self, device: torch.device | str = "cpu") -> Tensor:
        none = torch.zeros(0, self.width, dtype=self.dtype)
        return torch.cat([part.to(device) for part in (none, *self._counts)])

    def sync(self) -> None:
        """Gather the counts of all ranks."""
        self._counts = [distributed.concatenate(self._all(distributed.communication_device()))]
        self._groups = [*chain(*distributed.gathered(self._groups))]

    def counts(self) -> Array:
        """(I, width) counts of the images that have labelled pixels."""
        counts = self._all().numpy()
        return counts[counts[:, 0] > 0]

    def by_group(self, values: Array) -> Array:
        """(U, n) sums over groups of (I, n) values of the images of `counts`.

        Groups are the units of intervals, and an image without one is a unit by itself.
        """
        held = (self._all()[:, 0] > 0).tolist()
        found = zip(range(len(held)), self._groups, held, strict=True)
        units = [i if group is None else group for i, group, kept in found if kept]
        number = {unit: n for n, unit in enumerate(dict.fromkeys(units))}
        sums = np.zeros((len(number), values.shape[1]))
        np.add.at(sums, np.array([number[unit] for unit in units], np.intp), values)
        return sums


class AcceptedPixels(ImageCounts):
    """Counts of each image: labelled pixels, accepted ones, and right ones among these.

    A pixel is accepted if its confidence is above the threshold; None accepts nothing. With
    `multilabel`, decisions of K sigmoid outputs are counted. Batches are of logits, or of `probs`.
    """

    width = 3

    def __init__(
        self,
        threshold: float | None,
        ignore_index: int | None = None,
        *,
        multilabel: bool = False,
        probs: bool = False,
    ) -> None:
        super().__init__()
        self.threshold, self._multilabel, self._probs = threshold, multilabel, probs
        self._above = math.inf if threshold is None else threshold
        self._ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor, groups: Sequence[str] | None = None) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels; (N, C, *S) of sigmoid outputs."""
        logits, labels = countable(logits, labels)
        pixels = flatten(logits, labels, self._ignore_index, multilabel=self._multilabel)
        found = pixels.dense if self._probs else probabilities(pixels.dense)
        confidence, predicted = found.max(1)  # (N, L)
        taken = pixels.valid & (confidence.double() > self._above)
        right = taken & (predicted == pixels.target)
        counts = torch.stack([x.sum(1) for x in (pixels.valid, taken, right)], 1)
        self._keep(counts.view(len(logits), -1, 3).sum(1), groups)

    def point(self, target: Target, holdout: FineHistogram, holdout_images: int) -> OperatingPoint:
        """What the threshold gives here, beside what it gave on the hold-out."""
        pixels, taken, right = self.by_group(self.counts()).T
        known = accepted(holdout, self.threshold)
        return operating_point(
            str(target), self.threshold, holdout_images, known, (taken, pixels), (right, taken)
        )


def thresholds() -> Tensor:
    """(G,) float32 the grid of 1 - λ from 0 to 1, finer towards both ends."""
    octave = torch.arange(_OCTAVES).unsqueeze(1) - _OCTAVES
    low = (2.0**octave * (1 + torch.arange(_STEPS) / _STEPS)).flatten()  # 2**-18 .. below 1
    low = low[low < 0.5]
    ends = torch.tensor([0.0, 0.5, 1.0])
    return torch.cat([ends[:1], low, ends[1:2], (1 - low).flip(0), ends[2:]])


class MissRates:
    """The sum over images of their miss rates at each threshold of the grid."""

    def __init__(self, ignore_index: int | None = None) -> None:
        self._ignore_index = ignore_index
        self._grid = thresholds()
        self._total = torch.zeros(len(self._grid), dtype=torch.float64)
        self._images = torch.zeros((), dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor, groups: Sequence[str] | None = None) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels; groups change nothing."""
        logits, labels = countable(logits, labels)
        size = len(self._grid) + 1
        step = max(_MOST_CELLS // size, 1)
        grid = self._grid.to(logits.device)
        for first in range(0, len(logits), step):
            images = slice(first, first + step)
            pixels = flatten(logits[images], labels[images], self._ignore_index)
            probs = probabilities(pixels.dense)
            true = probs.gather(1, pixels.target.unsqueeze(1)).squeeze(1)  # (N, L)
            # The set holds the label up to this many thresholds; ignored pixels are never missed.
            kept = torch.bucketize(true.float(), grid, right=True)
            kept = histograms(kept.masked_fill(~pixels.valid, size - 1), size)
            missed = kept[:, :-1].cumsum(1).double()  # (N, G)
            counted = pixels.valid.sum(1, keepdim=True)
            rates = missed / counted.clamp(min=1)
            self._total = self._total.to(kept.device) + rates.sum(0)
            self._images = self._images.to(kept.device) + (counted > 0).sum()

    def sync(self) -> None:
        """Sum over all ranks."""
        self._total, self._images = map(distributed.total, (self._total, self._images))

    @property
    def images(self) -> int:
        """n, the images that have labelled pixels."""
        return int(self._images)

    def means(self) -> dict[float, float]:
        """The mean miss rate of the images by threshold, 1 - λ."""
        rates = self._total.cpu() / self._images.cpu()
        return dict(zip(self._grid.tolist(), rates.tolist(), strict=True))

    def choose(self, alpha: float) -> tuple[float, float]:
        """The least λ for the miss rate α, and the mean miss rate of the images at it."""
        n = self.images
        if 1 / (n + 1) > alpha + _ROUNDING:
            raise ValueError(
                f"Expected at least {math.ceil(1 / alpha - 1 - _ROUNDING)} images in the hold-out "
                f"to promise a miss rate of {alpha:g}, but got {n}"
            )
        total = self._total.cpu().numpy()
        good = np.flatnonzero((total + 1) / (n + 1) <= alpha + _ROUNDING)
        return 1 - float(self._grid[good[-1]]), float(total[good[-1]] / n)


class SetCounts(ImageCounts):
    """Counts of each image: labelled pixels, missed ones, classes in all sets, and empty sets."""

    width = 4

    def __init__(self, lam: float, ignore_index: int | None = None) -> None:
        super().__init__()
        self.lam = lam
        self._ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor, groups: Sequence[str] | None = None) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels."""
        pixels = flatten(*countable(logits, labels), self._ignore_index)
        held = probabilities(pixels.dense) >= 1 - self.lam  # (N, C, L)
        missed = ~held.gather(1, pixels.target.unsqueeze(1)).squeeze(1)
        sizes = held.sum(1)  # (N, L)
        parts = (torch.ones_like(sizes), missed, sizes, sizes == 0)
        self._keep(torch.stack([(x * pixels.valid).sum(1) for x in parts], 1), groups)

    def sets(self, alpha: float, holdout_images: int, holdout_miss: float) -> ClassSets:
        """What the sets are here, beside what they were on the hold-out."""
        pixels, missed, sizes, empty = self.counts().T
        total = max(int(pixels.sum()), 1)
        rates = missed / pixels
        each = self.by_group(np.stack([rates, np.ones(len(rates))], 1))
        return ClassSets(
            miss=alpha,
            lam=self.lam,
            holdout_images=holdout_images,
            holdout_miss=holdout_miss,
            miss_rate=float(rates.mean()) if len(rates) else math.nan,
            interval=fraction_interval(*each.T, trials=math.inf),
            set_size=float(sizes.sum() / total),
            empty=float(empty.sum() / total),
        )
