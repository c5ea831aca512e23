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
    weight, total = _BinSums.apply(probs, pixels.valid, bins, soft)  # (N, K, B)
    wide = weight.dtype
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
        return (p * bins).ceil().long().sub_(1).clamp_(0, bins - 1), None
    place = (p * bins - 0.5).clamp(0, bins - 1)
    low = place.detach().floor().clamp_max(bins - 2)
    return low.long(), place - low


def _flat_bin(p: Tensor, valid: Tensor, bins: int, soft: bool) -> tuple[Tensor, Tensor | None]:
    """`_bin` of (N, K, L) as positions in a flat (N, K, B + 2); ignored pixels are in bin B."""
    low, fraction = _bin(p, bins, soft)
    low = low.int().masked_fill_(~valid.unsqueeze(1), bins)
    first = torch.arange(p.shape[0] * p.shape[1], dtype=torch.int32, device=p.device) * (bins + 2)
    flat = low.add_(first.view(*p.shape[:2], 1)).view(-1)
    if fraction is not None:
        fraction = fraction.masked_fill_(~valid.unsqueeze(1), 0).reshape(-1)
    return flat, fraction


class _BinSums(torch.autograd.Function):
    """(N, K, B) weight of each bin, and Σ of weight times p in it; ignored pixels are in none."""

    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, valid: Tensor, bins: int, soft: bool
    ) -> tuple[Tensor, Tensor]:
        n, k, _ = probs.shape
        sums = torch.zeros(2, n, k, bins + 2, dtype=accumulator(probs), device=probs.device)
        for rows, columns in blocks(probs.shape, probs.device):
            p = probs[rows, :, columns]
            low, fraction = _flat_bin(p, valid[rows, columns], bins, soft)
            part = torch.zeros(2, len(p) * k * (bins + 2), dtype=p.dtype, device=p.device)
            p = p.reshape(-1)
            if fraction is None:
                part[0].index_add_(0, low, torch.ones_like(p))
                part[1].index_add_(0, low, p)
            else:
                for place, share in ((low, 1 - fraction), (low + 1, fraction)):
                    part[0].index_add_(0, place, share)
                    part[1].index_add_(0, place, share * p)
            sums[:, rows] += part.view(2, -1, k, bins + 2)
        weight, total = sums[..., :bins].unbind(0)
        ctx.save_for_backward(probs, valid)
        ctx.bins, ctx.soft = bins, soft
        if not soft:
            ctx.mark_non_differentiable(weight)
        return weight, total

    @staticmethod
    @first_order
    def backward(ctx: Any, weight: Tensor, total: Tensor) -> tuple[Tensor, None, None, None]:
        probs, valid = ctx.saved_tensors
        bins, soft = ctx.bins, ctx.soft
        by_weight, by_total = (F.pad(grad.to(probs.dtype), (0, 2)) for grad in (weight, total))
        out = torch.empty_like(probs)
        for rows, columns in blocks(probs.shape, probs.device):
            p = probs[rows, :, columns]
            low, fraction = _flat_bin(p, valid[rows, columns], bins, soft)
            table = by_total[rows].reshape(-1)
            slope = table[low]
            if fraction is not None:
                # Moving p by 1 moves B of its weight from the lower bin to the upper one.
                step = table[low + 1] - slope
                weights = by_weight[rows].reshape(-1)
                moved = step * p.reshape(-1) + weights[low + 1] - weights[low]
                inside = (p > 0.5 / bins) & (p < 1 - 0.5 / bins)
                slope = slope + step * fraction + bins * moved * inside.reshape(-1)
            out[rows, :, columns] = slope.view_as(p)
        return out, None, None, None
