"""Scalers that are one linear map, and the fit that they share: vector, matrix, Dirichlet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from segcal.posthoc.convex import Objective, choose_penalty, minimise
from segcal.posthoc.pixelwise import MAX_PIXELS, PixelScaler, unmasked
from segcal.posthoc.sample import PixelSampler
from segcal.posthoc.stream import Stream, Survey

# The grid of the paper, 13 × 5 pairs.
LAMBDAS = (0.0, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MUS = (0.0, 0.01, 0.1, 1.0, 10.0)


class AffineScaler(PixelScaler):
    """softmax(W x + b) with x made of the logits, fitted on a sample of the hold-out's pixels.

    One pass over the batches takes the sample: each valid pixel has the same chance, and the sample
    depends on the seed and the order of the images alone, not on batches or ranks. A hold-out of up
    to `max_pixels` is used whole.

    Every fifth image is for validation (of a single image, every fifth pixel). For each (λ, μ) the
    convex objective

        mean NLL + λ · ‖W off its diagonal‖² / (K(K−1)) + μ · ‖b‖² / K

    (ODIR, Kull et al. 2019) is minimised on the other images, by L-BFGS from the identity. The pair
    of least validation NLL is then fitted on all images. If that NLL is not below the identity's,
    the map does not generalise to new images, and the scaler is the identity.

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


class VectorScaling(AffineScaler):
    """Vector scaling (Guo et al. 2017): w ∘ logits + b, a scale and a shift for each class.

    Fitted as `AffineScaler` says, with W diagonal; λ has no effect. The predicted class may change.

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


class MatrixScaling(AffineScaler):
    """Matrix scaling (Guo et al. 2017): W · logits + b.

    Fitted as `AffineScaler` says, by default without penalty. C² + C values learned from a few
    images seldom generalise to others: expect the identity there, or give `lambdas` to choose from.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
    """

    name = "ms"


class DirichletCalibration(AffineScaler):
    """Dirichlet calibration with ODIR (Kull et al. 2019): softmax(W · log p + b), p = softmax(z).

    Fitted as `AffineScaler` says. W = I/T with b = 0 is temperature scaling. The objective is
    convex, so L-BFGS converges to the minimum that the Adam of the original approaches. The
    predicted class may change.

    Args:
        lambdas: values of λ to choose from; by default the paper's 13.
        mus: values of μ to choose from; by default the paper's 5.
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.

    Attributes:
        weight_: (C, C) W.
        bias_: (C,) b.
        lambda_: the λ chosen.
        mu_: the μ chosen.
    """

    name = "dc"
    usual_lambdas, usual_mus = LAMBDAS, MUS

    def _features(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-2)
