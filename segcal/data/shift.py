"""The place for data that is changed on purpose: test images turned, classes made rare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from segcal.data.source import Label, Part


@dataclass(frozen=True)
class TurnedPart:
    """A part of a classification set whose images are turned.

    Attributes:
        part: the images as they are.
        degrees: how far they are turned, counter-clockwise.
    """

    part: Part
    degrees: float

    @property
    def names(self) -> Sequence[str]:
        """The names of the images that are turned."""
        return self.part.names

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        return turn(self.part.image(index), self.degrees)

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The turned image and its class."""
        image, label = self.part.read(index)
        return turn(image, self.degrees), label


def turn(image: np.ndarray, degrees: float) -> np.ndarray:
    """(H, W, 3) uint8 turned counter-clockwise about its centre, bilinear, the corners black."""
    return np.asarray(Image.fromarray(image).rotate(degrees, Image.Resampling.BILINEAR))


def imbalanced(classes: np.ndarray, *, num_classes: int, factor: float, seed: int) -> np.ndarray:
    """Choose samples so that class 0 is `factor` times as common as the last class.

    Class c keeps n_c = int(n factor^(-c / (K - 1))) samples, an exponential profile (Cui et al.
    2019, Class-Balanced Loss), where n is the size of the smallest class: 5000 for CIFAR-10.

    Args:
        classes: (n,) class of each sample.
        num_classes: K.
        factor: how many times more common the first class is than the last, at least 1.
        seed: decides which samples are kept.

    Returns:
        Their indices, sorted.
    """
    if factor < 1:
        raise ValueError(f"Expected imbalance of at least 1, but got {factor}")
    smallest = np.bincount(classes, minlength=num_classes).min()
    sizes = [int(smallest * factor ** (-c / (num_classes - 1))) for c in range(num_classes)]
    if min(sizes) < 1:
        raise ValueError(
            f"Expected an imbalance of at most {smallest}, the size of the smallest class, "
            f"but got {factor:g}"
        )
    rng = np.random.default_rng(seed)
    kept = [rng.permutation(np.flatnonzero(classes == c))[:n] for c, n in enumerate(sizes)]
    return np.sort(np.concatenate(kept))
