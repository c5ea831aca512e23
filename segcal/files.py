"""Safe reading of untrusted files, and atomic writing.

Sizes are read from the header of a file and checked before memory is allocated, and nothing is ever
unpickled. Any problem with a file raises `BadFile`.
"""

from __future__ import annotations

import errno
import lzma
import math
import os
import platform
import secrets
import tokenize
import zipfile
import zlib
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
def naming(path: Path, expected: str = "") -> Iterator[None]:
    """Turn what reading `path` may raise into `BadFile`.

    Args:
        path: the file.
        expected: put before what a library says of it, where that alone would not be clear.
    """
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


MAX_BYTES = 4 * 2**30  # of one array in memory; a 150-class 2048 x 2048 float32 map has 2.4 GiB
MAX_CLASSES = math.isqrt(MAX_BYTES // 8)  # the int64 confusion matrix is one array; 23170


def require_file(path: Path) -> None:
    """Raise unless `path` is a regular file: reading a pipe would wait forever."""
    if path.exists() and not path.is_file():
        raise BadFile(f"{path} is not a regular file")


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted by name, without hidden files such as ._a.png of macOS."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def check_size(length: int, what: str) -> None:
    """Raise if an array of `length` bytes is larger than `MAX_BYTES`."""
    if length > MAX_BYTES:
        limit = MAX_BYTES / 2**30
        raise ValueError(f"Expected at most {limit:g} GiB, but {what} is {length / 2**30:.1f} GiB")


def check_num_classes(num_classes: int, *, multilabel: bool = False) -> None:
    """Raise if tables of this many classes make no sense, or would not fit in memory."""
    least = 1 if multilabel else 2
    if not least <= num_classes <= MAX_CLASSES:
        raise ValueError(
            f"Expected num_classes of at least {least} and at most {MAX_CLASSES}, "
            f"but got {num_classes}"
        )


_PIECE = 2**20  # bytes read at a time
_SMALL = 2**26  # bytes that a file of any size may unpack to
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    require_file(path)
    with naming(path), path.open("rb") as file:
        return _read_array(file, path.stat().st_size)


def npy_shape(path: Path) -> tuple[int, ...]:
    """The shape of the array of a .npy file, of any size, which is not read."""
    require_file(path)
    with naming(path), path.open("rb") as file:
        return _read_header(file, path.stat().st_size, any_size=True)[0]


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
            require_file(path)
            self._archive = zipfile.ZipFile(path)
            members = [info for info in self._archive.infolist() if info.filename.endswith(".npy")]
            names = [info.filename for info in members]
            if len(set(names)) < len(names):
                raise ValueError("two arrays have one name")
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
        """The shape of an array of any size, which is not read."""
        with naming(self._path), self._archive.open(self._member(key)) as file:
            size = self._member(key).file_size
            return _read_header(file, size, own=self._own, any_size=True)[0]

    def _member(self, key: str) -> zipfile.ZipInfo:
        if key not in self._members:
            found = ", ".join(self.keys) or "none"
            raise ValueError(f"Expected an array called {key}, but got {found}")
        return self._members[key]


def _read_header(
    file: IO[bytes], size: int, *, own: bool = False, any_size: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype) of an open .npy file of `size` bytes, checked."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"Expected a .npy header of version 1.0 or 2.0, but got {version}")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("Expected an array of numbers, but got pickled objects, never loaded")
    if dtype.kind not in "biuf":
        raise ValueError(f"Expected an array of numbers, but got dtype {dtype}")
    if min(shape, default=1) < (0 if own else 1):
        raise ValueError(f"Expected an array that is not empty, but got shape {shape}")
    length = math.prod(shape) * dtype.itemsize
    if not (own or any_size):
        check_size(length, f"shape {shape} of {dtype}")
    if file.tell() + length != size:
        raise EOFError(f"shape {shape} of {dtype} needs {length} bytes, not {size - file.tell()}")
    return shape, fortran, dtype


def _read_array(file: IO[bytes], size: int, *, own: bool = False) -> np.ndarray:
    """The array of an open .npy file of `size` bytes, in native byte order."""
    shape, fortran, dtype = _read_header(file, size, own=own)
    flat = np.empty(math.prod(shape), dtype)
    _fill(file, flat)
    array = flat.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _fill(file: IO[bytes], array: np.ndarray) -> None:
    """Read the bytes of a contiguous array."""
    left = array.reshape(-1).view(np.uint8).data
    while left:  # in pieces, because an archive's member holds all that is asked for twice
        got = file.readinto(left[:_PIECE])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"the data of shape {array.shape} ends early")
        left = left[got:]


