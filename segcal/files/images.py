"""Reading of images and masks, with every value as it was stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from segcal.files.errors import BadFile, naming
from segcal.files.limits import check_size

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_MASK_MODES = ("1", "L", "P", "I", *_SIXTEEN_BITS)  # one channel of whole numbers
# Pillow stretches grey of 2 and 4 bits to 0..255; by these factors.
_STRETCHED = {"L;2": 85, "L;4": 17}


def read_rgb(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file; grey of 16 bits becomes 8 bits by its depth."""
    with _opened(path) as image:
        if image.mode in ("I", "F"):  # of no stated range: Pillow would cut it off at 0 and 255
            raise BadFile(
                f"{path}: Expected an image of 8 or 16 bits a channel, but got 32 "
                f"(mode {image.mode}), whose range is not known"
            )
        if image.mode in _SIXTEEN_BITS:
            depth = 12 if _raw_mode(image) == "I;12" else 16
            grey = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """(H, W) class indices of a grey or palette image, of an integer dtype.

    Of a palette its indices, not its colours; of grey the stored numbers, whatever their depth.
    """
    with _opened(path) as image:
        if image.mode not in _MASK_MODES:
            raise BadFile(
                f"{path}: Expected a mask of one channel that holds class indices, "
                f"but got an image of mode {image.mode}"
            )
        raw = _raw_mode(image)
        mask = np.asarray(image)
        if mask.dtype == bool:
            return mask.astype(np.uint8)
        return mask // np.uint8(_STRETCHED[raw[:3]]) if raw[:3] in _STRETCHED else mask


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image file, whose pixels are not read."""
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile.ImageFile]:
    with (
        naming(path, "Expected a readable image file, but reading it failed: "),
        Image.open(path) as image,
    ):
        with naming(path):
            check_size(8 * image.width * image.height, f"{image.width} x {image.height} pixels")
        yield image


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """How the pixels are stored, in Pillow's words; known until they are read."""
    for *_, arguments in image.tile[:1]:
        return str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)
    return ""
