"""The place for bins: which bin a probability lies in, and histograms of bin numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.metrics import device
from segcal.metrics.sums import FINE_BINS, OCTAVES, STEPS

SPARE = 1024  # slots for what is not counted; many, so that atomic additions do not queue up


class Binning:
    """B equal bins over [0, 1]: (lo, hi] with 0 in the first, or [lo, hi) with 1 in the last.

    Args:
        num_bins: B.
        edge_rule: "right" for (lo, hi], "left" for [lo, hi).
        dtype: of the probabilities; the edges k/B are rounded to it, so that a probability
            written as k/B lies on the edge whatever its precision.
        device: of the probabilities.
    """

    def __init__(
        self, num_bins: int, edge_rule: str, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)  # what counting.py computes in
        edges = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
        edges = edges.to(dtype).to(wide)
        self.num_bins = num_bins
        self._first = edges[0] if num_bins > 1 else edges.new_tensor(torch.inf)  # on the CPU
        self._edges = edges.to(device)  # (B - 1,)
        self._right = edge_rule == "right"
        # How far p·B can be off, in rounding and in the rounding of the edges.
        self._slack = 2 * num_bins * torch.finfo(dtype).eps

    def bin_of(self, probs: Tensor) -> Tensor:
        """Number of each probability's bin, 0..B-1."""
        if not device.on_cpu(probs) or self._slack > 0.5:
            return self._search(probs)
        # p·B tells the bin except near an edge; only there, in a few of a million, is it searched.
        scaled = probs * self.num_bins
        bins = scaled.long().clamp_(max=self.num_bins - 1)
        edge = scaled.round().clamp_(1, max(self.num_bins - 1, 1))
        near = np.flatnonzero((scaled - edge).abs_().numpy() <= self._slack)
        if len(near):
            at = torch.from_numpy(near)
            bins[at] = self._search(probs[at])
        return bins

    def _search(self, probs: Tensor) -> Tensor:
        return torch.bucketize(probs, self._edges, right=not self._right)

    def above_first(self, probs: Tensor, out: Tensor) -> None:
        """Write to `out` whether each probability lies past the first bin."""
        if device.on_cpu(probs):  # numpy's comparison takes a fifth of torch's time
            compare = np.greater if self._right else np.greater_equal
            compare(probs.numpy(), self._first.numpy(), out=out.numpy())
        else:
            (torch.gt if self._right else torch.ge)(probs, self._first.item(), out=out)


def fine_bin(confidence: Tensor) -> Tensor:
    """Number of the fine bin of each confidence p, from the leading bits of q = 1 - p."""
    if confidence.dtype == torch.float64:
        bits, mantissa, bias = (1 - confidence).view(torch.int64), 52, 1023
    else:
        bits, mantissa, bias = (1 - confidence).view(torch.int32), 23, 127
    step = bits >> (mantissa - STEPS.bit_length() + 1)
    return (FINE_BINS - 2 + (bias - OCTAVES) * STEPS - step).clamp_(0, FINE_BINS - 1).long()


def histogram(slot: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
    """(size,) how often each slot occurs, or the sum of its weights, in float64.

    Slots from `size` to `size + SPARE - 1` are not counted.
    """
    dtype = torch.int64 if weight is None else torch.float64
    weight = None if weight is None else weight.double()
    if device.on_cpu(slot):
        # The conversion matters without any slots: bincount then ignores the weight's dtype.
        return torch.bincount(slot, weight, minlength=size)[:size].to(dtype)
    out = torch.zeros(size + SPARE, dtype=dtype, device=slot.device)  # bincount waits for a GPU
    return out.scatter_add_(0, slot, torch.ones_like(slot) if weight is None else weight)[:size]
