"""Parts of a data set as they are read, the torch data set over them, and its loader."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from segcal import distributed
from segcal.data.transforms import Augmentation, Augmenter, normalise, resize_mask, resize_square
from segcal.files import BadFile, read_mask, read_rgb, utf8

# (H, W) class of each pixel, (K, H, W) presence of each class, or the class of the image
Label = np.ndarray | int
Batch = tuple[Tensor, Tensor]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_LISTED = 8  # bad mask values named in an error
_DIED = re.compile(r"DataLoader worker \(pid[^.]*")  # how torch's message begins


class Part(ABC):
    """One part of a data set (train, say), before any transform.

    Attributes:
        names: what each sample is called in reports.
    """

    names: Sequence[str]

    @abstractmethod
    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, or the numbers of the words of a text, (L,) int32."""

    @abstractmethod
    def label(self, index: int) -> Label:
        """(H, W) or (K, H, W), or the class; files of images are not read."""

    @abstractmethod
    def fingerprint(self, indices: Sequence[int]) -> str:
        """Text that changes when one of these samples does."""

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image and its label."""
        return self.image(index), self.label(index)


@dataclass(eq=False)
class ArrayPart(Part):
    """A part held in memory.

    Images are (n, H, W, 3) or, if grey, (n, H, W) uint8, texts (n, L) int32; labels are (n, H, W)
    uint8 or (n,) of an integer dtype.
    """

    images: np.ndarray
    labels: np.ndarray
    names: Sequence[str]

    def image(self, index: int) -> np.ndarray:
        image = self.images[index]
        return np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image

    def label(self, index: int) -> Label:
        label = self.labels[index]
        return label if label.ndim else int(label)

    def fingerprint(self, indices: Sequence[int]) -> str:
        return digest(self.images[indices].tobytes(), self.labels[indices].tobytes())


class FilePart(Part):
    """A part whose images, and masks if it has them, are read from files when asked for.

    Labels are n mask files, n tuples of mask files, one per class, or n classes. Masks hold
    0..num_classes-1, those of one class 0 and 1, or ignore_index.
    """

    def __init__(
        self,
        images: Sequence[Path],
        labels: Sequence[Path] | Sequence[tuple[Path, ...]] | Sequence[int],
        *,
        num_classes: int,
        ignore_index: int = -1,
    ) -> None:
        self.images, self.labels = images, labels
        self.num_classes, self.ignore_index = num_classes, ignore_index
        # The mask files of each image; classes have none.
        self.masks = [
            () if isinstance(x, int) else (x,) if isinstance(x, Path) else x for x in labels
        ]
        # Images of classes are called by their folder too.
        inside = bool(labels) and isinstance(labels[0], int)
        names = [f"{path.parent.name}/{path.stem}" if inside else path.stem for path in images]
        self.names = [utf8(name) for name in names]

    def image(self, index: int) -> np.ndarray:
        return read_rgb(self.images[index])

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        image, label = super().read(index)
        if isinstance(label, np.ndarray) and label.shape[-2:] != image.shape[:2]:
            (h, w), (mask_h, mask_w) = image.shape[:2], label.shape[-2:]
            raise BadFile(
                f"{self.masks[index][0]}: Expected a mask of {w}x{h} pixels, the size of "
                f"{self.images[index]}, but got {mask_w}x{mask_h}"
            )
        return image, label

    def label(self, index: int) -> Label:
        label = self.labels[index]
        if isinstance(label, int):
            return label
        classes = 2 if isinstance(label, tuple) else self.num_classes
        masks: list[np.ndarray] = []
        for path in self.masks[index]:
            mask = read_class_mask(path, num_classes=classes, ignore_index=self.ignore_index)
            if masks and mask.shape != masks[0].shape:
                raise BadFile(f"{path}: its size is not that of the other masks of this image")
            masks.append(mask)
        return np.stack(masks) if isinstance(label, tuple) else masks[0]

    def fingerprint(self, indices: Sequence[int]) -> str:
        """A digest of the sizes and times of the files, and of classes."""
        lines = []
        for index in indices:
            label = self.labels[index]
            lines += [str(label)] if isinstance(label, int) else []
            for path in (self.images[index], *self.masks[index]):
                found = path.stat() if path.exists() else None
                lines.append(f"{path.name} {found and (found.st_size, found.st_mtime_ns)}")
        return digest("\n".join(lines))


class ImagePart(FilePart):
    """Images without labels; in place of a mask there are zeros of their size."""

    def __init__(self, images: Sequence[Path]) -> None:
        super().__init__(images, [()] * len(images), num_classes=1)

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        image = self.image(index)
        return image, np.zeros(image.shape[:2], np.uint8)


def _as_it_is(value: Any, name: str) -> Any:  # no lambda: workers may get it by pickle
    return value


class ChangedPart(Part):
    """A part whose images or labels are changed, by functions that also get the sample's name.

    `key` names the change, for fingerprints.
    """

    def __init__(
        self,
        part: Part,
        key: str | bytes,
        *,
        image: Callable[[np.ndarray, str], np.ndarray] = _as_it_is,
        label: Callable[[Label, str], Label] = _as_it_is,
    ) -> None:
        self.part, self.names = part, part.names
        self._key, self._image, self._label = key, image, label

    def image(self, index: int) -> np.ndarray:
        return self._image(self.part.image(index), self.names[index])

    def label(self, index: int) -> Label:
        return self._label(self.part.label(index), self.names[index])

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        image, label = self.part.read(index)
        return self._image(image, self.names[index]), self._label(label, self.names[index])

    def fingerprint(self, indices: Sequence[int]) -> str:
        return digest(self.part.fingerprint(indices), self._key)


class AbsentPart:
    """A part that cannot be read; to ask it for anything raises the reason.

    So the test part of a folder can be used where there is nothing to train on.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "reason":
            raise AttributeError(name)
        raise ValueError(self.reason)

    def __len__(self) -> int:
        raise ValueError(self.reason)


