"""Shifts: test images that differ from the training images on purpose, and rare classes."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from segcal.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from segcal.data.samples import ChangedPart, Part

ROTATION, DOMAIN, DATA = "rotation", "domain", "data"
ALL = "all"  # every corruption
DEFAULT_SEVERITY = 3


@dataclass(frozen=True)
class Shift:
    """One change of the test images.

    The value is the severity of a corruption, 0 to 5, degrees counter-clockwise, the domain of a
    data set that has some, or the folder that holds other test images.
    """

    name: str  # an entry of `CORRUPTIONS`, rotation, domain or data
    value: int | float | str

    def __post_init__(self) -> None:
        if self.name in CORRUPTIONS:
            if self.value not in (0, *SEVERITIES):
                raise ValueError(
                    f"Expected a severity of 1 to 5 for {self.name}, but got {self.value}"
                )
        elif self.name == ROTATION:
            if not isinstance(self.value, int | float) or not math.isfinite(self.value):
                raise ValueError(f"Expected degrees for {ROTATION}, but got {self.value!r}")
        elif self.name not in (DOMAIN, DATA):
            known = ", ".join([ALL, *CORRUPTIONS, ROTATION, DOMAIN])
            raise ValueError(f"Expected shifts out of {known}, but got {self.name!r}")
        elif not isinstance(self.value, str) or not self.value:
            raise ValueError(f"Expected {self.name}:NAME, but got {self.value!r}")

    def __str__(self) -> str:
        value: object = self.value
        if self.name == DATA:
            value = Path(str(value)).resolve().name
        return f"{self.name}:{f'{value:g}' if isinstance(value, float) else value}"

    @property
    def severity(self) -> int | None:
        """The severity of a corruption; other shifts have none."""
        return int(self.value) if self.name in CORRUPTIONS else None

    @property
    def family(self) -> str:
        """The family of a corruption; other shifts are one by themselves."""
        return CORRUPTIONS[self.name].family if self.name in CORRUPTIONS else self.name

    @property
    def brings_images(self) -> bool:
        """Whether it takes other images, with labels of their own, instead of changing pixels."""
        return self.name in (DOMAIN, DATA)

    def apply(self, image: np.ndarray, key: str) -> np.ndarray:
        """Change one (H, W, 3) uint8 image, whose name `key` decides what is random."""
        if self.name == ROTATION:
            return rotate(image, float(self.value))
        return corrupt(image, self.name, int(self.value), key=key)


def parse_shifts(text: str) -> tuple[Shift, ...]:
    """The shifts that a comma list names, each once and in order.

    `fog:3`, `rotation:45` and `domain:sketch` are one each; `fog` is `fog:3`, `fog:1,3,5` three,
    and `all` stands for every corruption, as in `all:1,3,5`.
    """
    named: list[tuple[str, list[str]]] = []  # each name with its values
    for word in map(str.strip, text.split(",")):
        name, colon, value = word.partition(":")
        if colon and not value:
            raise ValueError(f"Expected a value after {word!r}, but got none")
        if not named or not re.fullmatch(r"[-+]?[\d.]+", word):
            named.append((name, [value] if colon else []))
        elif named[-1][1]:
            named[-1][1].append(word)
        else:
            raise ValueError(f"Expected {named[-1][0]}:{word}, but got {named[-1][0]},{word}")
    each = [_named(name, value) for name, values in named for value in values or [""]]
    return tuple(dict.fromkeys(shift for shifts in each for shift in shifts))


def _named(name: str, value: str) -> list[Shift]:
    read: int | float | str = value  # `Shift` refuses what cannot be read
    if name == ALL or name in CORRUPTIONS:
        known = {str(severity): severity for severity in SEVERITIES} | {"": DEFAULT_SEVERITY}
        read = known.get(value, value)
    elif name == ROTATION:
        with suppress(ValueError):
            read = float(value)
    return [Shift(each, read) for each in (CORRUPTIONS if name == ALL else [name])]


def shifted_part(part: Part, shift: Shift) -> Part:
    """A part whose images a corruption or a rotation changes."""
    return ChangedPart(part, str(shift), image=shift.apply)


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """(H, W, 3) uint8 rotated counter-clockwise about its centre, bilinear, the corners black."""
    return np.asarray(Image.fromarray(image).rotate(degrees, Image.Resampling.BILINEAR))


def imbalanced(classes: np.ndarray, *, num_classes: int, factor: float, seed: int) -> np.ndarray:
    """Choose samples so that class 0 is `factor` times as common as the last class.

    Class c keeps n_c = int(n factor^(-c / (K - 1))) samples, an exponential profile (Cui et al.
    2019, Class-Balanced Loss), where n is the size of the smallest class: 5000 for CIFAR-10. Takes
    the (n,) classes of the samples, and returns the sorted indices of those that are kept.
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
