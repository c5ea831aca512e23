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
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

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
class Promise:
    """What probabilities promise, from sums over pixels: of images (M,), or of all together ().

    Properties follow the formulas above. They are NaN where a class is predicted nowhere, and
    where there is no threshold.

    Attributes:
        pixels: (…) pixels; of C sigmoid outputs, C times as many.
        confidence: (…) sums over pixels of max_c p_c.
        predicted: (…, C) n_{ŷ=c}.
        inside: (…, C) Σ_{ŷ=c} p_c.
        outside: (…, C) Σ_{ŷ≠c} p_c.
        above: (…) pixels above the threshold of ATC; NaN without one.
        accepted: (…) pixels above the threshold of the operating point; NaN without one.
    """

    pixels: Array
    confidence: Array
    predicted: Array
    inside: Array
    outside: Array
    above: Array
    accepted: Array

    @property
    def accuracy(self) -> Array:
        """(…) expected accuracy."""
        return self.confidence / self.pixels

    @property
    def atc(self) -> Array:
        """(…) accuracy as ATC expects it."""
        return self.above / self.pixels

    @property
    def coverage(self) -> Array:
        """(…) share of the pixels that the operating point accepts."""
        return self.accepted / self.pixels

    @property
    def class_iou(self) -> Array:
        """(…, C) expected IoU."""
        empty = np.full(np.shape(self.inside), np.nan)
        union = self.predicted + self.outside
        return np.divide(self.inside, union, out=empty, where=self.predicted > 0)

    @property
    def class_dice(self) -> Array:
        """(…, C) expected Dice."""
        return _dice(self.class_iou)

    @property
    def miou(self) -> Array:
        """(…) mean expected IoU of the classes that are predicted."""
        return mean_of_known(self.class_iou)

    @property
    def dice(self) -> Array:
        """(…) mean expected Dice of the classes that are predicted."""
        return mean_of_known(self.class_dice)


