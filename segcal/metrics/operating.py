"""Operating points: the confidence threshold that reaches a target, and its result elsewhere.

A pixel is accepted if its confidence is above the threshold. The threshold is chosen on a hold-out
and checked on test images, with intervals over the images.
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
from segcal.metrics.scores import Array, ratio
from segcal.metrics.tables import FineHistogram, Interval, from_finite, without_nan
from segcal.pixels import countable, flatten

TARGETS = {
    "accuracy": "least share of accepted pixels that are right",
    "risk": "largest share of accepted pixels that are wrong",
    "coverage": "least share of pixels that are accepted",
}


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
        try:
            return cls(kind.strip(), float(value))
        except ValueError:
            raise ValueError(
                f"Expected a target such as accuracy=0.99, with one of {', '.join(TARGETS)} and a "
                f"value between 0 and 1, but got {text!r}"
            ) from None


def parse_targets(text: str) -> tuple[Target, ...]:
    """The targets in a text such as accuracy=0.99,coverage=0.9, each once."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(Target.parse(part) for part in parts if part))


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


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold that was chosen on a hold-out, and what it gives on test images.

    Attributes:
        target: such as "accuracy=0.99".
        threshold: accept a pixel if its confidence is above; NaN if none reaches the target on the
            hold-out.
        holdout_images: images of the hold-out.
        holdout_coverage: share of the pixels of the hold-out that are accepted.
        holdout_accuracy: share of these that are right.
        coverage: share of the test pixels that are accepted.
        accuracy: share of these that are right.
        intervals: of "coverage" and "accuracy", over the test images; none for fewer than two.
    """

    target: str
    threshold: float
    holdout_images: int
    holdout_coverage: float
    holdout_accuracy: float
    coverage: float
    accuracy: float
    intervals: Mapping[str, Interval]

    @property
    def risk(self) -> float:
        """Share of the accepted test pixels that are wrong."""
        return 1 - self.accuracy

    @property
    def verdict(self) -> str:
        """Whether the target is reached on images like the test images, by the interval."""
        target = Target.parse(self.target)
        if math.isnan(self.threshold):
            return "no threshold reaches it on the hold-out"
        interval = self.intervals.get("coverage" if target.kind == "coverage" else "accuracy")
        least = 1 - target.value if target.kind == "risk" else target.value
        if interval is None:
            return "too few images to tell"
        if interval.low >= least:
            return "reached"
        return "not reached" if interval.high < least else "within the interval"

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, numbers and strings. NaN becomes None."""
        return without_nan(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OperatingPoint:
        """The inverse of `to_dict`."""
        names = ("threshold", "holdout_coverage", "holdout_accuracy", "coverage", "accuracy")
        return cls(
            target=str(Target.parse(data["target"])),
            holdout_images=int(data["holdout_images"]),
            intervals={str(n): Interval.from_dict(i) for n, i in data["intervals"].items()},
            **{name: from_finite(data[name]) for name in names},
        )


class ImageCounts:
    """Counts of each image, the first of which is that of its labelled pixels."""

    width: int  # how many counts an image has

    def __init__(self) -> None:
        self._counts: list[Tensor] = []

    def sync(self) -> None:
        """Gather the counts of all ranks."""
        device = distributed.communication_device()
        none = torch.zeros(0, self.width, dtype=torch.int64, device=device)
        own = torch.cat([none, *(part.to(device) for part in self._counts)])
        self._counts = [distributed.concatenate(own)]

    def add(self, other: ImageCounts) -> None:
        """Add the counts of other images at the same threshold."""
        self._counts += other._counts

    def counts(self) -> Array:
        """(I, width) counts of the images that have labelled pixels."""
        counts = np.concatenate([part.cpu().numpy() for part in self._counts])
        return counts[counts[:, 0] > 0]


class AcceptedPixels(ImageCounts):
    """Counts of each image: labelled pixels, accepted ones, and right ones among these.

    Args:
        threshold: of the confidence; None accepts nothing.
        ignore_index: the label that means "do not count this pixel".
        multilabel: count the decisions of K sigmoid outputs instead of pixels.
    """

    width = 3

    def __init__(
        self, threshold: float | None, ignore_index: int = 255, *, multilabel: bool = False
    ) -> None:
        super().__init__()
        self.threshold, self._multilabel = threshold, multilabel
        self._above = math.inf if threshold is None else threshold
        self._ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: (N, C, *S) logits and (N, *S) labels; (N, C, *S) of sigmoid outputs."""
        logits, labels = countable(logits, labels)
        pixels = flatten(logits, labels, self._ignore_index, multilabel=self._multilabel)
        confidence, predicted = probabilities(pixels.dense).max(1)  # (N, L)
        taken = pixels.valid & (confidence.double() > self._above)
        right = taken & (predicted == pixels.target)
        counts = torch.stack([x.sum(1) for x in (pixels.valid, taken, right)], 1)
        self._counts.append(counts.view(len(logits), -1, 3).sum(1))

    def point(self, target: Target, holdout: FineHistogram, holdout_images: int) -> OperatingPoint:
        """What the threshold gives here, beside what it gave on the hold-out.

        Args:
            target: that the threshold was chosen for.
            holdout: the fine histogram of the hold-out.
            holdout_images: its images.
        """
        pixels, taken, right = self.counts().T
        coverage, accuracy = accepted(holdout, self.threshold)
        found = {"coverage": (taken, pixels), "accuracy": (right, taken)}
        intervals = {name: fraction_interval(*sums) for name, sums in found.items()}
        return OperatingPoint(
            target=str(target),
            threshold=math.nan if self.threshold is None else self.threshold,
            holdout_images=holdout_images,
            holdout_coverage=coverage,
            holdout_accuracy=accuracy,
            coverage=float(ratio(taken.sum(), pixels.sum())),
            accuracy=float(ratio(right.sum(), taken.sum())),
            intervals={n: interval for n, interval in intervals.items() if interval is not None},
        )


def probabilities(logits: Tensor) -> Tensor:
    """(N, C, L) softmax in float32 at least, rounded as the meter rounds it."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    exp = (wide - wide.amax(1, keepdim=True)).exp_()
    return exp.div_(exp.sum(1, keepdim=True, dtype=torch.float64).to(exp))
