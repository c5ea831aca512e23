"""Conformal risk control of class sets, by images.

The class set of a pixel is {c: p_c >= 1 - λ}. An image's miss rate is the share of its labelled
pixels whose set does not hold the label. λ is the least on a grid with (n R(λ) + 1) / (n + 1) <= α,
where R is the mean miss rate of n images of a hold-out. Then the miss rate of another image like
these is at most α on average, whatever the network (Angelopoulos et al. 2024). Images are
exchangeable and pixels are not, so the promise is about images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.metrics.intervals import fraction_interval
from segcal.metrics.operating import ImageCounts, probabilities
from segcal.metrics.tables import Interval, from_finite, without_nan
from segcal.pixels import countable, flatten

_OCTAVES, _STEPS = 18, 32  # every point of the grid is exact in float32
_MOST_CELLS = 2**22  # of a histogram by image and threshold, worked on at a time
_ROUNDING = 1e-12  # sums over ranks are added in another order


def thresholds() -> Tensor:
    """(G,) float32 the grid of 1 - λ from 0 to 1, finer towards both ends."""
    octave = torch.arange(_OCTAVES).unsqueeze(1) - _OCTAVES
    low = (2.0**octave * (1 + torch.arange(_STEPS) / _STEPS)).flatten()  # 2**-18 .. below 1
    low = low[low < 0.5]
    ends = torch.tensor([0.0, 0.5, 1.0])
    return torch.cat([ends[:1], low, ends[1:2], (1 - low).flip(0), ends[2:]])


def check_miss(text: str) -> float:
    """The α of a text such as miss=0.1.

    Raises:
        ValueError: something else, or a value that is not between 0 and 1.
    """
    kind, _, value = text.partition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = math.nan
    if kind.strip() != "miss" or not 0 < alpha < 1:
        raise ValueError(f"Expected miss=A with A between 0 and 1, but got {text!r}")
    return alpha


def parse_misses(text: str) -> tuple[float, ...]:
    """The miss rates in a text such as miss=0.1,miss=0.05, each once."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(check_miss(part) for part in parts if part))


class MissRates:
    """The sum over images of their miss rates at each threshold of the grid.

    Args:
        ignore_index: the label that means "do not count this pixel".
    """

    def __init__(self, ignore_index: int = 255) -> None:
        self._ignore_index = ignore_index
        self._grid = thresholds()
        self._total = torch.zeros(len(self._grid), dtype=torch.float64)
        self._images = torch.zeros((), dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels."""
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
            kept = kept.masked_fill(~pixels.valid, size - 1)
            slot = kept + size * torch.arange(len(kept), device=kept.device).unsqueeze(1)
            table = slot.new_zeros(len(kept) * size)
            table.scatter_add_(0, slot.flatten(), torch.ones_like(slot).flatten())
            missed = table.view(-1, size)[:, :-1].cumsum(1).double()  # (N, G)
            counted = pixels.valid.sum(1, keepdim=True)
            rates = missed / counted.clamp(min=1)
            self._total = self._total.to(kept.device) + rates.sum(0)
            self._images = self._images.to(kept.device) + (counted > 0).sum()

    def sync(self) -> None:
        """Sum over all ranks."""
        device = distributed.communication_device()
        self._total, self._images = self._total.to(device), self._images.to(device)
        distributed.sum_(self._total, self._images)

    @property
    def images(self) -> int:
        """n, the images that have labelled pixels."""
        return int(self._images)

    def means(self) -> dict[float, float]:
        """The mean miss rate of the images by threshold, 1 - λ."""
        rates = self._total.cpu() / self._images.cpu()
        return dict(zip(self._grid.tolist(), rates.tolist(), strict=True))

    def choose(self, alpha: float) -> tuple[float, float]:
        """The least λ for the miss rate α, and the mean miss rate of the images at it.

        Raises:
            ValueError: there are too few images to promise α.
        """
        n = self.images
        if 1 / (n + 1) > alpha + _ROUNDING:
            raise ValueError(
                f"Expected at least {math.ceil(1 / alpha - 1 - _ROUNDING)} images in the hold-out "
                f"to promise a miss rate of {alpha:g}, but got {n}"
            )
        total = self._total.cpu().numpy()
        good = np.flatnonzero((total + 1) / (n + 1) <= alpha + _ROUNDING)
        return 1 - float(self._grid[good[-1]]), float(total[good[-1]] / n)


@dataclass(frozen=True)
class ClassSets:
    """Class sets with a promised miss rate, and what they are on test images.

    Attributes:
        miss: α, the miss rate that is promised on average over images.
        lam: λ; the set of a pixel is {c: p_c >= 1 - λ}.
        holdout_images: images that λ was chosen on.
        holdout_miss: their mean miss rate.
        miss_rate: the mean miss rate of the test images.
        interval: of the miss rate, over the test images; None for fewer than two.
        set_size: mean number of classes in the set of a test pixel.
        empty: share of the test pixels whose set is empty.
    """

    miss: float
    lam: float
    holdout_images: int
    holdout_miss: float
    miss_rate: float
    interval: Interval | None
    set_size: float
    empty: float

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, numbers and strings. NaN becomes None."""
        return without_nan(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClassSets:
        """The inverse of `to_dict`."""
        names = ("miss", "lam", "holdout_miss", "miss_rate", "set_size", "empty")
        interval = data["interval"]
        return cls(
            holdout_images=int(data["holdout_images"]),
            interval=None if interval is None else Interval.from_dict(interval),
            **{name: from_finite(data[name]) for name in names},
        )


class SetCounts(ImageCounts):
    """Counts of each image: labelled pixels, missed ones, classes in all sets, and empty sets.

    Args:
        lam: λ of the sets.
        ignore_index: the label that means "do not count this pixel".
    """

    width = 4

    def __init__(self, lam: float, ignore_index: int = 255) -> None:
        super().__init__()
        self.lam = lam
        self._ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels."""
        pixels = flatten(*countable(logits, labels), self._ignore_index)
        held = probabilities(pixels.dense) >= 1 - self.lam  # (N, C, L)
        missed = ~held.gather(1, pixels.target.unsqueeze(1)).squeeze(1)
        sizes = held.sum(1)  # (N, L)
        parts = (torch.ones_like(sizes), missed, sizes, sizes == 0)
        self._counts.append(torch.stack([(x * pixels.valid).sum(1) for x in parts], 1))

    def sets(self, alpha: float, holdout_images: int, holdout_miss: float) -> ClassSets:
        """What the sets are here, beside what they were on the hold-out."""
        pixels, missed, sizes, empty = self.counts().T
        total = max(int(pixels.sum()), 1)
        rates = missed / pixels
        return ClassSets(
            miss=alpha,
            lam=self.lam,
            holdout_images=holdout_images,
            holdout_miss=holdout_miss,
            miss_rate=float(rates.mean()) if len(rates) else math.nan,
            interval=fraction_interval(rates, np.ones(len(rates)), trials=math.inf),
            set_size=float(sizes.sum() / total),
            empty=float(empty.sum() / total),
        )
