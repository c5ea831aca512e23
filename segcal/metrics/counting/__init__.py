"""Sums of a batch of pixels: a compiled pass on the CPU, a pass in torch on other devices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

from torch import Tensor

from segcal.metrics.counting.device import count_in_torch
from segcal.metrics.sums import BatchSums, Settings
from segcal.pixels import fold_multilabel

log = logging.getLogger(__name__)

_MOST_MASKS = 8  # in one walk: the compiled pass keeps them in the bits of a byte


def count(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None],
    settings: Settings,
    *,
    logits: bool,
) -> list[BatchSums]:
    """The sums of one batch, for each mask in `inside`; probabilities are computed once.

    Values that cannot be counted (not finite, or not probabilities) are reported in
    `Sums.faults`; the other sums then mean nothing.

    Args:
        values: (N, K, *S) logits, or probabilities if `logits` is False.
        labels: (N, *S); of sigmoid outputs (N, K, *S).
        inside: bool of the labels' shape each, what to count; None for all.
        settings: of the meter.
        logits: whether a softmax, or sigmoids, are still to be taken.
    """
    if settings.multilabel:
        return _count_multilabel(values, labels, inside, settings, logits=logits)
    counted: list[BatchSums] = []
    for first in range(0, len(inside), _MOST_MASKS):
        masks = inside[first : first + _MOST_MASKS]
        one_pass = counting_pass(values.device.type)
        counted += one_pass(values, labels, masks, settings, logits=logits)
    return counted


def _count_multilabel(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None],
    settings: Settings,
    *,
    logits: bool,
) -> list[BatchSums]:
    """The same of sigmoid outputs: each class is counted as a two-class problem."""
    two = replace(settings, num_classes=2, class_names=None, multilabel=False)
    problems = []
    for c in range(values.shape[1]):
        one = slice(c, c + 1)
        folded = fold_multilabel(values[:, one], labels[:, one], probs=not logits)
        masks = [None if mask is None else mask[:, c] for mask in inside]
        problems.append(count(*folded, masks, two, logits=logits))
    found = []
    for mask, parts in zip(inside, zip(*problems, strict=True), strict=True):
        counted = labels != settings.ignore_index
        counted = counted if mask is None else counted & mask
        batch = BatchSums.of_problems(parts, images=counted.flatten(1).any(1).sum())
        batch.neutralise()
        found.append(batch)
    return found


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
