"""The auxiliary losses, which are added to a base loss to improve calibration.

Signatures are those of the base losses. Every mean but that of ace is over all valid pixels of the
global batch. A batch without valid pixels gives 0. In a multi-label batch the statistics of a batch
are those of each class, and the loss is their mean over the classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.distributed import exclusive_prefix, is_distributed
from segcal.losses.softmax import LossBatch, accumulator, problem_mean, require

_LIGHTEST = 0.01  # soft bins of ace with less weight than that are left out
# Copies of the bins that neighbouring pixels take in turn: on a CPU an addition that has to wait
# for the one before it, because both go to one bin, takes three times as long.
_LANES = 8


def mdca(batch: LossBatch, class_sum: Tensor) -> Tensor:
    """Multi-class difference of confidence and accuracy (Hebbalaguppe et al. 2022, eq. 6).

    (1/K) Σ_c | mean_i p_ic − mean_i 1[y_i = c] |, over all K classes, absent ones included.
    """
    pixels, wide = batch.pixels, accumulator(class_sum)
    rows = torch.stack([class_sum.to(wide), pixels.class_counts().to(wide)], 1)
    sums = batch.sum(pixels.per_problem(rows))  # (G, 2, K)
    count = sums[:, 1].sum(1)  # (G,)
    gap = (sums[:, 0] - sums[:, 1]).abs().mean(1) / count.clamp_min(1)
    return problem_mean(gap, (count > 0).to(wide)).to(class_sum.dtype)


def dca(batch: LossBatch, confidence: Tensor, correct: Tensor) -> Tensor:
    """Difference of confidence and accuracy (Liang et al. 2020): |mean(max_c p) − accuracy|.

    The accuracy is a constant to the gradient.
    """
    pixels, wide = batch.pixels, accumulator(confidence)
    gaps, counts = (confidence - correct).sum(1, dtype=wide), pixels.valid.sum(1, dtype=wide)
    sums = batch.sum(pixels.per_problem(torch.stack([gaps, counts], 1)))
    gap, count = sums.unbind(1)  # (G,)
    return problem_mean(gap.abs() / count.clamp_min(1), (count > 0).to(wide)).to(confidence.dtype)


def cp(batch: LossBatch, entropy: Tensor) -> Tensor:
    """Confidence penalty (Pereyra et al. 2017): minus the mean entropy, mean of Σ_c p_c log p_c."""
    return batch.mean(-entropy)


def mbls(batch: LossBatch, *, margin: float = 10.0) -> Tensor:
    """Margin-based label smoothing (Liu et al. 2022).

    Mean over pixels i and classes c of max(0, max_j z_ij − z_ic − margin), z the logits.
    """
    require(margin >= 0, "margin >= 0", margin)
    pixels = batch.pixels
    z = pixels.dense.to(torch.promote_types(pixels.dense.dtype, torch.float32))
    excess = (z.max(1, keepdim=True).values - margin - z).relu()  # (N, K, L)
    return batch.mean(torch.where(pixels.valid, excess.mean(1), 0))


def mmce(
    batch: LossBatch,
    confidence: Tensor,
    correct: Tensor,
    *,
    bandwidth: float = 0.4,
    sample: int = 4096,
    seed: int = 0,
) -> Tensor:
    """Weighted maximum mean calibration error (Kumar et al. 2018), on a sample of pixels.

    With r the confidence of the predicted class, k(a, b) = exp(−|a − b| / bandwidth), m correct
    and n wrong pixels: the square root of

        Σ_{i,j correct} (1−r_i)(1−r_j) k_ij / m² + Σ_{i,j wrong} r_i r_j k_ij / n²
        − 2 Σ_{i correct, j wrong} (1−r_i) r_j k_ij / (m n)

    and 0 when either side is empty. The pairs make it O(P²), so it is computed on a sample: the
    valid pixels of the global batch, in order, are cut into `sample` equal runs, and one pixel is
    drawn from each. Batches of at most `sample` valid pixels are used whole.
    """
    require(bandwidth > 0, "bandwidth > 0", bandwidth)
    pixels = batch.pixels
    index, mine, drawn = sampled_pixels(batch, sample, seed)
    group = batch.sum(pixels.problem(index // pixels.valid.shape[1]) * mine)
    r = batch.sum(confidence.flatten()[index] * mine)  # (M,)
    hit = batch.sum(correct.flatten()[index] * mine) > 0  # (M,)
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
    batch: LossBatch,
    *,
    bins: int = 15,
    t_a: float = 100.0,
    t_b: float = 0.01,
    sample: int = 4096,
    seed: int = 0,
) -> Tensor:
    """Differentiable expected calibration error (Bohdal et al. 2021), on a sample of pixels.

    Σ_b | Σ_i w_ib (a_i − r_i) | / P with r the confidence of the predicted class, and

        a_i = max(0, 2 − rank_i),  rank_i = 1 + Σ_{c ≠ y} sigmoid(t_a (p_ic − p_iy))
        w_i = softmax over b = 1..B of (b r_i − Σ_{j < b} j / B) / t_b

    the soft accuracy and the soft bins. The sample is that of mmce.
    """
    require(bins >= 1 and t_a > 0 and t_b > 0, "bins >= 1, t_a > 0 and t_b > 0", (bins, t_a, t_b))
    pixels = batch.pixels
    length = pixels.valid.shape[1]
    index, mine, drawn = sampled_pixels(batch, sample, seed)
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
    sums = batch.sum(sums.index_add(0, group, rows))  # (G, B + 1)
    count = sums[:, -1]
    value = sums[:, :-1].abs().sum(1) / count.clamp_min(1)
    return problem_mean(value, (count > 0).to(dtype))


def sampled_pixels(batch: LossBatch, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which pixels a sample takes, the same for any split of the batch over ranks.

    Returns (M,) positions in the flattened (N, L) of this rank; (M,) whether this rank holds the
    pixel; (M,) whether the place is filled at all. Nothing is read back from the device.
    """
    require(size >= 2, "sample >= 2", size)
    require(seed >= 0, "seed >= 0", seed)
    valid = batch.pixels.valid
    offset = _offsets(size, seed).to(valid.device)
    if not (batch.sync and is_distributed()):  # more places than pixels stay empty
        size = min(size, valid.numel())
        offset = offset[:size]
    place = torch.arange(size, device=valid.device)
    running = valid.flatten().cumsum(0)  # (N·L,)
    count = valid.sum()
    before, total = exclusive_prefix(count, sync=batch.sync)
    low, high = place * total // size, (place + 1) * total // size  # disjoint runs of pixels
    drawn = low + (offset * (high - low)).long().minimum(high - low - 1)
    ordinal = torch.where(total <= size, place, drawn)  # which of the batch's valid pixels
    local = ordinal - before
    mine = (local >= 0) & (local < count)
    position = torch.searchsorted(running, local + 1)  # where the count first reaches it
    return position.clamp(0, valid.numel() - 1), mine, place < total


