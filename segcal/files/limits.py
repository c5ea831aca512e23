"""How much memory a file, or a number in it, may ask for."""

from __future__ import annotations

import math

MAX_BYTES = 4 * 2**30  # of one array in memory; a 150-class 2048 x 2048 float32 map has 2.4 GiB
MAX_CLASSES = math.isqrt(MAX_BYTES // 8)  # the int64 confusion matrix is one array; 23170


def check_size(length: int, what: str) -> None:
    """Raise if an array of `length` bytes is more than one may ask memory for."""
    if length > MAX_BYTES:
        limit = MAX_BYTES / 2**30
        raise ValueError(f"Expected at most {limit:g} GiB, but {what} is {length / 2**30:.1f} GiB")


def check_num_classes(num_classes: int) -> None:
    """Raise if tables of this many classes make no sense, or would not fit in memory."""
    if not 2 <= num_classes <= MAX_CLASSES:
        raise ValueError(
            f"Expected num_classes of at least 2 and at most {MAX_CLASSES}, but got {num_classes}"
        )
