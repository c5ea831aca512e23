"""Calibrators that are one linear map: vector, matrix and Dirichlet, and the convex fit they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.pixelwise import MAX_PIXELS, PixelCalibrator, unmasked
from segcal.posthoc.sample import PixelSampler
from segcal.posthoc.stream import Stream, Survey

# The grid of the paper, 13 × 5 pairs.
LAMBDAS = (0.0, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MUS = (0.0, 0.01, 0.1, 1.0, 10.0)
Pair = tuple[float, float]  # (λ, μ)

_BLOCK_VALUES = 1 << 18  # worked on at once, to stay in a core's cache
_ROUGH, _EXACT = 1e-5, 1e-9  # a fit ends when a step lowers the objective by less than this
_MOST_STEPS = 500
_MEMORY = 50  # steps that L-BFGS remembers: correlated classes make long valleys
_LEAST_CURVATURE = 1e-3  # so that rare classes do not take unbounded steps


class AffineCalibrator(PixelCalibrator):
    """softmax(W x + b) with x made of the logits, fitted on a sample of the hold-out's pixels.

    One pass over the batches takes the sample: each valid pixel has the same chance, and the sample
    depends on the seed and the order of the images alone, not on batches or ranks. A hold-out of up
    to `max_pixels` is used whole.

    Every fifth image is for validation (of a single image, every fifth pixel). For each (λ, μ) the
    convex objective

        mean NLL + λ · ‖W off its diagonal‖² / (K(K−1)) + μ · ‖b‖² / K

    (ODIR, Kull et al. 2019) is minimised on the other images, by L-BFGS from the identity. The pair
    of least validation NLL is then fitted on all images. If that NLL is not below the identity's,
    the map does not generalise to new images, and the calibrator is the identity.

    Args:
        lambdas: values of λ to choose from; by default those of the class, 0 alone.
        mus: values of μ to choose from; likewise.
        max_pixels: size of the sample; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.

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
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
        ignore_index: int = 255,
        sync: bool = True,
    ) -> None:
        super().__init__(max_pixels=max_pixels, seed=seed, ignore_index=ignore_index, sync=sync)
        self.lambdas = self.usual_lambdas if lambdas is None else tuple(lambdas)
        self.mus = self.usual_mus if mus is None else tuple(mus)
        for name in ("lambdas", "mus"):
            values = getattr(self, name)
            if not values or not all(value >= 0 for value in values):
                raise ValueError(f"Expected {name} to be numbers >= 0, but got {values}")

    def _fit(self, stream: Stream) -> tuple[Survey, float, float]:
        sampler = PixelSampler(self.max_pixels, self.seed)
        survey = stream.survey(sampler)
        sample = sampler.finish(stream, survey.num_classes)
        x, labels = self._features(sample.logits), sample.labels  # (K, P), (P,)
        held = sample.validation
        fitting = Objective(x[:, ~held], labels[~held], stream)
        validation = Objective(x[:, held], labels[held], stream)
        free = self._free(survey.num_classes).to(x.device)
        pairs = [*product(self.lambdas, self.mus)]
        pair, affine, after = choose_penalty(fitting, validation, free, pairs)
        before = float(validation(validation.identity)[0])
        if after < before:
            affine = minimise(Objective(x, labels, stream), free, pair, affine)
        self.num_classes_ = survey.num_classes
        self._keep(affine[:, :-1].float(), affine[:, -1].float())
        self.lambda_, self.mu_ = pair
        return survey, before, after

    def _map(self, dense: Tensor) -> Tensor:
        bias = self.bias_.to(dense).unsqueeze(1)  # (C, 1)
        plain, masked = unmasked(dense)
        mapped = self._multiply(self.weight_.to(dense), self._features(plain)) + bias
        return torch.where(masked, dense, mapped)

    def _features(self, logits: Tensor) -> Tensor:
        """Make x (…, C, P) of logits (…, C, P)."""
        return logits

    def _multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        """W x, (N, C, L)."""
        return weight @ x

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self._keep(torch.eye(num_classes), torch.zeros(num_classes))

    def _keep(self, weight: Tensor, bias: Tensor) -> None:
        self.register_buffer("weight_", weight)
        self.register_buffer("bias_", bias)

    def _free(self, num_classes: int) -> Tensor:
        """(K, K + 1) bool: which entries of [W, b] are learned."""
        return torch.ones(num_classes, num_classes + 1, dtype=torch.bool)


class VectorScaling(AffineCalibrator):
    """Vector scaling (Guo et al. 2017): w ∘ logits + b, a scale and a shift for each class.

    Fitted as `AffineCalibrator` says, with W diagonal; λ has no effect. The predicted class may change.

    Attributes:
        weight_: (C,) w.
        bias_: (C,) b.
    """

    name = "vs"

    def _keep(self, weight: Tensor, bias: Tensor) -> None:
        super()._keep(weight.diagonal().clone(), bias)

    def _multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight.unsqueeze(1) * x

    def _free(self, num_classes: int) -> Tensor:
        free = torch.eye(num_classes, num_classes + 1, dtype=torch.bool)
        free[:, -1] = True
        return free


class MatrixScaling(AffineCalibrator):
    """Matrix scaling (Guo et al. 2017): W · logits + b.

    Fitted as `AffineCalibrator` says, by default without penalty. C² + C values learned from a few
    images seldom generalise to others: expect the identity there, or give `lambdas` to choose from.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
    """

    name = "ms"


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

    def _features(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-2)


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
    from scipy.optimize import minimize  # takes long to import

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