def or_absent(read: Callable[[], Part]) -> Part:
    """The part that `read` returns, or one that raises later what `read` raised."""
    try:
        return read()
    except ValueError as error:
        return cast("Part", AbsentPart(str(error)))


def digest(*parts: str | bytes) -> str:
    """A short name of contents: the same for the same, another for others."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class RawDataset:
    """A data set as the function of its entry in `DATASETS` returns it."""

    train: Part  # before the hold-out is taken from it
    test: Part
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of each channel on a 0-1 scale
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    holdout: Part | None = None  # of data sets that make their own; `train` excludes it
    augmentation: Augmentation = field(default_factory=Augmentation)
    resize: int | None = None  # square side that images of all parts are resized to
    palette: np.ndarray | None = None  # (num_classes, 3) uint8
    uniform: bool = True  # all images of a part have one size
    words: tuple[str, ...] = ()  # the vocabulary of a text, in the order of its numbers


def split(n: int, *, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..n-1 at random into (kept, held out), both sorted and neither of them empty."""
    if not 0 < holdout < 1:
        raise ValueError(f"Expected holdout to be a share between 0 and 1, but got {holdout}")
    if n < 2:
        raise ValueError(f"Expected at least 2 training images to hold some out, but got {n}")
    size = min(max(round(n * holdout), 1), n - 1)
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[size:]), np.sort(order[:size])


def spread(indices: np.ndarray, limit: int | None) -> np.ndarray:
    """At most `limit` of the indices, evenly spaced: sorted folders keep all their classes."""
    if limit is None or limit >= len(indices):
        return indices
    return indices[np.linspace(0, len(indices) - 1, limit).round().astype(int)]


def read_class_mask(path: Path, *, num_classes: int, ignore_index: int) -> np.ndarray:
    """(H, W) class indices of a mask file, checked for range; uint8, or uint16 for many classes."""
    mask = read_mask(path)
    bad = mask[((mask < 0) | (mask >= num_classes)) & (mask != ignore_index)]
    if bad.size:
        values = np.unique(bad)
        shown = ", ".join(map(str, values[:_MAX_LISTED])) + ", …" * (len(values) > _MAX_LISTED)
        advice = f"; if {shown} means ignored, state --ignore-index {shown}"
        raise BadFile(
            f"{path}: Expected mask values in 0..{num_classes - 1} or "
            f"ignore_index={ignore_index}, but got {shown}" + advice * (len(values) == 1)
        )
    return mask.astype(np.uint8 if max(num_classes - 1, ignore_index) < 256 else np.uint16)


