"""Bins of probabilities, and the pieces of a batch that are counted at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from segcal.metrics.sums import FINE_BINS, FINE_CELLS, FINE_STEPS, OCTAVES


@functools.lru_cache(maxsize=64)
def bin_edges(num_bins: int, edge_rule: str, dtype: torch.dtype) -> Tensor:
    """(B + 1,) edges of bins (lo, hi] over [0, 1] in float32 at least; the outer ones are infinite.

    A bin [lo, hi) holds the same numbers as (lo, hi] with lo and hi one step of the dtype smaller,
    so that the comparison is the same for both rules.

    Args:
        num_bins: B.
        edge_rule: "right" for (lo, hi], "left" for [lo, hi).
        dtype: of the probabilities; k/B is rounded to it, so that a probability written as k/B
            lies on the edge whatever its precision.

    Returns:
        The same tensor for the same arguments: not to be changed.
    """
    edges = torch.arange(num_bins + 1, dtype=torch.float64) / num_bins
    edges = edges.to(dtype).to(torch.promote_types(dtype, torch.float32))
    if edge_rule == "left":
        edges = edges.nextafter(-torch.ones_like(edges))
    edges[0], edges[-1] = -torch.inf, torch.inf
    return edges


def bin_of(probs: Tensor, edges: Tensor) -> Tensor:
    """Number of each probability's bin, 0..B-1."""
    return torch.bucketize(probs, edges[1:-1])


def fine_bin(confidence: Tensor) -> Tensor:
    """Number of the fine bin of each confidence p; next to 1 from the leading bits of 1 - p."""
    q = 1 - confidence
    if confidence.dtype == torch.float64:
        bits, mantissa, bias = q.view(torch.int64), 52, 1023
    else:
        bits, mantissa, bias = q.view(torch.int32), 23, 127
    step = (bits >> (mantissa - FINE_STEPS.bit_length() + 1)).long()
    step = (FINE_BINS - 2 + (bias - OCTAVES) * FINE_STEPS - step).clamp_(max=FINE_BINS - 1)
    cell = (q * FINE_CELLS).long()
    return torch.where(cell < FINE_STEPS, step, (FINE_CELLS - 1 - cell).clamp_(min=0))


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
