"""Temperature scaling: one number that divides all logits, or one for each predicted class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from segcal.pixels import Pixels
from segcal.posthoc.calibrator import Calibrator, PixelCalibrator
from segcal.posthoc.holdout import Holdout, HoldoutBatch, PixelSample, PixelSampler
from segcal.posthoc.minimise import (
    T_MAX,
    T_MIN,
    TOLERANCE,
    best_beta,
    blocks,
    lbfgs,
    least_nll,
    nll_derivatives,
)

SHARES = (1.0, 0.1, 0.01, 0.001)
# Newton's first guess comes from this many pixels, so that two or three passes finish it.
_GUESS_PIXELS = 1 << 16
_MOST_PASSES = 9  # with the first, which makes the guess, ten
_TOLERANCE_OF_PASSES = 3e-4  # a step costs a pass, so fewer are made than in memory


class TemperatureScaling(Calibrator):
    """Temperature scaling (Guo et al. 2017): logits / T, with T of least NLL on the hold-out.

    The predicted class never changes. T is positive, within 0.01..100, and never makes the NLL of
    the hold-out worse than T = 1 does.

    `newton` finds the minimum itself. With β = 1/T the NLL is convex, and a pass over the hold-out
    sums it with its first two derivatives,

        Σ log Σ_c exp(β z_c) − β z_y,     Σ E_p[z] − z_y,     Σ Var_p[z],

    for a step in log β that is kept between the values known to be too small and too large. The
    first guess comes from a sample of 65536 pixels; a smaller hold-out is read only once.

    `grid` is the best of T = 0.1, 0.2, …, 10, the grid of the paper. As the NLL is convex in β,
    that is one of the two next to the minimum.

    K sigmoid outputs (`multilabel`) share one T, of least NLL over all their labels.
    `ClasswiseTemperatureScaling` has one for each.

    Args:
        method: "newton" or "grid".
        **options: of `Calibrator`.

    Attributes:
        temperature_: () T.
    """

    name = "ts"
    keeps_mask = True

    temperature_: Tensor

    def __init__(self, *, method: str = "newton", **options: Any) -> None:
        super().__init__(**options)
        if method not in ("newton", "grid"):
            raise ValueError(f"method must be 'newton' or 'grid', but got {method!r}")
        self.method = method

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return {"temperature_": torch.ones(())}

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        return logits / self.temperature_.to(logits)

    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        sampler = PixelSampler(holdout, _GUESS_PIXELS, seed=0)
        unscaled = torch.zeros((), dtype=torch.float64)

        def visit(batch: HoldoutBatch) -> None:
            sampler(batch)
            for dense, target, valid in blocks(batch.pixels):
                nll = cross_entropy(dense, target, reduction="none").masked_fill_(~valid, 0)
                unscaled.add_(nll.sum(dtype=torch.float64).cpu())

        holdout.survey(visit)
        sample = sampler.finish().pixels

        def of_all(beta: float) -> Tensor:
            return holdout.total(partial(nll_derivatives, beta=beta))

        sums: Callable[[float], Tensor] = partial(nll_derivatives, sample)
        beta, nll = least_nll(sums)
        before = float(sums(1.0)[0])
        if holdout.count > _GUESS_PIXELS:  # else the sample is the whole hold-out
            sums = of_all
            beta, nll = least_nll(sums, beta, _TOLERANCE_OF_PASSES, most=_MOST_PASSES)
            before = sum(float(nll) for nll in holdout.everyone(unscaled))
        temperature, low, high = 1 / beta, T_MIN, T_MAX
        if self.method == "grid":
            low, high = 0.1, 10.0
            below = min(max(math.floor(temperature * 10), 1), 100)
            near = {t: float(sums(1 / t)[0]) for t in (below / 10, min(below + 1, 100) / 10)}
            temperature = min(near, key=lambda t: near[t])
            nll = before if temperature == 1 else near[temperature]
        if not low * (1 + TOLERANCE) < temperature < high * (1 - TOLERANCE):
            self._warn(
                f"the NLL is least at the bound T = {temperature:g} of {low:g}..{high:g}; the "
                "hold-out is too small, has no wrong predictions, or no temperature fits it"
            )
        self._start(holdout.num_classes, holdout.image_channels)
        self.temperature_.fill_(temperature)
        return before / holdout.count, nll / holdout.count


class ClasswiseTemperatureScaling(PixelCalibrator):
    """A temperature for each predicted class: logits / T_c, with c the class of largest logit.

    The predicted class never changes. T is the common temperature of least NLL over all P pixels.
    With β = 1/T and β_c = 1/T_c, each T_c minimises

        Σ_{pixels predicted as c} NLL(β_c) + s · P · v · (β_c − β)² / 2,

    with v the second derivative of the mean NLL at β: as if s · P pixels of all classes had been
    predicted as c too. Without them, a class of few pixels that are all right would become certain.
    The share s is the one of least NLL on images that were not fitted on.

    With K sigmoid outputs (`multilabel`), T_c is the temperature of output c, and the sum is over
    its own labels.

    Args:
        shares: values of s to choose from.
        **options: of `PixelCalibrator`, which says how it is fitted.

    Attributes:
        temperature_: () T.
        temperatures_: (C,) T_c; T for a class that is never predicted.
        share_: the s chosen.
    """

    name = "cts"
    keeps_mask = True

    temperature_: Tensor
    temperatures_: Tensor
    share_: float

    def __init__(self, *, shares: Sequence[float] = SHARES, **options: Any) -> None:
        super().__init__(**options)
        if not shares or not all(0 <= share < math.inf for share in shares):
            raise ValueError(f"shares must be numbers >= 0, but got {shares}")
        self.shares = tuple(sorted(shares, reverse=True))
        self._choices = len(self.shares)

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        ones = torch.ones(num_classes)
        return {"temperature_": ones[0].clone(), "temperatures_": ones, "share_": self.shares[0]}

    def _map(self, x: Tensor) -> Tensor:
        temperatures = self.temperatures_.to(x)
        own = temperatures[:, None] if self.multilabel else temperatures[x.argmax(1, keepdim=True)]
        return x / own

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.share_ = self.shares[choice]
        beta = best_beta(sample.pixels)
        weight = self.share_ * float(nll_derivatives(sample.pixels, beta)[2])  # s · P · v
        self.temperature_.fill_(1 / beta)
        predicted = sample.x.argmax(0)
        for c in range(self.num_classes_):
            if self.multilabel:
                known = sample.labels[c] >= 0
                part = PixelSample(sample.x[c : c + 1], sample.labels[c : c + 1], known)[known]
            else:
                part = sample[predicted == c]
            self.temperatures_[c] = 1 / _pulled_beta(part.pixels, beta, weight)


def _pulled_beta(pixels: Pixels, centre: float, weight: float) -> float:
    """β of least NLL + weight · (β − centre)² / 2."""
    if not pixels.valid.numel():
        return centre

    def sums(beta: float) -> Tensor:
        away = beta - centre
        pull = torch.tensor([weight * away**2 / 2, weight * away, weight], dtype=torch.float64)
        return nll_derivatives(pixels, beta).cpu() + pull

    return least_nll(sums, centre)[0]


class EnsembleTemperatureScaling(PixelCalibrator):
    """Ensemble temperature scaling (Zhang et al. 2020): a mixture of three predictions.

        q = w₁ softmax(z / T) + w₂ softmax(z) + w₃ / C,    w ≥ 0, Σ w = 1

    T is the common temperature of least NLL; given T, the NLL is convex in w. The order of the
    classes never changes. The calibrated logits are log q. `PixelCalibrator` says how it is fitted.

    Attributes:
        temperature_: () T.
        weights_: (3,) w.
    """

    name = "ets"
    keeps_mask = True

    temperature_: Tensor
    weights_: Tensor

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return {"temperature_": torch.ones(()), "weights_": torch.tensor([0.0, 1.0, 0.0])}

    def _map(self, x: Tensor) -> Tensor:
        log_w = self.weights_.to(x).log()
        even = torch.full_like(x, -math.log(x.shape[1]))
        parts = (x / self.temperature_.to(x)).log_softmax(1), x, even
        return torch.stack([w + log_p for w, log_p in zip(log_w, parts, strict=True)]).logsumexp(0)

    def _learn(self, sample: PixelSample, choice: int) -> None:
        beta = best_beta(sample.pixels)
        x, y = sample.x, sample.labels[None]
        p = torch.stack([(x * beta).log_softmax(0).gather(0, y)[0], x.gather(0, y)[0]]).exp()
        p = torch.cat([p, torch.full_like(p[:1], 1 / len(x))])  # (3, P) of the true class

        def value_and_gradient(w: Tensor) -> tuple[Tensor, Tensor]:
            # With + Σ w the minimum over all w ≥ 0 is where Σ w = 1.
            mixed = (w @ p).clamp_min(1e-300)
            return w.sum() - mixed.log().mean(), 1 - (p / mixed).mean(1)

        start = p.new_tensor([0.8, 0.1, 0.1])
        weights = lbfgs(value_and_gradient, start, bounds=[(0, None)] * 3)
        self.temperature_.fill_(1 / beta)
        self.weights_.copy_(weights / weights.sum())