@dataclass(frozen=True, eq=False)
class Expected(Promise):
    """What calibrated probabilities promise for all of M images together.

    Attributes:
        names: of the images.
        class_names: C names.
        each: the same of each image, (M,).
        bins: (M, B) pixels by confidence, as in `HoldoutProfile`.
        operate: the operating point, such as accuracy=0.99; empty without one.
        profile: of the hold-out, if it is known.
        multilabel: whether the outputs are sigmoids.
        reused: how many of the images had been written before.
        skipped: names of images that were left out.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    each: Promise
    bins: Array
    operate: str = ""
    profile: HoldoutProfile | None = None
    multilabel: bool = False
    reused: int = 0
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, sums: Mapping[str, Array], **more: Any) -> Expected:
        """From the sums of each image, by the names of the attributes of `Promise`, and `bins`."""
        bins = sums["bins"]
        each = Promise(**{field.name: sums[field.name] for field in fields(Promise)})
        return cls(
            **{name: values.sum(0) for name, values in vars(each).items()},
            each=each,
            bins=bins,
            **more,
        )

    @cached_property
    def drift(self) -> Drift | None:
        """How unlike the hold-out the images are; None where no hold-out is known."""
        if self.profile is None:
            return None
        share = len(self.class_names) if self.multilabel else 1
        pixels = self.each.pixels[:, None]
        classes = self.each.predicted / (pixels / share)
        return measure_drift(self.profile, self.bins / pixels, classes)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals over images: accuracy, atc, miou, dice, and iou:CLASS, dice:CLASS."""
        each = self.each
        sums: dict[str, tuple[Array, Array]] = {"accuracy": (each.confidence, each.pixels)}
        if not math.isnan(self.atc):
            sums["atc"] = each.above, each.pixels
        union = each.predicted + each.outside
        for c in np.flatnonzero(self.predicted):
            sums[f"iou:{self.class_names[c]}"] = each.inside[:, c], union[:, c]
        found = {name: fraction_interval(*pair) for name, pair in sums.items()}
        known = {name: interval for name, interval in found.items() if interval is not None}
        for name, interval in [*known.items()]:
            if name.startswith("iou:"):
                low, high = _dice(np.array([interval.low, interval.high])).tolist()
                known[f"dice:{name[4:]}"] = Interval(low, high, interval.level)
        if len(self.names) > 1 and not math.isnan(self.miou):
            names = [field.name for field in fields(Promise)]
            without = Promise(*(getattr(self, name) - getattr(each, name) for name in names))
            for name in ("miou", "dice"):  # jackknife: over all images but one
                value = float(getattr(self, name))
                down, up = t_margins((value - getattr(without, name))[None], plain=True)[:, 0]
                known[name] = Interval(max(value - down, 0.0), min(value + up, 1.0), LEVEL)
        return known

    @property
    def review(self) -> list[int]:
        """The numbers of the images, the first to look at first.

        Those unlike the hold-out come first, as no expectation holds for them; then those with the
        lowest expected accuracy.
        """
        unlike = np.zeros(len(self.names), bool) if self.drift is None else self.drift.unlike.any(0)
        return np.lexsort((self.each.accuracy, ~unlike)).tolist()

    @cached_property
    def reasons(self) -> list[str]:
        """(M) why to look at each image.

        It is unlike the hold-out; or more than twice the usual share of its pixels is below the
        threshold of the operating point; or its weakest class has an expected IoU below a half. If
        nothing of this is so, the weakest class is named.
        """
        iou = np.nan_to_num(self.each.class_iou, nan=np.inf)
        below, usual = 1 - self.each.coverage, 1 - self.coverage
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

    def __repr__(self) -> str:
        return f"Expected({self.describe()})"

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
        far = [math.nan] * 2 if self.drift is None else [*self.drift.distances]
        rows = [["(all images)", *self._shares(self), *far, "", *self.class_iou]]
        shares, iou = self._shares(self.each), self.each.class_iou
        for i in self.review:
            if self.drift is not None:
                far = [*self.drift.image_distances[:, i]]
            mine = [share[i] for share in shares]
            rows.append([self.names[i], *mine, *far, self.reasons[i], *iou[i]])
        return csv_text(headings, rows)

    @staticmethod
    def _shares(of: Promise) -> list[Array]:
        return [of.pixels, of.accuracy, of.atc, of.miou, of.dice, of.coverage]

    def to_json(self) -> str:
        """What is expected of all images together, with intervals, and the drift."""
        drift = self.drift
        found = {
            "images": len(self.names),
            "pixels": int(self.pixels),
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
        share = self.predicted / self.pixels
        share = share * (len(self.class_names) if self.multilabel else 1)
        known = None if self.profile is None else self.profile.classes.mean(0)
        rows = []
        for c, name in enumerate(self.class_names):
            iou, dice = (self.intervals.get(f"{kind}:{name}") for kind in ("iou", "dice"))
            cells = [score_cell(_IOU, self.class_iou[c], iou)]
            cells += [score_cell(_IOU, self.class_dice[c], dice), score_cell(_ACCURACY, share[c])]
            cells += [] if known is None else [score_cell(_ACCURACY, known[c])]
            rows.append((name, cells))
        scores = [f"expected {SCORES[name].heading}" for name in ("class_iou", "dice")]
        headings = ["class", *scores, "share of the pixels (%)"]
        headings += [] if known is None else ["share on the hold-out (%)"]
        return Table("Expected by class", headings, rows)

    def review_table(self) -> Table:
        """The images, the one to look at first on top, with the reason."""
        each = self.each
        accuracy, miou = (f"expected {SCORES[name].heading}" for name in ("accuracy", "miou"))
        headings = ["image", accuracy, "by ATC (%)", miou, "reason"]
        if self.operate:
            headings.insert(4, f"accepted at {self.operate} (%)")
        rows = []
        for i in self.review[:_LISTED]:
            shares = [each.accuracy, each.atc, each.miou, *([each.coverage] * bool(self.operate))]
            cells = [score_cell(_ACCURACY, share[i]) for share in shares]
            rows.append((self.names[i], [*cells, Cell(self.reasons[i])]))
        notes = [f"{TABLE} lists all {len(self.names)} images."] * (len(rows) < len(self.names))
        return Table("Images to review", headings, rows, notes)

    def write_page(self, path: Path, title: str, gallery: Mapping[str, str]) -> None:
        """Write the page; the gallery has data URIs of pictures to review, by caption."""
        headline = [
            Phrase(f"Expected accuracy {self.accuracy:.1%}, expected mIoU {self.miou:.1%}", "even"),
            Phrase(f" of {len(self.names):,} images, as far as the calibration holds for them."),
        ]
        tiles = {
            label: score_cell(_ACCURACY, getattr(self, name), self.intervals.get(name))
            for name, label in (
                ("accuracy", "expected accuracy"),
                ("atc", "accuracy by ATC"),
                ("miou", "expected mIoU"),
                ("dice", "expected Dice"),
                ("coverage", f"accepted at {self.operate}"),
            )
            if not math.isnan(getattr(self, name))
        }
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
                ("Pixels by class", self.class_names, [self.each.predicted, self.profile.classes]),
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
