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
from typing import Any

import numpy as np

from segcal.metrics import Interval
from segcal.metrics.drift import CONFIDENCE_EDGES, Drift, HoldoutProfile, measure_drift
from segcal.metrics.intervals import fraction_interval, t_margins
from segcal.metrics.report import to_plain
from segcal.metrics.scores import SCORES, Array, mean_of_known
from segcal.viz.page import Phrase, Section, write_sections
from segcal.viz.page.numbers import data_uri
from segcal.viz.plots import compared_shares, figure_png
from segcal.viz.tables import Cell, Table, csv_text, score_cell

_ACCURACY, _IOU, _DICE = SCORES["accuracy"], SCORES["class_iou"], SCORES["dice"]
TABLE = "expected.csv"
_LISTED = 500  # images in the table of the page
_LOW = 0.5  # expected IoU
_MANY = 2.0  # times the usual share of pixels below the threshold


@dataclass(frozen=True, eq=False)
class Promise:
    """What probabilities promise for each of M images (M,), or for all together ().

    They are NaN where a class is predicted nowhere, and where there is no threshold.
    """

    accuracy: Array  # (…) expected accuracy
    atc: Array  # (…) accuracy as ATC expects it
    coverage: Array  # (…) share of the pixels that the operating point accepts
    class_iou: Array  # (…, C) expected IoU
    class_dice: Array  # (…, C) expected Dice
    miou: Array  # (…) mean expected IoU of the classes that are predicted
    dice: Array  # (…) mean expected Dice of the classes that are predicted

    @classmethod
    def of(cls, sums: Mapping[str, Array]) -> Promise:
        """From sums over pixels, as `metrics.drift.prediction_sums` names them.

        Besides, `above` and `accepted` are the pixels above the threshold of ATC and of the
        operating point; NaN without one.
        """
        union, there = sums["predicted"] + sums["outside"], sums["predicted"] > 0
        iou = np.divide(sums["inside"], union, out=np.full(np.shape(union), np.nan), where=there)
        dice = _dice(iou)
        return Promise(
            accuracy=sums["confidence"] / sums["pixels"],
            atc=sums["above"] / sums["pixels"],
            coverage=sums["accepted"] / sums["pixels"],
            class_iou=iou,
            class_dice=dice,
            miou=mean_of_known(iou),
            dice=mean_of_known(dice),
        )


