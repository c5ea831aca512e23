"""Parts of a report: protocol, bin tables, fine histogram, statistics over images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from segcal.files import utf8
from segcal.metrics import scores
from segcal.metrics.scores import Array


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


def frozen_array(values: Any, dtype: type) -> Array:
    """A read-only copy as an array."""
    array: Array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def require_sums(name: str, shape: tuple[int, ...], *arrays: Array) -> None:
    """Raise a ValueError unless all arrays have that shape and hold finite numbers >= 0."""
    for array in arrays:
        if array.shape != shape:
            raise ValueError(f"Expected {name} tables of {shape}, but got {array.shape}")
        if not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(f"Expected finite numbers of at least 0 in {name}, but got others")


def _freeze(owner: object, **dtypes: type) -> None:
    for name, dtype in dtypes.items():
        object.__setattr__(owner, name, frozen_array(getattr(owner, name), dtype))


@dataclass(frozen=True, eq=False)
class BinTable:
    """The (..., B) sums behind a reliability diagram, and the values it shows.

    Attributes:
        edges: (B + 1,) from 0 to 1.
        count: (..., B) pixels in each bin.
        hits: (..., B) those of them for which the predicted event occurred.
        confidence_sum: (..., B) sum of their probabilities.
    """

    edges: Array
    count: Array
    hits: Array
    confidence_sum: Array

    def __post_init__(self) -> None:
        _freeze(self, edges=np.float64, count=np.int64, hits=np.int64, confidence_sum=np.float64)

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
class FineHistogram:
    """Fine histogram of top-label confidence, for correct and for wrong predictions.

    The bins (lo, hi] are of unequal width and become finer towards 1.

    Attributes:
        edges: (F + 1,) from 0 to 1.
        correct: (F,) correctly predicted pixels.
        wrong: (F,) wrongly predicted pixels.
        confidence_sum: (F,) sum of the confidence of both.
    """

    edges: Array
    correct: Array
    wrong: Array
    confidence_sum: Array

    def __post_init__(self) -> None:
        _freeze(self, edges=np.float64, correct=np.int64, wrong=np.int64, confidence_sum=np.float64)

    @property
    def sums(self) -> tuple[Array, Array, Array]:
        """(correct, wrong, confidence_sum), the arguments of the functions in `scores`."""
        return self.correct, self.wrong, self.confidence_sum

    def on(self, edges: Array) -> FineHistogram:
        """The histogram with other edges, all pixels of a bin being where their mean confidence is.

        Reports and states of earlier versions have wider bins. On the edges of today, their scores
        are the same.
        """
        if np.array_equal(edges, self.edges):
            return self
        mean = np.nan_to_num(scores.ratio(self.confidence_sum, self.correct + self.wrong))
        bins = np.clip(np.searchsorted(edges, mean) - 1, 0, len(edges) - 2)
        moved = [np.zeros(len(edges) - 1, column.dtype) for column in self.sums]
        for new, column in zip(moved, self.sums, strict=True):
            np.add.at(new, bins, column)
        return FineHistogram(edges, *moved)


@dataclass(frozen=True, eq=False)
class ClassHistogram:
    """Fine histogram of top-label confidence by predicted class; every 16 bins of it are one.

    table = report.class_fine
    table.accepted[c, g]  # pixels predicted as c with a confidence above table.edges[g]
    table.right[c, g]     # those of them whose label is c

    Of sigmoid outputs, these are the decisions that class c is present.

    Attributes:
        edges: (G + 1,) from 0 to 1.
        correct: (K, G) correctly predicted pixels.
        wrong: (K, G) wrongly predicted pixels.
    """

    edges: Array
    correct: Array
    wrong: Array

    def __post_init__(self) -> None:
        _freeze(self, edges=np.float64, correct=np.int64, wrong=np.int64)

    @property
    def accepted(self) -> Array:
        """(K, G) pixels predicted as the class, of confidence above each of the first G edges."""
        return _above(self.correct + self.wrong)

    @property
    def right(self) -> Array:
        """(K, G) those of them that are predicted correctly."""
        return _above(self.correct)


def _above(counts: Array) -> Array:
    """The sums of each bin and all bins after it, along the last axis."""
    return counts[..., ::-1].cumsum(-1)[..., ::-1]


@dataclass(frozen=True)
class Interval:
    """A confidence interval: a fraction `level` of such intervals holds the large-sample value."""

    low: float
    high: float
    level: float = 0.95

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Interval:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{name: float(value) for name, value in data.items()})


@dataclass(frozen=True)
class ImageScore:
    """The ECE of one image."""

    name: str
    ece: float
    pixels: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", utf8(self.name))


@dataclass(frozen=True)
class ImageTable:
    """Every image that has pixels, as columns, in the order of names.

    Attributes:
        names: of the images.
        pixels: counted in each.
        correct: those of them that are predicted right.
        ece: of each image, to six decimals.
        bias: mean confidence minus accuracy of each image, to six decimals.
    """

    names: tuple[str, ...]
    pixels: tuple[int, ...]
    correct: tuple[int, ...]
    ece: tuple[float, ...]
    bias: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(map(utf8, self.names)))
        lengths = {len(column) for column in vars(self).values()}
        if len(lengths) > 1:
            raise ValueError(f"Expected columns of one length, but got {sorted(lengths)}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ImageTable:
        """The inverse of `dataclasses.asdict`, after JSON."""
        return cls(
            tuple(map(str, data["names"])),
            tuple(map(int, data["pixels"])),
            tuple(map(int, data["correct"])),
            tuple(map(float, data["ece"])),
            tuple(map(float, data["bias"])),
        )


@dataclass(frozen=True)
class BinGap:
    """The gap of one bin of the top-label table, image by image.

    A gap is the sum of confidence minus the number of hits, divided by the pixels of all bins: the
    signed part of the ECE that the bin has.

    Attributes:
        low: lower end of its 95 % interval over images; NaN if there is none.
        high: upper end.
        images: names of the images with the largest gaps in the bin, and these gaps.
    """

    low: float
    high: float
    images: tuple[tuple[str, float], ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BinGap:
        """The inverse of `dataclasses.asdict`, after JSON."""
        images = tuple((utf8(str(name)), float(gap)) for name, gap in data["images"])
        return cls(from_finite(data["low"]), from_finite(data["high"]), images)


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics that need the sums of each image.

    Attributes:
        ece: the mean over images of the ECE of each image. It is larger than the ECE over all
            pixels, because the ECE of few pixels is noisy.
        ece_debiased: the ECE over all pixels, estimated such that noise adds nothing to it.
        sce_debiased: the SCE, estimated likewise.
        ace: the mean ACE over the pairs of an image and a class that it shows.
        class_ace: of each class, the mean ACE over the images that show it; NaN if none does.
        intervals: by score name ("ece", "sce", "accuracy", "miou"), from a bootstrap over images.
        class_ece_intervals: of the class-j-ECE of each class; empty without intervals.
        withheld: by score name, why there is no interval.
        worst: the images with the largest ECE, worst first.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
        bins: the gap of each bin of the top-label table; empty in reports of earlier versions.
        table: every image, or the worst 10,000; None in regions and reports of earlier versions.
    """

    ece: float
    ece_debiased: float
    sce_debiased: float
    ace: float
    class_ace: tuple[float, ...]
    intervals: Mapping[str, Interval]
    class_ece_intervals: tuple[Interval, ...]
    withheld: Mapping[str, str]
    worst: tuple[ImageScore, ...]
    resamples: int
    seed: int
    bins: tuple[BinGap, ...] = ()
    table: ImageTable | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings. NaN becomes None."""
        return without_nan(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ImageStatistics:
        """The inverse of `to_dict`."""
        return cls(
            ece=from_finite(data.get("ece")),
            ece_debiased=from_finite(data.get("ece_debiased")),
            sce_debiased=from_finite(data.get("sce_debiased")),
            ace=from_finite(data.get("ace")),
            class_ace=tuple(map(from_finite, data.get("class_ace", []))),
            intervals={n: Interval.from_dict(found) for n, found in data["intervals"].items()},
            class_ece_intervals=tuple(map(Interval.from_dict, data.get("class_ece_intervals", []))),
            withheld={str(name): utf8(str(why)) for name, why in data.get("withheld", {}).items()},
            worst=tuple(
                ImageScore(str(image["name"]), float(image["ece"]), int(image["pixels"]))
                for image in data["worst"]
            ),
            resamples=int(data["resamples"]),
            seed=int(data["seed"]),
            bins=tuple(map(BinGap.from_dict, data.get("bins", []))),
            table=None if data.get("table") is None else ImageTable.from_dict(data["table"]),
        )


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def from_finite(value: float | None) -> float:
    """The inverse of `finite`, with NaN for None."""
    return math.nan if value is None else float(value)


def without_nan(value: Any) -> Any:
    """`value` with None for each number inside that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return finite(value) if isinstance(value, float) else value
