"""The auxiliary losses, which compare mean confidence with frequency over a batch.

Signatures are those of the base losses. Every mean is over all valid
pixels of the global batch, not per image. A batch without valid pixels gives 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from segcal.distributed import exclusive_prefix, is_distributed, sum_over_ranks
from segcal.losses.softmax import accumulator
from segcal.pixels import Pixels


def mdca(pixels: Pixels, class_sum: Tensor, *, sync: bool = True) -> Tensor:
    """Multi-class difference of confidence and accuracy (Hebbalaguppe et al. 2022, eq. 6).

    (1/K) Σ_c | mean_i p_ic − mean_i 1[y_i = c] |, over all K classes, absent ones included.
    """
    valid = pixels.valid.flatten()
    occurrences = torch.zeros_like(class_sum)
    occurrences.scatter_add_(0, pixels.target.flatten(), valid.to(class_sum.dtype))
    sums = sum_over_ranks(torch.stack([class_sum, occurrences]), sync=sync)  # (2, K)
    count = sums[1].sum().clamp_min(1)
    return ((sums[0] - sums[1]) / count).abs().mean().to(_dtype(pixels))


def dca(pixels: Pixels, confidence: Tensor, correct: Tensor, *, sync: bool = True) -> Tensor:
    """Difference of confidence and accuracy (Liang et al. 2020): |mean(max_c p) − accuracy|.

    The accuracy is a constant to the gradient.
    """
    wide = accumulator(confidence)
    sums = torch.stack([(confidence - correct).sum(dtype=wide), pixels.valid.sum(dtype=wide)])
    gap, count = sum_over_ranks(sums, sync=sync)
    return (gap / count.clamp_min(1)).abs().to(confidence.dtype)


def mmce(
    pixels: Pixels,
    confidence: Tensor,
    correct: Tensor,
    *,
    bandwidth: Annotated[float, "bandwidth of the kernel"] = 0.4,
    sample: Annotated[int, "pixels of a batch that are compared"] = 4096,
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
    whole = isinstance(sample, int) and isinstance(seed, int)
    if not (whole and bandwidth > 0 and sample >= 2 and 0 <= seed < 2**63):
        raise ValueError(
            f"Expected bandwidth > 0, a whole sample >= 2 and a whole seed >= 0, "
            f"but got bandwidth={bandwidth}, sample={sample}, seed={seed}"
        )
    index, mine, drawn = _sample(pixels.valid, sample, seed, sync)
    r = sum_over_ranks(confidence.flatten()[index] * mine, sync=sync)  # (M,)
    hit = sum_over_ranks(correct.flatten()[index] * mine, sync=sync) > 0  # (M,)
    # Signed, normalised residuals turn the three double sums into the one quadratic form e·K·e.
    hit, miss = hit & drawn, ~hit & drawn
    m, n = hit.sum().clamp_min(1), miss.sum().clamp_min(1)
    residual = torch.where(hit, (1 - r) / m, torch.where(miss, -r / n, 0 * r))
    kernel = torch.exp((r[:, None] - r[None, :]).abs() / -bandwidth)  # (M, M)
    square = (residual * (kernel @ residual)).sum().clamp_min(0)
    both = hit.any() & miss.any()
    # The 1e-10 keeps the square root's slope finite; the select keeps an empty side at exactly 0.
    return torch.where(both, (square + 1e-10).sqrt(), 0 * square)


AUXILIARY_LOSSES: dict[str, Callable[..., Tensor]] = {"mdca": mdca, "dca": dca, "mmce": mmce}
USUAL_BETA: dict[str, float] = {}  # the weight that an auxiliary has unless told; 1 for the rest


def _sample(valid: Tensor, size: int, seed: int, sync: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which pixels a sample takes, the same for any split of the batch over ranks.

    Shapes are fixed and nothing is read back from the device.

    Returns:
        (M,) positions in the flattened (N, L) of this rank; (M,) 1 where this rank holds the
        pixel, else 0; (M,) bool, whether the place is filled at all.
    """
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


def _dtype(pixels: Pixels) -> torch.dtype:
    return torch.promote_types(pixels.dense.dtype, torch.float32)
