"""The average calibration error of each image and class as a loss: ace."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.means import require
from segcal.losses.softmax import accumulator, blocks, first_order
from segcal.pixels import Pixels

# Copies of the bins that neighbouring pixels take in turn: on a CPU an addition that has to wait
# for the one before it, because both go to one bin, takes three times as long.
_LANES = 8
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
    weight, total = _BinSums.apply(probs, bins, soft)  # (N, K, B)
    wide = weight.dtype
    ignored = (~pixels.valid).sum(1, dtype=wide).view(-1, 1, 1)  # all of them in the first bin
    weight = weight - F.pad(ignored, (0, bins - 1))
    low, fraction = _bin(true_log_prob.exp(), bins, soft)  # (N, L)
    n, k, _ = weight.shape
    hits = torch.zeros(n, k * bins, dtype=wide, device=weight.device)
    place = pixels.target * bins + low
    if fraction is None:
        hits = hits.scatter_add(1, place, pixels.valid.to(wide))
    else:
        upper = (fraction * pixels.valid).to(wide)
        hits = hits.scatter_add(1, place, pixels.valid.to(wide) - upper).scatter_add(
            1, place + 1, upper
        )
    filled = weight >= _LIGHTEST if soft else weight > 0
    gap = (total - hits.view(n, k, bins)).abs() / torch.where(filled, weight, 1)
    error = (gap * filled).sum(2) / filled.sum(2).clamp_min(1)  # (N, K)
    present = pixels.class_counts() > 0
    sums = torch.stack([(error * present).sum(), present.sum(dtype=wide)])
    value, pairs = sum_over_ranks(sums, sync=sync)
    return (value / pairs.clamp_min(1)).to(probs.dtype)


def _bin(p: Tensor, bins: int, soft: bool) -> tuple[Tensor, Tensor | None]:
    """The bin (lo, hi] of each p; for soft bins the lower one, and the share of the one above."""
    if not soft:
        return (p * bins).ceil_().clamp_(1, bins).sub_(1).long(), None
    place = (p * bins - 0.5).clamp(0, bins - 1)
    low = place.detach().floor().clamp_max_(bins - 2)
    return low.long(), place - low


class _BinSums(torch.autograd.Function):
    """(N, K, B) weight of each bin, and Σ of weight times p in it.

    Ignored pixels have p = 0 here, and count in the first bin.
    """

    @staticmethod
    def forward(ctx: Any, probs: Tensor, bins: int, soft: bool) -> tuple[Tensor, Tensor]:
        n, k, length = probs.shape
        planes = probs.reshape(n * k, length)
        sums = torch.zeros(2, n * k, bins, dtype=accumulator(probs), device=probs.device)
        for rows, columns in blocks(planes.unsqueeze(1).shape, probs.device):
            p = planes[rows, columns]
            low, fraction = _bin(p, bins, soft)
            low += torch.arange(p.shape[1], device=p.device) % _LANES * bins
            part = p.new_zeros(2, len(p), _LANES * bins)
            if fraction is None:
                part[0].scatter_add_(1, low, p.new_ones(1, 1).expand_as(p))
                part[1].scatter_add_(1, low, p)
            else:
                for place, share in ((low, 1 - fraction), (low + 1, fraction)):
                    part[0].scatter_add_(1, place, share)
                    part[1].scatter_add_(1, place, share * p)
            sums[:, rows] += part.view(2, len(p), _LANES, bins).sum(2)
        weight, total = sums.view(2, n, k, bins).unbind(0)
        ctx.save_for_backward(probs)
        ctx.bins, ctx.soft = bins, soft
        if not soft:
            ctx.mark_non_differentiable(weight)
        return weight, total

    @staticmethod
    @first_order
    def backward(ctx: Any, weight: Tensor, total: Tensor) -> tuple[Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        bins, soft = ctx.bins, ctx.soft
        n, k, length = probs.shape
        planes = probs.reshape(n * k, length)
        by_weight, by_total = (g.to(probs.dtype).reshape(n * k, bins) for g in (weight, total))
        out = torch.empty_like(planes)
        for rows, columns in blocks(planes.unsqueeze(1).shape, probs.device):
            p = planes[rows, columns]
            low, fraction = _bin(p, bins, soft)
            slope = by_total[rows].gather(1, low)
            if fraction is not None:
                # Moving p by 1 moves B of its weight from the lower bin to the upper one.
                step = by_total[rows].gather(1, low + 1) - slope
                moved = by_weight[rows].gather(1, low + 1) - by_weight[rows].gather(1, low)
                inside = (p > 0.5 / bins) & (p < 1 - 0.5 / bins)
                slope += step * fraction + bins * inside * (moved + step * p)
            out[rows, columns] = slope
        return out.view_as(probs), None, None
