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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
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
        known = {"match": MATCHES, "confidence": CONFIDENCES, "calibrate": ("", *CALIBRATORS)}
        for name, words in known.items():
            if getattr(self, name) not in words:
                raise ValueError(
                    f"The {name} of objects is {getattr(self, name)!r}, but must be one of "
                    f"{', '.join(filter(None, words))}"
                )
        folders = [folder for folder in (*self.labels, *self.maps) if not Path(folder).is_dir()]
        wrong = ""
        if not self.classes or min(self.classes) < 0:
            wrong = f"Expected classes, but got {self.classes}"
        elif self.min_size < 1:
            wrong = f"The least size must be at least 1, but is {self.min_size}"
        elif not 0 < self.iou <= 1:
            wrong = f"The IoU must be above 0 and at most 1, but is {self.iou}"
        elif self.confidence == "score" and not self.maps:
            wrong = "The score needs predicted maps"
        elif folders:
            wrong = f"There is no folder of instance maps at {folders[0]}"
        if wrong:
            raise ValueError(f"{wrong} (objects)")

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
    [("image", "i4"), ("of_class", "i4"), ("number", "i4"), ("size", "i8"), ("real", "?")]
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
    p, t = predicted.ravel(), truth.ravel()
    at = np.flatnonzero(p > 0)
    ids, inside = p[at].astype(np.int64), t[at]
    size, true_size = np.bincount(ids), np.bincount(t[t > 0], minlength=1)
    mine, theirs = (np.zeros(np.count_nonzero(sizes), OBJECT) for sizes in (size, true_size))
    for rows, sizes in ((mine, size), (theirs, true_size)):
        rows["number"] = np.flatnonzero(sizes)
        rows["size"] = rows["rank"] = sizes[sizes > 0]
    if rule.confidence == "score":
        assert scores is not None
        mine["rank"] = scores[mine["number"] - 1]
    elif rule.confidence == "min":
        least = np.ones(len(size))
        np.minimum.at(least, ids, probability.ravel()[at])
        mine["rank"] = least[mine["number"]]
    else:
        places, owner, count = at, ids, size
        if rule.confidence == "border":
            kept = _on_border(predicted).ravel()[at]
            places, owner = at[kept], ids[kept]
            count = np.bincount(owner)
        total = np.bincount(owner, probability.ravel()[places])
        mine["rank"] = np.clip((total / np.maximum(count, 1))[mine["number"]], 0, 1)
    both = np.flatnonzero(inside > 0)
    width = len(true_size)  # pairs that overlap are one number: i * width + j
    pairs, common = np.unique(ids[both] * width + inside[both], return_counts=True)
    i, j = np.divmod(pairs, width)
    iou = common / (size[i] + true_size[j] - common)
    if rule.match == "iou":
        kept = iou >= rule.iou
    elif rule.match == "centre":
        kept = np.isin(pairs, _centred(predicted, truth, ids, at, size))
    else:
        kept = iou > 0
    i, j = (np.searchsorted(r["number"], x[kept]) for r, x in ((mine, i), (theirs, j)))
    order = np.lexsort((theirs["size"][j], mine["size"][i], -mine["rank"][i], -iou[kept]))
    real, found = np.zeros(len(mine), bool), np.zeros(len(theirs), bool)
    for a, b in zip(i[order].tolist(), j[order].tolist(), strict=True):
        if not (real[a] or found[b]):
            real[a] = found[b] = True
    mine["real"], theirs["real"] = real, found
    return mine, theirs


def _on_border(ids: Array) -> Array:
    """(*S) whether a side is on the outside of the object; what is outside the image is."""
    around = np.pad(ids, 1)
    inner = (slice(1, -1),) * ids.ndim
    turned = [np.roll(around, step, axis) for axis in range(ids.ndim) for step in (-1, 1)]
    return np.logical_or.reduce([each[inner] != ids for each in turned])


