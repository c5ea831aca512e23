"""Safe reading of files that someone else may have made, and atomic writing.

Sizes are read from the header of a file and checked before memory is allocated, and nothing is ever
unpickled. Any problem with a file raises `BadFile`.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import math
import os
import re
import secrets
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from PIL import Image, ImageFile

try:
    import fcntl
except ImportError:  # Windows: without locks
    fcntl = None  # type: ignore[assignment]

# SyntaxError and TokenError come from numpy's header parser and from broken PNG files,
# RuntimeError from encrypted archives.
_READ_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, OverflowError, RuntimeError, MemoryError),
    *(SyntaxError, tokenize.TokenError, Image.DecompressionBombError),
)
_DAMAGE = (EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


class BadFile(ValueError):
    """A file that cannot be used; the message is one line that names it and says why."""


@contextmanager
def reading(path: Path, expected: str = "") -> Iterator[None]:
    """Turn what reading `path` may raise into `BadFile`; `expected` is put before it."""
    if path.exists() and not path.is_file():
        raise BadFile(f"{path}: this is not a regular file")  # a pipe would be waited for forever
    try:
        yield
    except BadFile:
        raise
    except FileNotFoundError:
        raise BadFile(f"{path}: there is no such file") from None
    except _DAMAGE as error:
        raise BadFile(f"{path}: the file is truncated or damaged ({one_line(error)})") from None
    except _READ_ERRORS as error:
        raise BadFile(f"{path}: {expected}{one_line(error)}") from None


def one_line(error: Exception) -> str:
    """What another library said, as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def utf8(text: str) -> str:
    """`text` with ? for what no UTF-8 file can hold: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted by name, without hidden files such as ._a.png of macOS."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


MAX_BYTES = 4 * 2**30  # of one array in memory; a 150-class 2048 x 2048 float32 map has 2.4 GiB
MAX_CLASSES = math.isqrt(MAX_BYTES // 8)  # the int64 confusion matrix is one array; 23170


def check_size(length: int, what: str) -> None:
    """Raise if an array of `length` bytes is larger than `MAX_BYTES`."""
    if length > MAX_BYTES:
        limit = MAX_BYTES / 2**30
        raise ValueError(f"{what} takes {length / 2**30:.1f} GiB, and {limit:g} GiB is the most")


def check_num_classes(num_classes: int, *, multilabel: bool = False) -> None:
    """Raise if tables of this many classes make no sense, or would not fit in memory."""
    least = 1 if multilabel else 2
    if not least <= num_classes <= MAX_CLASSES:
        raise ValueError(
            f"num_classes must be at least {least} and at most {MAX_CLASSES}, but is {num_classes}"
        )


# Arrays ------------------------------------------------------------------------------------------

_PIECE = 2**20  # bytes read at a time
_SMALL = 2**26  # bytes that a file of any size may unpack to
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    with reading(path), path.open("rb") as file:
        return _read_array(file, path.stat().st_size)


def npy_shape(path: Path) -> tuple[int, ...]:
    """The shape of the array of a .npy file, of any size, which is not read."""
    with reading(path), path.open("rb") as file:
        return _read_header(file, path.stat().st_size)[0]


class Npz:
    """A .npz file; each array is read when it is asked for, as in `with Npz(path) as arrays:`.

    `own` says that segcal wrote the file: its arrays may be empty and of any size, but large ones
    are not compressed, so that they take no more memory than the file.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        self._path, self._own = path, own
        with reading(path):
            self._archive = zipfile.ZipFile(path)
            members = [info for info in self._archive.infolist() if info.filename.endswith(".npy")]
            self._members = {info.filename.removesuffix(".npy"): info for info in members}
            if len(self._members) < len(members):
                raise ValueError("two of its arrays have one name")
            total = sum(info.file_size for info in members)
            if own and total > max(path.stat().st_size, _SMALL):
                raise ValueError(
                    f"its arrays would unpack from {path.stat().st_size / 2**20:.1f} to "
                    f"{total / 2**20:.0f} MiB, but segcal does not compress large ones"
                )
        self.keys = [*self._members]

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def __getitem__(self, key: str) -> np.ndarray:
        with reading(self._path), self._archive.open(self._member(key)) as file:
            return _read_array(file, self._member(key).file_size, own=self._own)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of an array of any size, which is not read."""
        with reading(self._path), self._archive.open(self._member(key)) as file:
            return _read_header(file, self._member(key).file_size, own=self._own)[0]

    def _member(self, key: str) -> zipfile.ZipInfo:
        if key not in self._members:
            raise ValueError(f"it has no array {key}, only {', '.join(self.keys) or 'none'}")
        return self._members[key]


def _read_header(
    file: IO[bytes], size: int, *, own: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype) of an open .npy file of `size` bytes, checked."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its .npy header has version {version}, but only 1.0 and 2.0 are read")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("an array must hold numbers, not pickled objects, which are never loaded")
    if dtype.kind not in "biuf":
        raise ValueError(f"an array must hold numbers, but has dtype {dtype}")
    if min(shape, default=1) < (0 if own else 1):
        raise ValueError(f"an array is empty: its shape is {shape}")
    length = math.prod(shape) * dtype.itemsize
    if file.tell() + length != size:
        raise EOFError(f"shape {shape} of {dtype} needs {length} bytes, not {size - file.tell()}")
    return shape, fortran, dtype


def _read_array(file: IO[bytes], size: int, *, own: bool = False) -> np.ndarray:
    """The array of an open .npy file of `size` bytes, in native byte order."""
    shape, fortran, dtype = _read_header(file, size, own=own)
    if not own:
        check_size(math.prod(shape) * dtype.itemsize, f"an array of shape {shape} and {dtype}")
    flat = np.empty(math.prod(shape), dtype)
    left = flat.view(np.uint8).data
    while left:  # in pieces, because an archive's member holds all that is asked for twice
        got = file.readinto(left[:_PIECE])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"the data of shape {shape} end early")
        left = left[got:]
    array = flat.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


class Nifti:
    """A NIfTI file (.nii or .nii.gz), opened with nibabel; its array is read when asked for.

    Axes are reversed to (z, y, x) or (class, z, y, x), as SimpleITK and nnU-Net have them, and none
    is flipped: `affine` (4, 4) takes a voxel (x, y, z) to millimetres.
    """

    def __init__(self, path: Path) -> None:
        try:
            from nibabel.filebasedimages import ImageFileError
            from nibabel.imageglobals import LoggingOutputSuppressor
            from nibabel.nifti1 import Nifti1Image
            from nibabel.spatialimages import HeaderDataError
            from nibabel.wrapstruct import WrapStructError
        except ImportError:
            raise BadFile(
                f"{path}: reading it needs the package nibabel: pip install 'segcal[nifti]'"
            ) from None
        self._path = path
        with reading(path, "it cannot be read as NIfTI: "):
            try:
                with LoggingOutputSuppressor():  # it speaks of a bad header besides raising
                    image = Nifti1Image.from_filename(path)
            except (ImageFileError, HeaderDataError, WrapStructError) as error:
                raise ValueError(str(error)) from None
        self._data = image.dataobj
        self.shape: tuple[int, ...] = tuple(map(int, image.shape[::-1]))
        self.affine: np.ndarray = image.affine
        if image.get_data_dtype().kind not in "biuf" or min(self.shape, default=0) < 1:
            raise BadFile(f"{path}: voxels must be numbers, but are {image.get_data_dtype()}")

    def read(self) -> np.ndarray:
        """The whole array, of at most 4 GiB."""
        with reading(self._path):
            check_size(8 * math.prod(self.shape), f"an array of shape {self.shape}")
            return np.asarray(self._data).T


def is_nifti(path: Path) -> bool:
    """Whether a file is a NIfTI file by its name."""
    return path.name.endswith((".nii", ".nii.gz"))


def write_nifti(path: Path, array: np.ndarray, affine: np.ndarray) -> None:
    """Write a (z, y, x) array as .nii.gz, which `Nifti` reads, completely or not at all."""
    try:
        from nibabel.nifti1 import Nifti1Image
    except ImportError:
        raise BadFile(
            f"{path}: writing it needs the package nibabel: pip install 'segcal[nifti]'"
        ) from None
    image = Nifti1Image(array.T, affine)
    image.set_qform(affine, 1)
    image.set_sform(affine, 1)
    image.header.set_xyzt_units("mm")
    with atomic_write(path, "wb") as file:
        file.write(gzip.compress(image.to_bytes(), 5, mtime=0))


# Images ------------------------------------------------------------------------------------------

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_MASK_MODES = ("1", "L", "P", "I", *_SIXTEEN_BITS)  # one channel of whole numbers
# Pillow stretches grey of 2 and 4 bits to 0..255; by these factors.
_STRETCHED = {"L;2": 85, "L;4": 17}


def read_rgb(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file; grey of 16 bits becomes 8 bits by its depth."""
    with _opened(path) as image:
        if image.mode in ("I", "F"):  # of no stated range: Pillow would cut it off at 0 and 255
            raise BadFile(
                f"{path}: an image has 8 or 16 bits per channel; this one has 32 (mode "
                f"{image.mode}), whose range is not known"
            )
        if image.mode in _SIXTEEN_BITS:
            depth = 12 if _raw_mode(image) == "I;12" else 16
            grey = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """(H, W) integers of a grey or palette image: the stored numbers, whatever their depth."""
    with _opened(path) as image:
        if image.mode not in _MASK_MODES:
            raise BadFile(
                f"{path}: a mask has one channel of class indices, but this image is of mode "
                f"{image.mode}"
            )
        depth = _raw_mode(image)[:3]
        mask = np.asarray(image)
        if mask.dtype == bool:
            return mask.astype(np.uint8)
        return mask // np.uint8(_STRETCHED[depth]) if depth in _STRETCHED else mask


