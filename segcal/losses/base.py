"""The base losses, one short function each: (batch, statistics…, *, hyper-parameters) -> scalar.

p = softmax(logits), with K classes. The statistics are those that the loss's entry in
`criterion.BASE_LOSSES` names. Each loss but dice is a mean over the valid pixels of the global
batch; class weights make it the weighted mean Σ w_y l / Σ w_y, as in nn.CrossEntropyLoss. A batch
without valid pixels gives 0 with zero gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.losses.softmax import LossBatch, accumulator, problem_mean, require


def nll(batch: LossBatch, true_log_prob: Tensor) -> Tensor:
    """Negative log-likelihood (cross-entropy): mean of −log p_y."""
    return batch.mean(-true_log_prob)


def ls(
    batch: LossBatch,
    true_log_prob: Tensor,
    mean_log_prob: Tensor,
    *,
    alpha: float = 0.1,
    slope: float = 0.0,
) -> Tensor:
    """Label smoothing (Müller et al. 2019), also by class frequency (CDA-LS, Islam et al. 2021).

    Cross-entropy against targets 1 − α_y on the label and α_y/(K−1) on every other class, the
    paper's form; note that torch's `label_smoothing` spreads α/K over all classes instead.
    α_c = alpha + slope · n_c / max n with n_c the valid pixels of class c in the global batch;
    CDA-LS has a slope of 0.01.

    Every class gets a share, so a logit of −inf makes it infinite: mask no class with `ls`.
    """
    require(0 <= alpha <= 1, "alpha in 0..1", alpha)
    require(0 <= slope <= 1 - alpha, "slope in 0..1 - alpha", slope)
    pixels, k = batch.pixels, batch.pixels.num_classes
    smoothing: float | Tensor = alpha
    if slope:
        counts = pixels.per_problem(pixels.class_counts()).to(accumulator(true_log_prob))  # (G, K)
        counts = batch.sum(counts)
        frequency = (counts / counts.amax(1, keepdim=True).clamp_min(1)).to(true_log_prob)
        rows = pixels.problem(torch.arange(len(pixels.target), device=counts.device))
        smoothing = alpha + slope * frequency[rows].gather(1, pixels.target)  # (N, L)
    other = smoothing / (k - 1)
    return batch.mean((smoothing + other - 1) * true_log_prob - other * k * mean_log_prob)


def fl(batch: LossBatch, true_log_prob: Tensor, *, gamma: float = 3.0) -> Tensor:
    """Focal loss (Lin et al. 2017): mean of −(1 − p_y)^γ log p_y."""
    require(gamma >= 0, "gamma >= 0", gamma)
    return batch.mean(_focal(true_log_prob, gamma))


def flsd(batch: LossBatch, true_log_prob: Tensor, *, gamma: float = 3.0) -> Tensor:
    """Sample-dependent focal loss FLSD-53 (Mukhoti et al. 2020): γ is 5 where p_y < 0.2."""
    require(gamma >= 0, "gamma >= 0", gamma)
    hard = true_log_prob.exp() < 0.2
    return batch.mean(torch.where(hard, _focal(true_log_prob, 5.0), _focal(true_log_prob, gamma)))


def dual(
    batch: LossBatch, true_log_prob: Tensor, below_true: Tensor, *, gamma: float = 5.0
) -> Tensor:
    """Dual focal loss (Tao et al. 2023): mean of −(1 − p_y + p_j)^γ log p_y.

    p_j is the largest probability below p_y, and 0 where the label is the least likely class.
    """
    require(gamma >= 0, "gamma >= 0", gamma)
    return batch.mean(_focal(true_log_prob, gamma, below_true))


def brier(batch: LossBatch, true_log_prob: Tensor, square_sum: Tensor) -> Tensor:
    """Brier score (Brier 1950): mean over pixels of Σ_c (p_c − 1[y = c])²."""
    return batch.mean(square_sum - 2 * true_log_prob.exp() + 1)


def dice(batch: LossBatch, true_log_prob: Tensor, class_sum: Tensor) -> Tensor:
    """Soft Dice loss (Milletari et al. 2016), over the global batch.

    1 − mean over classes of 2 Σ_i p_ic 1[y_i = c] / (Σ_i p_ic + Σ_i 1[y_i = c]). Sums are over all
    valid pixels of the batch, not per image; classes without a labelled pixel in it are left out
    of the mean. Class weights make that a weighted mean.
    """
    pixels, wide = batch.pixels, accumulator(class_sum)
    true = true_log_prob.exp() * pixels.valid
    overlap = torch.zeros_like(class_sum).scatter_add(1, pixels.target, true)  # (N, K)
    rows = torch.stack([overlap.to(wide), class_sum.to(wide), pixels.class_counts().to(wide)], 1)
    hit, mass, count = batch.sum(pixels.per_problem(rows)).unbind(1)  # (G, K)
    share = (count > 0).to(wide)  # (G, K)
    present = share.amax(1)  # (G,)
    if batch.weight is not None:
        if pixels.problems is None:
            share = share * batch.weight
        else:
            present = present * batch.weight
    loss = share * (1 - 2 * hit / torch.where(count > 0, mass + count, 1))
    per_class = share.sum(1)
    mean = loss.sum(1) / torch.where(per_class > 0, per_class, 1)  # (G,)
    return problem_mean(mean, present).to(class_sum.dtype)


def dicece(batch: LossBatch, true_log_prob: Tensor, class_sum: Tensor) -> Tensor:
    """Dice and cross-entropy: dice + nll, the usual loss of medical segmentation."""
    return dice(batch, true_log_prob, class_sum) + nll(batch, true_log_prob)


def _focal(log_p: Tensor, gamma: float, below: Tensor | None = None) -> Tensor:
    miss = -torch.expm1(log_p)  # 1 − p, keeping its digits as p → 1
    if below is not None:
        miss = miss + below
    if gamma < 1:
        miss = miss.clamp_min(torch.finfo(log_p.dtype).tiny)  # the slope at p = 1 would be inf
    return -(miss**gamma) * log_p