def _offsets(size: int, seed: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


# What torch.compiler.assume_constant_result sets, which takes seconds to import.
_offsets._dynamo_marked_constant = True  # type: ignore[attr-defined]


def ace(
    batch: LossBatch,
    true_log_prob: Tensor,
    probs: Tensor,
    *,
    bins: int = 20,
    soft: bool = False,
) -> Tensor:
    """Marginal L1 average calibration error, mL1-ACE (Barfoot et al. 2024, 2025).

    For each image and class c: the mean over non-empty bins (lo, hi] of p_c of
    |mean p_c − mean 1[y = c]|; then the mean over all pairs of an image and a class that has a
    labelled pixel in it. Hard bins have a gradient through the mean of p_c alone. Soft bins share
    p_c linearly between the two nearest bin centres; those of weight below 0.01 are left out.
    """
    require(bins >= 1 + soft, f"bins >= {1 + soft}", bins)
    pixels = batch.pixels
    weight, total, square = _Moments.apply(probs, bins, soft).unbind(0)  # (N, K, B or B + 1)
    wide = weight.dtype
    ignored = (~pixels.valid).sum(1, dtype=wide).view(-1, 1, 1)  # all of them in the first place
    weight = weight - F.pad(ignored, (0, weight.shape[2] - 1))
    true_prob = true_log_prob.exp() * pixels.valid
    n, k, places = weight.shape
    cell = pixels.target * places + _place(true_prob, bins, soft)  # (N, L)
    zeros = weight.new_zeros(n, k * places)
    hits = zeros.scatter_add(1, cell, pixels.valid.to(wide)).view_as(weight)
    if soft:
        true_total = zeros.scatter_add(1, cell, true_prob.to(wide)).view_as(weight)
        edge = torch.arange(places, dtype=wide, device=weight.device)
        # An offset is B p − edge: how far, in bins, p is from the edge where it is counted.
        weight, total, hits = (
            _shared(amount, bins * amount_times_p - edge * amount)
            for amount, amount_times_p in ((weight, total), (total, square), (hits, true_total))
        )
    filled = weight >= _LIGHTEST if soft else weight > 0
    gap = (total - hits).abs() / torch.where(filled, weight, 1)
    error = (gap * filled).sum(2) / filled.sum(2).clamp_min(1)  # (N, K)
    present = pixels.class_counts() > 0
    value, pairs = batch.sum(torch.stack([(error * present).sum(), present.sum(dtype=wide)]))
    return (value / pairs.clamp_min(1)).to(probs.dtype)


def _place(p: Tensor, bins: int, soft: bool) -> Tensor:
    """Where each p is counted: in the bin (lo, hi], or at the nearest of the B + 1 edges l/B."""
    scaled = p.detach() * bins
    place = (scaled.round_() if soft else scaled.ceil_().sub_(1)).long()
    return place.clamp_(0, bins if soft else bins - 1)  # NaN, as of a diverged step, is anywhere


def _shared(amount: Tensor, product: Tensor) -> Tensor:
    """(..., B) what soft bins get of the amounts at their (..., B + 1) edges.

    The bin above an edge gets a share of 1/2 + offset, the one below the rest; the outer edges have
    one bin alone. `product` is Σ of amount times offset.
    """
    above = (amount / 2 + product)[..., 1:-1]
    above = torch.cat([amount[..., :1], above], -1)
    below = torch.cat([amount[..., 1:-1] - above[..., 1:], amount[..., -1:]], -1)
    return above + below


class _Moments(torch.autograd.Function):
    """(3, N, K, B) number of pixels, Σ p and, for soft bins, Σ p² in each of the B places.

    Ignored pixels have p = 0 and count in the first place. Plain autograd keeps the places of all
    probabilities: it takes twice the time, and four times their memory. On a CPU one class is
    counted after another, since small arrays are quick to allocate.
    """

    @staticmethod
    def forward(probs: Tensor, bins: int, soft: bool) -> Tensor:
        n, k, length = probs.shape
        places, wide = bins + soft, accumulator(probs)
        sums = torch.zeros(3, n, k, places * _LANES, dtype=wide, device=probs.device)
        lane = torch.arange(length, device=probs.device) % _LANES
        one = sums.new_ones(())
        for classes in _class_slices(probs):
            p = probs[:, classes]
            place = _place(p, bins, soft).mul_(_LANES).add_(lane)
            amount = p.to(wide, copy=True)
            sums[0, :, classes].scatter_add_(2, place, one.expand_as(place))
            sums[1, :, classes].scatter_add_(2, place, amount)
            if soft:
                sums[2, :, classes].scatter_add_(2, place, amount.square_())
        return sums.view(3, n, k, places, _LANES).sum(4)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        probs, ctx.bins, ctx.soft = inputs
        ctx.save_for_backward(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        slope, twice = grad[1].to(probs.dtype), 2 * grad[2].to(probs.dtype)
        out = torch.empty_like(probs)
        for classes in _class_slices(probs):
            p = probs[:, classes]
            place = _place(p, ctx.bins, ctx.soft)
            part = slope[:, classes].gather(2, place)
            out[:, classes] = part + twice[:, classes].gather(2, place) * p if ctx.soft else part
        return out, None, None


def _class_slices(probs: Tensor) -> list[slice]:
    count = probs.shape[1]
    step = 1 if probs.device.type == "cpu" else count
    return [slice(c, c + step) for c in range(0, count, step)]
