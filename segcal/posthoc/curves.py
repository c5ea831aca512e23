"""One-vs-rest calibration: each class has a curve, by beta calibration or isotonic regression."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from segcal.posthoc.calibrator import PixelCalibrator
from segcal.posthoc.holdout import PixelSample
from segcal.posthoc.minimise import lbfgs

_STEEPEST = 100.0  # of a and b; without a bound, classes that p separates perfectly have no minimum
# Where isotonic curves are kept: log-odds −16, −16 + 1/32, …, 16, that is p = 1e-7 … 1 − 1e-7.
LIMIT, PER_UNIT = 16, 32


class CurveCalibrator(PixelCalibrator):
    """q_c = f_c(p_c) for each class c by itself, then normalised over the classes.

    With K sigmoid outputs, each has its own curve, and nothing is normalised.

    The predicted class may change. A class without pixels to learn from, or with nothing but
    pixels of its own, keeps its p_c. Fitted as `PixelCalibrator` says, with its arguments.
    """

    def _map(self, x: Tensor) -> Tensor:
        if self.multilabel:
            return self._log_odds(logsigmoid(x), logsigmoid(-x))
        # Softmax divides by the sum, so log q_c are logits of the normalised q.
        return logsigmoid(self._log_odds(*log_probs(x)))

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self._start(self.num_classes_)
        self.to(sample.x.device)
        if not self.multilabel:
            log_p, log_rest = (log[0] for log in log_probs(sample.x[None]))
        for c in range(self.num_classes_):
            if self.multilabel:
                known = sample.labels[c] >= 0
                z, of_class = sample.x[c, known], sample.labels[c, known] == 1
                mine = logsigmoid(z), logsigmoid(-z)
            else:
                mine, of_class = (log_p[c], log_rest[c]), sample.labels == c
            if of_class.any() and not of_class.all():
                self._learn_class(c, *mine, of_class)

    @abstractmethod
    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        """log(q / (1 − q)) of each class, of its log p and log(1 − p), all (N, C, L)."""

    @abstractmethod
    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        """Learn the curve of class c from its log p and log(1 − p), and from y = c, all (P,)."""


def log_probs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of p and of 1 − p, (N, C, L), of logits (N, C, L); finite for p near 1."""
    log_p = x.log_softmax(1)
    classes = torch.arange(x.shape[1], device=x.device).unsqueeze(1)  # (C, 1)
    top = x.argmax(1, keepdim=True) == classes  # (N, C, L)
    # Below 1/2, log(1 − p) has no cancellation; the largest p needs the sum of the others.
    others = log_p.masked_fill(top, -torch.inf).logsumexp(1, keepdim=True)  # (N, 1, L)
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))


class BetaCalibration(CurveCalibrator):
    """Beta calibration (Kull et al. 2017), one class against the rest, then normalised.

        q_c = σ(a_c ln p_c − b_c ln(1 − p_c) + m_c),   a_c, b_c ≥ 0

    For each class this is the logistic regression of y = c on ln p_c and −ln(1 − p_c), with the
    least NLL under the bounds. a = b = 1, m = 0 is the identity.

    See `CurveCalibrator` for what both methods share.

    Attributes:
        slope_: (C, 2) a and b.
        shift_: (C,) m.
    """

    name = "beta"

    slope_: Tensor
    shift_: Tensor

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return {"slope_": torch.ones(num_classes, 2), "shift_": torch.zeros(num_classes)}

    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        a, b = self.slope_.to(log_p).unsqueeze(2).unbind(1)  # (C, 1)
        return a * log_p - b * log_rest + self.shift_.to(log_p).unsqueeze(1)

    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        a, b, shift = fit_beta(log_p, log_rest, of_class)
        self.slope_[c] = self.slope_.new_tensor([a, b])
        self.shift_[c] = shift


