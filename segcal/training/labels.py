"""Checks the labels of a run before it trains: absent classes, ignored labels."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from segcal import distributed
from segcal.data.build import Splits
from segcal.data.image_files import FilePart
from segcal.data.samples import Part, Samples, spread

log = logging.getLogger(__name__)
_MAX_LISTED = 8  # classes named in a warning


def check_labels(data: Splits) -> None:
    """Report absent classes and ignored labels; raise if all labels of a part are ignored."""
    for name, part in (("training", data.train), ("hold-out", data.holdout)):
        found = count_labels(part, data.num_classes, data.ignore_index, multilabel=data.multilabel)
        if found.ignored == found.total and found.items == len(part):
            raise ValueError(
                f"Expected labels in the {name} images, but got only {data.ignore_index}, the "
                f"label that is ignored{_hint(data, found)}"
            )
        if name == "training" and distributed.rank() == 0:
            _describe_labels(data, found)


def _describe_labels(data: Splits, found: LabelCounts) -> None:
    absent = [n for n, count in zip(data.class_names, found.classes, strict=True) if not count]
    where = f"in {found.items} of {len(data.train)} training images"
    if found.ignored:
        print(f"labels {where}: {found.ignored / found.total:.1%} are ignored")
    if absent:
        shown = ", ".join(absent[:_MAX_LISTED]) + ", …" * (len(absent) > _MAX_LISTED)
        log.warning(
            "no label %s is of %d of the %d classes: %s%s",
            *(where, len(absent), data.num_classes, shown, _hint(data, found)),
        )


def _hint(data: Splits, found: LabelCounts) -> str:
    """What may have happened to a binary mask of 0 and 255."""
    binary = data.multilabel or data.num_classes == 2
    if binary and data.ignore_index == 255 and found.ignored:
        return "; if 255 is the foreground in the masks, write it as 1: 255 is ignored"
    return ""


@dataclass(frozen=True)
class LabelCounts:
    """How often labels occur.

    Attributes:
        classes: (K,) labels of each class.
        ignored: labels that are not counted.
        total: all labels.
        items: how many images or texts were looked at.
    """

    classes: np.ndarray
    ignored: int
    total: int
    items: int


def count_labels(
    samples: Samples,
    num_classes: int,
    ignore_index: int,
    *,
    multilabel: bool = False,
    most: int = 500,
) -> LabelCounts:
    """Count the labels of at most `most` items, evenly spaced; files of images are not read.

    Args:
        samples: the items.
        num_classes: K.
        ignore_index: the label that is not counted.
        multilabel: labels are the presence, 0 or 1, of each class.
        most: items to look at.
    """
    some = spread(np.asarray(samples.indices), most).tolist()

    def count(index: int) -> np.ndarray:
        labels = _labels(samples.part, index, multilabel=multilabel)
        ignored = sum(int((label == ignore_index).sum()) for label in labels)
        total = sum(label.size for label in labels)
        if multilabel:
            return np.array([*(int((label == 1).sum()) for label in labels), ignored, total])
        kept = labels[0][labels[0] != ignore_index].astype(np.int64)
        return np.array([*np.bincount(kept, minlength=num_classes), ignored, total])

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders let other threads run
        found = sum(pool.map(count, some), np.zeros(num_classes + 2, dtype=np.int64))
    return LabelCounts(found[:-2], int(found[-2]), int(found[-1]), len(some))


def _labels(part: Part, index: int, *, multilabel: bool) -> list[np.ndarray]:
    """The label of a sample, or that of each class."""
    if isinstance(part, FilePart):
        return part.read_labels(index)
    label = np.asarray(part.read(index)[1])
    return [*label] if multilabel else [label]
