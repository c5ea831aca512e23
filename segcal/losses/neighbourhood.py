"""Losses that compare a pixel's prediction with the labels around it: svls and nacl.

The window has 3 pixels along each spatial axis, for 1 to 3 axes; ignored pixels carry no weight in
it. Classification has no neighbours: there svls is nll, and nacl pulls the logits to the one-hot
label, and both say so in a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from segcal.losses.means import pixel_mean, require
from segcal.losses.slopes import with_slope
from segcal.losses.softmax import blocks, first_order
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
        flat = logits.contiguous().view(-1)
        total = torch.zeros(pixels.target.shape, dtype=dtype, device=logits.device)
        mass = torch.zeros_like(total)
        for place, share in _places(pixels, sigma, dtype):
            total.addcmul_(flat[place], share)
            mass += share
        own = logits.gather(1, pixels.target.unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(mass)
        ctx.pixels, ctx.sigma = pixels, sigma
        return total.div_(mass).sub_(own).masked_fill_(~pixels.valid, 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mass,) = ctx.saved_tensors
        pixels: Pixels = ctx.pixels
        ignored = ~pixels.valid
        own = -grad.masked_fill(ignored, 0)
        grad = (grad / mass).masked_fill_(ignored, 0)
        out = torch.zeros(pixels.dense.shape, dtype=grad.dtype, device=grad.device)
        flat = out.view(-1)
        for place, share in _places(pixels, ctx.sigma, grad.dtype):
            flat.scatter_add_(0, place.view(-1), share.mul_(grad).view(-1))
        out.scatter_add_(1, pixels.target.unsqueeze(1), own.unsqueeze(1))
        return out.to(pixels.dense.dtype), None, None


def _places(pixels: Pixels, sigma: float, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """For each place of the window: where its class's logit lies in (N, C, L), and its weight."""
    n, c, length = pixels.dense.shape
    # Relative to the nearest neighbours' weight, so that a small sigma turns none into 0 / 0.
    axes = len(pixels.spatial)
    far = {d: math.exp(-(d - 1) / (2 * sigma**2)) for d in range(1, axes + 1)}  # by d²
    middle = sum(weight * math.comb(axes, d) * 2**d for d, weight in far.items()) or 1.0
    weights = {0: middle, **far}
    device = pixels.target.device
    first = torch.arange(n, device=device).unsqueeze(1) * (c * length)
    first = first + torch.arange(length, device=device)  # (N, L) where class 0 lies
    for square, labels, valid in pixels.neighbours():
        # An ignored neighbour has no weight: the pixel's own class keeps −inf of others away.
        labels = torch.where(valid, labels, pixels.target)
        yield labels.mul_(length).add_(first), valid.to(dtype).mul_(weights[square])
