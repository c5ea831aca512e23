"""What a data set gives before any transform: raw parts, and the defaults of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from segcal.data.transforms import Augmentation

# (H, W) class of each pixel, (K, H, W) presence of each class, or the class of the image
Label = np.ndarray | int
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Part(Protocol):
    """One part of a data set (train, say), before any transform."""

    @property
    def names(self) -> Sequence[str]:
        """What each sample is called in reports."""
        ...

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        ...

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image (H, W, 3) uint8 or the text (L,), and its label: (H, W) uint8 or an int."""
        ...


@dataclass(frozen=True)
class ArrayPart:
    """A part held in memory.

    Attributes:
        images: (n, H, W, 3) or, for grey images, (n, H, W) uint8.
        labels: (n, H, W) uint8 or (n,) of an integer dtype.
        names: n names.
    """

    images: np.ndarray
    labels: np.ndarray
    names: Sequence[str]

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        image = self.images[index]
        return image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image and its label."""
        label = self.labels[index]
        return self.image(index), label if label.ndim else int(label)


@dataclass(frozen=True)
class AbsentPart:
    """A part that cannot be read, which raises the reason when it is asked for.

    So the test part of a folder can be used where there is nothing to train on.

    Attributes:
        reason: one line.
    """

    reason: str

    @property
    def names(self) -> Sequence[str]:
        """None."""
        raise ValueError(self.reason)

    def image(self, index: int) -> np.ndarray:
        """None."""
        raise ValueError(self.reason)

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """None."""
        raise ValueError(self.reason)


_P = TypeVar("_P", bound=Part)


def or_absent(read: Callable[[], _P]) -> _P | AbsentPart:
    """The part that `read` returns, or one that raises later what `read` raised."""
    try:
        return read()
    except ValueError as error:
        return AbsentPart(str(error))


@dataclass(frozen=True)
class RawDataset:
    """A data set as the function of its entry in `DATASETS` returns it.

    Attributes:
        train: what is trained on, before the hold-out is taken from it.
        test: what is tested on.
        class_names: one name a class.
        mean: of each channel, on a 0-1 scale.
        std: of each channel, on a 0-1 scale.
        holdout: the hold-out, for data sets that make their own (`train` then excludes it).
        augmentation: the recipe for training images.
        resize: square side that images of all parts are resized to.
        palette: (num_classes, 3) uint8 colours to draw the classes in.
        uniform: whether all images of a part have one size.
        words: the vocabulary of a text, in the order of its numbers; none for images.
    """

    train: Part
    test: Part
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    holdout: Part | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    resize: int | None = None
    palette: np.ndarray | None = None
    uniform: bool = True
    words: tuple[str, ...] = ()


def split(n: int, *, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..n-1 at random into (kept, held out), both sorted and neither of them empty."""
    if not 0 < holdout < 1:
        raise ValueError(f"Expected holdout to be a share between 0 and 1, but got {holdout}")
    if n < 2:
        raise ValueError(f"Expected at least 2 training images to hold some out, but got {n}")
    size = min(max(round(n * holdout), 1), n - 1)
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[size:]), np.sort(order[:size])
