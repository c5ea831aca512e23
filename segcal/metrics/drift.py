"""What a hold-out tells about images without labels: thresholds, and how unlike it they are.

A `HoldoutProfile` is made where a calibrator is fitted, and read where it is applied.

*Accuracy.* ATC (Garg et al., ICLR 2022) expects the share of pixels whose confidence is above the
threshold that as large a share of the hold-out's pixels exceeds as are predicted right.

*Drift.* Two distances from the hold-out, each half the sum of absolute differences of shares: of
the pixels by confidence, and by predicted class. An image is unlike the hold-out if one of them
exceeds all but a share `RATE` / 2 of the distances of hold-out images, each from the others. A set
of M images is unlike it if one of them exceeds all but that share of the distances between two
draws from the hold-out, of M images and of as many as it has. So images like the hold-out's give a
false alarm with a probability of about `RATE`. Both take images for independent, which frames of
one video are not.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.files import atomic_write
from segcal.metrics.report import Report, from_plain, to_plain
from segcal.metrics.scores import Array
from segcal.metrics.triage import ImageCounts, Target, choose_threshold, histograms

RATE = 0.05  # of false alarms
# Bins (lo, hi] of confidence, each half as wide as the one before from 3/4 on: exact in binary.
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, *(1 - 0.5**k for k in range(2, 11)), 1.0)
_BINS = len(CONFIDENCE_EDGES) - 1
_MOST_IMAGES = 1000  # kept in a profile
_FORMAT = "segcal hold-out profile 1"


@torch.inference_mode()
def prediction_sums(probs: Tensor, *, multilabel: bool = False) -> dict[str, Tensor]:
    """Sums over the pixels of each image of (N, C, *S) probabilities.

    Those of sigmoid outputs are over the decisions of all classes.

    Returns:
        pixels: (N,) P; top: (N, P) max_c p_c; confidence: (N,) its sum; predicted: (N, C) n_{ŷ=c};
        inside: (N, C) Σ_{ŷ=c} p_c; outside: (N, C) Σ_{ŷ≠c} p_c; and bins: (N, B) pixels by
        confidence, between `CONFIDENCE_EDGES`.
    """
    p = probs.reshape(*probs.shape[:2], -1)  # (N, C, L)
    if multilabel:
        chosen = p >= 0.5
        top = torch.maximum(p, 1 - p).flatten(1).double()
        predicted, inside = chosen.sum(2), (p * chosen).sum(2, dtype=torch.float64)
    else:
        highest, index = p.max(1)
        top = highest.double()
        predicted = histograms(index, p.shape[1])
        inside = top.new_zeros(p.shape[:2]).scatter_add_(1, index, top)
    edges = torch.tensor(CONFIDENCE_EDGES[1:-1], dtype=torch.float64, device=p.device)
    return {
        "pixels": torch.full((len(p),), top.shape[1], device=p.device),
        "top": top,
        "confidence": top.sum(1),
        "predicted": predicted,
        "inside": inside,
        "outside": (p.sum(2, dtype=torch.float64) - inside).clamp_min(0),
        "bins": histograms(torch.bucketize(top, edges), _BINS),
    }


class ProfileCounts(ImageCounts):
    """Counts of each image of a hold-out: pixels, labelled or not; by confidence; by prediction."""

    def __init__(self, num_classes: int, *, multilabel: bool = False) -> None:
        super().__init__()
        self.width, self._multilabel = 1 + _BINS + num_classes, multilabel

    def update(self, logits: Tensor, labels: Tensor, groups: Sequence[str] | None = None) -> None:
        """Count a batch of (N, C, *S) logits; no label is looked at, as new images have none."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probs = wide.sigmoid() if self._multilabel else wide.softmax(1)
        sums = prediction_sums(probs, multilabel=self._multilabel)
        counts = [sums["pixels"][:, None], sums["bins"], sums["predicted"]]
        self._keep(torch.cat(counts, 1), groups)


