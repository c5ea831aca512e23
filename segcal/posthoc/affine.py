"""Calibrators that are one linear map: vector, matrix and Dirichlet scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from segcal.posthoc.calibrator import PixelCalibrator
from segcal.posthoc.holdout import PixelSample
from segcal.posthoc.minimise import lbfgs

# The grid of the paper, 13 × 5 pairs.
LAMBDAS = (0.0, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MUS = (0.0, 0.01, 0.1, 1.0, 10.0)
Pair = tuple[float, float]  # (λ, μ)

_BLOCK_VALUES = 1 << 18  # worked on at once, to stay in a core's cache
_CURVATURE_WORK = 1e10  # multiplications spent on the blocks of the Hessian
_ROUGH, _EXACT = 1e-7, 1e-14  # a fit ends when a step lowers the objective by less than this
# ρ of the pull to the identity. Without it, a class that the hold-out separates has no minimum, and
# along the long valley that it leaves, the last bits of the logits decide where a fit ends.
RIDGE = 1e-4


class AffineCalibrator(PixelCalibrator):
    """softmax(W x + b) with x made of the log-probabilities, fitted on a sample of pixels.

    For each (λ, μ) the convex objective

        mean NLL + λ · ‖W off its diagonal‖² / (K(K−1)) + μ · ‖b‖² / K + ρ · ‖[W, b] − [I, 0]‖²

    (ODIR, Kull et al. 2019, and a faint pull to the identity, ρ = 1e-4, so that there is one
    minimum) is minimised by L-BFGS from the identity. `PixelCalibrator` says how the pair is
    chosen and the fit is judged.

    Args:
        lambdas: values of λ to choose from.
        mus: values of μ to choose from.
        **options: of `PixelCalibrator`.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
        lambda_: the λ chosen.
        mu_: the μ chosen.
    """

    weight_: Tensor
    bias_: Tensor
    lambda_: float
    mu_: float

    def __init__(
        self, *, lambdas: Sequence[float] = (0.0,), mus: Sequence[float] = (0.0,), **options: Any
    ) -> None:
        super().__init__(**options)
        self.lambdas = tuple(lambdas)
        self.mus = tuple(mus)
        for name, values in (("lambdas", self.lambdas), ("mus", self.mus)):
            if not values or not all(value >= 0 for value in values):
                raise ValueError(f"{name} must be numbers >= 0, but got {values}")
        # From the strongest penalty to the weakest.
        self._pairs = sorted(product(self.lambdas, self.mus), reverse=True)

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        weight, bias = torch.eye(num_classes), torch.zeros(num_classes)
        return {"weight_": weight, "bias_": bias, "lambda_": 0.0, "mu_": 0.0}

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        nlls, objective, affine = [], self._objective(fitting), None
        for pair in self._pairs:  # each fit starts near its minimum, at the last one
            affine = objective.minimise(pair, affine, _ROUGH)
            self._keep(affine)
            nlls.append(self._nll(validation))
        return nlls

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.lambda_, self.mu_ = self._pairs[choice]
        self._keep(self._objective(sample).minimise(self._pairs[choice]))

    def _objective(self, sample: PixelSample) -> Objective:
        x = self._features(sample.x)
        return Objective(x, sample.labels, self._learned(len(x)).to(x.device))

    def _map(self, x: Tensor) -> Tensor:
        return self.weight_.to(x) @ self._features(x) + self.bias_.to(x)[:, None]

    def _features(self, x: Tensor) -> Tensor:
        """What W multiplies, made of log-probabilities (…, C, P)."""
        return x

    def _learned(self, num_classes: int) -> Tensor:
        """(K, f) the columns of each row of [W, b] that are learned."""
        return torch.arange(num_classes + 1).expand(num_classes, -1)

    def _keep(self, affine: Tensor) -> None:
        """Make `weight_` and `bias_` of [W, b], (C, C + 1)."""
        self.weight_, self.bias_ = affine[:, :-1].float(), affine[:, -1].float()


class VectorScaling(AffineCalibrator):
    """Vector scaling (Guo et al. 2017): w ∘ log p + b, a scale and a shift for each class.

    Guo et al. scale the logits, but then a constant added to all logits of a pixel would change
    the calibrated probabilities. The log-probabilities p = softmax(z) do not have it.

    Fitted as `AffineCalibrator` says, with W diagonal; λ has no effect. The predicted class may
    change.

    Attributes:
        weight_: (C,) w.
        bias_: (C,) b.
    """

    name = "vs"

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return super()._identity(num_classes, image_channels) | {"weight_": torch.ones(num_classes)}

    def _map(self, x: Tensor) -> Tensor:
        return self.weight_.to(x)[:, None] * x + self.bias_.to(x)[:, None]

    def _learned(self, num_classes: int) -> Tensor:
        rows = torch.arange(num_classes)
        return torch.stack([rows, torch.full_like(rows, num_classes)], 1)

    def _keep(self, affine: Tensor) -> None:
        self.weight_, self.bias_ = affine.diagonal().float(), affine[:, -1].float()


class MatrixScaling(AffineCalibrator):
    """Matrix scaling (Guo et al. 2017): W · (z − mean of z over the classes) + b.

    Centred, the logits have no constant that softmax would not see. As a map of z itself that is
    a matrix whose rows all have the sum 0. One sum for all rows is what any matrix needs to be
    invariant to a constant, and which sum it is changes no probability.

    Fitted as `AffineCalibrator` says, by default without penalty. C² + C values learned from a few
    images seldom generalise to others: expect the identity there, or give `lambdas` to choose from.
    """

    name = "ms"

    def _features(self, x: Tensor) -> Tensor:
        return x - x.mean(-2, keepdim=True)


class DirichletCalibration(AffineCalibrator):
    """Dirichlet calibration with ODIR (Kull et al. 2019): softmax(W · log p + b), p = softmax(z).

    Fitted as `AffineCalibrator` says. W = I/T with b = 0 is temperature scaling. The objective is
    convex, so L-BFGS converges to the minimum that the Adam of the original approaches. The
    predicted class may change. By default λ and μ are chosen from the paper's 13 × 5 pairs.
    """

    name = "dc"

    def __init__(
        self, *, lambdas: Sequence[float] = LAMBDAS, mus: Sequence[float] = MUS, **options: Any
    ) -> None:
        super().__init__(lambdas=lambdas, mus=mus, **options)


def penalty(affine: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """The penalty of [W, b] with (λ, μ), and its gradient (K, K + 1).

    ODIR (Kull et al. 2019) and the pull to the identity,

        λ/(K(K−1)) · Σ_{i≠j} W_ij² + μ/K · Σ_i b_i² + ρ · Σ ([W, b] − [I, 0])²
    """
    odir = _odir_weight(affine, pair)
    away = affine - torch.eye(*affine.shape, dtype=affine.dtype, device=affine.device)
    value = (odir * affine.square()).sum() + RIDGE * away.square().sum()
    return value, 2 * (odir * affine + RIDGE * away)


def _odir_weight(affine: Tensor, pair: Pair) -> Tensor:
    k = len(affine)
    weight = torch.full_like(affine, pair[0] / (k * (k - 1)))
    weight.fill_diagonal_(0)
    weight[:, k] = pair[1] / k
    return weight


class Objective:
    """The mean NLL of softmax(W x + b) + penalty, of which any (λ, μ) can be minimised.

    The variables of each row of [W, b] are whitened by the row's block of the Hessian at the
    identity: classes are correlated, and rare ones have little curvature.

    Args:
        x: (K, P) float64.
        labels: (P,).
        learned: (K, f) the columns of each row of [W, b] that are learned.
    """

    def __init__(self, x: Tensor, labels: Tensor, learned: Tensor) -> None:
        self._learned = learned
        k, count = x.shape
        x = torch.cat([x, torch.ones_like(x[:1])])  # (K + 1, P)
        some = x[:, :: math.ceil(k * learned.shape[1] ** 2 * count / _CURVATURE_WORK)]
        weight = some[:-1].softmax(0)
        weight = weight * (1 - weight) / some.shape[1]
        self._curvature = torch.stack(  # (K, f, f)
            [(some[row] * w) @ some[row].T for row, w in zip(learned, weight, strict=True)]
        )
        size = _BLOCK_VALUES // k + 1
        self._blocks = list(zip(x.split(size, 1), labels[None].split(size, 1), strict=True))
        self._count = count

    def minimise(
        self, pair: Pair, start: Tensor | None = None, tolerance: float = _EXACT
    ) -> Tensor:
        """[W, b], (K, K + 1), of least value.

        Args:
            pair: (λ, μ).
            start: (K, K + 1); by default the identity.
            tolerance: the fit ends when a step lowers the value by less.
        """
        k = len(self._learned)
        first = torch.eye(k, k + 1).to(self._curvature) if start is None else start
        stiffness = 2 * (_odir_weight(first, pair) + RIDGE).gather(1, self._learned)
        whitening = torch.linalg.cholesky(self._curvature + torch.diag_embed(stiffness))

        def affine(moved: Tensor) -> Tensor:
            step = torch.linalg.solve_triangular(whitening.mT, moved, upper=True)
            return first.scatter_add(1, self._learned, step[..., 0])

        def value_and_gradient(moved: Tensor) -> tuple[Tensor, Tensor]:
            at = affine(moved)
            value, slope = penalty(at, pair)
            for part, y in self._blocks:
                log_p = (at @ part).log_softmax(0)  # (K, p)
                value = value - log_p.gather(0, y).sum() / self._count
                error = log_p.exp_()  # p − onehot(y)
                error.scatter_add_(0, y, error.new_full((), -1).expand_as(y))
                slope = slope + error @ part.T / self._count
            slope = slope.gather(1, self._learned).unsqueeze(2)
            return value, torch.linalg.solve_triangular(whitening, slope, upper=False)

        nowhere = torch.zeros_like(whitening[..., :1])  # (K, f, 1)
        return affine(lbfgs(value_and_gradient, nowhere, tolerance=tolerance))
