"""The base losses, one short function each: (pixels, statistics…, *, options) -> scalar.

P valid pixels, K classes, p = softmax(logits). The positional arguments after the pixels are
`STATISTICS` of the softmax: the criterion reads their names here, computes them once for all its
terms and hands them over. Each loss is a mean over the valid pixels of the global batch; `weight`
(K,) turns it into the weighted mean Σ w_y l / Σ w_y, as in nn.CrossEntropyLoss. A batch without
valid pixels gives 0 with zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.losses.softmax import accumulator
from segcal.pixels import Pixels


def nll(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Negative log-likelihood (cross-entropy): mean of −log p_y."""
    return _mean(-true_log_prob, pixels, weight, sync)


def ls(
    pixels: Pixels,
    true_log_prob: Tensor,
    mean_log_prob: Tensor,
    *,
    alpha: Annotated[float, "share of the target that the other classes get"] = 0.1,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Label smoothing (Müller et al. 2019), the paper's form.

    Cross-entropy against targets 1 − α on the label and α/(K−1) on every other class; note that
    torch's `label_smoothing` spreads α/K over all classes instead.
    """
    k = pixels.num_classes
    _require(0 <= alpha <= 1, "alpha in 0..1", alpha)
    other = alpha / (k - 1)
    loss = -(1 - alpha - other) * true_log_prob - other * k * mean_log_prob
    return _mean(loss, pixels, weight, sync)


def fl(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    gamma: Annotated[float, "exponent of the focal factor"] = 3.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Focal loss (Lin et al. 2017): mean of −(1 − p_y)^γ log p_y."""
    _require(gamma >= 0, "gamma >= 0", gamma)
    return _mean(_focal(true_log_prob, gamma), pixels, weight, sync)


def flsd(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    gamma: Annotated[float, "exponent of the focal factor"] = 3.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Sample-dependent focal loss FLSD-53 (Mukhoti et al. 2020): γ is 5 where p_y < 0.2."""
    _require(gamma >= 0, "gamma >= 0", gamma)
    hard = true_log_prob.exp() < 0.2
    loss = torch.where(hard, _focal(true_log_prob, 5.0), _focal(true_log_prob, gamma))
    return _mean(loss, pixels, weight, sync)


def brier(
    pixels: Pixels,
    true_log_prob: Tensor,
    square_sum: Tensor,
    *,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Brier score (Brier 1950): mean over pixels of Σ_c (p_c − 1[y = c])²."""
    return _mean(square_sum - 2 * true_log_prob.exp() + 1, pixels, weight, sync)


BASE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "nll": nll,
    "ls": ls,
    "fl": fl,
    "flsd": flsd,
    "brier": brier,
}


def _focal(log_p: Tensor, gamma: float) -> Tensor:
    miss = -torch.expm1(log_p)  # 1 − p, keeping its digits as p → 1
    if gamma < 1:
        miss = miss.clamp_min(torch.finfo(log_p.dtype).tiny)  # the slope at p = 1 would be inf
    return -(miss**gamma) * log_p


def _mean(loss: Tensor, pixels: Pixels, weight: Tensor | None, sync: bool) -> Tensor:
    """(Weighted) mean over the valid pixels of all ranks of the (N, L) `loss`, 0 where ignored."""
    if weight is None:
        share = pixels.valid
    else:
        share = _class_weight(weight, pixels).to(loss)[pixels.target] * pixels.valid
        loss = loss * share
    wide = accumulator(loss)
    # Rows are summed pairwise in the loss's own precision, which is exact enough and fast.
    sums = torch.stack([loss.sum(1).sum(dtype=wide), share.sum(dtype=wide)])
    total, mass = sum_over_ranks(sums, sync=sync)
    return (total / torch.where(mass > 0, mass, 1)).to(loss.dtype)


def _class_weight(weight: Tensor, pixels: Pixels) -> Tensor:
    if weight.shape != (pixels.num_classes,):
        raise ValueError(
            f"Expected weight of shape ({pixels.num_classes},), one a class, "
            f"but got {tuple(weight.shape)}"
        )
    return weight


def _require(condition: bool, expected: str, got: float) -> None:
    if not condition:
        raise ValueError(f"Expected {expected}, but got {got}")
