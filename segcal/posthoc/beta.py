"""Beta calibration: three numbers for each class."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.posthoc.onevsrest import OneVsRestScaler

_STEEPEST = 100.0  # of a and b; without a bound, classes that p separates perfectly have no minimum


class BetaCalibration(OneVsRestScaler):
    """Beta calibration (Kull et al. 2017), one class against the rest, then normalised.

        q_c = σ(a_c ln p_c − b_c ln(1 − p_c) + m_c),   a_c, b_c ≥ 0

    For each class this is the logistic regression of y = c on ln p_c and −ln(1 − p_c), with the
    least NLL under the bounds. a = b = 1, m = 0 is the identity.

    The predicted class may change. A class without pixels in the sample, or with nothing but
    pixels of its own, keeps its p_c. Fitted as `SampledScaler` says.

    Args:
        max_pixels: size of the sample of pixels; 8·C bytes a pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs; each has a curve, and is not normalised.

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
        nll = (torch.nn.functional.softplus(log_odds) - y * log_odds).mean()
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
