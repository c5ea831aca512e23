"""Losses that compare a pixel's prediction with the labels around it: svls and nacl.

The window has 3 pixels along each spatial axis, for 1 to 3 axes; ignored pixels carry no weight in
it. Classification has no neighbours: there svls is nll, and nacl pulls the logits to the one-hot
label, and both say so in a warning.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from segcal.losses.softmax import LossBatch, require
from segcal.pixels import Pixels

_MAX_AXES = 3


def svls(batch: LossBatch, true_log_prob: Tensor, *, sigma: float = 1.0) -> Tensor:
    """Spatially varying label smoothing (Islam and Glocker 2021).

    Cross-entropy against the labels of the window: a neighbour at distance d weighs
    exp(−d²/2σ²), the pixel itself as much as all its neighbours together, and the weights of the
    valid ones are normalised. Beyond the border lies the border's pixel again.
    """
    require(sigma > 0, "sigma > 0", sigma)
    pixels = batch.pixels
    _check_axes(pixels, "svls", "it is nll")
    # Σ_c q_c log p_c = log p_y + Σ_c (q_c − δ[c = y]) z_c, with q the smoothed label.
    z = pixels.dense.to(true_log_prob.dtype)
    with torch.no_grad():
        valid = pixels.valid.to(z.dtype)
        slope, mass, middle = torch.zeros_like(z), torch.zeros_like(valid), 0.0
        for square, target, near in _neighbours(pixels, valid):
            # Relative to the nearest, so that a small sigma does not make 0 / 0.
            weight = math.exp(-(square - 1) / (2 * sigma**2))
            middle += weight
            near = near * weight
            mass += near
            slope.scatter_add_(1, target.unsqueeze(1), near.unsqueeze(1))
        slope.scatter_add_(1, pixels.target.unsqueeze(1), -mass.unsqueeze(1))
        slope *= (valid / (mass + (middle or 1.0))).unsqueeze(1)
    # The logit of a masked class is −inf: clamped, 0 times it is 0.
    value = (z.clamp_min(torch.finfo(z.dtype).min / 64) * slope).sum(1)
    return batch.mean(-(true_log_prob + torch.where(pixels.valid, value, 0)))


def nacl(batch: LossBatch) -> Tensor:
    """Neighbour-aware calibration loss (Murugesan et al. 2023): mean over i, c of |τ_ic − z_ic|.

    τ_ic is the share of class c among the valid pixels of the window inside the image. z are the
    raw logits, so the loss changes when a constant is added to all of them.
    """
    pixels = batch.pixels
    _check_axes(pixels, "nacl", "its targets are the one-hot labels")
    z = pixels.dense.to(torch.promote_types(pixels.dense.dtype, torch.float32))
    share = _window_counts(pixels).to(z.dtype)
    share /= share.sum(1, keepdim=True)
    return batch.mean(torch.where(pixels.valid, (share - z).abs().mean(1), 0))


def _check_axes(pixels: Pixels, name: str, limit: str) -> None:
    if len(pixels.spatial) > _MAX_AXES:
        raise ValueError(
            f"{name} looks at neighbours along at most {_MAX_AXES} spatial axes, but the logits "
            f"have {len(pixels.spatial)}: {pixels.spatial}"
        )
    if not pixels.spatial and not torch.compiler.is_compiling():
        warnings.warn(
            f"{name} looks at neighbouring pixels, and classification has none: {limit} there",
            stacklevel=2,
        )


def _neighbours(pixels: Pixels, valid: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each place of the window but its middle: distance², (N, L) labels and validity there."""
    n, length = valid.shape
    sides, padded = pixels.spatial, []
    for values in (pixels.target, valid):
        values = values.reshape(n, *sides)
        for axis, side in enumerate(sides, 1):
            first, last = values.narrow(axis, 0, 1), values.narrow(axis, side - 1, 1)
            values = torch.cat([first, values, last], axis)
        padded.append(values)
    for steps in itertools.product((-1, 0, 1), repeat=len(sides)):
        if any(steps):
            inner = [slice(1 + d, 1 + d + s) for d, s in zip(steps, sides, strict=True)]
            target, near = (values[(slice(None), *inner)].reshape(n, length) for values in padded)
            yield sum(d * d for d in steps), target, near


def _window_counts(pixels: Pixels) -> Tensor:
    """(N, C, L) uint8: valid pixels of each class in the window around each pixel, it included."""
    n, c, length = pixels.dense.shape
    counts = torch.zeros((n, c, length), dtype=torch.uint8, device=pixels.dense.device)
    counts.scatter_(1, pixels.target.unsqueeze(1), pixels.valid.to(torch.uint8).unsqueeze(1))
    counts = counts.reshape(n, c, *pixels.spatial)
    for axis, side in enumerate(pixels.spatial, 2):  # one axis after another
        before = counts
        counts = before.clone()
        counts.narrow(axis, 1, side - 1).add_(before.narrow(axis, 0, side - 1))
        counts.narrow(axis, 0, side - 1).add_(before.narrow(axis, 1, side - 1))
    return counts.reshape(n, c, length)
