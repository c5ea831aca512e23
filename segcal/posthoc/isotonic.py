"""Isotonic regression: a non-decreasing curve for each class."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.posthoc.onevsrest import OneVsRestScaler

# Where curves are kept: log-odds −16, −16 + 1/32, …, 16, that is p = 1e-7 … 1 − 1e-7.
LIMIT, PER_UNIT = 16, 32


class IsotonicCalibration(OneVsRestScaler):
    """Isotonic regression (Zadrozny & Elkan 2002), one class against the rest.

    For each class, q_c is the non-decreasing function of p_c with the least squared error to
    y = c (`sklearn.isotonic.IsotonicRegression`), then normalised over the classes. No q is below
    1/(2P) or above 1 − 1/(2P), with P the pixels learned from: that many pixels do not prove an
    event impossible.

    The curves are kept at log-odds of p that are 1/32 apart, linear in between, and constant below
    p = 1e-7 and above 1 − 1e-7.

    The predicted class may change. A class without pixels in the sample, or with nothing but
    pixels of its own, keeps its p_c. Fitted as `SampledScaler` says.

    Args:
        max_pixels: size of the sample of pixels; 8·C bytes a pixel.
        seed: of the sample.
        ignore_index: the label that means "do not count this pixel".
        sync: sample over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs; each has a curve, and is not normalised.

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
