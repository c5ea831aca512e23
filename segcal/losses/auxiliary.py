"""The auxiliary losses, which are added to a base loss to improve calibration.

Signatures are those of the base losses. Every mean is over all valid pixels of the global batch,
not per image, but for ace. A batch without valid pixels gives 0. In a multi-label batch the
statistics of a batch are those of each class, and the loss is their mean over the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.binned import ace
from segcal.losses.means import pixel_mean, problem_mean, require
from segcal.losses.neighbourhood import nacl
from segcal.losses.sampled import dece, mmce
from segcal.losses.softmax import accumulator, blocks, with_slope
from segcal.pixels import Pixels


def mdca(pixels: Pixels, class_sum: Tensor, *, sync: bool = True) -> Tensor:
    """Multi-class difference of confidence and accuracy (Hebbalaguppe et al. 2022, eq. 6).

    (1/K) Σ_c | mean_i p_ic − mean_i 1[y_i = c] |, over all K classes, absent ones included.
    """
    wide = accumulator(class_sum)
    rows = torch.stack([class_sum.to(wide), pixels.class_counts().to(wide)], 1)
    sums = sum_over_ranks(pixels.per_problem(rows), sync=sync)  # (G, 2, K)
    count = sums[:, 1].sum(1)  # (G,)
    gap = (sums[:, 0] - sums[:, 1]).abs().mean(1) / count.clamp_min(1)
    return problem_mean(gap, (count > 0).to(wide)).to(class_sum.dtype)


def dca(pixels: Pixels, confidence: Tensor, correct: Tensor, *, sync: bool = True) -> Tensor:
    """Difference of confidence and accuracy (Liang et al. 2020): |mean(max_c p) − accuracy|.

    The accuracy is a constant to the gradient.
    """
    wide = accumulator(confidence)
    gaps, counts = (confidence - correct).sum(1, dtype=wide), pixels.valid.sum(1, dtype=wide)
    sums = pixels.per_problem(torch.stack([gaps, counts], 1))
    gap, count = sum_over_ranks(sums, sync=sync).unbind(1)  # (G,)
    return problem_mean(gap.abs() / count.clamp_min(1), (count > 0).to(wide)).to(confidence.dtype)


def cp(pixels: Pixels, entropy: Tensor, *, sync: bool = True) -> Tensor:
    """Confidence penalty (Pereyra et al. 2017): minus the mean entropy, mean of Σ_c p_c log p_c."""
    return pixel_mean(-entropy, pixels, sync=sync)


def mbls(
    pixels: Pixels,
    *,
    margin: Annotated[float, "how far logits may lie below the largest without a penalty"] = 10.0,
    sync: bool = True,
) -> Tensor:
    """Margin-based label smoothing (Liu et al. 2022).

    Mean over pixels i and classes c of max(0, max_j z_ij − z_ic − margin), z the logits.
    """
    require(margin >= 0, "margin >= 0", margin)
    with torch.no_grad():
        dense = pixels.dense
        k = dense.shape[1]
        dtype = torch.promote_types(dense.dtype, torch.float32)
        value = torch.empty(pixels.target.shape, dtype=dtype, device=dense.device)
        slope = torch.empty(dense.shape, dtype=_count_dtype(k), device=dense.device)
        for rows, columns in blocks(dense.shape, dense.device):
            part = dense[rows, :, columns].to(dtype)
            top, first = part.max(1, keepdim=True)
            excess = (top - margin).sub(part).clamp_min_(0)
            excess.masked_fill_(~pixels.valid[rows, columns].unsqueeze(1), 0)
            value[rows, columns] = excess.mean(1)
            over = (excess > 0).to(slope.dtype)
            count = over.sum(1, keepdim=True, dtype=slope.dtype)
            slope[rows, :, columns] = over.neg_().scatter_add_(1, first, count)
    return pixel_mean(with_slope(dense, value, slope, k), pixels, sync=sync)


def _count_dtype(most: int) -> torch.dtype:
    """The smallest integer dtype that holds −most..most."""
    return next(d for d in (torch.int8, torch.int16, torch.int32) if most <= torch.iinfo(d).max)


AUXILIARY_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mdca": mdca,
    "dca": dca,
    "mmce": mmce,
    "cp": cp,
    "mbls": mbls,
    "nacl": nacl,
    "ace": ace,
    "dece": dece,
}
# The weight that an auxiliary has unless told; 1 for the rest.
USUAL_BETA = {"cp": 0.1, "mbls": 0.1, "nacl": 0.1, "dece": 0.5}