def fit_beta(log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> tuple[float, float, float]:
    """(a, b, m) of least NLL of σ(a ln p − b ln(1 − p) + m), with a and b in 0..100.

    Args:
        log_p: (P,) ln p in float64.
        log_rest: (P,) ln(1 − p).
        of_class: (P,) bool, whether the pixel is of the class; both cases occur.
    """
    features = torch.stack([log_p, -log_rest])  # (2, P)
    mean, scale = features.mean(1), features.std(1).clamp_min(1e-6)
    x = torch.cat([(features - mean[:, None]) / scale[:, None], torch.ones_like(log_p)[None]])
    y = of_class.to(x)

    def value_and_gradient(weight: Tensor) -> tuple[Tensor, Tensor]:
        log_odds = weight @ x
        nll = (softplus(log_odds) - y * log_odds).mean()
        return nll, x @ (log_odds.sigmoid() - y) / len(y)

    steepest_a, steepest_b = (_STEEPEST * scale).tolist()
    bounds = [(0, steepest_a), (0, steepest_b), (None, None)]
    identity = torch.cat([scale, mean.sum()[None]])
    found = lbfgs(value_and_gradient, identity, bounds=bounds, tolerance=1e-12, memory=10)
    slopes = found[:2] / scale
    return float(slopes[0]), float(slopes[1]), float(found[2] - slopes @ mean)


class IsotonicCalibration(CurveCalibrator):
    """Isotonic regression (Zadrozny & Elkan 2002), one class against the rest.

    For each class, q_c is the non-decreasing function of p_c with the least squared error to
    y = c (`scipy.optimize.isotonic_regression`), then normalised over the classes. No q is below
    1/(2P) or above 1 − 1/(2P), with P the pixels learned from: that many pixels do not prove an
    event impossible.

    The curves are fitted and kept at log-odds of p that are 1/32 apart, linear in between, and
    constant below p = 1e-7 and above 1 − 1e-7. A pixel counts at the two points next to it, by
    how near they are, so a rounded logit hardly moves the curve.

    See `CurveCalibrator` for what both methods share.

    Attributes:
        shift_: (C, 1025) what is added to the log-odds of p at each point of the grid.
        slope_: (C,) of the log-odds beyond the grid: 0, or 1 for a class that keeps its p_c.
    """

    name = "isotonic"

    shift_: Tensor
    slope_: Tensor

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        shift = torch.zeros(num_classes, 2 * LIMIT * PER_UNIT + 1)
        return {"shift_": shift, "slope_": torch.ones(num_classes)}

    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        log_odds = log_p - log_rest
        inside, below, share = _on_grid(log_odds)
        beyond = self.slope_.to(log_odds).unsqueeze(1) * (log_odds - inside)
        classes = torch.arange(self.num_classes_, device=below.device).unsqueeze(1)  # (C, 1)
        at = below + classes * self.shift_.shape[1]
        table = self.shift_.to(log_odds).flatten()
        return inside + torch.lerp(table[at], table[at + 1], share) + beyond

    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        from scipy.optimize import isotonic_regression  # takes long to import

        _, below, share = _on_grid(log_p - log_rest)
        mass, hits = torch.zeros(2, self.shift_.shape[1], dtype=share.dtype, device=share.device)
        for at, weight in ((below, 1 - share), (below + 1, share)):
            mass.index_add_(0, at, weight)
            hits.index_add_(0, at, weight * of_class)
        used = (mass > 1e-6).cpu().numpy()
        points = np.linspace(-LIMIT, LIMIT, len(used))
        weights = mass.cpu().numpy()[used]
        curve = isotonic_regression(hits.cpu().numpy()[used] / weights, weights=weights).x
        q = np.interp(points, points[used], curve)
        least = 0.5 / len(of_class)
        self.shift_[c] = torch.from_numpy(q.clip(least, 1 - least)).logit() - torch.from_numpy(
            points
        )
        self.slope_[c] = 0


def _on_grid(log_odds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-odds kept to the grid, the point below each, and how far it is to the next, 0..1."""
    inside = log_odds.clamp(-LIMIT, LIMIT)
    place = (inside + LIMIT) * PER_UNIT
    below = place.detach().floor().clamp_max(2 * LIMIT * PER_UNIT - 1)
    return inside, below.long(), place - below
