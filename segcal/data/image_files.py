"""Parts of a data set whose images and masks are files, read when they are asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segcal.data.samples import ArrayPart, Label, Part
from segcal.files import BadFile, image_size, naming, read_mask, read_rgb, utf8, visible

log = logging.getLogger(__name__)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_MAX_LISTED = 8  # bad mask values named in an error


@dataclass(frozen=True)
class FilePart:
    """A part whose images, and masks if it has them, are read from files when asked for.

    Attributes:
        images: n image files.
        labels: n mask files, n tuples of mask files, one per class, or n classes.
        num_classes: masks may hold 0..num_classes-1; those of one class 0 and 1.
        ignore_index: and this.
    """

    images: Sequence[Path]
    labels: Sequence[Path] | Sequence[tuple[Path, ...]] | Sequence[int]
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
        return read_rgb(self.images[index])

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image and its mask or class."""
        image, label = self.image(index), self.labels[index]
        if isinstance(label, int):
            return image, label
        if isinstance(label, tuple):
            return image, np.stack([self._mask(index, path, image, 2) for path in label])
        return image, self._mask(index, label, image, self.num_classes)

    def read_labels(self, index: int) -> list[np.ndarray]:
        """The class or the mask of an image, or the masks of all classes; the image is not read."""
        label = self.labels[index]
        if isinstance(label, int):
            return [np.asarray(label)]
        paths, classes = (label, 2) if isinstance(label, tuple) else ((label,), self.num_classes)
        return [self._read_mask(path, classes) for path in paths]

    def _read_mask(self, path: Path, num_classes: int) -> np.ndarray:
        return read_class_mask(path, num_classes=num_classes, ignore_index=self.ignore_index)

    def _mask(self, index: int, path: Path, image: np.ndarray, num_classes: int) -> np.ndarray:
        """(H, W) the mask of an image."""
        mask = self._read_mask(path, num_classes)
        if mask.shape != image.shape[:2]:
            (h, w), (mask_h, mask_w) = image.shape[:2], mask.shape
            raise BadFile(
                f"{path}: Expected a mask of {w}x{h} pixels, the size of {self.images[index]}, "
                f"but got {mask_w}x{mask_h}"
            )
        return mask

    @property
    def mask_files(self) -> list[Path]:
        """All mask files."""
        return [
            path
            for label in self.labels
            if not isinstance(label, int)
            for path in (label if isinstance(label, tuple) else (label,))
        ]


def read_class_mask(path: Path, *, num_classes: int, ignore_index: int) -> np.ndarray:
    """(H, W) class indices of a mask file, checked for range; uint8, or uint16 for many classes."""
    mask = read_mask(path)
    bad = mask[((mask < 0) | (mask >= num_classes)) & (mask != ignore_index)]
    if bad.size:
        values = np.unique(bad)
        shown = ", ".join(map(str, values[:_MAX_LISTED])) + ", …" * (len(values) > _MAX_LISTED)
        raise BadFile(
            f"{path}: Expected mask values in 0..{num_classes - 1} or "
            f"ignore_index={ignore_index}, but got {shown}"
        )
    return mask.astype(np.uint8 if max(num_classes - 1, ignore_index) < 256 else np.uint16)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty; errors name the file."""
    with naming(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]


def find_images(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name; at least one."""
    if not folder.is_dir():
        raise ValueError(f"Expected a folder of images at {folder}, but there is none")
    found = [path for path in visible(folder) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise ValueError(f"Expected images ({' '.join(IMAGE_SUFFIXES)}) in {folder}, but got none")
    return found


def class_files(folders: Iterable[tuple[Path, int]], num_classes: int) -> FilePart:
    """The images of each folder, all of the class that is named with it, in order."""
    found = [(path, index) for folder, index in folders for path in find_images(folder)]
    images, classes = [path for path, _ in found], [index for _, index in found]
    return FilePart(images, classes, num_classes=num_classes, ignore_index=-1)


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
            sizes.add(image_size(path))
        except BadFile:
            if not skip_bad:
                raise
        if len(sizes) > 1:
            return False
    return True