def read_confidence(path: Path) -> np.ndarray:
    """(H, W) float32 in 0..1 of a grey image of 8 or 16 bits, whose largest number stands for 1."""
    with _opened(path) as image:
        if image.mode not in ("L", "I", *_SIXTEEN_BITS):
            raise BadFile(
                f"{path}: confidence is a grey image of 8 or 16 bits, but this one is of mode "
                f"{image.mode}"
            )
        return (np.asarray(image) / (255 if image.mode == "L" else 65535)).astype(np.float32)


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image file, whose pixels are not read."""
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile.ImageFile]:
    with reading(path, "it cannot be read as an image: "), Image.open(path) as image:
        with reading(path):
            size = f"an image of {image.width} x {image.height} pixels"
            check_size(8 * image.width * image.height, size)
        yield image


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """How the pixels are stored, in Pillow's words; known until they are read."""
    for *_, arguments in image.tile[:1]:
        return str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)
    return ""


# Text and weights --------------------------------------------------------------------------------

_MAX_TEXT = 2**20


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader without aliases, by which a few bytes can stand for gigabytes.

    It also refuses a key that stands twice, of which the last would count.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"the alias *{self.peek_event().anchor} is not allowed")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode):
            keys = Counter((key.tag, str(key.value)) for key, _ in node.value)
            for (_, key), number in keys.items():
                if number > 1:
                    raise ValueError(f"{key} stands there {number} times")
        return node