@dataclass(frozen=True, eq=False)
class Expected(Promise):
    """What calibrated probabilities promise for all of M images together."""

    names: tuple[str, ...]  # of the images
    class_names: tuple[str, ...]
    sums: Mapping[str, Array]  # the sums of each image, (M, …); see `Promise.of`
    operate: str = ""  # the operating point, such as accuracy=0.99
    profile: HoldoutProfile | None = None  # of the hold-out, if it is known
    multilabel: bool = False  # whether the outputs are sigmoids
    reused: int = 0  # how many of the images had been written before
    skipped: tuple[str, ...] = ()  # names of images that were left out

    @classmethod
    def of(cls, sums: Mapping[str, Array], **more: Any) -> Expected:
        """From the sums of each image."""
        total = {name: values.sum(0) for name, values in sums.items()}
        return cls(**vars(Promise.of(total)), sums=sums, **more)

    @cached_property
    def each(self) -> Promise:
        """The same of each image, (M,)."""
        return Promise.of(self.sums)

    @cached_property
    def class_shares(self) -> Array:
        """(M, C) share of the pixels of each image that are predicted as each class."""
        share = len(self.class_names) if self.multilabel else 1
        return share * self.sums["predicted"] / self.sums["pixels"][:, None]

    @cached_property
    def drift(self) -> Drift | None:
        """How unlike the hold-out the images are; None where no hold-out is known."""
        if self.profile is None:
            return None
        confidence = self.sums["bins"] / self.sums["pixels"][:, None]
        return measure_drift(self.profile, confidence, self.class_shares)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals over images: accuracy, atc, miou, dice, and iou:CLASS, dice:CLASS."""
        sums = self.sums
        fractions = {"accuracy": (sums["confidence"], sums["pixels"])}
        if not math.isnan(self.atc):
            fractions["atc"] = sums["above"], sums["pixels"]
        union = sums["predicted"] + sums["outside"]
        for c in np.flatnonzero(np.isfinite(self.class_iou)):
            fractions[f"iou:{self.class_names[c]}"] = sums["inside"][:, c], union[:, c]
        known = {}
        for name, fraction in fractions.items():
            interval = fraction_interval(*fraction)
            if interval is None:
                continue
            known[name] = interval
            if name.startswith("iou:"):
                low, high = _dice(np.array([interval.low, interval.high])).tolist()
                known[f"dice:{name[4:]}"] = Interval(low, high)
        if len(self.names) > 1 and not math.isnan(self.miou):
            # Jackknife: what is expected of all images but one.
            without = Promise.of({name: values.sum(0) - values for name, values in sums.items()})
            for name in ("miou", "dice"):
                value = float(getattr(self, name))
                down, up = t_margins((value - getattr(without, name))[None], plain=True)[:, 0]
                known[name] = Interval(max(value - down, 0.0), min(value + up, 1.0))
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
                share = _ACCURACY.brief(float(below[i]))
                parts.append(f"{share} of the pixels below the threshold")
            if np.isinf(iou[i, weakest]):
                parts.append("no class is predicted")
            elif iou[i, weakest] < _LOW or not parts:
                value = _ACCURACY.brief(float(iou[i, weakest]))
                parts.append(f"expected IoU of {self.class_names[weakest]} is {value}")
            found.append("; ".join(parts))
        return found

    def __repr__(self) -> str:
        return f"Expected({self.describe()})"

    def describe(self) -> str:
        """The same in a few lines, for a terminal."""
        main = []
        for name, text in (("accuracy", "accuracy"), ("atc", "by ATC"), ("miou", "mIoU")):
            if not math.isnan(getattr(self, name)):
                cell = score_cell(_ACCURACY, getattr(self, name), self.intervals.get(name))
                main.append(f"{text} {cell.text} % {cell.note}".strip())
        order = np.argsort(self.class_iou, kind="stable")[: np.isfinite(self.class_iou).sum()]
        classes = [f"{self.class_names[c]} {_ACCURACY.brief(self.class_iou[c])}" for c in order[:8]]
        lines = [
            f"expected of {len(self.names)} images, as far as the calibration holds for them: "
            f"{', '.join(main)}",
            f"lowest expected IoU: {', '.join(classes)}",
        ]
        if self.operate:
            share = _ACCURACY.brief(float(self.coverage))
            lines.append(f"accepted at {self.operate}: {share} of the pixels")
        first = [f"{self.names[i]} ({self.reasons[i]})" for i in self.review[:3]]
        lines.append(f"review first: {', '.join(first)}")
        return "\n".join([*lines, *([f"drift: {self.describe_drift()}"] if self.drift else [])])

    def describe_drift(self) -> str:
        """Whether the images are unlike the hold-out, in one line; empty where that is unknown."""
        if self.drift is None:
            return ""
        drift = self.drift
        kinds = zip(("confidence", "classes"), drift.distances, drift.limits, strict=True)
        far = [f"{kind} {d:.3f} (by chance up to {limit:.3f})" for kind, d, limit in kinds]
        return (
            f"the images together are {'unlike' if drift.alarm else 'like'} the hold-out: the "
            f"distance in {', in '.join(far)}. {int(drift.unlike.any(0).sum())} of "
            f"{len(self.names)} images are unlike it by themselves; by chance about "
            f"{drift.image_rate * len(self.names):.0f} would be"
        )

    # Files ---------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """All images together, and each image, the one to look at first on top."""
        headings = ["image", "pixels", "expected_accuracy", "atc", "expected_miou", "expected_dice"]
        headings += ["accepted", "drift_confidence", "drift_classes", "reason"]
        headings += [f"expected_iou:{name}" for name in self.class_names]
        each, pixels = self.each, self.sums["pixels"]
        columns = np.stack([pixels, each.accuracy, each.atc, each.miou, each.dice, each.coverage])
        total = [pixels.sum(), self.accuracy, self.atc, self.miou, self.dice, self.coverage]
        far, of_set = np.full((2, len(pixels)), math.nan), [math.nan] * 2
        if self.drift is not None:
            far, of_set = self.drift.image_distances, self.drift.distances.tolist()
        rows = [["(all images)", *total, *of_set, "", *self.class_iou]]
        for i in self.review:
            mine = [*columns[:, i], *far[:, i]]
            rows.append([self.names[i], *mine, self.reasons[i], *each.class_iou[i]])
        return csv_text(headings, rows)

    def to_json(self) -> str:
        """What is expected of all images together, with intervals, and the drift."""
        drift = self.drift
        found: dict[str, Any] = {
            "images": len(self.names),
            "pixels": int(self.sums["pixels"].sum()),
            **{name: getattr(self, name) for name in ("accuracy", "atc", "miou", "dice")},
            "class_iou": dict(zip(self.class_names, self.class_iou.tolist(), strict=True)),
            "class_dice": dict(zip(self.class_names, self.class_dice.tolist(), strict=True)),
            "intervals": self.intervals,
            "operate": self.operate,
            "accepted": self.coverage,
            "drift": None,
        }
        if drift is not None:
            unlike = [self.names[i] for i in np.flatnonzero(drift.unlike.any(0))]
            distances = {"distances": drift.distances, "limits": drift.limits}
            found["drift"] = {"alarm": drift.alarm, **distances, "unlike_images": unlike}
        return json.dumps(to_plain(found), indent=1, allow_nan=False) + "\n"

    def class_table(self) -> Table:
        """Expected IoU and Dice by class, and its share of the pixels here and on the hold-out."""
        headings = ["class", f"expected {_IOU.heading}", f"expected {_DICE.heading}"]
        headings.append("share of the pixels (%)")
        shares = [self.class_shares.mean(0)]
        if self.profile is not None:
            headings.append("share on the hold-out (%)")
            shares.append(self.profile.classes.mean(0))
        rows = []
        for c, name in enumerate(self.class_names):
            iou, dice = (self.intervals.get(f"{kind}:{name}") for kind in ("iou", "dice"))
            cells = [score_cell(_IOU, self.class_iou[c], iou)]
            cells += [score_cell(_IOU, self.class_dice[c], dice)]
            rows.append((name, cells + [score_cell(_ACCURACY, share[c]) for share in shares]))
        return Table("Expected by class", headings, rows)

    def review_table(self) -> Table:
        """The images, the one to look at first on top, with the reason."""
        accuracy, miou = (f"expected {SCORES[name].heading}" for name in ("accuracy", "miou"))
        columns = {accuracy: self.each.accuracy, miou: self.each.miou}
        if not math.isnan(self.atc):
            columns["accuracy by ATC (%)"] = self.each.atc
        if self.operate:
            columns[f"accepted at {self.operate} (%)"] = self.each.coverage
        rows = []
        for i in self.review[:_LISTED]:
            cells = [score_cell(_ACCURACY, values[i]) for values in columns.values()]
            rows.append((self.names[i], [*cells, Cell(self.reasons[i])]))
        notes = [f"{TABLE} lists all {len(self.names)} images."] * (len(rows) < len(self.names))
        return Table("Images to review", ["image", *columns, "reason"], rows, notes)

    def write_page(
        self, path: Path, title: str, gallery: Mapping[str, str], palette: Array
    ) -> None:
        """Write the page.

        Args:
            path: its file.
            title: its heading.
            gallery: data URIs of pictures to review, by caption.
            palette: (C, 3) the colours of the classes in them.
        """
        accuracy, miou = (_ACCURACY.brief(float(x)) for x in (self.accuracy, self.miou))
        headline = [
            Phrase(f"Expected accuracy {accuracy}, expected mIoU {miou}", "even"),
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
        lead = (
            "What calibrated confidence promises for each predicted class. In brackets, 95 % "
            "intervals over images. Choose a heading to sort."
        )
        sections = [Section("classes", "Classes", lead, [self.class_table()])]
        if self.drift is not None and self.profile is not None:
            kind, unlike = ("over", "unlike") if self.drift.alarm else ("even", "like")
            headline += [Phrase(" They are "), Phrase(f"{unlike} the hold-out", kind), Phrase(".")]
            edges = [f"{100 * edge:.4g}" for edge in CONFIDENCE_EDGES]
            bins = [f"{low} to {high} %" for low, high in pairwise(edges)]
            confidence = self.sums["bins"] / self.sums["pixels"][:, None]
            figures = {}
            for caption, names, here, known in (
                ("Pixels by confidence", bins, confidence, self.profile.confidence),
                ("Pixels by class", self.class_names, self.class_shares, self.profile.classes),
            ):
                bars = {"these images": here.mean(0), "hold-out": known.mean(0)}
                draw = partial(compared_shares, bars, names, "pixels (%)")
                figures[caption] = data_uri(figure_png(draw, dpi=110), "image/png")
            lead = f"T{self.describe_drift()[1:]}."
            sections.append(Section("drift", "Drift", lead, (), figures))
        if gallery:
            lead = (
                "The first images to review: the image, the predicted classes, paler where the "
                "confidence is lower, and in red where it is low."
            )
            there = np.flatnonzero(np.isfinite(self.class_iou))
            key = {self.class_names[c]: f"rgb{tuple(palette[c].tolist())}" for c in there}
            sections.append(Section("gallery", "Gallery", lead, (), gallery, key))
        after = ", after images unlike the hold-out, for which no expectation holds"
        lead = (
            f"The lowest expected accuracy comes first{after if self.drift else ''}. The reason "
            "names the weakest class."
        )
        sections.append(Section("review", "Review", lead, [self.review_table()]))
        write_sections(path, sections, title=title, headline=headline, tiles=tiles)


def _dice(iou: Array) -> Array:
    return 2 * iou / (1 + iou)
