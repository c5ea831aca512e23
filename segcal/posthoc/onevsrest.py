"""One-vs-rest calibration: each class has a curve, by beta calibration or isotonic regression."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from segcal.posthoc.pixelwise import SampledCalibrator
from segcal.posthoc.stream import LARGEST

_STEEPEST = 100.0  # of a and b; without a bound, classes that p separates perfectly have no minimum
# Where isotonic curves are kept: log-odds −16, −16 + 1/32, …, 16, that is p = 1e-7 … 1 − 1e-7.
LIMIT, PER_UNIT = 16, 32


class OneVsRestCalibrator(SampledCalibrator):
    """q_c = f_c(p_c) for each class c by itself, then normalised over the classes.

    With K sigmoid outputs, each has its own curve, and nothing is normalised.

    The predicted class may change. A class without pixels to learn from, or with nothing but
    pixels of its own, keeps its p_c. Fitted as `SampledCalibrator` says.

    Args:
        max_pixels: size of the sample of pixels; 8·C bytes per pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs.
    """

    def _map(self, dense: Tensor) -> Tensor:
        if self.multilabel:
            return self._log_odds(logsigmoid(dense), logsigmoid(-dense))
        # Softmax divides by the sum, so log q_c are logits of the normalised q.
        log_q = logsigmoid(self._log_odds(*log_probs(dense)))
        return torch.where(dense <= -LARGEST, dense, log_q)  # masked classes stay masked

    def _learn(self, logits: Tensor, labels: Tensor) -> None:
        self._start(self.num_classes_, 0)
        self.to(logits.device)
        if not self.multilabel:
            log_p, log_rest = (log[0] for log in log_probs(logits[None]))
        for c in range(self.num_classes_):
            if self.multilabel:
                known = labels[c] >= 0
                z, of_class = logits[c, known], labels[c, known] == 1
                mine = logsigmoid(z), logsigmoid(-z)
            else:
                mine, of_class = (log_p[c], log_rest[c]), labels == c
            if of_class.any() and not of_class.all():
                self._learn_class(c, *mine, of_class)

    @abstractmethod
    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        """log(q / (1 − q)) of each class, of its log p and log(1 − p), all (N, C, L)."""

    @abstractmethod
    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        """Learn the curve of class c from its log p and log(1 − p), and from y = c, all (P,)."""


def log_probs(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of p and of 1 − p, (N, C, L), of logits (N, C, L); finite for p near 1."""
    log_p = dense.log_softmax(1)
    classes = torch.arange(dense.shape[1], device=dense.device).unsqueeze(1)  # (C, 1)
    top = dense.argmax(1, keepdim=True) == classes  # (N, C, L)
    # Below 1/2, log(1 − p) has no cancellation; the largest p needs the sum of the others.
    others = log_p.masked_fill(top, -torch.inf).logsumexp(1, keepdim=True)  # (N, 1, L)
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))


class BetaCalibration(OneVsRestCalibrator):
    """Beta calibration (Kull et al. 2017), one class against the rest, then normalised.

        q_c = σ(a_c ln p_c − b_c ln(1 − p_c) + m_c),   a_c, b_c ≥ 0

    For each class this is the logistic regression of y = c on ln p_c and −ln(1 − p_c), with the
    least NLL under the bounds. a = b = 1, m = 0 is the identity.

    See `OneVsRestCalibrator` for the arguments and for what both methods share.

    Attributes:
        slope_: (C, 2) a and b.
        shift_: (C,) m.
    """

    name = "beta"

    slope_: Tensor
    shift_: Tensor

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("slope_", torch.ones(num_classes, 2))
        self.register_buffer("shift_", torch.zeros(num_classes))

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
    from scipy.optimize import minimize  # takes long to import

    features = torch.stack([log_p, -log_rest])  # (2, P)
    mean, scale = features.mean(1), features.std(1).clamp_min(1e-6)
    x = torch.cat([(features - mean[:, None]) / scale[:, None], torch.ones_like(log_p)[None]])
    y = of_class.to(x)

    def value_and_gradient(weight: np.ndarray) -> tuple[float, np.ndarray]:
        log_odds = torch.from_numpy(weight).to(x) @ x
        nll = (softplus(log_odds) - y * log_odds).mean()
        gradient = x @ (log_odds.sigmoid() - y) / len(y)
        return float(nll), gradient.cpu().numpy()

    most = (_STEEPEST * scale).tolist()
    found = minimize(
        value_and_gradient,
        np.array([*scale.tolist(), float(mean.sum())]),  # the identity
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, most[0]), (0, most[1]), (None, None)],
        options={"ftol": 1e-12, "gtol": 1e-9, "maxiter": 500},
    )
    a, b = (found.x[:2] / scale.cpu().numpy()).tolist()
    return a, b, float(found.x[2]) - a * float(mean[0]) - b * float(mean[1])


class IsotonicCalibration(OneVsRestCalibrator):
    """Isotonic regression (Zadrozny & Elkan 2002), one class against the rest.

    For each class, q_c is the non-decreasing function of p_c with the least squared error to
    y = c (`sklearn.isotonic.IsotonicRegression`), then normalised over the classes. No q is below
    1/(2P) or above 1 − 1/(2P), with P the pixels learned from: that many pixels do not prove an
    event impossible.

    The curves are kept at log-odds of p that are 1/32 apart, linear in between, and constant below
    p = 1e-7 and above 1 − 1e-7.

    See `OneVsRestCalibrator` for the arguments and for what both methods share.

    Attributes:
        shift_: (C, 1025) what is added to the log-odds of p at each point of the grid.
        slope_: (C,) of the log-odds beyond the grid: 0, or 1 for a class that keeps its p_c.
    """

    name = "isotonic"

    shift_: Tensor
    slope_: Tensor

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("shift_", torch.zeros(num_classes, 2 * LIMIT * PER_UNIT + 1))
        self.register_buffer("slope_", torch.ones(num_classes))

    def _log_odds(self, log_p: Tensor, log_rest: Tensor) -> Tensor:
        log_odds = log_p - log_rest
        inside = log_odds.clamp(-LIMIT, LIMIT)
        beyond = self.slope_.to(log_odds).unsqueeze(1) * (log_odds - inside)
        place = (inside + LIMIT) * PER_UNIT
        points = self.shift_.shape[1]
        below = place.detach().floor().clamp_max(points - 2)
        classes = torch.arange(self.num_classes_, device=place.device).unsqueeze(1)  # (C, 1)
        at = below.long() + classes * points
        table = self.shift_.to(place).flatten()
        return inside + torch.lerp(table[at], table[at + 1], place - below) + beyond

    def _learn_class(self, c: int, log_p: Tensor, log_rest: Tensor, of_class: Tensor) -> None:
        from sklearn.isotonic import IsotonicRegression  # takes a second to import

        grid = torch.linspace(-LIMIT, LIMIT, self.shift_.shape[1], dtype=torch.float64)
        regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        regression.fit((log_p - log_rest).cpu().numpy(), of_class.double().cpu().numpy())
        q = torch.from_numpy(regression.predict(grid.numpy()))
        least = 0.5 / len(of_class)
        self.shift_[c] = q.clamp(least, 1 - least).logit() - grid
        self.slope_[c] = 0
