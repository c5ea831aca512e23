"""The place for reading arrays and images that anyone may have written.

What a file holds is looked up in its header and held against its size before any memory is taken
for it, and nothing is ever unpickled. Whatever is wrong with a file becomes one `BadFile`.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

MAX_BYTES = 4 * 2**30  # of one array in memory; a 150-class 2048 x 2048 float32 map has 2.4 GiB
_PIECE = 2**20  # bytes read at a time

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LABEL_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")  # one channel, whole numbers


# SyntaxError and TokenError come from numpy's header parser, RuntimeError from encrypted archives.
_READ_ERRORS = (
    *(OSError, ValueError, TypeError, OverflowError, RuntimeError, MemoryError),
    *(SyntaxError, tokenize.TokenError, Image.DecompressionBombError),
)


class BadFile(ValueError):
    """A file that cannot be used; the message is one line that names it and says why."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what reading `path` may raise into `BadFile`."""
    try:
        yield
    except BadFile:
        raise
    except FileNotFoundError:
        raise BadFile(f"{path}: there is no such file") from None
    except (EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadFile(f"{path}: the file is truncated or damaged ({_line(error)})") from None
    except _READ_ERRORS as error:
        raise BadFile(f"{path}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    with naming(path), path.open("rb") as file:
        return _read_array(file, path.stat().st_size)


def npy_shape(path: Path) -> tuple[int, ...]:
    """The shape of the array of a .npy file, which is not read."""
    with naming(path), path.open("rb") as file:
        return _read_header(file, path.stat().st_size)[0]


def npz_keys(path: Path) -> list[str]:
    """The names of the arrays in a .npz file."""
    with naming(path), zipfile.ZipFile(path) as archive:
        return [name[:-4] for name in archive.namelist() if name.endswith(".npy")]


def read_npz(path: Path, key: str) -> np.ndarray:
    """The array called `key` of a .npz file; no other is read."""
    with naming(path), zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
        return _read_array(file, archive.getinfo(f"{key}.npy").file_size)


def npz_shape(path: Path, key: str) -> tuple[int, ...]:
    """The shape of the array called `key` of a .npz file, which is not read."""
    with naming(path), zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
        return _read_header(file, archive.getinfo(f"{key}.npy").file_size)[0]


def _read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype) of an open .npy file of `size` bytes, checked."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"Expected a .npy header of version 1.0 or 2.0, but got {version}")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("Expected an array of numbers, but got Python objects (pickled), unread")
    if dtype.kind not in "biuf":
        raise ValueError(f"Expected an array of numbers, but got dtype {dtype}")
    if min(shape, default=1) < 1:
        raise ValueError(f"Expected an array that is not empty, but got shape {shape}")
    length = math.prod(shape) * dtype.itemsize
    check_size(length, f"shape {shape} of {dtype}")
    if file.tell() + length != size:
        raise EOFError(f"shape {shape} of {dtype} needs {length} bytes, not {size - file.tell()}")
    return shape, fortran, dtype


def _read_array(file: IO[bytes], size: int) -> np.ndarray:
    """The array of an open .npy file of `size` bytes, in native byte order."""
    shape, fortran, dtype = _read_header(file, size)
    flat = np.empty(math.prod(shape), dtype)
    left = flat.view(np.uint8).data
    while left:  # in pieces, because an archive's member holds all that is asked for twice
        got = file.readinto(left[:_PIECE])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"the data of shape {shape} ends early")
        left = left[got:]
    array = flat.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def check_size(length: int, what: str) -> None:
    """Raise if an array of `length` bytes is more than one may ask memory for."""
    if length > MAX_BYTES:
        limit = MAX_BYTES / 2**30
        raise ValueError(f"Expected at most {limit:g} GiB, but {what} is {length / 2**30:.1f} GiB")


def read_labels(path: Path) -> np.ndarray:
    """(H, W) class numbers of a grey or palette image; a palette's indices, not its colours."""
    with naming(path), Image.open(path) as image:
        if image.mode not in _LABEL_MODES:
            raise ValueError(
                f"Expected an image of class numbers (grey or palette), but got mode {image.mode}"
            )
        check_size(image.width * image.height * 8, f"{image.width} x {image.height} labels")
        return np.asarray(image)


def read_rgb(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file."""
    with naming(path), Image.open(path) as image:
        check_size(image.width * image.height * 3, f"{image.width} x {image.height} pixels")
        return np.asarray(image.convert("RGB"))
