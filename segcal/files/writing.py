"""Writing of files so that a reader never meets a half-written one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


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
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        name_file(error, path)
        raise


def name_file(error: BaseException, path: Path) -> None:
    """Put `path` into an error of the system that names no file, as those of writing do not."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def utf8(text: str) -> str:
    """`text` with ? for what no UTF-8 file can hold: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
