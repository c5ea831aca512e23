"""Means over the pixels of the global batch, and over the problems of a multi-label one."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.softmax import accumulator
from segcal.pixels import Pixels


def pixel_mean(
    loss: Tensor, pixels: Pixels, *, weight: Tensor | None = None, sync: bool = True
) -> Tensor:
    """(Weighted) mean over the valid pixels of all ranks of the (N, L) `loss`, 0 where ignored."""
    if weight is None:
        share = pixels.valid
    else:
        share = _pixel_weight(weight, pixels).to(loss) * pixels.valid
        loss = loss * share
    wide = accumulator(loss)
    # Rows are summed pairwise in the loss's own precision, which is exact enough and fast.
    sums = torch.stack([loss.sum(1).sum(dtype=wide), share.sum(dtype=wide)])
    total, mass = sum_over_ranks(sums, sync=sync)
    return (total / torch.where(mass > 0, mass, 1)).to(loss.dtype)


def problem_mean(values: Tensor, share: Tensor) -> Tensor:
    """The mean of the (G,) `values` with weights `share`, 0 for problems without a valid pixel."""
    mass = share.sum()
    return (values * share).sum() / torch.where(mass > 0, mass, 1)


def class_weight(weight: Tensor, pixels: Pixels) -> Tensor:
    """`weight`, checked to have one entry per class."""
    classes = pixels.problems or pixels.num_classes
    if weight.shape != (classes,):
        raise ValueError(
            f"Expected weight of shape ({classes},), one per class, but got {tuple(weight.shape)}"
        )
    return weight


def _pixel_weight(weight: Tensor, pixels: Pixels) -> Tensor:
    """(N, L) or (N, 1): what each pixel weighs."""
    weight = class_weight(weight, pixels)
    if pixels.problems is None:
        return weight[pixels.target]
    rows = torch.arange(len(pixels.target), device=weight.device)
    return weight[pixels.problem(rows)].unsqueeze(1)


def require(condition: bool, expected: str, got: object) -> None:
    """Raise a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(f"Expected {expected}, but got {got}")