def _centred(predicted: Array, truth: Array, ids: Array, at: Array, size: Array) -> Array:
    """The pairs i * width + j of a predicted object and the true one that holds its centre."""
    width = int(truth.max()) + 1
    where = np.unravel_index(at, predicted.shape)
    centre = [np.bincount(ids, x, minlength=len(size)) / np.maximum(size, 1) for x in where]
    # A centre between two pixels lies in both, so that a flip changes nothing.
    ends = [[np.ceil(c - 0.5).astype(int), np.floor(c + 0.5).astype(int)] for c in centre]
    held = [truth[corner] for corner in product(*ends)]
    return np.concatenate([np.arange(len(size)) * width + j for j in held])


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
        self._units: list[str] = []  # of each image: its name, or that of its group
        self._predicted: list[Array] = [np.zeros(0, OBJECT)]
        self._true: list[Array] = [np.zeros(0, OBJECT)]
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
        arrays = probs.float().cpu().numpy(), labels.cpu().numpy()
        for n, (p, y) in enumerate(zip(*arrays, strict=True)):
            image = len(self._units)
            name = f"{distributed.rank()}:{image}" if names is None else names[n]
            self._units.append(name if groups is None else groups[n])
            truth_map, _ = _read_map(self.rule.labels, name, p.shape[1:])
            map_, scores = _read_map(self.rule.maps, name, p.shape[1:])
            if self.rule.confidence == "score" and scores is None:
                raise BadFile(f"the predicted instance map of {name} has no scores")
            for c in self.rule.classes:
                of_class = y[c] if self._multilabel else y
                valid, mask = of_class != self._ignore_index, p[c] > 0.5
                if not self._multilabel:  # the first of the largest
                    mask = p[c] > p[:c].max(0, initial=-1)
                    mask &= p[c] >= p[c + 1 :].max(0, initial=-1)
                truth = true_objects(of_class == (1 if self._multilabel else c), valid, truth_map)
                predicted = predicted_objects(mask, valid, map_)
                if self.rule.min_size > 1:
                    truth, predicted = (
                        ids * (np.bincount(ids.ravel()) >= self.rule.min_size)[ids]
                        for ids in (truth, predicted)
                    )
                mine, theirs = match_objects(predicted, truth, p[c], self.rule, scores)
                for objects in (mine, theirs):
                    objects["image"], objects["of_class"] = image, c
                self._predicted.append(mine)
                self._true.append(theirs)
                _keep(self.false, mine, name, predicted, predicted, truth)
                _keep(self.missed, theirs, name, truth, predicted, truth)

    def sync(self) -> None:
        """Gather the objects of all ranks."""
        if not distributed.is_distributed():
            return
        own = self._units, *self._rows(), self.false, self.missed
        parts: list[Any] = [None] * distributed.world_size()
        dist.all_gather_object(parts, own)
        self._units, self._predicted, self._true, self.false, self.missed = [], [], [], [], []
        for units, predicted, true, false, missed in parts:
            for rows in (predicted, true):
                rows["image"] += len(self._units)
            self._units += units
            self._predicted.append(predicted)
            self._true.append(true)
            self.false += false
            self.missed += missed
        for kept in (self.false, self.missed):
            kept.sort(key=lambda crop: -crop.rank)
            del kept[GALLERY:]

    def by_unit(self) -> list[tuple[Array, Array]]:
        """(n,) confidences of the predicted objects and whether they are real, of each unit.

        A unit is an image, or the images of a group.
        """
        rows, _ = self._rows()
        unit = self._unit[rows["image"]]
        order = np.argsort(unit, kind="stable")
        parts = np.split(rows[order], np.flatnonzero(np.diff(unit[order])) + 1)
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
        predicted, true = self._rows(confidence)
        groups: list[tuple[str, str, float, float]] = []  # those of a field above one and up to one
        if len(self.rule.classes) > 1:
            groups += [(f"class {c}", "of_class", c - 1, c) for c in self.rule.classes]
        if len(true):
            size = np.quantile(true["size"], (1 / 3, 2 / 3), method="lower").astype(int)
            low, high = size.tolist()
            groups += [
                (f"up to {low} pixels", "size", 0, low),
                (f"{low + 1} to {high} pixels", "size", low, high),
                (f"above {high} pixels", "size", high, np.inf),
            ]
        parts = []
        for text, field, least, most in groups:
            some, of = (x[(x[field] > least) & (x[field] <= most)] for x in (predicted, true))
            if len(some) or len(of):
                parts.append(_scores(text, some, of, self._unit, num_bins))
        edges = fine_edges().numpy()
        place = np.searchsorted(edges[1:-1], predicted["rank"])
        weights = predicted["real"], ~predicted["real"], predicted["rank"]
        return ObjectReport(
            calibration=name,
            rule=str(self.rule),
            images=len(self._units),
            whole=_scores("all", predicted, true, self._unit, num_bins, resamples),
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
        predicted, true = self._rows(confidence)
        above = np.inf if threshold is None else threshold
        taken = predicted[predicted["rank"] > above]
        right, kept, truth = (
            _by_unit(self._unit, rows) for rows in (taken[taken["real"]], taken, true)
        )
        precision, recall = holdout.above(above)
        known = recall, precision
        return operating_point(
            target, threshold, holdout.images, known, (right, truth), (right, kept)
        )

    @property
    def _unit(self) -> Array:
        """(I,) the number of the unit of each image."""
        return np.unique(np.array(self._units), return_inverse=True)[1]

    def _rows(self, confidence: Callable[[Array], Array] | None = None) -> tuple[Array, Array]:
        self._predicted = [np.concatenate(self._predicted)]
        self._true = [np.concatenate(self._true)]
        predicted = self._predicted[0].copy()
        if confidence is not None:
            predicted["rank"] = confidence(predicted["rank"])
        return predicted, self._true[0]


def _by_unit(unit: Array, rows: Array, weights: Array | None = None) -> Array:
    """(U,) the number of objects in the images of each unit, or their sum of weights."""
    return np.bincount(unit[rows["image"]], weights, int(unit.max(initial=-1)) + 1)


def _scores(
    name: str, predicted: Array, true: Array, unit: Array, num_bins: int, resamples: int = 0
) -> ObjectScores:
    """The scores of some objects; (I,) `unit` tells the images of different groups apart."""
    real, sure = predicted["real"].astype(float), predicted["rank"]
    edges = np.linspace(0, 1, num_bins + 1)
    place = np.searchsorted(edges[1:-1], sure)  # bins (lo, hi]
    bins = [np.bincount(place, w, num_bins) for w in (None, real, sure)]
    rank = np.unique(sure, return_inverse=True)[1]
    count, hits = _by_unit(unit, predicted), _by_unit(unit, predicted, real)
    sums = {
        "precision": (hits, count),
        "recall": (_by_unit(unit, true, true["real"]), _by_unit(unit, true)),
        "brier": (_by_unit(unit, predicted, (sure - real) ** 2), count),
    }
    intervals = {score: fraction_interval(*each) for score, each in sums.items()}
    held = np.flatnonzero(count)
    if resamples and len(held) > 1:
        of_unit = unit[predicted["image"]]
        gap = np.bincount(of_unit * num_bins + place, sure - real, len(count) * num_bins)
        gap, n, h = gap.reshape(-1, num_bins)[held], count[held], hits[held]
        one = {"class_gap": gap, "class_pixels": n, "intersection": h, "predicted": n, "truth": n}
        model = ImageScores(
            {"top_gap": gap, "pixels": n, "hits": h, **{k: x[:, None] for k, x in one.items()}}
        )
        intervals["ece"] = combine([model], [1.0], resamples=resamples, seed=0)["ece"].interval
        areas = []
        for block in resampled_weights(len(count), resamples, 0):
            for weights in block:
                weight = weights[of_unit]
                drawn = (np.bincount(rank, weight * w) for w in (real, 1 - real))
                areas.append(auroc(*drawn))
        if np.isfinite(areas).all():
            low, high = np.quantile(areas, [0.025, 0.975]).tolist()
            intervals["auroc"] = Interval(low, high)
    return ObjectScores(
        name=name,
        truth=len(true),
        found=int(true["real"].sum()),
        top=BinTable(edges, *bins),
        brier=float(ratio(sums["brier"][0].sum(), len(predicted))),
        auroc=auroc(np.bincount(rank, real), np.bincount(rank, 1 - real)),
        intervals={score: each for score, each in intervals.items() if each is not None},
    )


def _keep(
    kept: list[Crop], objects: Array, name: str, ids: Array, predicted: Array, truth: Array
) -> None:
    """Add the objects of an image that are not real to those drawn, if they are of higher rank."""
    least = kept[-1].rank if len(kept) == GALLERY else -1.0
    objects = objects[~objects["real"] & (objects["rank"] > least)]
    for one in objects[np.argsort(-objects["rank"], kind="stable")][:GALLERY]:
        where, plane = np.nonzero(ids == one["number"]), None
        if ids.ndim == 3:  # the plane with most of it
            plane = int(np.bincount(where[0]).argmax())
            where = tuple(x[where[0] == plane] for x in where[1:])
        side = max(48, *(2 * int(np.ptp(x)) for x in where))
        starts = [int(x.min() + x.max() - side) // 2 for x in where]
        starts = [max(0, min(s, n - side)) for s, n in zip(starts, ids.shape[-2:], strict=True)]
        box = slice(starts[0], starts[0] + side), slice(starts[1], starts[1] + side)
        seen = ((each if plane is None else each[plane])[box].copy() for each in (predicted, truth))
        kept.append(Crop(float(one["rank"]), name, one["number"], plane, box, *seen))
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
        ids = Nifti(path).read() if path.name.endswith((".nii", ".nii.gz")) else read_mask(path)
    if ids.shape != shape:
        raise BadFile(f"{path}: the instance map has the shape {ids.shape}, the labels {shape}")
    if ids.dtype.kind == "f" and (ids == ids.round()).all():  # as NIfTI may hold them
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "biu" or ids.min() < 0 or ids.max() >= _LARGEST:
        raise BadFile(f"{path}: an instance map holds whole numbers from 0 to {_LARGEST - 1}")
    most = int(ids.max())
    if scores is not None and (
        scores.ndim != 1 or len(scores) < most or not ((scores >= 0) & (scores <= 1)).all()
    ):
        raise BadFile(f"{path}: expected ({most},) scores from 0 to 1, but got {scores.shape}")
    return ids.astype(np.int64), scores
