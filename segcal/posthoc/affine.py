"""Calibrators that are one linear map: vector, matrix, Dirichlet, and the convex fit they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.calibrator import PixelCalibrator, PixelSample

# The grid of the paper, 13 × 5 pairs.
LAMBDAS = (0.0, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MUS = (0.0, 0.01, 0.1, 1.0, 10.0)
Pair = tuple[float, float]  # (λ, μ)

_BLOCK_VALUES = 1 << 18  # worked on at once, to stay in a core's cache
_ROUGH, _EXACT = 1e-7, 1e-14  # a fit ends when a step lowers the objective by less than this
_MOST_STEPS = 3000
_MEMORY = 50  # steps that L-BFGS remembers
_CURVATURE_WORK = 1e10  # multiplications spent on the blocks of the Hessian
# ρ of the pull to the identity. Without it, a class that the hold-out separates has no minimum, and
# along the long valley that it leaves, the last bits of the logits decide where a fit ends.
RIDGE = 1e-4


class AffineCalibrator(PixelCalibrator):
    """softmax(W x + b) with x made of the log-probabilities, fitted on a sample of pixels.

    The sample and its three parts are those of `PixelCalibrator`. For each (λ, μ) the convex
    objective

        mean NLL + λ · ‖W off its diagonal‖² / (K(K−1)) + μ · ‖b‖² / K + ρ · ‖[W, b] − [I, 0]‖²

    (ODIR, Kull et al. 2019, and a faint pull to the identity, ρ = 1e-4, so that there is one
    minimum) is minimised by L-BFGS from the identity. The pair of least NLL on images that were not
    fitted on is then fitted on all. If that NLL is not below the identity's, the map does not
    generalise to new images, and the calibrator is the identity.

    Args:
        lambdas: values of λ to choose from; by default those of the class.
        mus: values of μ to choose from; likewise.
        **options: of `PixelCalibrator`.

    Attributes:
        weight_: W.
        bias_: (C,) b.
        lambda_: the λ chosen.
        mu_: the μ chosen.
    """

    usual_lambdas: ClassVar[tuple[float, ...]] = (0.0,)
    usual_mus: ClassVar[tuple[float, ...]] = (0.0,)

    weight_: Tensor
    bias_: Tensor
    lambda_: float
    mu_: float

    def __init__(
        self,
        *,
        lambdas: Sequence[float] | None = None,
        mus: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.lambdas = self.usual_lambdas if lambdas is None else tuple(lambdas)
        self.mus = self.usual_mus if mus is None else tuple(mus)
        for name in ("lambdas", "mus"):
            values = getattr(self, name)
            if not values or not all(value >= 0 for value in values):
                raise ValueError(f"{name} must be numbers >= 0, but got {values}")

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.lambda_, self.mu_ = 0.0, 0.0
        self._keep(torch.eye(num_classes, num_classes + 1))

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        nlls = []
        x, k = self._features(fitting.x), len(fitting.x)
        free = self._free(k).to(x.device)
        affine, curvature = torch.eye(k, k + 1, dtype=x.dtype, device=x.device), None
        for pair in self._pairs:  # each fit starts near its minimum, at the last one
            affine, curvature = minimise(x, fitting.labels, free, pair, affine, curvature, _ROUGH)
            self._keep(affine)
            nlls.append(self._nll(validation))
        return nlls

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.lambda_, self.mu_ = pair = self._pairs[choice]
        x, k = self._features(sample.x), len(sample.x)
        start = torch.eye(k, k + 1, dtype=x.dtype, device=x.device)
        self._keep(minimise(x, sample.labels, self._free(k).to(x.device), pair, start)[0])

    @property
    def _pairs(self) -> list[Pair]:
        """All (λ, μ), from the strongest penalty to the weakest."""
        return sorted(product(self.lambdas, self.mus), reverse=True)

    def _map(self, x: Tensor) -> Tensor:
        return self._multiply(self.weight_.to(x), self._features(x)) + self.bias_.to(x)[:, None]

    def _features(self, x: Tensor) -> Tensor:
        """What W multiplies, made of log-probabilities (…, C, P)."""
        return x

    def _multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        """W x, (N, C, L)."""
        return weight @ x

    def _keep(self, affine: Tensor) -> None:
        """Make `weight_` and `bias_` of [W, b], (C, C + 1)."""
        self.register_buffer("weight_", affine[:, :-1].float())
        self.register_buffer("bias_", affine[:, -1].float())

    def _free(self, num_classes: int) -> Tensor:
        """(K, K + 1) bool: which entries of [W, b] are learned."""
        return torch.ones(num_classes, num_classes + 1, dtype=torch.bool)


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

    def _keep(self, affine: Tensor) -> None:
        super()._keep(affine)
        self.register_buffer("weight_", self.weight_.diagonal().clone())

    def _multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight.unsqueeze(1) * x

    def _free(self, num_classes: int) -> Tensor:
        free = torch.eye(num_classes, num_classes + 1, dtype=torch.bool)
        free[:, -1] = True
        return free


class MatrixScaling(AffineCalibrator):
    """Matrix scaling (Guo et al. 2017): W · (z − mean of z over the classes) + b.

    Centred, the logits have no constant that softmax would not see. As a map of z itself that is
    a matrix whose rows all have the sum 0. One sum for all rows is what any matrix needs to be
    invariant to a constant, and which sum it is changes no probability.

    Fitted as `AffineCalibrator` says, by default without penalty. C² + C values learned from a few
    images seldom generalise to others: expect the identity there, or give `lambdas` to choose from.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
    """

    name = "ms"

    def _features(self, x: Tensor) -> Tensor:
        return x - x.mean(-2, keepdim=True)


class DirichletCalibration(AffineCalibrator):
    """Dirichlet calibration with ODIR (Kull et al. 2019): softmax(W · log p + b), p = softmax(z).

    Fitted as `AffineCalibrator` says. W = I/T with b = 0 is temperature scaling. The objective is
    convex, so L-BFGS converges to the minimum that the Adam of the original approaches. The
    predicted class may change. By default λ and μ are chosen from the paper's 13 × 5 pairs.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
    """

    name = "dc"
    usual_lambdas, usual_mus = LAMBDAS, MUS


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


def minimise(
    x: Tensor,
    labels: Tensor,
    free: Tensor,
    pair: Pair,
    start: Tensor,
    curvature: Tensor | None = None,
    tolerance: float = _EXACT,
) -> tuple[Tensor, Tensor]:
    """[W, b], (K, K + 1), of least mean NLL of softmax(W x + b) + penalty, and the curvature.

    L-BFGS from `start`. The variables of each row are whitened by the row's block of the Hessian at
    the identity: classes are correlated, and rare ones have little curvature.

    Args:
        x: (K, P) float64.
        labels: (P,).
        free: (K, K + 1) bool, with as many in each row; other entries stay as in `start`.
        pair: (λ, μ).
        start: (K, K + 1).
        curvature: what an earlier call returned for the same x; it does not depend on the pair.
        tolerance: the fit ends when a step lowers the objective by less.
    """
    from scipy.optimize import minimize  # takes long to import

    k, count = x.shape
    places = free.nonzero()[:, 1].view(k, -1)  # (K, f) the free columns of each row
    f = places.shape[1]
    x = torch.cat([x, torch.ones_like(x[:1])])  # (K + 1, P)
    if curvature is None:
        some = x[:, :: max(1, math.ceil(k * f * f * count / _CURVATURE_WORK))]
        weight = some[:-1].softmax(0)
        weight = weight * (1 - weight) / some.shape[1]
        curvature = torch.stack(
            [(some[row] * w) @ some[row].T for row, w in zip(places, weight, strict=True)]
        )
    stiffness = 2 * (_odir_weight(start, pair) + RIDGE).gather(1, places)
    whitening = torch.linalg.cholesky(curvature + torch.diag_embed(stiffness))  # (K, f, f)
    batches = [
        (part, y[None])  # (K + 1, p), (1, p)
        for part, y in zip(
            x.split(_BLOCK_VALUES // k + 1, 1), labels.split(_BLOCK_VALUES // k + 1), strict=True
        )
    ]

    def affine(moved: np.ndarray) -> Tensor:
        step = torch.from_numpy(moved).to(start).view(k, f, 1)
        step = torch.linalg.solve_triangular(whitening.mT, step, upper=True)
        return start.scatter_add(1, places, step[..., 0])

    def value_and_gradient(moved: np.ndarray) -> tuple[float, np.ndarray]:
        at = affine(moved)
        value, slope = penalty(at, pair)
        for part, y in batches:
            log_p = (at @ part).log_softmax(0)  # (K, p)
            value = value - log_p.gather(0, y).sum() / count
            error = log_p.exp_()  # p − onehot(y)
            error.scatter_add_(0, y, error.new_full((), -1).expand_as(y))
            slope = slope + error @ part.T / count
        slope = slope.gather(1, places).unsqueeze(2)
        slope = torch.linalg.solve_triangular(whitening, slope, upper=False)
        return float(value), slope.flatten().cpu().numpy()

    found = minimize(
        value_and_gradient,
        np.zeros(k * f),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxcor": _MEMORY,
            "maxiter": _MOST_STEPS,
            "maxfun": 2 * _MOST_STEPS,
            "ftol": tolerance,
            "gtol": 1e-8,
        },
    )
    return affine(found.x), curvature
