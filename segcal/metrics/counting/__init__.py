"""Sums of a batch of pixels: a compiled pass on the CPU, a pass in torch on other devices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

from torch import Tensor

from segcal.metrics.counting.device import count_in_torch
from segcal.metrics.sums import BatchSums

log = logging.getLogger(__name__)

_MOST_MASKS = 8  # in one walk: the compiled pass keeps them in the bits of a byte


def count(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None] = (None,),
    *,
    ignore_index: int,
    num_bins: int,
    edge_rule: str,
    logits: bool,
    per_image: bool,
) -> list[BatchSums]:
    """The sums of one batch, for each mask in `inside`; probabilities are computed once.

    Values that cannot be counted (not finite, or not probabilities) are reported in
    `Sums.faults`; the other sums then mean nothing.

    Args:
        values: (N, K, *S) logits, or probabilities if `logits` is False.
        labels: (N, *S).
        inside: (N, *S) bool each, which pixels to count; None for all.
        ignore_index: the label that means "do not count this pixel".
        num_bins: B.
        edge_rule: see `bins.bin_edges`.
        logits: whether a softmax is still to be taken.
        per_image: whether to keep `ImageSums`.
    """
    counted: list[BatchSums] = []
    for first in range(0, len(inside), _MOST_MASKS):
        counted += counting_pass(values.device.type)(
            values,
            labels,
            inside[first : first + _MOST_MASKS],
            ignore_index=ignore_index,
            num_bins=num_bins,
            edge_rule=edge_rule,
            logits=logits,
            per_image=per_image,
        )
    return counted


def counting_pass(device_type: str) -> Callable[..., list[BatchSums]]:
    """The function that counts on a type of device."""
    compiled = compiled_passes() if device_type == "cpu" else None
    return count_in_torch if compiled is None else compiled.count_compiled


@functools.cache
def compiled_passes() -> ModuleType | None:
    """`counting.cpu`, or None without numba, which is not imported before it is needed."""
    try:
        from segcal.metrics.counting import cpu
    except ImportError as error:
        log.info("counting with torch, which is slower: numba cannot be imported (%s)", error)
        return None
    return cpu