@dataclass(frozen=True, eq=False)
class HoldoutProfile:
    """What `apply` needs to know of the hold-out of a calibrator; a small JSON file."""

    images: int  # n, those that are kept below; at most 1000, evenly chosen
    accuracy: float  # of the labelled pixels
    atc_threshold: float
    # Thresholds of confidence by target, such as "accuracy=0.99"; NaN where none reaches it
    operating_points: Mapping[str, float]
    class_sets: Mapping[str, float]  # λ by promised miss rate, such as "0.1"
    confidence: Array  # (n, B) shares of the pixels of an image by confidence
    classes: Array  # (n, C) shares of its pixels that are predicted as each class
    class_names: tuple[str, ...] = ()  # C names, or none

    @classmethod
    def of(
        cls,
        report: Report,
        counts: ProfileCounts,
        operating_points: Mapping[str, float | None],
        class_sets: Mapping[str, float],
    ) -> HoldoutProfile:
        """The profile of a hold-out: the report of its labelled pixels, and counts of its images.

        An operating point that none reaches is None.
        """
        rows = counts.counts()
        rows = rows[np.lexsort(rows.T)]  # over ranks, images come in another order
        rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MOST_IMAGES)).round().astype(int)]
        pixels = rows[:, :1]
        k = rows.shape[1] - 1 - _BINS if report.protocol.multilabel else 1
        atc = 1.0
        if report.accuracy > 0:
            share = Target("coverage", min(report.accuracy, 1 - 1e-12))
            atc = choose_threshold(report.fine, share) or 0.0
        return cls(
            images=len(rows),
            accuracy=report.accuracy,
            atc_threshold=atc,
            operating_points={n: math.nan if t is None else t for n, t in operating_points.items()},
            class_sets=dict(class_sets),
            confidence=(rows[:, 1 : 1 + _BINS] / pixels).round(5),
            classes=(rows[:, 1 + _BINS :] / (pixels / k)).round(5),
            class_names=tuple(report.class_names or ()),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, completely or not at all."""
        with atomic_write(path) as file:
            json.dump({"format": _FORMAT, **to_plain(self)}, file, allow_nan=False)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HoldoutProfile:
        """Read what `save` wrote; a ValueError names the file if it is something else."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format") != _FORMAT:
                raise ValueError("another format")
            found: HoldoutProfile = from_plain(cls, {"class_names": [], **data})
            shares = np.concatenate([found.confidence, found.classes], 1, dtype=np.float64)
            levels = [found.atc_threshold, *found.class_sets.values()]
            whole = np.isfinite(shares).all() and shares.min() >= 0 and shares.max() <= 1
            if (
                not whole
                or found.confidence.shape != (found.images, _BINS)
                or not all(0 <= level <= 1 for level in levels)
                or len(found.class_names) not in (0, found.classes.shape[1])
            ):
                raise ValueError("numbers that do not fit")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no hold-out profile of segcal eval: {error!r:.100}"
            ) from None
        return found

    def point(self, target: str | None = None) -> tuple[str, float | None]:
        """The operating point of a target, the first if none is named: target and threshold.

        The threshold is None if there is no operating point, or the hold-out does not reach it.
        """
        return _chosen(self.operating_points, target, "--operate")

    def lam(self, miss: str | None = None) -> float | None:
        """λ of the class sets of a miss rate, the first if none is named; None without any."""
        return _chosen(self.class_sets, miss, "--conformal")[1]


def _chosen(known: Mapping[str, float], name: str | None, option: str) -> tuple[str, float | None]:
    name = next(iter(known), "") if name is None else name
    if name and name not in known:
        raise ValueError(
            f"{name} was not chosen on the hold-out, only {', '.join(known) or 'nothing'}: "
            f"name it in {option} of segcal eval"
        )
    value = known.get(name, math.nan)
    return name, None if math.isnan(value) else value


@dataclass(frozen=True, eq=False)
class Drift:
    """How unlike the hold-out M images are; of two distances, by confidence and by class."""

    distances: Array  # (2,) of all images together
    limits: Array  # (2,) what they reach by chance
    image_distances: Array  # (2, M)
    image_limits: Array  # (2,)
    image_rate: float  # share of the hold-out's images beyond a limit: > `RATE` if they are few

    @property
    def alarm(self) -> bool:
        """Whether the images together are unlike the hold-out."""
        return bool((self.distances > self.limits).any())

    @property
    def unlike(self) -> Array:
        """(2, M) whether each image is unlike those of the hold-out, by confidence and by class."""
        return self.image_distances > self.image_limits[:, None]


def measure_drift(
    profile: HoldoutProfile, confidence: Array, classes: Array, *, resamples: int = 1000
) -> Drift | None:
    """The drift of M images; None if the hold-out has fewer than two images.

    `confidence` (M, B) and `classes` (M, C) are shares of the pixels of each image, as in
    `HoldoutProfile`. The limits of a set come from `resamples` pairs of draws.
    """
    n, m = profile.images, len(confidence)
    if n < 2:
        return None
    generator = np.random.default_rng(0)
    draws = [generator.multinomial(k, np.full(n, 1 / n), resamples) / k for k in (m, n)]
    place = min(n, math.ceil((n + 1) * (1 - RATE / 2)))
    found: dict[str, list[Array]] = defaultdict(list)
    for known, new in ((profile.confidence, confidence), (profile.classes, classes)):
        total = known.sum(0)
        own = np.sort(_distance(known, (total - known) / (n - 1)))
        by_chance = _distance(draws[0] @ known, draws[1] @ known)
        found["distances"].append(_distance(new.mean(0), total / n))
        found["limits"].append(np.quantile(by_chance, 1 - RATE / 2))
        found["image_distances"].append(_distance(new, total / n))
        found["image_limits"].append(own[place - 1])
    arrays = {name: np.array(values) for name, values in found.items()}
    return Drift(image_rate=min(2 * (1 - place / (n + 1)), 1.0), **arrays)


def _distance(shares: Array, reference: Array) -> Array:
    """(…,) half the sum of absolute differences of (…, B) shares."""
    return 0.5 * np.abs(shares - reference).sum(-1)
