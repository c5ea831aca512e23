"""One error for everything that can be wrong with a file."""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

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
