"""Sums of a batch of sigmoid outputs: each class is counted as a two-class problem."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from segcal.metrics.counting import count
from segcal.metrics.sums import BatchSums
from segcal.pixels import fold_multilabel


def count_multilabel(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None],
    *,
    ignore_index: int,
    num_bins: int,
    edge_rule: str,
    logits: bool,
    per_image: bool,
) -> list[BatchSums]:
    """The sums of one batch, for each mask in `inside`; see `counting.count`.

    Args:
        values: (N, K, *S) outputs before the sigmoid, or after it if `logits` is False.
        labels: (N, K, *S) of 0, 1 or the ignore index.
        inside: (N, K, *S) bool each, which decisions to count; None for all.
        ignore_index: the label that means "do not count this decision".
        num_bins: B.
        edge_rule: see `bins.bin_edges`.
        logits: whether a sigmoid is still to be taken.
        per_image: whether to keep `ImageSums`.
    """
    problems = [
        count(
            *fold_multilabel(values[:, c : c + 1], labels[:, c : c + 1], probs=not logits),
            [None if mask is None else mask[:, c] for mask in inside],
            ignore_index=ignore_index,
            num_bins=num_bins,
            edge_rule=edge_rule,
            logits=logits,
            per_image=per_image,
        )
        for c in range(values.shape[1])
    ]
    found = []
    for mask, parts in zip(inside, zip(*problems, strict=True), strict=True):
        counted = labels != ignore_index if mask is None else (labels != ignore_index) & mask
        batch = BatchSums.of_problems(parts, images=counted.flatten(1).any(1).sum())
        batch.neutralise()
        found.append(batch)
    return found
