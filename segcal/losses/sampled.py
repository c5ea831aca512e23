"""Losses that compare pixels with each other or with soft bins, on a sample of a batch."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from segcal.distributed import exclusive_prefix, is_distributed, sum_over_ranks
from segcal.losses.means import problem_mean, require
from segcal.pixels import Pixels


def mmce(
    pixels: Pixels,
    confidence: Tensor,
    correct: Tensor,
    *,
    bandwidth: Annotated[float, "bandwidth of the kernel"] = 0.4,
    sample: Annotated[int, "pixels of a batch that are looked at"] = 4096,
    seed: Annotated[int, "seed of the sample"] = 0,
    sync: bool = True,
) -> Tensor:
    """Weighted maximum mean calibration error (Kumar et al. 2018), on a sample of pixels.

    With r the confidence of the predicted class, k(a, b) = exp(−|a − b| / bandwidth), m correct
    and n wrong pixels: the square root of

        Σ_{i,j correct} (1−r_i)(1−r_j) k_ij / m² + Σ_{i,j wrong} r_i r_j k_ij / n²
        − 2 Σ_{i correct, j wrong} (1−r_i) r_j k_ij / (m n)

    and 0 when either side is empty. The pairs make it O(P²), so it is computed on `sample`
    pixels: the valid pixels of the global batch, in order, are cut into `sample` equal runs and
    one pixel is drawn from each at an offset fixed by `seed`. Batches of at most `sample` valid
    pixels are used whole.
    """
    require(bandwidth > 0, "bandwidth > 0", bandwidth)
    index, mine, drawn = _sample(pixels.valid, sample, seed, sync)
    group = sum_over_ranks(pixels.problem(index // pixels.valid.shape[1]) * mine, sync=sync)
    r = sum_over_ranks(confidence.flatten()[index] * mine, sync=sync)  # (M,)
    hit = sum_over_ranks(correct.flatten()[index] * mine, sync=sync) > 0  # (M,)
    # Signed, normalised residuals turn the three double sums into the one quadratic form e·K·e.
    problems = torch.arange(pixels.problems or 1, device=group.device)
    member = (group == problems.unsqueeze(1)) & drawn  # (G, M)
    m, n = ((member & side).sum(1) for side in (hit, ~hit))  # (G,)
    residual = torch.where(hit, 1 - r, -r) / torch.where(hit, m[group], n[group]).clamp_min(1)
    residual = torch.where(member, residual, 0)  # (G, M)
    kernel = torch.exp((r[:, None] - r[None, :]).abs() / -bandwidth)  # (M, M)
    square = (residual * (residual @ kernel)).sum(1).clamp_min(0)  # (G,)
    both = (m > 0) & (n > 0)
    # The 1e-10 keeps the square root's slope finite; the select keeps an empty side at exactly 0.
    value = torch.where(both, (square + 1e-10).sqrt(), 0 * square)
    return problem_mean(value, (m + n > 0).to(value))


def dece(
    pixels: Pixels,
    *,
    bins: Annotated[int, "bins of equal width"] = 15,
    t_a: Annotated[float, "steepness of the soft rank"] = 100.0,
    t_b: Annotated[float, "temperature of the soft bins"] = 0.01,
    sample: Annotated[int, "pixels of a batch that are looked at"] = 4096,
    seed: Annotated[int, "seed of the sample"] = 0,
    sync: bool = True,
) -> Tensor:
    """Differentiable expected calibration error (Bohdal et al. 2021), on a sample of pixels.

    Σ_b | Σ_i w_ib (a_i − r_i) | / P with r the confidence of the predicted class, and

        a_i = max(0, 2 − rank_i),  rank_i = 1 + Σ_{c ≠ y} sigmoid(t_a (p_ic − p_iy))
        w_i = softmax over b = 1..B of (b r_i − Σ_{j < b} j / B) / t_b

    the soft accuracy and the soft bins. The sample is that of mmce.
    """
    require(bins >= 1 and t_a > 0 and t_b > 0, "bins >= 1, t_a > 0 and t_b > 0", (bins, t_a, t_b))
    length = pixels.valid.shape[1]
    index, mine, drawn = _sample(pixels.valid, sample, seed, sync)
    row = index // length
    dtype = torch.promote_types(pixels.dense.dtype, torch.float32)
    logits = pixels.dense[row, :, index % length].to(dtype)  # (M, K)
    taken = (mine & drawn).unsqueeze(1)
    probs = torch.where(taken, logits, 0).softmax(1)
    true = probs.gather(1, pixels.target.flatten()[index].unsqueeze(1))  # (M, 1)
    rank = torch.sigmoid(t_a * (probs - true)).sum(1) + 0.5  # the label itself gives the other half
    confidence = probs.amax(1)
    step = torch.arange(1, bins + 1, dtype=dtype, device=probs.device)
    cut = step * (step - 1) / (2 * bins)  # Σ_{j < b} j / B
    soft = ((step * confidence.unsqueeze(1) - cut) / t_b).softmax(1)  # (M, B)
    gap = soft * ((2 - rank).clamp_min(0) - confidence).unsqueeze(1)
    group = pixels.problem(row)
    sums = torch.zeros(pixels.problems or 1, bins + 1, dtype=dtype, device=probs.device)
    rows = torch.cat([gap, torch.ones_like(true)], 1) * taken
    sums = sum_over_ranks(sums.index_add(0, group, rows), sync=sync)  # (G, B + 1)
    count = sums[:, -1]
    value = sums[:, :-1].abs().sum(1) / count.clamp_min(1)
    return problem_mean(value, (count > 0).to(dtype))


def _sample(valid: Tensor, size: int, seed: int, sync: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which pixels a sample takes, the same for any split of the batch over ranks.

    Shapes are fixed and nothing is read back from the device.

    Returns:
        (M,) positions in the flattened (N, L) of this rank; (M,) 1 where this rank holds the
        pixel, else 0; (M,) bool, whether the place is filled at all.
    """
    require(size >= 2, "sample >= 2", size)
    require(seed >= 0, "seed >= 0", seed)
    if not (sync and is_distributed()):
        size = min(size, valid.numel())
    place = torch.arange(size, device=valid.device)
    offset = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    running = valid.flatten().cumsum(0)  # (N·L,)
    count = valid.sum()
    before, total = exclusive_prefix(count, sync=sync)
    low, high = place * total // size, (place + 1) * total // size  # disjoint runs of pixels
    drawn = low + (offset.to(valid.device) * (high - low)).long().minimum(high - low - 1)
    ordinal = torch.where(total <= size, place, drawn)  # which of the batch's valid pixels
    local = ordinal - before
    mine = (local >= 0) & (local < count)
    position = torch.searchsorted(running, local + 1)  # where the count first reaches it
    return position.clamp(0, valid.numel() - 1), mine, place < total
