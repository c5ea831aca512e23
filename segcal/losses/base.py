"""The base losses, one short function each: (pixels, statistics…, *, options) -> scalar.

P valid pixels, K classes, p = softmax(logits). The positional arguments after the pixels are
`STATISTICS` of the softmax: the criterion reads their names here, computes them once for all its
terms and hands them over. Each loss but dice is a mean over the valid pixels of the global batch;
`weight` (K,) turns it into the weighted mean Σ w_y l / Σ w_y, as in nn.CrossEntropyLoss. A batch
without valid pixels gives 0 with zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.means import class_weight, pixel_mean, problem_mean, require
from segcal.losses.neighbourhood import svls
from segcal.losses.softmax import accumulator
from segcal.pixels import Pixels


def nll(
    pixels: Pixels, true_log_prob: Tensor, *, weight: Tensor | None = None, sync: bool = True
) -> Tensor:
    """Negative log-likelihood (cross-entropy): mean of −log p_y."""
    return pixel_mean(-true_log_prob, pixels, weight=weight, sync=sync)


def ls(
    pixels: Pixels,
    true_log_prob: Tensor,
    mean_log_prob: Tensor,
    *,
    alpha: Annotated[float, "share of the target that the other classes get"] = 0.1,
    slope: Annotated[float, "what the most frequent class adds to alpha, 0.01 in CDA-LS"] = 0.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Label smoothing (Müller et al. 2019), also by class frequency (CDA-LS, Islam et al. 2021).

    Cross-entropy against targets 1 − α_y on the label and α_y/(K−1) on every other class, the
    paper's form; note that torch's `label_smoothing` spreads α/K over all classes instead.
    α_c = alpha + slope · n_c / max n with n_c the valid pixels of class c in the global batch.

    Every class gets a share, so a logit of −inf makes it infinite: mask no class with `ls`.
    """
    require(0 <= alpha <= 1, "alpha in 0..1", alpha)
    require(0 <= slope <= 1 - alpha, "slope in 0..1 - alpha", slope)
    k = pixels.num_classes
    smoothing: float | Tensor = alpha
    if slope:
        counts = pixels.per_problem(pixels.class_counts()).to(accumulator(true_log_prob))  # (G, K)
        counts = sum_over_ranks(counts, sync=sync)
        frequency = (counts / counts.amax(1, keepdim=True).clamp_min(1)).to(true_log_prob)
        rows = pixels.problem(torch.arange(len(pixels.target), device=counts.device))
        smoothing = alpha + slope * frequency[rows].gather(1, pixels.target)  # (N, L)
    other = smoothing / (k - 1)
    loss = (smoothing + other - 1) * true_log_prob - other * k * mean_log_prob
    return pixel_mean(loss, pixels, weight=weight, sync=sync)


def fl(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    gamma: Annotated[float, "exponent of the focal factor"] = 3.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Focal loss (Lin et al. 2017): mean of −(1 − p_y)^γ log p_y."""
    require(gamma >= 0, "gamma >= 0", gamma)
    return pixel_mean(_focal(true_log_prob, gamma), pixels, weight=weight, sync=sync)


def flsd(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    gamma: Annotated[float, "exponent of the focal factor"] = 3.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Sample-dependent focal loss FLSD-53 (Mukhoti et al. 2020): γ is 5 where p_y < 0.2."""
    require(gamma >= 0, "gamma >= 0", gamma)
    hard = true_log_prob.exp() < 0.2
    loss = torch.where(hard, _focal(true_log_prob, 5.0), _focal(true_log_prob, gamma))
    return pixel_mean(loss, pixels, weight=weight, sync=sync)


def dual(
    pixels: Pixels,
    true_log_prob: Tensor,
    below_true: Tensor,
    *,
    gamma: Annotated[float, "exponent of the focal factor"] = 5.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Dual focal loss (Tao et al. 2023): mean of −(1 − p_y + p_j)^γ log p_y.

    p_j is the largest probability below p_y, and 0 where the label is the least likely class.
    """
    require(gamma >= 0, "gamma >= 0", gamma)
    return pixel_mean(_focal(true_log_prob, gamma, below_true), pixels, weight=weight, sync=sync)


def brier(
    pixels: Pixels,
    true_log_prob: Tensor,
    square_sum: Tensor,
    *,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Brier score (Brier 1950): mean over pixels of Σ_c (p_c − 1[y = c])²."""
    return pixel_mean(square_sum - 2 * true_log_prob.exp() + 1, pixels, weight=weight, sync=sync)


def dice(
    pixels: Pixels,
    true_log_prob: Tensor,
    class_sum: Tensor,
    *,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Soft Dice loss (Milletari et al. 2016), over the global batch.

    1 − mean over classes of 2 Σ_i p_ic 1[y_i = c] / (Σ_i p_ic + Σ_i 1[y_i = c]). Sums are over all
    valid pixels of the batch, not per image; classes without a labelled pixel in it are left out
    of the mean. `weight` makes that a weighted mean.
    """
    wide = accumulator(class_sum)
    true = true_log_prob.exp() * pixels.valid
    overlap = torch.zeros_like(class_sum).scatter_add(1, pixels.target, true)  # (N, K)
    rows = torch.stack([overlap.to(wide), class_sum.to(wide), pixels.class_counts().to(wide)], 1)
    hit, mass, count = sum_over_ranks(pixels.per_problem(rows), sync=sync).unbind(1)  # (G, K)
    share = (count > 0).to(wide)  # (G, K)
    present = share.amax(1)  # (G,)
    if weight is not None:
        if pixels.problems is None:
            share = share * class_weight(weight, pixels)
        else:
            present = present * class_weight(weight, pixels)
    loss = share * (1 - 2 * hit / torch.where(count > 0, mass + count, 1))
    per_class = share.sum(1)
    mean = loss.sum(1) / torch.where(per_class > 0, per_class, 1)  # (G,)
    return problem_mean(mean, present).to(class_sum.dtype)


def dicece(
    pixels: Pixels,
    true_log_prob: Tensor,
    class_sum: Tensor,
    *,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Dice and cross-entropy: dice + nll, the usual loss of medical segmentation."""
    return dice(pixels, true_log_prob, class_sum, weight=weight, sync=sync) + nll(
        pixels, true_log_prob, weight=weight, sync=sync
    )


BASE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "nll": nll,
    "ls": ls,
    "fl": fl,
    "flsd": flsd,
    "dual": dual,
    "brier": brier,
    "svls": svls,
    "dice": dice,
    "dicece": dicece,
}


def _focal(log_p: Tensor, gamma: float, below: Tensor | None = None) -> Tensor:
    miss = -torch.expm1(log_p)  # 1 − p, keeping its digits as p → 1
    if below is not None:
        miss = miss + below
    if gamma < 1:
        miss = miss.clamp_min(torch.finfo(log_p.dtype).tiny)  # the slope at p = 1 would be inf
    return -(miss**gamma) * log_p
