"""Cutting a batch into pieces that bound the memory a pass needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Cut = tuple[slice, slice]  # which images, which of their rows


def as_rows(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The batch as (N, K, rows, *), with as many rows as its memory allows, and its labels.

    Nothing is copied: rows are single pixels, unless that would move (N, K, *S) values.
    """
    shape = values.shape[0], values.shape[1], math.prod(values.shape[2:])
    try:
        return values.view(shape), labels.reshape(shape[0], shape[2])
    except RuntimeError:  # a crop, for example
        return values, labels.reshape(shape[0], *values.shape[2:])


def cut(shape: Sequence[int], pixels: int, *, most_images: int) -> list[Cut]:
    """Pieces of an (N, K, rows, *) batch of about `pixels` pixels: of one image, or whole images.

    Args:
        shape: of the batch.
        pixels: a piece may have; more only if a row does.
        most_images: a piece may have.
    """
    images, rows, length = shape[0], shape[2], math.prod(shape[2:])
    if not length:
        return []
    if length > pixels:
        step = max(pixels * rows // length, 1)
        starts = range(0, rows, step)
        return [(slice(i, i + 1), slice(s, s + step)) for i in range(images) for s in starts]
    step = max(min(pixels // length, most_images), 1)
    return [(slice(i, min(i + step, images)), slice(rows)) for i in range(0, images, step)]
