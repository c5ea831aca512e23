"""Fits softmax(W x + b): the ODIR objective, its minimum, and the choice of λ and μ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.stream import Stream

Pair = tuple[float, float]

_BLOCK_VALUES = 1 << 18  # worked on at once, to stay in a core's cache
_ROUGH, _EXACT = 1e-5, 1e-9  # a fit ends when a step lowers the objective by less than this
_MOST_STEPS = 500
_MEMORY = 50  # steps that L-BFGS remembers: correlated classes make long valleys
_LEAST_CURVATURE = 1e-3  # so that rare classes do not take unbounded steps


class Objective:
    """Mean NLL of softmax(W x + b) over the pixels of all ranks: a convex function of [W, b].

    Args:
        x: (K, P) float64, this rank's share.
        labels: (P,).
        stream: whose ranks to sum over.

    Attributes:
        identity: (K, K + 1) [I, 0].
        count: pixels of all ranks.
    """

    def __init__(self, x: Tensor, labels: Tensor, stream: Stream) -> None:
        k, count = x.shape
        self._stream = stream
        self._parts = [
            (torch.cat([x_, torch.ones_like(x_[:1])]), y_[None])  # (K + 1, p), (1, p)
            for x_, y_ in zip(
                x.split(_BLOCK_VALUES // k + 1, 1),
                labels.split(_BLOCK_VALUES // k + 1),
                strict=True,
            )
        ]
        self.identity = torch.eye(k, k + 1, dtype=x.dtype, device=x.device)
        self.count = int(stream.sum_over_ranks(torch.tensor(float(count), dtype=torch.float64)))

    def __call__(self, affine: Tensor) -> tuple[Tensor, Tensor]:
        """The mean NLL with [W, b] = `affine`, and its gradient, (K, K + 1)."""

        def terms(x: Tensor, y: Tensor) -> Tensor:
            log_p = (affine @ x).log_softmax(0)  # (K, p)
            nll = -log_p.gather(0, y).sum()
            error = log_p.exp_()  # p − onehot(y)
            error.scatter_add_(0, y, error.new_full((), -1).expand_as(y))
            return torch.cat([nll[None], (error @ x.T).flatten()])

        mean = self._mean(terms, 1 + affine.numel())
        return mean[0], mean[1:].view_as(affine)

    @cached_property
    def curvature(self) -> Tensor:
        """(K, K + 1) the second derivative of the mean NLL at the identity, by each entry."""

        def terms(x: Tensor, _: Tensor) -> Tensor:
            p = x[:-1].softmax(0)  # (K, p)
            return ((p - p.square()) @ x.square().T).flatten()

        return self._mean(terms, self.identity.numel()).view_as(self.identity)

    def _mean(self, terms: Callable[[Tensor, Tensor], Tensor], size: int) -> Tensor:
        total = torch.zeros(size, dtype=torch.float64, device=self.identity.device)
        for x, y in self._parts:
            total += terms(x, y)
        return self._stream.sum_over_ranks(total) / max(self.count, 1)


def odir(affine: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """The ODIR penalty (Kull et al. 2019) of [W, b] with (λ, μ), and its gradient (K, K + 1).

    λ/(K(K−1)) · Σ_{i≠j} W_ij² + μ/K · Σ_i b_i²
    """
    weight = _odir_weight(affine, pair)
    return (weight * affine.square()).sum(), 2 * weight * affine


def _odir_weight(affine: Tensor, pair: Pair) -> Tensor:
    k = len(affine)
    weight = torch.full_like(affine, pair[0] / (k * (k - 1)))
    weight.fill_diagonal_(0)
    weight[:, k] = pair[1] / k
    return weight


def minimise(
    objective: Objective, free: Tensor, pair: Pair, start: Tensor, tolerance: float = _EXACT
) -> Tensor:
    """[W, b], (K, K + 1), of least NLL + ODIR; only entries that are `free` differ from `start`.

    L-BFGS from `start`, on variables that are scaled to similar curvature.
    """
    scale = objective.curvature + 2 * _odir_weight(start, pair)
    scale = scale.clamp_min(_LEAST_CURVATURE).rsqrt()

    def affine(moved: np.ndarray) -> Tensor:
        step = torch.zeros_like(start)
        step[free] = torch.from_numpy(moved).to(start)
        return start + scale * step

    def value_and_gradient(moved: np.ndarray) -> tuple[float, np.ndarray]:
        at = affine(moved)
        nll, slope = objective(at)
        penalty, pull = odir(at, pair)
        return float(nll + penalty), (scale * (slope + pull))[free].cpu().numpy()

    from scipy.optimize import minimize  # takes long to import

    found = minimize(
        value_and_gradient,
        np.zeros(int(free.sum())),
        jac=True,
        method="L-BFGS-B",
        options={"maxcor": _MEMORY, "maxiter": _MOST_STEPS, "ftol": tolerance, "gtol": 1e-7},
    )
    return affine(found.x)


def choose_penalty(
    fitting: Objective, validation: Objective, free: Tensor, pairs: Sequence[Pair]
) -> tuple[Pair, Tensor, float]:
    """The (λ, μ) whose fit on `fitting` has the least NLL on `validation`, that fit, that NLL."""
    affine = fitting.identity
    found = []
    # From the strongest penalty to the weakest: each fit starts near its minimum, at the last one.
    for pair in sorted(pairs, reverse=True):
        affine = minimise(fitting, free, pair, affine, _ROUGH)
        found.append((float(validation(affine)[0]), pair, affine))
    nll, pair, affine = min(found, key=lambda entry: entry[0])
    return pair, affine, nll
