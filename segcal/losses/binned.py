"""The average calibration error of each image and class as a loss: ace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.means import require
from segcal.losses.softmax import accumulator, first_order
from segcal.pixels import Pixels

# Copies of the bins that neighbouring pixels take in turn: on a CPU an addition that has to wait
# for the one before it, because both go to one bin, takes three times as long.
_LANES = 8
_ROWS, _COLUMNS = 4, 1 << 15  # of a piece on a CPU; threads share the rows
_LIGHTEST = 0.01  # soft bins with less weight than that are left out


def ace(
    pixels: Pixels,
    true_log_prob: Tensor,
    probs: Tensor,
    *,
    bins: Annotated[int, "bins of equal width"] = 20,
    soft: Annotated[bool, "share each probability between the two nearest bins"] = False,
    sync: bool = True,
) -> Tensor:
    """Marginal L1 average calibration error, mL1-ACE (Barfoot et al. 2024, 2025).

    For each image and class c: the mean over non-empty bins (lo, hi] of p_c of
    |mean p_c − mean 1[y = c]|; then the mean over all pairs of an image and a class that has a
    labelled pixel in it. Hard bins have a gradient through the mean of p_c alone. Soft bins share
    p_c linearly between the two nearest bin centres; those of weight below 0.01 are left out.
    """
    require(bins >= 1 + soft, f"bins >= {1 + soft}", bins)
    weight, total, *squares = _moments(probs, bins, soft)  # (N, K, B or B + 1)
    wide = weight.dtype
    ignored = (~pixels.valid).sum(1, dtype=wide).view(-1, 1, 1)  # all of them in the first place
    weight = weight - F.pad(ignored, (0, weight.shape[2] - 1))
    true_prob = true_log_prob.exp()
    place = _place(true_prob, bins, soft)  # (N, L)
    n, k, places = weight.shape
    cell, valid = pixels.target * places + place, pixels.valid.to(wide)
    hits = weight.new_zeros(n, k * places).scatter_add(1, cell, valid).view_as(weight)
    if soft:
        true_total = weight.new_zeros(n, k * places).scatter_add(
            1, cell, true_prob.to(wide) * valid
        )
        edge = torch.arange(places, dtype=wide, device=weight.device)
        # An offset is B p − edge: how far, in bins, p is from the edge where it is counted.
        weight, total, hits = (
            _shared(amount, bins * amount_times_p - edge * amount)
            for amount, amount_times_p in (
                (weight, total),
                (total, squares[0]),
                (hits, true_total.view_as(hits)),
            )
        )
    filled = weight >= _LIGHTEST if soft else weight > 0
    gap = (total - hits).abs() / torch.where(filled, weight, 1)
    error = (gap * filled).sum(2) / filled.sum(2).clamp_min(1)  # (N, K)
    present = pixels.class_counts() > 0
    sums = torch.stack([(error * present).sum(), present.sum(dtype=wide)])
    value, pairs = sum_over_ranks(sums, sync=sync)
    return (value / pairs.clamp_min(1)).to(probs.dtype)


def _place(p: Tensor, bins: int, soft: bool) -> Tensor:
    """Where each p is counted: in the bin (lo, hi], or at the nearest of the B + 1 edges l/B."""
    scaled = p.detach() * bins
    return (scaled.round_() if soft else scaled.ceil_().clamp_(1, bins).sub_(1)).long()


def _shared(amount: Tensor, product: Tensor) -> Tensor:
    """(..., B) what soft bins get of the amounts at their (..., B + 1) edges.

    The bin above an edge gets a share of 1/2 + offset, the one below the rest; the outer edges have
    one bin alone.

    Args:
        amount: at the edges.
        product: Σ of amount times offset.
    """
    above = (amount / 2 + product)[..., 1:-1]
    above = torch.cat([amount[..., :1], above], -1)
    below = torch.cat([amount[..., 1:-1] - above[..., 1:], amount[..., -1:]], -1)
    return above + below


def _moments(probs: Tensor, bins: int, soft: bool) -> tuple[Tensor, ...]:
    """(N, K, B) pixels and Σ p of hard bins; (N, K, B + 1) pixels, Σ p and Σ p² of soft.

    Ignored pixels have p = 0 here, and count in the first place.
    """
    moments: tuple[Tensor, ...] = _Moments.apply(probs, bins, soft)
    return moments


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, bins: int, soft: bool) -> tuple[Tensor, ...]:
        n, k, length = probs.shape
        planes, places, kept = probs.reshape(n * k, length), bins + soft, 2 + soft
        sums = torch.zeros(kept, n * k, places, dtype=accumulator(probs), device=probs.device)
        one = sums.new_ones(())
        lanes = torch.arange(length, device=probs.device) % _LANES * places
        for rows, columns in _pieces(planes):
            piece = planes[rows, columns]
            place = _place(piece, bins, soft).add_(lanes[columns])
            amount = piece.to(sums.dtype, copy=True)
            part = sums.new_zeros(kept, len(place), _LANES * places)
            part[0].scatter_add_(1, place, one.expand_as(place))
            part[1].scatter_add_(1, place, amount)
            if soft:
                part[2].scatter_add_(1, place, amount.square_())
            sums[:, rows] += part.view(kept, len(place), _LANES, places).sum(2)
        ctx.save_for_backward(probs)
        ctx.bins, ctx.soft = bins, soft
        moments = sums.view(kept, n, k, places).unbind(0)
        ctx.mark_non_differentiable(moments[0])
        return moments

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        bins, soft = ctx.bins, ctx.soft
        n, k, length = probs.shape
        planes = probs.reshape(n * k, length)
        tables = [  # the slopes of p and p² are 1 and 2 p
            ((order + 1) * grad).to(probs.dtype).view(len(planes), grad.shape[2])
            for order, grad in enumerate(grads)
        ]
        out = torch.empty_like(planes)
        for rows, columns in _pieces(planes):
            piece, slope = planes[rows, columns], out[rows, columns]
            place = _place(piece, bins, soft)
            constant = tables[0][rows].gather(1, place)
            if soft:
                torch.addcmul(constant, tables[1][rows].gather(1, place), piece, out=slope)
            else:
                slope.copy_(constant)
        return out.view_as(probs), None, None


def _pieces(planes: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces of (M, L) that a CPU's cache holds; elsewhere one piece."""
    count, length = planes.shape
    cpu = planes.device.type == "cpu"
    rows = max(_ROWS, _ROWS * _COLUMNS // max(length, 1)) if cpu else count
    columns = _COLUMNS if cpu else length
    for i in range(0, count, max(rows, 1)):
        for j in range(0, length, max(columns, 1)):
            yield slice(i, i + rows), slice(j, j + columns)
