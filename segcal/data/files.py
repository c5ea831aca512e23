"""The place where image and mask files are found and read, and where bad ones are named."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from segcal.data.source import ArrayPart, Label, Part
from segcal.files import utf8

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_MASK_MODES = ("L", "P", "1", "I;16")
_MAX_LISTED = 8  # bad mask values named in an error


@dataclass(frozen=True)
class FilePart:
    """A part whose images, and masks if it has them, are read from files when asked for.

    Attributes:
        images: n image files.
        labels: n mask files, or n classes.
        num_classes: masks may hold 0..num_classes-1.
        ignore_index: and this.
    """

    images: Sequence[Path]
    labels: Sequence[Path] | Sequence[int]
    num_classes: int
    ignore_index: int

    @property
    def names(self) -> Sequence[str]:
        """File names without their ending, after their class folder if they have one."""
        if self.labels and isinstance(self.labels[0], int):
            return [utf8(f"{path.parent.name}/{path.stem}") for path in self.images]
        return [utf8(path.stem) for path in self.images]

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        return read_image(self.images[index])

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image and its mask or class."""
        image, label = self.image(index), self.labels[index]
        if isinstance(label, int):
            return image, label
        mask = read_mask(label, num_classes=self.num_classes, ignore_index=self.ignore_index)
        if mask.shape != image.shape[:2]:
            (h, w), (mask_h, mask_w) = image.shape[:2], mask.shape
            raise ValueError(
                f"Expected a mask of {w}x{h} pixels for {self.images[index]}, "
                f"but got {mask_w}x{mask_h} in {label}"
            )
        return image, mask


def read_image(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except _READ_ERRORS as error:
        raise ValueError(_unreadable(path, error)) from error


def read_mask(path: Path, *, num_classes: int, ignore_index: int) -> np.ndarray:
    """(H, W) class indices of a mask file, uint8 (uint16 if the file is); checked for range."""
    try:
        with Image.open(path) as image:
            mode, mask = image.mode, np.asarray(image)
    except _READ_ERRORS as error:
        raise ValueError(_unreadable(path, error)) from error
    if mode not in _MASK_MODES:
        raise ValueError(
            f"Expected a mask of one channel that holds class indices, "
            f"but got an image of mode {mode} in {path}"
        )
    mask = mask.astype(np.uint8) if mask.dtype == bool else mask
    bad = mask[(mask >= num_classes) & (mask != ignore_index)]
    if bad.size:
        values = np.unique(bad)
        shown = ", ".join(map(str, values[:_MAX_LISTED])) + ", …" * (len(values) > _MAX_LISTED)
        raise ValueError(
            f"Expected mask values in 0..{num_classes - 1} or ignore_index={ignore_index}, "
            f"but got {shown} in {path}"
        )
    return mask


def find_images(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name; at least one."""
    if not folder.is_dir():
        raise ValueError(f"Expected a folder of images at {folder}, but there is none")
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise ValueError(f"Expected images ({' '.join(IMAGE_SUFFIXES)}) in {folder}, but got none")
    return found


def unusable(part: Part, indices: Sequence[int]) -> dict[int, str]:
    """Why, by index, for those samples of a part that cannot be read.

    Raises:
        ValueError: there are no others.
    """

    def reason(index: int) -> str | None:
        try:
            part.read(index)
        except ValueError as error:
            return str(error)
        return None

    if isinstance(part, ArrayPart):  # in memory: it was read
        return {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders let other threads run
        reasons = zip(indices, pool.map(reason, indices), strict=True)
        bad = {index: text for index, text in reasons if text is not None}
    for text in bad.values():
        log.warning("left out: %s", text)
    if bad and len(bad) == len(indices):
        first = bad[indices[0]]
        raise ValueError(f"Expected files that can be used, but all {len(bad)} are bad: {first}")
    return bad


def one_size(paths: Sequence[Path], *, skip_bad: bool = False) -> bool:
    """Whether all images have the same size; reads headers only, until the first that differs."""
    sizes: set[tuple[int, int]] = set()
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.add(image.size)
        except _READ_ERRORS as error:
            if not skip_bad:
                raise ValueError(_unreadable(path, error)) from error
        if len(sizes) > 1:
            return False
    return True


# What Pillow raises for damaged files, SyntaxError for a broken PNG among it.
_READ_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def _unreadable(path: Path, error: Exception) -> str:
    return f"Expected a readable image file at {path}, but reading it failed: {one_line(error)}"


def one_line(error: Exception) -> str:
    """What another library said, as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".")