@dataclass(eq=False)
class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Items of a part, normalised and, for training, augmented.

    An item is `(image, label)`: float32 (3, H, W), and int64 (H, W) for segmentation, (K, H, W)
    where classes may overlap, or () for classification. A text is int64 (L,) word numbers in place
    of the image. Index with an int, or with `(epoch, int)` for the augmentation of that epoch,
    which depends on seed, epoch and index alone.
    """

    part: Part
    indices: Sequence[int]  # which samples of the part, in which order
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    resize: int | None = None  # square side that every image is resized to first
    augmenter: Augmenter | None = None
    seed: int = 0  # of the augmentation
    skipped: Mapping[str, str] = field(default_factory=dict)  # why, by name of a bad file
    prepare: Callable[[np.ndarray], Tensor] | None = None  # makes the input, if not `normalise`

    def __post_init__(self) -> None:
        self.indices = [int(i) for i in self.indices]

    @cached_property
    def names(self) -> list[str]:
        """The name of each item."""
        return [self.part.names[i] for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def limited(self, limit: int | None) -> Samples:
        """At most `limit` items, evenly spaced."""
        return self.only(spread(np.arange(len(self)), limit))

    def only(self, kept: Sequence[int] | np.ndarray) -> Samples:
        """Some of the items, by number."""
        return replace(self, indices=[self.indices[i] for i in kept])

    def fingerprint(self) -> str:
        """A digest of all that the items depend on; files count by name, size and time."""
        mean, std = np.array([self.mean, self.std], np.float32).tolist()
        prepared = repr((mean, std, self.resize))
        return digest(self.part.fingerprint(self.indices), "\n".join(self.names), prepared)

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB of an item as it is stored, to draw on."""
        image = self.part.image(self.indices[index])
        if image.ndim == 1:
            raise ValueError(f"{self.names[index]} is a text: there is no image to draw")
        return image

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        index = range(len(self))[index]  # so that -1 is the last, with the last one's randomness
        image, label = self.part.read(self.indices[index])
        if image.ndim == 1:  # a text: its words are numbers already, to be taken as they are
            return torch.from_numpy(image.astype(np.int64)), torch.tensor(label)
        if self.resize is not None:
            image = resize_square(image, self.resize)
            if isinstance(key, tuple) and isinstance(label, np.ndarray):  # in training
                label = resize_mask(label, image.shape[:2])
        if self.augmenter is not None:
            mask = label if isinstance(label, np.ndarray) else None
            image, mask = self.augmenter(image, mask, seed=(self.seed, epoch, index))
            label = label if mask is None else mask
        target = torch.as_tensor(np.asarray(label, dtype=np.int64))  # (H, W), (K, H, W) or ()
        if self.prepare is not None:
            return self.prepare(image), target
        return normalise(image, self.mean, self.std), target


class WorkerDied(ChildProcessError):
    """A worker of a data loader ended without an error of its own: killed, or out of memory."""


class Batches(DataLoader[Batch]):
    """A data loader that raises its workers' errors as they were raised, without their tracebacks.

    The death of a worker raises `WorkerDied`. `before_each` is called before each batch is yielded.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        *,
        workers: int,
        pin: bool,
        before_each: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        # From Python 3.14 on, and elsewhere than on Linux, what workers need is pickled.
        if multiprocessing.get_start_method().endswith(("spawn", "server")):
            try:
                pickle.dumps(getattr(dataset, "prepare", None))
            except (AttributeError, TypeError, pickle.PicklingError):
                workers = 0  # a function in another, as in a FILE.py, cannot go to a worker
        super().__init__(
            dataset,
            num_workers=min(workers, max(len(dataset), 1)),  # type: ignore[arg-type]
            pin_memory=pin,
            worker_init_fn=_ignore_ctrl_c,
            # A generator of its own, so that a new loader takes no numbers from the run's.
            generator=torch.Generator(),
            **options,
        )
        self._before_each = before_each

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        try:
            for batch in super().__iter__():
                self._before_each()
                yield batch
        except Exception as error:
            name, text = type(error).__name__, str(error)
            # The cause, where there is one, knows the signal.
            if died := _DIED.match(str(error.__cause__)) or _DIED.match(text):
                raise WorkerDied(
                    f"{died[0]}; if memory or shared memory ran out, lower --workers or "
                    "--batch-size"
                ) from None
            if not text.startswith(f"Caught {name} in DataLoader worker"):
                raise
            raise type(error)(text.rpartition(f"{name}: ")[2].strip()) from None


def eval_loader(dataset: Samples, **options: Any) -> Batches:
    """This process's share of `dataset`, in order: each sample is read by exactly one process.

    Shares are not padded to equal length as by DistributedSampler, which would count samples twice.
    `options` are those of `Batches`.
    """
    share = range(distributed.rank(), len(dataset), distributed.world_size())
    return Batches(dataset, sampler=share, **options)


def _ignore_ctrl_c(_: int) -> None:
    """Ctrl-C reaches the workers too: the trainer alone handles it, after the current step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
