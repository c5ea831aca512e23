"""Losses that compare a pixel's prediction with the labels around it: svls and nacl.

The window has 3 pixels along each spatial axis, for 1 to 3 axes; ignored pixels carry no weight in
it. Classification has no neighbours: there svls is nll, and nacl pulls the logits to the one-hot
label, and both say so in a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import torch
from torch import Tensor

from segcal.losses.means import pixel_mean, require
from segcal.losses.softmax import blocks, first_order, with_slope
from segcal.pixels import Pixels


def svls(
    pixels: Pixels,
    true_log_prob: Tensor,
    *,
    sigma: Annotated[float, "width of the Gaussian over neighbours, in pixels"] = 1.0,
    weight: Tensor | None = None,
    sync: bool = True,
) -> Tensor:
    """Spatially varying label smoothing (Islam and Glocker 2021).

    Cross-entropy against the labels of the window: a neighbour at distance d weighs
    exp(−d²/2σ²), the pixel itself as much as all its neighbours together, and the weights of the
    valid ones are normalised. Beyond the border lies the border's pixel again.
    """
    require(sigma > 0, "sigma > 0", sigma)
    if not pixels.spatial:
        _warn("svls", "it is nll")
    # Σ_c q_c log p_c = log p_y + Σ_c q_c z_c − z_y, with q the smoothed label.
    smoothed = true_log_prob + _SmoothedLogit.apply(pixels.dense, pixels, sigma)
    return pixel_mean(-smoothed, pixels, weight=weight, sync=sync)


def nacl(pixels: Pixels, *, sync: bool = True) -> Tensor:
    """Neighbour-aware calibration loss (Murugesan et al. 2023): mean over i, c of |τ_ic − z_ic|.

    τ_ic is the share of class c among the valid pixels of the window inside the image. z are the
    raw logits, so the loss changes when a constant is added to all of them.
    """
    if not pixels.spatial:
        _warn("nacl", "its targets are the one-hot labels")
    with torch.no_grad():
        dense, counts = pixels.dense, pixels.window_counts()
        dtype = torch.promote_types(dense.dtype, torch.float32)
        value = torch.empty(pixels.target.shape, dtype=dtype, device=dense.device)
        slope = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
        for rows, columns in blocks(dense.shape, dense.device):
            part = counts[rows, :, columns].to(dtype)
            part /= part.sum(1, keepdim=True)
            part -= dense[rows, :, columns]
            part.masked_fill_(~pixels.valid[rows, columns].unsqueeze(1), 0)
            slope[rows, :, columns] = part.sign().neg_()
            value[rows, columns] = part.abs_().mean(1)
    return pixel_mean(with_slope(dense, value, slope, dense.shape[1]), pixels, sync=sync)


def _warn(name: str, limit: str) -> None:
    warnings.warn(
        f"{name} looks at neighbouring pixels, and classification has none: {limit} there",
        stacklevel=2,
    )


class _SmoothedLogit(torch.autograd.Function):
    """Σ_c q_ic z_ic − z_iy for the smoothed label q of svls, 0 where ignored: (N, C, L) to (N, L).

    The window is walked again in the backward pass, so that nothing of its size is kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, pixels: Pixels, sigma: float) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        flat = logits.flatten(1)
        own = logits.gather(1, pixels.target.unsqueeze(1)).squeeze(1).to(dtype)
        total, mass = torch.zeros_like(own), torch.zeros_like(own)
        for weight, place, valid in _neighbours(pixels, sigma, dtype):
            # An ignored neighbour has no weight: 0 times −inf, of a masked class, must be 0.
            near = flat.gather(1, place).to(dtype).clamp_min_(torch.finfo(dtype).min / 64)
            total.addcmul_(near.sub_(own), valid, value=weight)
            mass.add_(valid, alpha=weight)
        ctx.save_for_backward(mass)
        ctx.pixels, ctx.sigma = pixels, sigma
        middle = sum(_weights(pixels, sigma)) or 1.0  # as much as all neighbours together
        return total.div_(mass + middle).masked_fill_(~pixels.valid, 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mass,) = ctx.saved_tensors
        pixels: Pixels = ctx.pixels
        middle = sum(_weights(pixels, ctx.sigma)) or 1.0
        grad = (grad / (mass + middle)).masked_fill_(~pixels.valid, 0)
        out = torch.zeros(pixels.dense.shape, dtype=grad.dtype, device=grad.device)
        flat = out.flatten(1)  # a view
        for weight, place, valid in _neighbours(pixels, ctx.sigma, grad.dtype):
            flat.scatter_add_(1, place, valid.mul_(grad).mul_(weight))
        out.scatter_add_(1, pixels.target.unsqueeze(1), -(grad * mass).unsqueeze(1))
        return out.to(pixels.dense.dtype), None, None


def _neighbours(
    pixels: Pixels, sigma: float, dtype: torch.dtype
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The neighbours' weight, (N, L) place of their class's logit in (N, C·L), and validity."""
    length = pixels.target.shape[1]
    column = torch.arange(length, device=pixels.target.device)
    for square, (plane, valid) in pixels.neighbours(pixels.target * length, pixels.valid.to(dtype)):
        yield _weight(square, sigma), plane.add_(column), valid


def _weights(pixels: Pixels, sigma: float) -> list[float]:
    """The weights of all neighbours, valid or not."""
    squares = (sum(d * d for d in o) for o in product((-1, 0, 1), repeat=len(pixels.spatial)))
    return [_weight(square, sigma) for square in squares if square]


def _weight(square: int, sigma: float) -> float:
    """The weight at a squared distance, relative to the nearest: a small sigma makes no 0 / 0."""
    return math.exp(-(square - 1) / (2 * sigma**2))