class Nifti:
    """A NIfTI file (.nii or .nii.gz), opened with nibabel; its arrays are read when asked for.

    NIfTI counts (x, y, z, class) with x the fastest in memory. Arrays come with their axes
    reversed, (z, y, x) or (class, z, y, x), as SimpleITK and nnU-Net have them. No axis is
    flipped: `affine` says where voxels are.

    Attributes:
        shape: of the array, axes reversed.
        affine: (4, 4) from voxel (x, y, z) to millimetres.
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
                f"{path}: Expected the package nibabel to read it, but it is not installed: "
                "pip install 'segcal[nifti]'"
            ) from None
        self._path = path
        require_file(path)
        with naming(path, "Expected a NIfTI file, but reading it failed: "):
            try:
                with LoggingOutputSuppressor():  # it speaks of a bad header besides raising
                    image = Nifti1Image.from_filename(path)
            except (ImageFileError, HeaderDataError, WrapStructError) as error:
                raise ValueError(str(error)) from None
        self._data = image.dataobj
        self.shape: tuple[int, ...] = tuple(map(int, image.shape[::-1]))
        self.affine: np.ndarray = image.affine
        if image.get_data_dtype().kind not in "biuf" or min(self.shape, default=0) < 1:
            raise BadFile(f"{path}: Expected voxels of numbers, but got {image.get_data_dtype()}")

    def read(self) -> np.ndarray:
        """The whole array, of at most 4 GiB."""
        with naming(self._path):
            check_size(8 * math.prod(self.shape), f"shape {self.shape}")
            return np.asarray(self._data).T


def is_nifti(path: Path) -> bool:
    """Whether a file is a NIfTI file by its name."""
    return path.name.endswith((".nii", ".nii.gz"))


_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_MASK_MODES = ("1", "L", "P", "I", *_SIXTEEN_BITS)  # one channel of whole numbers
# Pillow stretches grey of 2 and 4 bits to 0..255; by these factors.
_STRETCHED = {"L;2": 85, "L;4": 17}


def read_rgb(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file; grey of 16 bits becomes 8 bits by its depth."""
    with _opened(path) as image:
        if image.mode in ("I", "F"):  # of no stated range: Pillow would cut it off at 0 and 255
            raise BadFile(
                f"{path}: Expected an image of 8 or 16 bits per channel, but got 32 "
                f"(mode {image.mode}), whose range is not known"
            )
        if image.mode in _SIXTEEN_BITS:
            depth = 12 if _raw_mode(image) == "I;12" else 16
            grey = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """(H, W) class indices of a grey or palette image, of an integer dtype.

    A palette image gives its indices, not its colours; a grey image gives the stored numbers,
    whatever their depth.
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
    require_file(path)
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


_MAX_TEXT = 2**20
_MAX_DEPTH = 32  # of lists and mappings inside each other


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader without aliases, by which a few bytes can stand for gigabytes."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"got the alias *{self.peek_event().anchor}, which is not allowed")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError(f"got more than {_MAX_DEPTH} levels of lists and mappings")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: Path) -> Any:
    """What a YAML (or JSON) file of at most 1 MiB holds: text, numbers, lists and dicts.

    Aliases are refused.

    Raises:
        BadFile: in one line, where the file is no such YAML.
    """
    require_file(path)
    with naming(path):
        if path.stat().st_size > _MAX_TEXT:
            raise ValueError("Expected YAML of at most 1 MiB, but the file is larger")
        content = path.read_bytes()
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except UnicodeDecodeError:
        raise BadFile(f"Expected YAML in UTF-8, but {path} is not text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise BadFile(f"{path}: Expected YAML, but line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadFile(f"{path}: Expected YAML, but {one_line(error)}") from None


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing; it takes its new contents only when the block ends well.

    The bytes go to a temporary file in the same folder, which replaces `path` at the end. If the
    block raises, `path` is as it was.

    Args:
        path: the file to write; its folder is made if missing.
        mode: "w" for text (UTF-8) or "wb" for bytes.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"Expected mode 'w' or 'wb', but got {mode!r}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise


def name_file(error: BaseException, path: Path) -> None:
    """Put `path` into an error of the system that names no file, as those of writing do not."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def utf8(text: str) -> str:
    """`text` with ? for what no UTF-8 file can hold: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, on the CPU: tensors, numbers, text and containers, never code.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or something else.
    """
    import torch

    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    require_file(path)
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


class Busy(ValueError):
    """Another process has a folder locked.

    Attributes:
        holder: who: its process and machine.
    """

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"Expected {folder} to be free, but {holder} is working in it")
        self.holder = holder


class _Lock:
    """An open folder that is locked; processes forked from this one do not keep it locked."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY)
        register_after_fork(self, _Lock.close)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keep other processes out of this block for `folder`, which exists.

    The lock ends with its process, however that ends. Where the system has no such locks, the
    block is entered without one.

    Args:
        folder: what to lock.
        wait: until another process leaves; otherwise raise `Busy`, which says who is there. A
            small file in the folder tells the next one.
    """
    lock = None if fcntl is None else _Lock(folder)
    note = folder / _HOLDER
    try:
        if lock is not None:
            try:
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Busy(folder, _holder(note)) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        if not wait:
            note.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        try:
            yield
        finally:
            if not wait:
                note.unlink(missing_ok=True)
    finally:
        if lock is not None:
            lock.close()


def _holder(note: Path) -> str:
    try:
        return note.read_text(encoding="utf-8", errors="replace")[:200].strip()
    except OSError:
        return "another process"


_HOLDER = ".in_use"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # some network folders
