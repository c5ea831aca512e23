"""The place for batches that cannot be counted: kept out, and explained when there is time to."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from segcal.files import is_distribution
from segcal.metrics.sums import ImageSums, Sums
from segcal.pixels import flatten


def neutralise(sums: Sums, images: ImageSums | None) -> None:
    """Make a batch with faults add nothing but the faults, without asking the device."""
    bad = sums.faults.sum() > 0
    for tensors in (sums, images):
        for name, tensor in tensors.tensors().items() if tensors is not None else ():
            if name != "faults":
                tensor.masked_fill_(bad, 0)


def explain_labels(values: Tensor, labels: Tensor, ignore_index: int) -> str:
    """The sentence for labels that are no class: which, how many, and where first."""
    try:
        flatten(values, labels, ignore_index)
    except ValueError as error:
        flat = labels.reshape(len(labels), -1)
        bad = ((flat < 0) | (flat >= values.shape[1])) & (flat != ignore_index)
        return f"{error}, first at {_place(bad, values)}"
    raise AssertionError("the labels are fine")


def explain_values(values: Tensor, labels: Tensor, ignore_index: int, *, logits: bool) -> str:
    """The sentence for the first pixel whose logits or probabilities could not be counted."""
    pixels = flatten(values, labels, ignore_index)
    wide = pixels.dense.to(torch.promote_types(values.dtype, torch.float32)).movedim(1, 0)
    wide = wide.flatten(1)  # (K, N L)
    rounded_to = values.dtype
    fine = wide.isfinite().all(0) if logits else is_distribution(wide, 0, rounded_to=rounded_to)
    bad = ~fine.view_as(pixels.valid) & pixels.valid
    column = wide[:, int(bad.flatten().nonzero()[0])]
    if logits:
        c = int((~column.isfinite()).nonzero()[0])
        return (
            f"Expected finite logits, but got {column[c].item():g} at {_place(bad, values)}, "
            f"class {c}"
        )
    low, high, total = column.min().item(), column.max().item(), column.sum().item()
    return (
        f"Expected probabilities, in 0..1 and of sum 1 over dimension 1, but got values in "
        f"{low:g}..{high:g} of sum {total:g} at {_place(bad, values)}; logits go to update()"
    )


def _place(bad: Tensor, values: Tensor) -> str:
    """Where the first True of `bad` (N, L) is, in the coordinates of `values` (N, K, *S)."""
    first = int(bad.flatten().nonzero()[0])
    image, pixel = divmod(first, max(math.prod(values.shape[2:]), 1))
    place = f"image {image} of the batch"
    if values.ndim > 2:
        position = np.unravel_index(pixel, values.shape[2:])
        place += f", pixel ({', '.join(str(int(i)) for i in position)})"
    return place
