"""Reading of .npy and .npz files, one array at a time."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from segcal.files.errors import naming
from segcal.files.limits import check_size

_PIECE = 2**20  # bytes read at a time
_SMALL = 2**26  # bytes that any file may ask for
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    with naming(path), path.open("rb") as file:
        return _read_array(file, path.stat().st_size)


def npy_shape(path: Path) -> tuple[int, ...]:
    """The shape of the array of a .npy file, which is not read."""
    with naming(path), path.open("rb") as file:
        return _read_header(file, path.stat().st_size)[0]


class Npz:
    """A .npz file, opened once; each array is read when it is asked for.

    with Npz(path) as arrays:
        logits = arrays["logits"]

    Args:
        path: the file.
        own: a file that segcal itself wrote. Its arrays may be empty and of any size, but large
            ones are not compressed, so that they take no more memory than the file.

    Attributes:
        keys: the names of the arrays.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        self._path, self._own = path, own
        with naming(path):
            self._archive = zipfile.ZipFile(path)
            members = [info for info in self._archive.infolist() if info.filename.endswith(".npy")]
            total = sum(info.file_size for info in members)
            if own and total > max(path.stat().st_size, _SMALL):
                raise ValueError(
                    f"Expected arrays that are not compressed, but got {total / 2**20:.0f} MiB in "
                    f"a file of {path.stat().st_size / 2**20:.1f} MiB"
                )
        self._members = {info.filename.removesuffix(".npy"): info for info in members}
        self.keys = [*self._members]

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def __getitem__(self, key: str) -> np.ndarray:
        with naming(self._path), self._archive.open(self._member(key)) as file:
            return _read_array(file, self._member(key).file_size, own=self._own)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of an array, which is not read."""
        with naming(self._path), self._archive.open(self._member(key)) as file:
            return _read_header(file, self._member(key).file_size, own=self._own)[0]

    def _member(self, key: str) -> zipfile.ZipInfo:
        if key not in self._members:
            found = ", ".join(self.keys) or "none"
            raise ValueError(f"Expected an array called {key}, but got {found}")
        return self._members[key]


def _read_header(
    file: IO[bytes], size: int, *, own: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype) of an open .npy file of `size` bytes, checked."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"Expected a .npy header of version 1.0 or 2.0, but got {version}")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("Expected an array of numbers, but got Python objects (pickled), unread")
    if dtype.kind not in "biuf":
        raise ValueError(f"Expected an array of numbers, but got dtype {dtype}")
    if min(shape, default=1) < (0 if own else 1):
        raise ValueError(f"Expected an array that is not empty, but got shape {shape}")
    length = math.prod(shape) * dtype.itemsize
    if not own:
        check_size(length, f"shape {shape} of {dtype}")
    if file.tell() + length != size:
        raise EOFError(f"shape {shape} of {dtype} needs {length} bytes, not {size - file.tell()}")
    return shape, fortran, dtype


def _read_array(file: IO[bytes], size: int, *, own: bool = False) -> np.ndarray:
    """The array of an open .npy file of `size` bytes, in native byte order."""
    shape, fortran, dtype = _read_header(file, size, own=own)
    flat = np.empty(math.prod(shape), dtype)
    left = flat.view(np.uint8).data
    while left:  # in pieces, because an archive's member holds all that is asked for twice
        got = file.readinto(left[:_PIECE])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"the data of shape {shape} ends early")
        left = left[got:]
    array = flat.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)
