"""Objects: how many of those that a network shows are real, and whether its confidence says so.

The objects of a class are the connected components of its pixels, which share a side, or those of
instance maps. An object of a map has the class of more than half of its pixels.

*Matching.* Pairs of a predicted and a true object that overlap and meet the criterion of `MATCHES`
are taken one to one, those of the largest IoU first; where it is equal, those with more confidence,
then with the smaller objects. What is left is a false object, or a missed one.

*Ignored pixels* belong to no object: a strip of them cuts a predicted and a true component alike. A
predicted object that has more than half of its pixels there counts neither as real nor as false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage
from torch import Tensor

from segcal import distributed
from segcal.files import BadFile, Nifti, Npz, read_mask, read_npy
from segcal.metrics.intervals import ImageScores, combine, fraction_interval, resampled_weights
from segcal.metrics.report import (
    BinTable,
    FineHistogram,
    Interval,
    ObjectReport,
    ObjectScores,
    OperatingPoint,
)
from segcal.metrics.scores import Array, auroc, ratio
from segcal.metrics.sums import fine_edges
from segcal.metrics.triage import operating_point
from segcal.pixels import resolve_ignore_index

MATCHES = {
    "iou": "their IoU is at least the one that is asked for",
    "overlap": "they have a pixel in common",
    "centre": "the true object holds the centre of mass of the predicted one",
}
CONFIDENCES = {
    "mean": "the mean probability of the class over its pixels",
    "min": "the least probability of the class among its pixels",
    "border": "the mean over its pixels with a side on the outside",
    "score": "its number under `scores` in the file of the predicted instance map",
}
CALIBRATORS = ("ts", "beta", "isotonic")  # post-hoc methods that are monotone
GALLERY = 12  # false objects, and missed ones, that are kept to be drawn
_LARGEST = 2**24  # number of an object in an instance map
_SUFFIXES = (".npz", ".png", ".npy", ".nii.gz", ".nii")


@dataclass(frozen=True)
class ObjectRule:
    """What an object is, and when it is real."""

    classes: tuple[int, ...]  # the classes whose objects count
    match: str = "iou"  # a key of `MATCHES`
    iou: float = 0.5  # for the match "iou", in (0, 1]
    confidence: str = "mean"  # a key of `CONFIDENCES`
    min_size: int = 1  # predicted and true objects of fewer pixels are left out
    # Folders of true instance maps, called like the images: .png, .npy, NIfTI, or .npz with
    # `instances`; 0 is no object. Without them, true objects are components
    labels: Sequence[str | Path] = ()
    # Folders of predicted instance maps; .npz may have `scores` (M,) in 0..1 of the objects 1..M
    maps: Sequence[str | Path] = ()
    # The post-hoc method that makes probabilities of the confidences of objects, fitted on those of
    # the hold-out: ts, beta or isotonic; "" for none
    calibrate: str = ""

    def __post_init__(self) -> None:
        folders = [folder for folder in (*self.labels, *self.maps) if not Path(folder).is_dir()]
        wrong = {
            f"expected classes, but got {self.classes}": min(self.classes, default=-1) < 0,
            f"the least size must be at least 1, but is {self.min_size}": self.min_size < 1,
            f"the IoU must be above 0 and at most 1, but is {self.iou}": not 0 < self.iou <= 1,
            "the score needs predicted maps": self.confidence == "score" and not self.maps,
            f"there is no folder of instance maps at {', '.join(map(str, folders))}": folders,
        }
        known = {"match": MATCHES, "confidence": CONFIDENCES, "calibrate": ("", *CALIBRATORS)}
        for name, words in known.items():
            word, choices = getattr(self, name), ", ".join(filter(None, words))
            wrong[f"{name} must be one of {choices}, but is {word!r}"] = word not in words
        for problem, is_so in wrong.items():
            if is_so:
                raise ValueError(f"objects: {problem}")

    @classmethod
    def parse(cls, text: str, **options: Any) -> ObjectRule:
        """The rule of a text such as classes:1,2, with other attributes as options."""
        kind, _, numbers = text.partition(":")
        classes = numbers.replace("+", ",").split(",")
        if kind != "classes" or not all(number.strip().isdecimal() for number in classes):
            raise ValueError(f"Expected objects such as classes:1,2, but got {text!r}")
        return cls(tuple(dict.fromkeys(map(int, classes))), **options)

    def __str__(self) -> str:
        match = f"IoU of at least {self.iou:g}" if self.match == "iou" else self.match
        least = f", of {self.min_size} pixels or more" if self.min_size > 1 else ""
        classes = ", ".join(map(str, self.classes))
        return f"classes {classes}{least}; match by {match}; confidence: {self.confidence}"


# One object: `rank` is the confidence of a predicted one, and the size of a true one.
OBJECT = np.dtype(
    [("unit", "i4"), ("of_class", "i4"), ("number", "i4"), ("size", "i8"), ("real", "?")]
    + [("rank", "f8")]
)


class Crop(NamedTuple):
    """A false or a missed object, to be drawn."""

    rank: float  # confidence of a false object, size of a missed one
    image: str
    number: int  # in the map of predicted objects, or in that of true ones
    plane: int | None  # of a volume (D, H, W)
    box: tuple[slice, slice]
    predicted: Array  # (h, w) numbers of the predicted objects of the class in the box
    truth: Array


def predicted_objects(mask: Array, valid: Array, given: Array | None = None) -> Array:
    """(*S) numbers of the predicted objects of a class; 0 is none.

    `mask` and `valid` are (*S) bool: pixels that are predicted as the class, and those whose label
    is not ignored. `given` is (*S) numbers of an instance map.
    """
    ids = ndimage.label(mask)[0] if given is None else _of_class(given, mask)
    if valid.all():
        return ids
    counted = np.bincount(ids[valid], minlength=int(ids.max()) + 1)
    ids = np.where((2 * counted >= np.bincount(ids.ravel()))[ids] & valid, ids, 0)
    return ndimage.label(ids > 0)[0] if given is None else ids


def true_objects(mask: Array, valid: Array, given: Array | None = None) -> Array:
    """(*S) numbers of the true objects of a class, as `predicted_objects` has them."""
    return ndimage.label(mask)[0] if given is None else _of_class(given * valid, mask)


def _of_class(ids: Array, mask: Array) -> Array:
    """The objects of a map that have more than half of their pixels in the mask."""
    size = np.bincount(ids.ravel())
    return ids * (2 * np.bincount(ids[mask], minlength=len(size)) > size)[ids]


def match_objects(
    predicted: Array,
    truth: Array,
    probability: Array,
    rule: ObjectRule,
    scores: Array | None = None,
) -> tuple[Array, Array]:
    """Measure and match the objects of one class in one image.

    `predicted` and `truth` are (*S) numbers of objects, `probability` is that of the class, and
    `scores` (M,) are of the predicted objects 1..M, for the confidence "score". The results are
    (n,) predicted and (m,) true objects, of the dtype `OBJECT`.
    """
    at, t = np.flatnonzero(predicted > 0), truth.ravel()
    ids, under = predicted.ravel()[at].astype(np.int64), t[at]
    # Sizes and so on of the objects 0, 1, …, of which some may not be there
    size, true_size = np.bincount(ids), np.bincount(t[t > 0], minlength=1)
    p = probability.ravel()[at]
    if rule.confidence == "score":
        assert scores is not None
        sure = np.concatenate([[0.0], scores[: max(len(size) - 1, 0)]])
    elif rule.confidence == "min":
        sure = np.ones(len(size))
        np.minimum.at(sure, ids, p)
    else:
        owner, count = ids, size
        if rule.confidence == "border":
            kept = _on_border(predicted).ravel()[at]
            owner, p = ids[kept], p[kept]
            count = np.bincount(owner, minlength=len(size))
        sure = np.bincount(owner, p, len(size)) / np.maximum(count, 1)
    both = np.flatnonzero(under > 0)  # pairs that overlap are one number: i * width + j
    width = len(true_size)
    pairs, common = np.unique(ids[both] * width + under[both], return_counts=True)
    i, j = np.divmod(pairs, width)
    iou = common / (size[i] + true_size[j] - common)
    if rule.match != "overlap":
        centred = rule.match == "centre"
        kept = _holds_centre(predicted, truth, size, i, j) if centred else iou >= rule.iou
        i, j, iou = i[kept], j[kept], iou[kept]
    order = np.lexsort((true_size[j], size[i], -sure[i], -iou))
    real, found = np.zeros(len(size), bool), np.zeros(width, bool)
    for a, b in zip(i[order].tolist(), j[order].tolist(), strict=True):
        if not (real[a] or found[b]):
            real[a] = found[b] = True
    return _rows(size, sure.clip(0, 1), real), _rows(true_size, true_size, found)


def _rows(size: Array, rank: Array, real: Array) -> Array:
    """The objects whose size is not 0, of the dtype `OBJECT`."""
    number = np.flatnonzero(size)
    rows = np.zeros(len(number), OBJECT)
    rows["number"] = number
    rows["size"], rows["rank"], rows["real"] = size[number], rank[number], real[number]
    return rows


def _on_border(ids: Array) -> Array:
    """(*S) whether a side is on the outside of the object; what is outside the image is."""
    around = np.pad(ids, 1)
    inner = (slice(1, -1),) * ids.ndim
    turned = [np.roll(around, step, axis) for axis in range(ids.ndim) for step in (-1, 1)]
    return np.logical_or.reduce([each[inner] != ids for each in turned])


def _holds_centre(predicted: Array, truth: Array, size: Array, i: Array, j: Array) -> Array:
    """Whether the true object j holds the centre of the predicted object i, of each pair."""
    places = np.nonzero(predicted > 0)
    ids = predicted[places]
    centre = [np.bincount(ids, x, len(size))[i] / size[i] for x in places]
    # A centre between two pixels lies in both, so that a flip changes nothing.
    ends = [[np.ceil(c - 0.5).astype(int), np.floor(c + 0.5).astype(int)] for c in centre]
    return np.any([truth[corner] == j for corner in product(*ends)], 0)


class ObjectCounter:
    """The objects of a stream of images, 29 bytes each.

    `false` are the most confident false objects, and `missed` the largest missed ones. With
    `multilabel`, an object of a class is where its own probability is above one half.
    """

    def __init__(
        self,
        rule: ObjectRule,
        num_classes: int,
        ignore_index: int | None = None,
        *,
        multilabel: bool = False,
    ) -> None:
        if max(rule.classes) >= num_classes:
            raise ValueError(
                f"objects need classes below {num_classes}, but got {max(rule.classes)}"
            )
        self.rule, self._multilabel = rule, multilabel
        self._ignore_index = resolve_ignore_index(ignore_index, 2 if multilabel else num_classes)
        # Of each image: its name or that of its group, its predicted objects, and its true ones
        self._images: list[tuple[str, Array, Array]] = []
        self.false: list[Crop] = []
        self.missed: list[Crop] = []

    def update(
        self,
        probs: Tensor,
        labels: Tensor,
        names: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        """Count (N, C, *S) probabilities and (N, *S) labels, (N, C, *S) of sigmoid outputs.

        S is (H, W) or (D, H, W). Instance maps are found by the names of the images. Groups of
        images are the units of intervals; by default the images are.
        """
        if probs.ndim not in (4, 5):
            raise ValueError("objects need masks or volumes, not one label per image")
        if names is None and (self.rule.labels or self.rule.maps):
            raise ValueError("instance maps are found by name, but the images have no names")
        for n, (p, y) in enumerate(
            zip(probs.float().cpu().numpy(), labels.cpu().numpy(), strict=True)
        ):
            name = f"{distributed.rank()}:{len(self._images)}" if names is None else names[n]
            truth_map, _ = _read_map(self.rule.labels, name, p.shape[1:])
            map_, scores = _read_map(self.rule.maps, name, p.shape[1:])
            if self.rule.confidence == "score" and scores is None:
                raise BadFile(f"the predicted instance map of {name} has no scores")
            rows = []
            for c in self.rule.classes:
                if self._multilabel:
                    mask, label, true = p[c] > 0.5, y[c], y[c] == 1
                else:  # the first of the largest; several times as fast as argmax
                    mask = p[c] > p[:c].max(0, initial=-1)
                    mask &= p[c] >= p[c + 1 :].max(0, initial=-1)
                    label, true = y, y == c
                valid = label != self._ignore_index
                predicted = predicted_objects(mask, valid, map_)
                truth = true_objects(true, valid, truth_map)
                if self.rule.min_size > 1:
                    predicted, truth = (
                        ids * (np.bincount(ids.ravel()) >= self.rule.min_size)[ids]
                        for ids in (predicted, truth)
                    )
                rows.append(match_objects(predicted, truth, p[c], self.rule, scores))
                for each in rows[-1]:
                    each["of_class"] = c
                _keep(self.false, rows[-1][0], name, predicted, predicted, truth)
                _keep(self.missed, rows[-1][1], name, truth, predicted, truth)
            mine, theirs = map(np.concatenate, zip(*rows, strict=True))
            self._images.append((name if groups is None else groups[n], mine, theirs))

    def sync(self) -> None:
        """Gather the objects of all ranks."""
        parts = zip(*distributed.gathered((self._images, self.false, self.missed)), strict=True)
        self._images, self.false, self.missed = ([*chain(*each)] for each in parts)
        _shorten(self.false)
        _shorten(self.missed)

    def by_unit(self) -> list[tuple[Array, Array]]:
        """(n,) confidences of the predicted objects and whether they are real, of each unit.

        A unit is an image, or the images of a group.
        """
        rows, _, _ = self._rows()
        rows = rows[np.argsort(rows["unit"], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(rows["unit"])) + 1)
        return [(part["rank"], part["real"]) for part in parts if len(part)]

    def compute(
        self,
        confidence: Callable[[Array], Array] | None = None,
        *,
        name: str = "none",
        num_bins: int = 15,
        resamples: int = 1000,
    ) -> ObjectReport:
        """The scores of all objects, and by class and by size.

        `confidence` is the map that calibrates (n,) confidences, if there is one, and `name` what
        the report calls it. Images are drawn `resamples` times for the intervals of ECE and AUROC.
        """
        predicted, true, units = self._rows(confidence)
        groups: dict[str, tuple[str, float, float]] = {}  # a field, above one number, up to another
        if len(self.rule.classes) > 1:
            groups |= {f"class {c}": ("of_class", c - 1, c) for c in self.rule.classes}
        if len(true):
            thirds = np.quantile(true["size"], (1 / 3, 2 / 3), method="lower").astype(int)
            low, high = thirds.tolist()
            groups[f"up to {low} pixels"] = "size", 0, low
            groups[f"{low + 1} to {high} pixels"] = "size", low, high
            groups[f"above {high} pixels"] = "size", high, np.inf
        parts = []
        for text, (field, least, most) in groups.items():
            some, of = (x[(x[field] > least) & (x[field] <= most)] for x in (predicted, true))
            if len(some) or len(of):
                parts.append(_scores(text, some, of, units, num_bins))
        edges = fine_edges().numpy()
        place = np.searchsorted(edges[1:-1], predicted["rank"])
        weights = predicted["real"], ~predicted["real"], predicted["rank"]
        return ObjectReport(
            calibration=name,
            rule=str(self.rule),
            images=len(self._images),
            whole=_scores("all", predicted, true, units, num_bins, resamples),
            parts=tuple(parts),
            fine=FineHistogram(edges, *(np.bincount(place, w, len(edges) - 1) for w in weights)),
        )

    def point(
        self,
        target: str,
        threshold: float | None,
        holdout: ObjectReport,
        confidence: Callable[[Array], Array] | None = None,
    ) -> OperatingPoint:
        """What a threshold of confidence gives here, beside what it gave on the hold-out.

        `accuracy` is the precision of the accepted objects, and `coverage` the recall: the share of
        the true objects that they find.
        """
        predicted, true, units = self._rows(confidence)
        above = np.inf if threshold is None else threshold
        taken = predicted[predicted["rank"] > above]
        right, kept, truth = (
            np.bincount(rows["unit"], minlength=units)
            for rows in (taken[taken["real"]], taken, true)
        )
        precision, recall = holdout.above(above)
        return operating_point(
            target, threshold, holdout.images, (recall, precision), (right, truth), (right, kept)
        )

    def _rows(self, confidence: Callable[[Array], Array] | None = None) -> tuple[Array, Array, int]:
        """All predicted and all true objects, and the number of units that they are of."""
        names = [name for name, _, _ in self._images]
        kinds, unit = np.unique(np.array(names, str), return_inverse=True)
        found = []
        for kind in (1, 2):
            parts = [image[kind] for image in self._images]
            found.append(np.concatenate([np.zeros(0, OBJECT), *parts]))
            found[-1]["unit"] = np.repeat(unit, [len(part) for part in parts])
        if confidence is not None:
            found[0]["rank"] = confidence(found[0]["rank"])
        return found[0], found[1], len(kinds)


def _scores(
    name: str, predicted: Array, true: Array, units: int, num_bins: int, resamples: int = 0
) -> ObjectScores:
    """The scores of some objects of so many units."""
    unit, real, sure = predicted["unit"], predicted["real"].astype(float), predicted["rank"]
    edges = np.linspace(0, 1, num_bins + 1)
    place = np.searchsorted(edges[1:-1], sure)  # bins (lo, hi]
    rank = np.unique(sure, return_inverse=True)[1]
    count, hits, wrong = (np.bincount(unit, w, units) for w in (None, real, (sure - real) ** 2))
    sums = {
        "precision": (hits, count),
        "recall": tuple(np.bincount(true["unit"], w, units) for w in (true["real"], None)),
        "brier": (wrong, count),
    }
    intervals = {score: fraction_interval(*each) for score, each in sums.items()}
    held = np.flatnonzero(count)
    if resamples and len(held) > 1:
        gap = np.bincount(unit * num_bins + place, sure - real, units * num_bins)
        gap, n, h = gap.reshape(-1, num_bins)[held], count[held], hits[held]
        one = {"class_gap": gap, "class_pixels": n, "intersection": h, "predicted": n, "truth": n}
        model = ImageScores(
            {"top_gap": gap, "pixels": n, "hits": h, **{k: x[:, None] for k, x in one.items()}}
        )
        intervals["ece"] = combine([model], [1.0], resamples=resamples, seed=0)["ece"].interval
        areas = [
            auroc(*(np.bincount(rank, weights[unit] * w) for w in (real, 1 - real)))
            for block in resampled_weights(units, resamples, 0)
            for weights in block
        ]
        if np.isfinite(areas).all():
            intervals["auroc"] = Interval(*np.quantile(areas, [0.025, 0.975]).tolist())
    return ObjectScores(
        name=name,
        truth=len(true),
        found=int(true["real"].sum()),
        top=BinTable(edges, *(np.bincount(place, w, num_bins) for w in (None, real, sure))),
        brier=float(ratio(wrong.sum(), len(predicted))),
        auroc=auroc(np.bincount(rank, real), np.bincount(rank, 1 - real)),
        intervals={score: each for score, each in intervals.items() if each is not None},
    )


def _keep(
    kept: list[Crop], objects: Array, name: str, ids: Array, predicted: Array, truth: Array
) -> None:
    """Add the objects of an image that are not real to those drawn, if they are of higher rank."""
    least = kept[-1].rank if len(kept) == GALLERY else -1.0
    objects = objects[~objects["real"] & (objects["rank"] > least)]
    objects = objects[np.argsort(-objects["rank"], kind="stable")][:GALLERY]
    boxes = ndimage.find_objects(ids) if len(objects) else []
    for one in objects:
        number, around, plane = int(one["number"]), boxes[one["number"] - 1], None
        if ids.ndim == 3:  # the plane with most of it
            plane = around[0].start + int((ids[around] == number).sum((1, 2)).argmax())
        side = max(48, *(2 * (part.stop - part.start) for part in around[-2:]))
        starts = [
            max(0, min((part.start + part.stop - side) // 2, n - side))
            for part, n in zip(around[-2:], ids.shape[-2:], strict=True)
        ]
        box = slice(starts[0], starts[0] + side), slice(starts[1], starts[1] + side)
        seen = ((each if plane is None else each[plane])[box].copy() for each in (predicted, truth))
        kept.append(Crop(float(one["rank"]), name, number, plane, box, *seen))
    _shorten(kept)


def _shorten(kept: list[Crop]) -> None:
    kept.sort(key=lambda crop: -crop.rank)
    del kept[GALLERY:]


def _read_map(
    folders: Sequence[str | Path], name: str, shape: tuple[int, ...]
) -> tuple[Array | None, Array | None]:
    """The instance map of an image, and the scores of its objects; None where there are none."""
    if not folders:
        return None, None
    files = [Path(folder) / f"{name}{suffix}" for folder in folders for suffix in _SUFFIXES]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise BadFile(f"there is no instance map of {name} in {', '.join(map(str, folders))}")
    scores = None
    if path.suffix == ".npz":
        with Npz(path) as arrays:
            ids = arrays["instances"]
            scores = arrays["scores"] if "scores" in arrays.keys else None
    elif path.suffix == ".npy":
        ids = read_npy(path)
    else:
        ids = read_mask(path) if path.suffix == ".png" else Nifti(path).read()
    if ids.shape != shape:
        raise BadFile(f"{path}: the instance map has the shape {ids.shape}, the labels {shape}")
    whole = ids.dtype.kind in "biuf" and (ids == ids.round()).all()  # NIfTI may hold floats
    if not whole or ids.min() < 0 or ids.max() >= _LARGEST:
        raise BadFile(f"{path}: an instance map holds whole numbers from 0 to {_LARGEST - 1}")
    most = int(ids.max())
    if scores is not None and (
        scores.ndim != 1 or len(scores) < most or not ((scores >= 0) & (scores <= 1)).all()
    ):
        raise BadFile(f"{path}: expected ({most},) scores from 0 to 1, but got {scores.shape}")
    return ids.astype(np.int64), scores
