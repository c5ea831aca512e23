"""The torch data set that training and evaluation read, of any part of any data set."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from segcal.data.image_files import FilePart
from segcal.data.raw import ArrayPart, Part
from segcal.data.shift import Shift, ShiftedPart
from segcal.data.transforms import Augmenter, normalise, resize_square


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Items of a part, normalised and, for training, augmented.

    An item is `(image, label)`: float32 (3, H, W), and int64 (H, W) for segmentation, (K, H, W)
    where classes may overlap, or () for classification. A text is int64 (L,) word numbers in place
    of the image. Index with an int, or with `(epoch, int)` for the augmentation of that epoch,
    which depends on seed, epoch and index alone.

    Args:
        part: where samples are read from.
        indices: which samples of it, in which order.
        mean: of each channel, on a 0-1 scale.
        std: of each channel, on a 0-1 scale.
        resize: side to resize every image to first; for classification only.
        augmenter: None to show images as they are.
        seed: of the augmentation.
        skipped: why, by name, for samples that are not among `indices` because their files are bad.
    """

    def __init__(
        self,
        part: Part,
        indices: Sequence[int] | np.ndarray,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        resize: int | None = None,
        augmenter: Augmenter | None = None,
        seed: int = 0,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self.part = part
        self.indices = [int(i) for i in indices]
        names = part.names
        self.names = [names[i] for i in self.indices]
        self.skipped = dict(skipped or {})
        self._mean = torch.tensor(mean, dtype=torch.float32).view(3, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32).view(3, 1, 1)
        self._resize = resize
        self._augmenter = augmenter
        self._seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def shard(self, number: int, count: int) -> Samples:
        """Every `count`-th item from item `number` on: what one of `count` machines looks at."""
        part = copy.copy(self)
        part.indices, part.names = self.indices[number::count], self.names[number::count]
        return part

    def limited(self, limit: int | None) -> Samples:
        """At most `limit` items, evenly spaced."""
        part = copy.copy(self)
        kept = spread(np.arange(len(self)), limit).tolist()
        part.indices, part.names = (
            [every[i] for i in kept] for every in (self.indices, self.names)
        )
        return part

    def shifted(self, shift: Shift, *, seed: int = 0) -> Samples:
        """The same items, their images changed by a shift before they are resized."""
        changed = copy.copy(self)
        changed.part = ShiftedPart(self.part, shift, seed)
        return changed

    def fingerprint(self) -> str:
        """A digest that changes when the items do: their names, and sizes and times of files."""
        part = self.part
        while isinstance(part, ShiftedPart):
            part = part.part
        digest = hashlib.sha256("\0".join(self.names).encode("utf-8", "surrogatepass"))
        if isinstance(part, FilePart):
            for path in (*part.images, *part.mask_files):
                found = path.stat()
                digest.update(
                    f"{path} {found.st_size} {found.st_mtime_ns}\0".encode("utf-8", "replace")
                )
        elif isinstance(part, ArrayPart):
            for array in (part.images, part.labels):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def count_labels(
        self, num_classes: int, ignore_index: int, *, multilabel: bool = False, most: int = 500
    ) -> LabelCounts:
        """Count the labels of at most `most` items, evenly spaced; files of images are not read.

        Args:
            num_classes: K.
            ignore_index: the label that is not counted.
            multilabel: labels are the presence, 0 or 1, of each class.
            most: items to look at.
        """
        some = spread(np.asarray(self.indices), most).tolist()

        def count(index: int) -> np.ndarray:
            labels = _labels(self.part, index, multilabel=multilabel)
            ignored = sum(int((label == ignore_index).sum()) for label in labels)
            total = sum(label.size for label in labels)
            if multilabel:
                return np.array([*(int((label == 1).sum()) for label in labels), ignored, total])
            kept = labels[0][labels[0] != ignore_index].astype(np.int64)
            return np.array([*np.bincount(kept, minlength=num_classes), ignored, total])

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders let other threads run
            found = sum(pool.map(count, some), np.zeros(num_classes + 2, dtype=np.int64))
        return LabelCounts(found[:-2], int(found[-2]), int(found[-1]), len(some))

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB of an item, not augmented, to draw on."""
        image = self.part.image(self.indices[index])
        return image if self._resize is None else resize_square(image, self._resize)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        index = range(len(self))[index]  # so that -1 is the last, with the last one's randomness
        image, label = self.part.read(self.indices[index])
        if image.ndim == 1:  # a text: its words are numbers already, to be taken as they are
            return torch.from_numpy(image.astype(np.int64)), torch.tensor(label)
        if self._resize is not None:
            image = resize_square(image, self._resize)
        if self._augmenter is not None:
            mask = label if isinstance(label, np.ndarray) else None
            seed = (self._seed, epoch, index)
            image, mask = self._augmenter(image, mask, seed=seed)
            label = label if mask is None else mask
        target = torch.as_tensor(np.asarray(label, dtype=np.int64))  # (H, W), (K, H, W) or ()
        return normalise(image, self._mean, self._std), target


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


def _labels(part: Part, index: int, *, multilabel: bool) -> list[np.ndarray]:
    """The label of a sample, or that of each class."""
    if isinstance(part, FilePart):
        return part.read_labels(index)
    label = np.asarray(part.labels[index] if isinstance(part, ArrayPart) else part.read(index)[1])
    return [*label] if multilabel else [label]


def spread(indices: np.ndarray, limit: int | None) -> np.ndarray:
    """At most `limit` of the indices, evenly spaced: sorted folders keep all their classes."""
    if limit is None or limit >= len(indices):
        return indices
    return indices[np.linspace(0, len(indices) - 1, limit).round().astype(int)]
