"""The two minimisers of the fits: Newton for one temperature, L-BFGS for many values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from segcal.pixels import Pixels

# Where temperatures are sought. If all predictions on the hold-out are right, T → 0; if the logits
# say nothing of the labels, T → ∞: both end at a bound, with a warning.
T_MIN, T_MAX = 0.01, 100.0
# A step in log T smaller than this is the last: convergence is quadratic, so it lands near its
# square.
TOLERANCE = 1e-5
_BLOCK_VALUES = 1 << 18  # summed at once, to stay in a core's cache


def nll_derivatives(pixels: Pixels, beta: float) -> Tensor:
    """(3,) Σ over pixels of the NLL at 1/T = β and of its first two derivatives in β.

    Each pixel is computed in the dtype of its logits, float32 at least; sums are float64.
    """
    total = torch.zeros(3, dtype=torch.float64, device=pixels.dense.device)
    for wide, target, valid in blocks(pixels):
        z = wide - wide.amax(1, keepdim=True)  # (n, C, l), so that exp cannot overflow
        true = z.gather(1, target.unsqueeze(1)).squeeze(1)  # (n, l)
        weight = (z * beta).exp_()
        norm = weight.sum(1)
        mean = weight.mul_(z).sum(1).div_(norm)
        square = weight.mul_(z).sum(1).div_(norm)
        terms = norm.log_() - beta * true, mean - true, square - mean.square()
        total += torch.stack([t.masked_fill_(~valid, 0).sum(dtype=torch.float64) for t in terms])
    return total


def blocks(pixels: Pixels) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
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


def best_beta(pixels: Pixels) -> float:
    """1/T of least NLL."""
    return least_nll(lambda beta: nll_derivatives(pixels, beta))[0]


def least_nll(
    sums: Callable[[float], Tensor],
    start: float = 1.0,
    tolerance: float = TOLERANCE,
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


def lbfgs(
    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    scale: Tensor | None = None,
    bounds: Sequence[tuple[float | None, float | None]] | None = None,
    tolerance: float = 1e-14,
    memory: int = 50,
) -> Tensor:
    """The x of least value, of any shape, by L-BFGS-B from `start`.

    Args:
        value_and_gradient: x to its value () and the gradient there, of the shape of x.
        start: float64.
        scale: the steps are made in x / scale, whose curvature should be near 1.
        bounds: (least, most) of each x / scale.
        tolerance: the end is reached when a step lowers the value by less.
        memory: the steps that the curvature is made of.
    """
    from scipy.optimize import minimize  # takes long to import

    unit = torch.ones_like(start) if scale is None else scale

    def function(moved: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_gradient(torch.from_numpy(moved).to(unit).view_as(unit) * unit)
        return float(value), (gradient * unit).flatten().cpu().numpy()

    found = minimize(
        function,
        (start / unit).flatten().cpu().numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={
            "maxcor": memory,
            "maxiter": 3000,
            "maxfun": 6000,
            "ftol": tolerance,
            "gtol": 1e-8,
        },
    )
    return torch.from_numpy(found.x).to(unit).view_as(unit) * unit
