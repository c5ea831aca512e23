"""Temperature scaling: one number that divides all logits, or one for each predicted class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from segcal.pixels import Pixels
from segcal.posthoc.calibrator import (
    Calibrator,
    Holdout,
    HoldoutBatch,
    PixelCalibrator,
    PixelSample,
    PixelSampler,
)

# Where temperatures are sought. If all predictions on the hold-out are right, T → 0; if the logits
# say nothing of the labels, T → ∞: both end at a bound, with a warning.
T_MIN, T_MAX = 0.01, 100.0
SHARES = (1.0, 0.1, 0.01, 0.001)
# Newton's first guess comes from this many pixels, so that two or three passes finish it.
_GUESS_PIXELS = 1 << 16
_MOST_PASSES = 9  # with the first, which makes the guess, ten
# A step in log T smaller than this is the last: convergence is quadratic, so it lands near its
# square. In memory a step costs little, on a stream a pass.
_TOLERANCE, _TOLERANCE_OF_PASSES = 1e-5, 3e-4
_BLOCK_VALUES = 1 << 18  # summed at once, to stay in a core's cache


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

    def __init__(
        self,
        *,
        method: str = "newton",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if method not in ("newton", "grid"):
            raise ValueError(f"method must be 'newton' or 'grid', but got {method!r}")
        self.method = method

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("temperature_", torch.ones(()))

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        return logits / self.temperature_.to(logits)

    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        sampler = PixelSampler(holdout, _GUESS_PIXELS, seed=0)
        unscaled = torch.zeros((), dtype=torch.float64)

        def visit(batch: HoldoutBatch) -> None:
            sampler(batch)
            for dense, target, valid in _blocks(batch.pixels):
                nll = cross_entropy(dense, target, reduction="none").masked_fill_(~valid, 0)
                unscaled.add_(nll.sum(dtype=torch.float64).cpu())

        holdout.survey(visit)
        sample = sampler.finish().pixels

        def of_sample(beta: float) -> Tensor:
            return nll_derivatives(sample, beta)

        def of_holdout(beta: float) -> Tensor:
            return holdout.total(lambda pixels: nll_derivatives(pixels, beta))

        beta, nll = least_nll(of_sample)
        if holdout.count > _GUESS_PIXELS:
            before = sum(float(nll) for nll in holdout.everyone(unscaled))
            beta, nll = least_nll(of_holdout, beta, _TOLERANCE_OF_PASSES, most=_MOST_PASSES)
            sums = of_holdout
        else:  # the sample is the whole hold-out
            before = float(of_sample(1.0)[0])
            sums = of_sample
        temperature, low, high = 1 / beta, T_MIN, T_MAX
        if self.method == "grid":
            low, high = 0.1, 10.0
            below = min(max(math.floor(temperature * 10), 1), 100)
            near = {t: float(sums(1 / t)[0]) for t in (below / 10, min(below + 1, 100) / 10)}
            temperature = min(near, key=lambda t: near[t])
            nll = before if temperature == 1 else near[temperature]
        if not low * (1 + _TOLERANCE) < temperature < high * (1 - _TOLERANCE):
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

    Fitted as `PixelCalibrator` says.

    Args:
        shares: values of s to choose from.
        **options: of `PixelCalibrator`.

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

    def __init__(
        self,
        *,
        shares: Sequence[float] = SHARES,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not shares or not all(0 <= share < math.inf for share in shares):
            raise ValueError(f"shares must be numbers >= 0, but got {shares}")
        self.shares = tuple(sorted(shares, reverse=True))

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.share_ = self.shares[0]
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("temperatures_", torch.ones(num_classes))

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        # The logits themselves, not their log-probabilities: rounding makes no ties.
        temperatures = self.temperatures_.to(logits)
        if self.multilabel:
            return logits / temperatures.view(-1, *[1] * (logits.ndim - 2))
        return logits / temperatures[logits.argmax(1, keepdim=True)]

    def _map(self, x: Tensor) -> Tensor:
        return self._transform(x, None)

    def _try(self, fitting: PixelSample, validation: PixelSample) -> list[float]:
        nlls = []
        for choice in range(len(self.shares)):
            self._learn(fitting, choice)
            nlls.append(self._nll(validation))
        return nlls

    def _learn(self, sample: PixelSample, choice: int) -> None:
        self.share_ = self.shares[choice]
        beta, _ = least_nll(lambda at: nll_derivatives(sample.pixels, at))
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


class EnsembleTemperatureScaling(PixelCalibrator):
    """Ensemble temperature scaling (Zhang et al. 2020): a mixture of three predictions.

        q = w₁ softmax(z / T) + w₂ softmax(z) + w₃ / C,    w ≥ 0, Σ w = 1

    T is the common temperature of least NLL; given T, the NLL is convex in w. The order of the
    classes never changes. The calibrated logits are log q.

    Fitted as `PixelCalibrator` says, with its arguments.

    Attributes:
        temperature_: () T.
        weights_: (3,) w.
    """

    name = "ets"
    keeps_mask = True

    temperature_: Tensor
    weights_: Tensor

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("weights_", torch.tensor([0.0, 1.0, 0.0]))

    def _map(self, x: Tensor) -> Tensor:
        log_w = self.weights_.to(x).log()
        even = torch.full_like(x, -math.log(x.shape[1]))
        parts = (x / self.temperature_.to(x)).log_softmax(1), x, even
        return torch.stack([w + log_p for w, log_p in zip(log_w, parts, strict=True)]).logsumexp(0)

    def _learn(self, sample: PixelSample, choice: int) -> None:
        from scipy.optimize import minimize  # takes long to import

        beta, _ = least_nll(lambda at: nll_derivatives(sample.pixels, at))
        x, y = sample.x, sample.labels[None]
        p = torch.stack([(x * beta).log_softmax(0).gather(0, y)[0], x.gather(0, y)[0]]).exp()
        p = torch.cat([p, torch.full_like(p[:1], 1 / len(x))])  # (3, P) of the true class

        def value_and_gradient(weights: np.ndarray) -> tuple[float, np.ndarray]:
            mixed = (torch.from_numpy(weights).to(p) @ p).clamp_min(1e-300)
            return -float(mixed.log().mean()), -(p / mixed).mean(1).cpu().numpy()

        found = minimize(
            value_and_gradient,
            np.array([0.8, 0.1, 0.1]),
            jac=True,
            method="SLSQP",
            bounds=[(0, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(3)},
            options={"ftol": 1e-14, "maxiter": 200},
        )
        weights = found.x.clip(0, 1)
        self.temperature_.fill_(1 / beta)
        self.weights_.copy_(torch.from_numpy(weights / weights.sum()))


def _pulled_beta(pixels: Pixels, centre: float, weight: float) -> float:
    """β of least NLL + weight · (β − centre)² / 2."""
    if not pixels.valid.numel():
        return centre

    def sums(beta: float) -> Tensor:
        away = beta - centre
        pull = [weight * away**2 / 2, weight * away, weight]
        return nll_derivatives(pixels, beta).cpu() + torch.tensor(pull, dtype=torch.float64)

    return least_nll(sums, centre)[0]


def nll_derivatives(pixels: Pixels, beta: float) -> Tensor:
    """(3,) Σ over pixels of the NLL at 1/T = β and of its first two derivatives in β.

    Each pixel is computed in the dtype of its logits, float32 at least; sums are float64.
    """
    total = torch.zeros(3, dtype=torch.float64, device=pixels.dense.device)
    for wide, target, valid in _blocks(pixels):
        z = wide - wide.amax(1, keepdim=True)  # (n, C, l), so that exp cannot overflow
        true = z.gather(1, target.unsqueeze(1)).squeeze(1)  # (n, l)
        weight = (z * beta).exp_()
        norm = weight.sum(1)
        mean = weight.mul_(z).sum(1).div_(norm)
        square = weight.mul_(z).sum(1).div_(norm)
        terms = norm.log_() - beta * true, mean - true, square - mean.square()
        total += torch.stack([t.masked_fill_(~valid, 0).sum(dtype=torch.float64) for t in terms])
    return total


def _blocks(pixels: Pixels) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some pixels at a time: dense (float32 at least), target and valid."""
    n, c, length = pixels.dense.shape
    columns = max(1, _BLOCK_VALUES // c)
    rows = max(1, columns // max(1, length))
    for i in range(0, n, rows):
        for j in range(0, length, columns):
            part = slice(i, i + rows), slice(j, j + columns)
            dense = pixels.dense[part[0], :, part[1]]
            wide = dense.to(torch.promote_types(dense.dtype, torch.float32))
            yield wide, pixels.target[part], pixels.valid[part]


def least_nll(
    sums: Callable[[float], Tensor],
    start: float = 1.0,
    tolerance: float = _TOLERANCE,
    *,
    most: int = 50,
) -> tuple[float, float]:
    """(β of least NLL within 1/T_MAX..1/T_MIN, the NLL there), by Newton's method in log β.

    Args:
        sums: β to (3,) NLL and its first two derivatives.
        start: the first β to try.
        tolerance: a step in log β smaller than this is the last.
        most: how many β to try.
    """
    at = math.log(start)
    low, high = -math.log(T_MAX), -math.log(T_MIN)
    untried = {low, high}
    best, last = (math.inf, at), math.inf
    for _ in range(most):
        nll, slope, curvature = sums(math.exp(at)).tolist()
        best = min(best, (nll, at))
        untried.discard(at)
        # Convex: where the NLL rises, its minimum is at a smaller β.
        low, high = (low, at) if slope > 0 else (at, high)
        curvature *= math.exp(at)  # d slope / d log β
        step = -slope / curvature if curvature > 0 else math.copysign(math.inf, -slope)
        if slope == 0 or low >= high:
            break
        if abs(step) < tolerance:
            best = (nll, at + step)
            break
        # Outside the bracket, or in ever equal steps towards infinity: try the bound next.
        if not low < at + step < high or abs(step) > last / 2:
            edge = low if step < 0 else high
            step = (edge if edge in untried else (low + high) / 2) - at
        last = abs(step)
        at += step
    nll, at = best
    return math.exp(at), nll
