"""What calibrated probabilities promise for images without labels: numbers, tables, text.

    expected accuracy     mean of max_c p_c
    ATC                   share of pixels with max_c p_c above a threshold; see `metrics.drift`
    expected IoU of c     Σ_{ŷ=c} p_c / (n_{ŷ=c} + Σ_{ŷ≠c} p_c)
    expected Dice of c    2 Σ_{ŷ=c} p_c / (n_{ŷ=c} + Σ p_c)

They are right as far as the calibration is: labels alone can show that it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segcal.metrics import Interval
from segcal.metrics.drift import CONFIDENCE_EDGES, Drift, HoldoutProfile, measure_drift
from segcal.metrics.intervals import LEVEL, fraction_interval, t_margins
from segcal.metrics.report import to_plain
from segcal.metrics.scores import SCORES, Array, mean_of_known
from segcal.viz.page import Phrase, Section, write_sections
from segcal.viz.page.numbers import data_uri
from segcal.viz.plots import compared_shares, figure_png
from segcal.viz.tables import Cell, Table, csv_text, score_cell

_ACCURACY, _IOU = SCORES["accuracy"], SCORES["class_iou"]
TABLE = "expected.csv"
_LISTED = 500  # images in the table of the page
_LOW = 0.5  # expected IoU
_MANY = 2.0  # times the usual share of pixels below the threshold


@dataclass(frozen=True, eq=False)
class Expected:
    """What calibrated probabilities promise for M images; properties follow the formulas above.

    Attributes:
        names: of the images.
        class_names: C names.
        pixels: (M,) pixels; of C sigmoid outputs, C times as many.
        confidence: (M,) sums over pixels of max_c p_c.
        predicted: (M, C) n_{ŷ=c}.
        inside: (M, C) Σ_{ŷ=c} p_c.
        outside: (M, C) Σ_{ŷ≠c} p_c.
        bins: (M, B) pixels by confidence, as in `HoldoutProfile`.
        above: (M,) pixels above the threshold of ATC; 0 without a profile.
        accepted: (M,) pixels above the threshold of the operating point; 0 without one.
        operate: the operating point, such as accuracy=0.99; empty without one.
        profile: of the hold-out, if it is known.
        multilabel: whether the outputs are sigmoids.
        reused: how many of the images had been written before.
        skipped: names of images that were left out.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    pixels: NDArray[np.int64]
    confidence: NDArray[np.float64]
    predicted: NDArray[np.int64]
    inside: NDArray[np.float64]
    outside: NDArray[np.float64]
    bins: NDArray[np.int64]
    above: NDArray[np.int64]
    accepted: NDArray[np.int64]
    operate: str = ""
    profile: HoldoutProfile | None = None
    multilabel: bool = False
    reused: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """Expected accuracy of all pixels."""
        return float(self.confidence.sum() / self.pixels.sum())

    @property
    def image_accuracy(self) -> NDArray[np.float64]:
        """(M,) expected accuracy of each image."""
        return self.confidence / self.pixels

    @property
    def atc(self) -> float:
        """Accuracy of all pixels as ATC expects it; NaN without a profile."""
        return math.nan if self.profile is None else float(self.above.sum() / self.pixels.sum())

    @property
    def image_atc(self) -> NDArray[np.float64]:
        """(M,) accuracy of each image as ATC expects it."""
        known = 1.0 if self.profile is not None else math.nan
        return known * self.above / self.pixels

    @property
    def coverage(self) -> float:
        """Share of all pixels that the operating point accepts; NaN without one."""
        return float(self.accepted.sum() / self.pixels.sum()) if self.operate else math.nan

    @property
    def image_coverage(self) -> NDArray[np.float64]:
        """(M,) share of the pixels that the operating point accepts; NaN without one."""
        return (1.0 if self.operate else math.nan) * self.accepted / self.pixels

    @property
    def class_iou(self) -> NDArray[np.float64]:
        """(C,) expected IoU over all images; NaN for a class that is predicted nowhere."""
        return _iou(self.predicted.sum(0), self.inside.sum(0), self.outside.sum(0))

    @property
    def image_class_iou(self) -> NDArray[np.float64]:
        """(M, C) expected IoU in each image; NaN for a class that is not predicted in it."""
        return _iou(self.predicted, self.inside, self.outside)

    @property
    def class_dice(self) -> NDArray[np.float64]:
        """(C,) expected Dice over all images; NaN for a class that is predicted nowhere."""
        return _dice(self.class_iou)

    @property
    def image_class_dice(self) -> NDArray[np.float64]:
        """(M, C) expected Dice in each image; NaN for a class that is not predicted in it."""
        return _dice(self.image_class_iou)

    @property
    def miou(self) -> float:
        """Mean expected IoU of the classes that are predicted anywhere; NaN if none is."""
        return float(mean_of_known(self.class_iou))

    @property
    def dice(self) -> float:
        """Mean expected Dice of the classes that are predicted anywhere; NaN if none is."""
        return float(mean_of_known(self.class_dice))

    @cached_property
    def drift(self) -> Drift | None:
        """How unlike the hold-out the images are; None where no hold-out is known."""
        if self.profile is None:
            return None
        share = len(self.class_names) if self.multilabel else 1
        pixels = self.pixels[:, None]
        return measure_drift(self.profile, self.bins / pixels, self.predicted / (pixels / share))

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals over images: accuracy, atc, miou, dice, and iou:CLASS, dice:CLASS."""
        sums: dict[str, tuple[Array, Array]] = {"accuracy": (self.confidence, self.pixels)}
        if self.profile is not None:
            sums["atc"] = self.above, self.pixels
        union = self.predicted + self.outside
        for c in np.flatnonzero(self.predicted.sum(0)):
            sums[f"iou:{self.class_names[c]}"] = self.inside[:, c], union[:, c]
        found = {name: fraction_interval(*each) for name, each in sums.items()}
        known = {name: interval for name, interval in found.items() if interval is not None}
        for name, (low, high, level) in [(n, vars(i).values()) for n, i in known.items()]:
            if name.startswith("iou:"):
                ends = _dice(np.array([low, high]))
                known[f"dice:{name[4:]}"] = Interval(float(ends[0]), float(ends[1]), level)
        if len(self.names) > 1 and not math.isnan(self.miou):
            rest = [sums.sum(0) - sums for sums in (self.predicted, self.inside, self.outside)]
            without = _iou(*rest)  # (M, C) over all images but one
            for name, value, each in (
                ("miou", self.miou, without),
                ("dice", self.dice, _dice(without)),
            ):
                down, up = t_margins((value - mean_of_known(each))[None], plain=True)[:, 0]
                known[name] = Interval(max(value - down, 0.0), min(value + up, 1.0), LEVEL)
        return known

    @property
    def review(self) -> list[int]:
        """The numbers of the images, the first to look at first.

        Those unlike the hold-out come first, as no expectation holds for them; then those with the
        lowest expected accuracy.
        """
        unlike = np.zeros(len(self.names), bool) if self.drift is None else self.drift.unlike.any(0)
        return np.lexsort((self.image_accuracy, ~unlike)).tolist()

    @cached_property
    def reasons(self) -> list[str]:
        """(M) why to look at each image.

        It is unlike the hold-out; or more than twice the usual share of its pixels is below the
        threshold of the operating point; or its weakest class has an expected IoU below a half. If
        nothing of this is so, the weakest class is named.
        """
        iou = np.where(np.isnan(self.image_class_iou), np.inf, self.image_class_iou)
        below, usual = 1 - self.image_coverage, 1 - self.coverage
        found = []
        for i, weakest in enumerate(iou.argmin(1)):
            parts = []
            if self.drift is not None and self.drift.unlike[:, i].any():
                kinds = np.array(["confidence", "classes"])[self.drift.unlike[:, i]]
                parts.append(f"unlike the hold-out in {' and '.join(kinds)}")
            if below[i] > _MANY * usual:
                parts.append(f"{below[i]:.1%} of the pixels below the threshold")
            if iou[i, weakest] < _LOW or not parts:
                value = "none" if np.isinf(iou[i, weakest]) else f"{iou[i, weakest]:.1%}"
                parts.append(f"expected IoU of {self.class_names[weakest]} {value}")
            found.append("; ".join(parts))
        return found

    def describe(self) -> str:
        """The same in a few lines, for a terminal."""
        order = np.argsort(self.class_iou, kind="stable")[: np.isfinite(self.class_iou).sum()]
        classes = ", ".join(f"{self.class_names[c]} {self.class_iou[c]:.1%}" for c in order[:8])
        main = [f"accuracy {self.accuracy:.2%}{self._ends('accuracy')}"]
        main += [] if math.isnan(self.atc) else [f"by ATC {self.atc:.2%}{self._ends('atc')}"]
        main += [f"mIoU {self.miou:.2%}{self._ends('miou')}"]
        main += [f"Dice {self.dice:.2%}{self._ends('dice')}"]
        lines = [
            f"expected of {len(self.names)} images, as far as the calibration holds for them: "
            f"{', '.join(main)}",
            f"lowest expected IoU: {classes}",
        ]
        if self.operate:
            lines.append(f"accepted at {self.operate}: {self.coverage:.1%} of the pixels")
        first = [f"{self.names[i]} ({self.reasons[i]})" for i in self.review[:3]]
        lines.append(f"review first: {', '.join(first)}")
        return "\n".join([*lines, *([f"drift: {self.describe_drift()}"] if self.drift else [])])

    def describe_drift(self) -> str:
        """Whether the images are unlike the hold-out, in one line; empty where that is unknown."""
        if self.drift is None:
            return ""
        drift = self.drift
        kinds = zip(("confidence", "classes"), drift.distances, drift.limits, strict=True)
        far = ", in ".join(
            f"{kind} {d:.3f} (by chance up to {limit:.3f})" for kind, d, limit in kinds
        )
        return (
            f"the images together are {'unlike' if drift.alarm else 'like'} the hold-out: the "
            f"distance in {far}. {int(drift.unlike.any(0).sum())} of {len(self.names)} images are "
            f"unlike it by themselves; by chance about {drift.image_rate * len(self.names):.0f} "
            "would be"
        )

    def _ends(self, name: str) -> str:
        found = self.intervals.get(name)
        return "" if found is None else f" ({100 * found.low:.2f} to {100 * found.high:.2f})"

    # Files ---------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """All images together, and each image, the one to look at first on top."""
        headings = ["image", "pixels", "expected_accuracy", "atc", "expected_miou", "expected_dice"]
        headings += ["accepted", "drift_confidence", "drift_classes", "reason"]
        headings += [f"expected_iou:{name}" for name in self.class_names]
        known, unknown = self.drift, math.nan
        iou, dice = self.image_class_iou, self.image_class_dice
        means = [self.image_accuracy, self.image_atc, mean_of_known(iou), mean_of_known(dice)]
        far = [unknown, unknown] if known is None else known.distances
        rows = [
            ["(all images)", self.pixels.sum(), self.accuracy, self.atc, self.miou, self.dice]
            + [self.coverage, *far, "", *self.class_iou]
        ]
        for i in self.review:
            far = [unknown, unknown] if known is None else known.image_distances[:, i]
            shares = [*(mean[i] for mean in means), self.image_coverage[i], *far]
            rows.append([self.names[i], self.pixels[i], *shares, self.reasons[i], *iou[i]])
        return csv_text(headings, rows)

    def to_json(self) -> str:
        """What is expected of all images together, with intervals, and the drift."""
        drift = self.drift
        found = {
            "images": len(self.names),
            "pixels": int(self.pixels.sum()),
            **{name: getattr(self, name) for name in ("accuracy", "atc", "miou", "dice")},
            "class_iou": dict(zip(self.class_names, self.class_iou.tolist(), strict=True)),
            "class_dice": dict(zip(self.class_names, self.class_dice.tolist(), strict=True)),
            "intervals": self.intervals,
            "operate": self.operate,
            "accepted": self.coverage,
            "drift": None
            if drift is None
            else {
                "alarm": drift.alarm,
                "distances": drift.distances,
                "limits": drift.limits,
                "unlike_images": [self.names[i] for i in np.flatnonzero(drift.unlike.any(0))],
            },
        }
        return json.dumps(to_plain(found), indent=1, allow_nan=False) + "\n"

    def class_table(self) -> Table:
        """Expected IoU and Dice by class, and its share of the pixels here and on the hold-out."""
        share = self.predicted.sum(0) / self.pixels.sum()
        share = share * (len(self.class_names) if self.multilabel else 1)
        known = None if self.profile is None else self.profile.classes.mean(0)
        rows = []
        for c, name in enumerate(self.class_names):
            cells = [
                score_cell(_IOU, value, self.intervals.get(f"{kind}:{name}"))
                for kind, value in (("iou", self.class_iou[c]), ("dice", self.class_dice[c]))
            ]
            cells.append(score_cell(_ACCURACY, share[c]))
            rows.append(
                (name, cells + ([] if known is None else [score_cell(_ACCURACY, known[c])]))
            )
        scores = [f"expected {SCORES[name].heading}" for name in ("class_iou", "dice")]
        headings = ["class", *scores, "share of the pixels (%)"]
        headings += [] if known is None else ["share on the hold-out (%)"]
        return Table("Expected by class", headings, rows)

    def review_table(self) -> Table:
        """The images, the one to look at first on top, with the reason."""
        iou = mean_of_known(self.image_class_iou)
        accuracy, miou = (f"expected {SCORES[name].heading}" for name in ("accuracy", "miou"))
        headings = ["image", accuracy, "by ATC (%)", miou, "reason"]
        if self.operate:
            headings.insert(4, f"accepted at {self.operate} (%)")
        rows = []
        for i in self.review[:_LISTED]:
            shares = [self.image_accuracy[i], self.image_atc[i], iou[i]]
            shares += [self.image_coverage[i]] if self.operate else []
            cells = [score_cell(_ACCURACY, share) for share in shares]
            rows.append((self.names[i], [*cells, Cell(self.reasons[i])]))
        notes = [f"{TABLE} lists all {len(self.names)} images."] * (len(rows) < len(self.names))
        return Table("Images to review", headings, rows, notes)

    def write_page(self, path: Path, title: str, gallery: Mapping[str, str]) -> None:
        """Write the page.

        Args:
            path: the file.
            title: its heading.
            gallery: data URIs of pictures of images to review, by caption.
        """
        ends = {n: f"[{100 * i.low:.2f}, {100 * i.high:.2f}]" for n, i in self.intervals.items()}
        headline = [
            Phrase(f"Expected accuracy {self.accuracy:.1%}, expected mIoU {self.miou:.1%}", "even"),
            Phrase(f" of {len(self.names):,} images, as far as the calibration holds for them."),
        ]
        tiles = {
            label: Cell(f"{100 * getattr(self, name):.2f}", ends.get(name, ""))
            for name, label in (
                *[("accuracy", "expected accuracy"), ("atc", "accuracy by ATC")],
                *[("miou", "expected mIoU"), ("dice", "expected Dice")],
            )
            if not math.isnan(getattr(self, name))
        }
        if self.operate:
            tiles[f"accepted at {self.operate}"] = Cell(f"{100 * self.coverage:.2f}")
        sections = [
            Section(
                "classes",
                "Classes",
                "What calibrated confidence promises for each predicted class. In brackets, 95 % "
                "intervals over images. Choose a heading to sort.",
                [self.class_table()],
            )
        ]
        if self.drift is not None and self.profile is not None:
            kind = "over" if self.drift.alarm else "even"
            unlike = "unlike" if self.drift.alarm else "like"
            headline += [Phrase(" They are "), Phrase(f"{unlike} the hold-out", kind), Phrase(".")]
            edges = [f"{100 * edge:.4g}" for edge in CONFIDENCE_EDGES]
            bins = [f"{low} to {high} %" for low, high in pairwise(edges)]
            figures = {}
            for caption, names, shares in (
                ("Pixels by confidence", bins, [self.bins, self.profile.confidence]),
                ("Pixels by class", self.class_names, [self.predicted, self.profile.classes]),
            ):
                # Of each image alike, as in the distances.
                means = [(x / x.sum(1, keepdims=True).clip(1e-9)).mean(0) for x in shares]
                bars = dict(zip(("these images", "hold-out"), means, strict=True))
                draw = partial(compared_shares, bars, names, "pixels (%)")
                figures[caption] = data_uri(figure_png(draw, dpi=110), "image/png")
            lead = f"T{self.describe_drift()[1:]}."
            sections.append(Section("drift", "Drift", lead, (), figures))
        if gallery:
            lead = (
                "The first images to review: the image, the predicted classes, paler where the "
                "confidence is lower, and in red where it is low."
            )
            sections.append(Section("gallery", "Gallery", lead, (), gallery))
        lead = (
            "Images unlike the hold-out come first, as no expectation holds for them; then those "
            "with the lowest expected accuracy. The reason names the weakest class."
        )
        sections.append(Section("review", "Review", lead, [self.review_table()]))
        write_sections(path, sections, title=title, headline=headline, tiles=tiles)


def _dice(iou: Array) -> Array:
    return 2 * iou / (1 + iou)


def _iou(predicted: Array, inside: Array, outside: Array) -> Array:
    empty = np.full(inside.shape, np.nan)
    return np.divide(inside, predicted + outside, out=empty, where=predicted > 0)
