"""`Report`: the sums of an evaluation, the scores computed from them, and the protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from segcal.files import atomic_write, utf8
from segcal.metrics import rows
from segcal.metrics.conformal import ClassSets
from segcal.metrics.operating import OperatingPoint
from segcal.metrics.protocols import PROTOCOL_SCORES, check_protocols
from segcal.metrics.scores import SCORES, Array, ScoreTable
from segcal.metrics.tables import (
    BinTable,
    ClassHistogram,
    FineHistogram,
    ImageScore,
    ImageStatistics,
    Interval,
    Protocol,
    finite,
    from_finite,
    frozen_array,
    require_sums,
)

_FORMAT = "segcal-report"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Report(ScoreTable):
    """The calibration and accuracy of one model on one data set.

    It holds sums. Every score of `scores.ScoreTable` is an attribute that is computed from them, a
    fraction, and every diagram can be drawn from the saved file alone.

    Attributes:
        protocol: how the numbers were measured.
        top: (B,) table of the predicted class: its probability, and how often it is the label.
        classes: (K, B) table of every class: its probability, and how often it is the label.
        fine: fine histogram of top-label confidence, for correct and for wrong predictions.
        confusion: (K, K) pixels of label (row) and prediction (column); for `multilabel`
            (K, 2, 2), of each class by itself.
        nll_sum: sum over pixels of -log p_y.
        brier_sum: sum over pixels of |p - onehot(y)|².
        class_names: K names, or None.
        images: statistics over images, or None if the sums of each image were not kept.
        regions: reports of regions of the same images, by name.
        protocols: scores of the same predictions under other protocols, by the name of the protocol
            and of the score; see `segcal.metrics.protocols`.
        operating_points: thresholds of confidence that were chosen on a hold-out.
        class_sets: class sets whose miss rate was promised on a hold-out.
        class_fine: fine histogram by predicted class; None in reports of earlier versions and of
            more than 256 classes.
    """

    protocol: Protocol
    top: BinTable
    classes: BinTable
    fine: FineHistogram
    confusion: Array
    nll_sum: float
    brier_sum: float
    class_names: tuple[str, ...] | None = None
    images: ImageStatistics | None = None
    regions: Mapping[str, Report] = field(default_factory=dict)
    protocols: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    operating_points: tuple[OperatingPoint, ...] = ()
    class_sets: tuple[ClassSets, ...] = ()
    class_fine: ClassHistogram | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "confusion", frozen_array(self.confusion, np.int64))
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(map(utf8, self.class_names)))

    @property
    def scores(self) -> dict[str, float]:
        """Every score of all pixels by name, as fractions."""
        return self._scores("pixels")

    def _scores(self, scope: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name, s in SCORES.items() if s.scope == scope}

    @property
    def overlap(self) -> tuple[Array, Array, Array]:
        """(K,) pixels of each class: correctly predicted, predicted, and in the truth."""
        if self.protocol.multilabel:
            present = self.confusion[:, 1]  # (K, 2)
            return present[:, 1], self.confusion[:, :, 1].sum(1), present.sum(1)
        return self.confusion.diagonal(), self.confusion.sum(0), self.confusion.sum(1)

    @property
    def intervals(self) -> Mapping[str, Interval]:
        """Confidence intervals by score name; empty unless the sums of each image were kept."""
        return {} if self.images is None else self.images.intervals

    @property
    def worst_images(self) -> tuple[ImageScore, ...]:
        """The worst calibrated images, worst first; empty unless their sums were kept."""
        return () if self.images is None else self.images.worst

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings. NaN becomes None, as JSON has no NaN."""
        return {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "protocol": asdict(self.protocol),
            # For readers of the file; `from_dict` computes the scores again from the sums.
            "scores": {name: finite(value) for name, value in self.scores.items()},
            "class_scores": {
                name.removeprefix("class_"): [finite(x) for x in values.tolist()]
                for name, values in self._scores("classes").items()
            },
            "class_names": None if self.class_names is None else list(self.class_names),
            "top": _arrays(self.top),
            "classes": _arrays(self.classes),
            "fine": _arrays(self.fine),
            "class_fine": None if self.class_fine is None else _arrays(self.class_fine),
            "confusion": self.confusion.tolist(),
            "nll_sum": self.nll_sum,
            "brier_sum": self.brier_sum,
            "images": None if self.images is None else self.images.to_dict(),
            "regions": {name: report.to_dict() for name, report in self.regions.items()},
            "protocols": {
                name: {score: finite(value) for score, value in found.items()}
                for name, found in self.protocols.items()
            },
            "operating_points": [point.to_dict() for point in self.operating_points],
            "class_sets": [sets.to_dict() for sets in self.class_sets],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`.

        Raises:
            ValueError: `data` is not the dict of a report.
        """
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"Expected a report with format {_FORMAT!r}, but got something else")
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"Expected format_version {FORMAT_VERSION}, but got {data.get('format_version')!r}"
            )
        try:
            names, images = data["class_names"], data["images"]
            by_class = data.get("class_fine")
            report = cls(
                protocol=Protocol(**data["protocol"]),
                top=BinTable(**data["top"]),
                classes=BinTable(**data["classes"]),
                fine=FineHistogram(**data["fine"]),
                confusion=data["confusion"],
                nll_sum=float(data["nll_sum"]),
                brier_sum=float(data["brier_sum"]),
                class_names=None if names is None else tuple(names),
                images=None if images is None else ImageStatistics.from_dict(images),
                regions={n: cls.from_dict(part) for n, part in data["regions"].items()},
                protocols={
                    name: {score: from_finite(found[score]) for score in PROTOCOL_SCORES}
                    for name, found in data.get("protocols", {}).items()
                },
                operating_points=tuple(
                    map(OperatingPoint.from_dict, data.get("operating_points", []))
                ),
                class_sets=tuple(map(ClassSets.from_dict, data.get("class_sets", []))),
                class_fine=None if by_class is None else ClassHistogram(**by_class),
            )
            report._check_sums()
            check_protocols(report.protocols)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"Expected a complete report, but got {error!r}") from None
        return report

    def _check_sums(self) -> None:
        """Raise a ValueError unless all tables have the sizes that the protocol states."""
        p = self.protocol
        for value in (p.num_classes, p.num_bins, p.images, p.pixels):
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"Expected whole numbers in the protocol, but got {value!r:.60}")
        for text in (p.edge_rule, p.average, p.region, p.version):
            if not isinstance(text, str):
                raise ValueError(f"Expected text in the protocol, but got {text!r:.60}")
        k, b, f = p.num_classes, p.num_bins, self.fine.correct.size
        require_sums("edges", (b + 1,), self.top.edges, self.classes.edges)
        require_sums("top", (b,), *self.top.sums)
        require_sums("classes", (k, b), *self.classes.sums)
        if type(p.multilabel) is not bool:
            raise ValueError(f"Expected multilabel to be a bool, but got {p.multilabel!r}")
        require_sums("confusion", (k, 2, 2) if p.multilabel else (k, k), self.confusion)
        fine = self.fine
        require_sums("fine", (f,), fine.correct, fine.wrong, fine.confidence_sum, fine.edges[1:])
        if (by_class := self.class_fine) is not None:
            shape = (k, by_class.edges.size - 1)
            require_sums("class_fine", shape, by_class.correct, by_class.wrong)
            require_sums("class_fine", (shape[1],), by_class.edges[1:])
        if self.images is not None and len(self.images.class_ace) not in (0, k):
            raise ValueError(f"Expected {k} class_ace, but got {len(self.images.class_ace)}")
        if self.images is not None and len(self.images.bins) not in (0, b):
            raise ValueError(f"Expected gaps of {b} bins, but got {len(self.images.bins)}")
        if self.class_names is not None and len(self.class_names) != k:
            raise ValueError(f"Expected {k} class_names, but got {len(self.class_names)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, completely or not at all."""
        with atomic_write(path) as file:
            json.dump(self.to_dict(), file, allow_nan=False)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote.

        Raises:
            ValueError: the file is not a report; the message names it.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def to_markdown(self, name: str = "model") -> str:
        """A table of one row with units in the header, and a line with the protocol."""
        return rows.to_markdown({name: self})

    def to_csv(self, name: str = "model") -> str:
        """A header line with units and one row."""
        return rows.to_csv({name: self})


def _arrays(table: BinTable | FineHistogram | ClassHistogram) -> dict[str, Any]:
    return {name: array.tolist() for name, array in vars(table).items()}