def read_yaml(path: Path) -> Any:
    """What a YAML (or JSON) file of at most 1 MiB, without aliases, holds; else a `BadFile`."""
    with reading(path):
        if path.stat().st_size > _MAX_TEXT:
            raise ValueError("a YAML file has at most 1 MiB, but this one is larger")
        content = path.read_bytes()
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not YAML, which is text in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise BadFile(f"{path}: not YAML: line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not YAML: {one_line(error)}") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, on the CPU: tensors, numbers, text and containers, never code."""
    import torch

    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    with reading(path):
        pass  # is a regular file
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not verify the checksums
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile and torch raise many kinds for damaged files
        raise ValueError(f"{path} is damaged, or is no file of weights") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no file of weights")
    return state


# Writing -----------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing, "w" text (UTF-8) or "wb" bytes, and make its folder if missing.

    A temporary file beside it replaces `path` when the block ends without an error.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        encoding = None if "b" in mode else "utf-8"
        with temporary.open(mode.replace("w", "x"), encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        name_file(error, path)
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of `atomic_write` below a folder, which a killed process left."""
    for path in [*folder.rglob(".*")]:
        if re.fullmatch(r"\..+\.[0-9a-f]{12}", path.name):
            path.unlink(missing_ok=True)


def name_file(error: BaseException, path: Path) -> None:
    """Put `path` into an error of the system that names no file."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


class Busy(ValueError):
    """Another process has a folder locked."""


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keep other processes out of this block for `folder`, where the system has locks.

    The lock ends with its process. Without `wait` another process inside raises `Busy`.
    """
    if fcntl is None:
        yield
        return
    lock = _Lock(folder)
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        lock.close()
        raise Busy(f"another process is working in {folder}") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            lock.close()
            raise
        # Some network folders have no locks.
    try:
        yield
    finally:
        lock.close()


class _Lock:
    """An open folder; processes forked from this one, such as readers of data, do not keep it."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY)
        register_after_fork(self, _Lock.close)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
