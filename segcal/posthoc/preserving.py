"""Affine maps by predicted class that keep the mask, or the order of all classes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segcal.posthoc.calibrator import PixelCalibrator
from segcal.posthoc.holdout import PixelSample
from segcal.posthoc.minimise import best_beta, lbfgs

PULLS = (10.0, 1.0, 0.1, 0.01, 0.001)
_TOLERANCE = 1e-12  # a fit ends when a step lowers the objective by less than this
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

    def __init__(self, *, pulls: Sequence[float] = PULLS, **options: Any) -> None:
        super().__init__(**options)
        if not pulls or not all(0 < pull < math.inf for pull in pulls):
            raise ValueError(f"pulls must be numbers > 0, but got {pulls}")
        self.pulls = tuple(sorted(pulls, reverse=True))
        self._choices = len(self.pulls)

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return {"pull_": self.pulls[0], "theta_": self._dividing(num_classes, 1.0)}

    def _map(self, x: Tensor) -> Tensor:
        n, c, length = x.shape
        margins, predicted = _margins(x.movedim(1, 2).reshape(-1, c))  # (N·L, C)
        mapped = self._new_margins(margins, self.theta_.to(x)[predicted])
        mapped = mapped.scatter(1, predicted[:, None], 0)
        return -mapped.view(n, length, c).movedim(1, 2)

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.pull_ = self.pulls[choice]
        beta = best_beta(sample.pixels)
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

        def value_and_gradient(theta: Tensor) -> tuple[Tensor, Tensor]:
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
            return value, gradient

        bounds = [(0, None)] * centre.numel()
        scale = curvature.rsqrt()
        found = lbfgs(value_and_gradient, centre, scale=scale, bounds=bounds, tolerance=_TOLERANCE)
        self.theta_.copy_(found)

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
