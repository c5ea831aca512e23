"""Temperature scaling: one number that divides all logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from segcal.metrics.counting import compiled_passes
from segcal.pixels import Pixels
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.sample import PixelSampler
from segcal.posthoc.stream import HoldoutBatch, PixelBlock, Stream, Survey, Total, sum_of_blocks

# Where temperatures are sought. If all predictions on the hold-out are right, T → 0; if the logits
# say nothing of the labels, T → ∞: both end at a bound, with a warning.
T_MIN, T_MAX = 0.01, 100.0
GRID = 100  # temperatures 0.1, 0.2, …, 10: the grid of the paper
# Newton's first guess comes from this many pixels, so that two or three passes finish it.
_GUESS_PIXELS = 1 << 16
_MOST_PASSES = 9  # with the first, which makes the guess, ten
_TOLERANCE = 1e-5  # of log T; convergence is quadratic, so the last step lands near its square


class TemperatureScaling(Calibrator):
    """Temperature scaling (Guo et al. 2017): logits / T, with T of least NLL on the hold-out.

    The predicted class never changes. T is positive, within 0.01..100, and never makes the NLL of
    the hold-out worse than T = 1 does.

    `newton` finds the minimum itself. With β = 1/T the NLL is convex, and a pass over the hold-out
    sums it with its first two derivatives,

        Σ log Σ_c exp(β z_c) − β z_y,     Σ E_p[z] − z_y,     Σ Var_p[z],

    for a step in log β that is kept between the values known to be too small and too large. The
    first guess comes from a sample of 65536 pixels; a smaller hold-out is read only once.

    `grid` is the paper's: the best of T = 0.1, 0.2, …, 10, all in a single pass.

    K sigmoid outputs (`multilabel`) share one T, of least NLL over all their labels.
    `ClasswiseTemperatureScaling` has one for each.

    Args:
        method: "newton" or "grid".
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.
        multilabel: the logits are of K sigmoid outputs.

    Attributes:
        temperature_: () T.
    """

    name = "ts"

    temperature_: Tensor

    def __init__(
        self,
        *,
        method: str = "newton",
        ignore_index: int = 255,
        sync: bool = True,
        multilabel: bool = False,
    ) -> None:
        super().__init__(ignore_index=ignore_index, sync=sync, multilabel=multilabel)
        if method not in ("newton", "grid"):
            raise ValueError(f"Expected method 'newton' or 'grid', but got {method!r}")
        self.method = method

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.register_buffer("temperature_", torch.ones(()))

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        return logits / self.temperature_.to(logits)

    def _fit(self, stream: Stream) -> tuple[Survey, float, float]:
        survey, temperature, before, after = (
            _fit_newton(stream) if self.method == "newton" else _fit_grid(stream)
        )
        low, high = (T_MIN, T_MAX) if self.method == "newton" else (0.1, 10.0)
        if not low * (1 + _TOLERANCE) < temperature < high * (1 - _TOLERANCE):
            self._warn(
                f"the NLL is least at the bound T = {temperature:g} of {low:g}..{high:g}; the "
                "hold-out is too small, has no wrong predictions, or no temperature fits it"
            )
        self._start(survey.num_classes, survey.image_channels)
        self.temperature_.fill_(temperature)
        return survey, before, after


def _fit_newton(stream: Stream) -> tuple[Survey, float, float, float]:
    sampler = PixelSampler(_GUESS_PIXELS, seed=0)
    unscaled = Total(lambda pixels: sum_derivatives(pixels, 1.0), 3)

    def visit(batch: HoldoutBatch) -> None:
        sampler(batch)
        unscaled(batch)

    survey = stream.survey(visit)
    sample = sampler.finish(stream, survey.num_classes)
    before = float(unscaled.over_ranks(stream)[0][0])
    beta, nll = least_nll(sums_of(sample.pixels, stream))
    if survey.count > _GUESS_PIXELS:  # else the sample is the whole

        def in_one_pass(beta: float) -> Tensor:
            return stream.total(lambda pixels: sum_derivatives(pixels, beta), 3)

        beta, nll = least_nll(in_one_pass, beta, most=_MOST_PASSES)
    return survey, 1 / beta, before / survey.count, nll / survey.count


def sums_of(pixels: Pixels, stream: Stream | None = None) -> Callable[[float], Tensor]:
    """The function that `least_nll` needs, of `pixels` in memory.

    Args:
        pixels: this rank's.
        stream: whose ranks to sum over; None sums this rank's pixels alone.
    """

    def sums(beta: float) -> Tensor:
        total = Total(lambda pixels: sum_derivatives(pixels, beta), 3).add(pixels)
        return total.alone() if stream is None else total.over_ranks(stream)[0]

    return sums


def sum_derivatives(pixels: Pixels, beta: float) -> Tensor:
    """(3,) Σ over pixels of the NLL at 1/T = β and of its first two derivatives in β."""
    if (compiled := _compiled_for(pixels)) is not None:
        return compiled.sum_tempered_nll(pixels, [beta])[0]
    return sum_of_blocks(lambda block: derivatives(block, beta), pixels, 3)


def sum_grid_nll(pixels: Pixels) -> Tensor:
    """(100,) Σ over pixels of the NLL at T = 0.1, 0.2, …, 10."""
    if (compiled := _compiled_for(pixels)) is not None:
        betas = [10 / index for index in range(1, GRID + 1)]
        return compiled.sum_tempered_nll(pixels, betas)[:, 0]
    return sum_of_blocks(grid_nll, pixels, GRID)


def _compiled_for(pixels: Pixels) -> ModuleType | None:
    return compiled_passes() if pixels.dense.device.type == "cpu" else None


def derivatives(block: PixelBlock, beta: float) -> Tensor:
    """(3,) the sums of `sum_derivatives` over the pixels of a block, in torch."""
    z = block.logits - block.logits.amax(1, keepdim=True)  # (n, C, l), so that exp cannot overflow
    true = z.gather(1, block.target.unsqueeze(1)).squeeze(1)  # (n, l)
    weight = (z * beta).exp_()
    norm = weight.sum(1)
    mean = weight.mul_(z).sum(1) / norm
    square = weight.mul_(z).sum(1) / norm
    return block.sum(norm.log() - beta * true, mean - true, square - mean.square())


def least_nll(
    sums: Callable[[float], Tensor], start: float = 1.0, *, most: int = 50
) -> tuple[float, float]:
    """(β of least NLL within 1/T_MAX..1/T_MIN, the NLL there), by Newton's method in log β.

    Args:
        sums: β to (3,) NLL and its first two derivatives.
        start: the first β to try.
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
        if abs(step) < _TOLERANCE:
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


def _fit_grid(stream: Stream) -> tuple[Survey, float, float, float]:
    total = Total(sum_grid_nll, GRID)
    survey = stream.survey(total)
    nll = total.over_ranks(stream)[0] / survey.count
    best = int(nll.argmin())
    return survey, (best + 1) / 10, float(nll[9]), float(nll[best])


def grid_nll(block: PixelBlock) -> Tensor:
    """(100,) the sums of `sum_grid_nll` over the pixels of a block, in torch."""
    z = block.logits - block.logits.amax(1, keepdim=True)  # (n, C, l)
    true = z.gather(1, block.target.unsqueeze(1)).squeeze(1)  # (n, l)
    nll = torch.zeros(GRID, dtype=z.dtype, device=z.device)
    # exp(z / T) is exp(z / 2T) squared: half of the temperatures need no exponential.
    for index in range(GRID // 2 + 1, GRID + 1):
        weight = (z * (10 / index)).exp_()
        while True:
            nll[index - 1] = block.sum(weight.sum(1).log_() - true * (10 / index))[0]
            if index % 2:
                break
            index //= 2
            weight.square_()
    return nll
