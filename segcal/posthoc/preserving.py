"""Affine maps by predicted class that keep the mask, or the order of all classes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.calibrator import PixelCalibrator, PixelSample
from segcal.posthoc.temperature import least_nll, nll_derivatives

PULLS = (10.0, 1.0, 0.1, 0.01, 0.001)
_ROUGH, _EXACT = 1e-9, 1e-14  # a fit ends when a step lowers the objective by less than this
_MOST_STEPS = 2000
_MEMORY = 50  # steps that L-BFGS remembers
_BLOCK_PIXELS = 1 << 13  # worked on at once, to stay in a core's cache


class PreservingMap(PixelCalibrator):
    """An affine map of the logits for each predicted class k, which stays the predicted class.

    A pixel is described by its margins m_j = z_k − z_j ≥ 0, which do not change when a constant is
    added to all its logits. The map gives new margins m', linear in values θ_k ≥ 0, and the
    calibrated logits −m'. As m' ≥ 0, class k stays the largest. The θ_k minimise the convex

        Σ_pixels NLL + s · P · Σ_k ‖θ_k − θ‖²

    over P pixels, with θ the map that divides all logits by the best common temperature, so a class
    of few pixels is calibrated as the others are. The pull s is the one of least NLL on images that
    were not fitted on. Kirscher et al. (2026) have such maps with full matrices.

    Fitted as `PixelCalibrator` says.

    Args:
        pulls: values of s to choose from.
        **options: of `PixelCalibrator`.

    Attributes:
        pull_: the s chosen.
        theta_: (C, …) the values θ_k of each predicted class.
    """

    keeps_mask = True

    pull_: float
    theta_: Tensor

    def __init__(
        self,
        *,
        pulls: Sequence[float] = PULLS,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not pulls or not all(0 < pull < math.inf for pull in pulls):
            raise ValueError(f"pulls must be numbers > 0, but got {pulls}")
        self.pulls = tuple(sorted(pulls, reverse=True))

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.pull_ = self.pulls[0]
        self.register_buffer("theta_", self._dividing(num_classes, 1.0))

    def _map(self, x: Tensor) -> Tensor:
        n, c, length = x.shape
        margins, predicted = _margins(x.movedim(1, 2).reshape(-1, c))  # (N·L, C)
        mapped = self._new_margins(margins, self.theta_.to(x)[predicted])
        mapped = mapped.scatter(1, predicted[:, None], 0)
        return -mapped.view(n, length, c).movedim(1, 2)

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        nlls = []
        for choice in range(len(self.pulls)):
            self._learn(fitting, choice, _ROUGH)
            nlls.append(self._nll(validation))
        return nlls

    def _learn(self, sample: PixelSample, choice: int, tolerance: float = _EXACT) -> None:
        from scipy.optimize import minimize  # takes long to import

        self.pull_ = self.pulls[choice]
        beta, _ = least_nll(lambda at: nll_derivatives(sample.pixels, at))
        count = len(sample.labels)
        blocks = [
            (*_margins(x.T.contiguous()), y[:, None])  # (p, C), (p,), (p, 1)
            for x, y in zip(
                sample.x.split(_BLOCK_PIXELS, 1), sample.labels.split(_BLOCK_PIXELS), strict=True
            )
        ]
        centre = self._dividing(self.num_classes_, beta).to(sample.x)
        curvature = torch.full_like(centre, 2 * self.pull_)  # of the mean, about
        for margins, predicted, _ in blocks:
            p = (-beta * margins).softmax(1)
            each = self._gradients(margins.square(), p - p.square())
            curvature.index_add_(0, predicted, each / count)
        scale = curvature.rsqrt()

        def value_and_gradient(moved: np.ndarray) -> tuple[float, np.ndarray]:
            theta = torch.from_numpy(moved).to(scale).view_as(scale) * scale
            away = theta - centre
            value, gradient = self.pull_ * away.square().sum(), 2 * self.pull_ * away
            for margins, predicted, y in blocks:
                mapped = self._new_margins(margins, theta[predicted])
                mapped = mapped.scatter_(1, predicted[:, None], 0).neg_()
                log_p = mapped.log_softmax(1)
                value = value - log_p.gather(1, y).sum() / count
                error = -log_p.exp()  # onehot(y) − p, the gradient in the new margins
                error.scatter_add_(1, y, torch.ones_like(error[:, :1]))
                error.scatter_(1, predicted[:, None], 0)  # whose margin stays 0
                gradient.index_add_(0, predicted, self._gradients(margins, error) / count)
            return float(value), (gradient * scale).flatten().cpu().numpy()

        found = minimize(
            value_and_gradient,
            (centre / scale).flatten().cpu().numpy(),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0, None)] * scale.numel(),
            options={
                "maxcor": _MEMORY,
                "maxiter": _MOST_STEPS,
                "maxfun": 2 * _MOST_STEPS,
                "ftol": tolerance,
                "gtol": 1e-9,
            },
        )
        self.theta_.copy_(torch.from_numpy(found.x).to(scale).view_as(scale) * scale)

    @abstractmethod
    def _dividing(self, num_classes: int, beta: float) -> Tensor:
        """(C, …) the θ that multiplies all logits by β."""

    @abstractmethod
    def _new_margins(self, margins: Tensor, theta: Tensor) -> Tensor:
        """The m' (P, C) of margins (P, C) with θ (P, …); that of class k itself is not read."""

    @abstractmethod
    def _gradients(self, margins: Tensor, error: Tensor) -> Tensor:
        """(P, …) the gradients in θ, of those in m', `error` (P, C)."""


def _margins(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(P, C) margins and (P,) predicted classes of logits (P, C)."""
    top, predicted = rows.max(1, keepdim=True)
    return top - rows, predicted[:, 0]


class ArgmaxPreservingMap(PreservingMap):
    """The map m'_j = a_kj m_j + b_kj with a, b ≥ 0: the predicted class k stays.

    The other classes may change places. See `PreservingMap` for the fit and the arguments.

    Attributes:
        theta_: (C, 2C) a_k, then b_k.
    """

    name = "capm"

    def _dividing(self, num_classes: int, beta: float) -> Tensor:
        slope = torch.full((num_classes, num_classes), beta)
        return torch.cat([slope, torch.zeros_like(slope)], 1)

    def _new_margins(self, margins: Tensor, theta: Tensor) -> Tensor:
        slope, shift = theta.chunk(2, 1)
        return slope * margins + shift

    def _gradients(self, margins: Tensor, error: Tensor) -> Tensor:
        return torch.cat([error * margins, error], 1)


class OrderPreservingMap(PreservingMap):
    """The map m'_j = α_k m_j + Σ_i c_ki m_i + b_k with α, c, b ≥ 0: the order of classes stays.

    Only α tells the other classes apart, so their order stays; c and b say how far class k is
    ahead of them. See `PreservingMap` for the fit and the arguments.

    Attributes:
        theta_: (C, C + 2) α_k, then c_k, then b_k.
    """

    name = "copm"

    def _dividing(self, num_classes: int, beta: float) -> Tensor:
        theta = torch.zeros(num_classes, num_classes + 2)
        theta[:, 0] = beta
        return theta

    def _new_margins(self, margins: Tensor, theta: Tensor) -> Tensor:
        ahead = (theta[:, 1:-1] * margins).sum(1, keepdim=True) + theta[:, -1:]
        return theta[:, :1] * margins + ahead

    def _gradients(self, margins: Tensor, error: Tensor) -> Tensor:
        total = error.sum(1, keepdim=True)
        return torch.cat([(error * margins).sum(1, keepdim=True), total * margins, total], 1)
