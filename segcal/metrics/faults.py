"""Error messages: which pixel of a batch cannot be counted, and why."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from segcal.files import is_distribution
from segcal.metrics.sums import MOST_NLL
from segcal.pixels import flatten


def explain_labels(
    values: Tensor, labels: Tensor, ignore_index: int, *, multilabel: bool = False
) -> str:
    """The sentence for labels that are no class: which, how many, and where first."""
    try:
        flatten(values, labels, ignore_index, multilabel=multilabel)
    except ValueError as error:
        flat = labels.reshape(len(labels), -1).long()
        classes = 2 if multilabel else values.shape[1]
        bad = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
        place = _place_of_class(bad, values)[0] if multilabel else _place(bad, values)
        return f"{error}, first at {place}"
    raise AssertionError("the labels are fine")


def explain_values(values: Tensor, labels: Tensor, ignore_index: int, *, logits: bool) -> str:
    """The sentence for the first pixel whose logits or probabilities could not be counted."""
    pixels = flatten(values, labels, ignore_index)
    wide = pixels.dense.to(torch.promote_types(values.dtype, torch.float32)).movedim(1, 0)
    wide = wide.flatten(1)  # (K, N L)
    target = pixels.target.flatten()
    if logits:
        true = wide.gather(0, target.unsqueeze(0)).squeeze(0)
        near = wide.amax(0).double() - true.double() <= MOST_NLL
        fine = near & (wide < torch.inf).all(0)  # not so for NaN
    else:
        fine = is_distribution(wide, 0, rounded_to=values.dtype)
    bad = ~fine.view_as(pixels.valid) & pixels.valid
    first = int(bad.flatten().nonzero()[0])
    column, place = wide[:, first], _place(bad, values)
    if logits:
        odd = (~(column < torch.inf)).nonzero().flatten().tolist()
        if odd:
            got = f"{column[odd[0]].item():g} at {place}, class {odd[0]}"
            return f"Expected finite logits, or -inf for masked classes, but got {got}"
        c = int(target[first])
        got = f"{column[c].item():g} at {place}, class {c}"
        return f"Expected a logit of finite NLL for the class of the label, but got {got}"
    low, high, total = column.min().item(), column.max().item(), column.sum().item()
    return (
        f"Expected probabilities, in 0..1 and of sum 1 over dimension 1, but got values in "
        f"{low:g}..{high:g} of sum {total:g} at {place}; logits go to update()"
    )


def explain_multilabel_values(
    values: Tensor, labels: Tensor, ignore_index: int, *, logits: bool
) -> str:
    """The sentence for the first of K sigmoid outputs that could not be counted."""
    wide = values.double()
    if logits:
        fine = (wide < torch.inf) & (torch.where(labels == 1, -wide, wide) <= MOST_NLL)
    else:
        fine = is_distribution(torch.stack([1 - values, values]), 0, rounded_to=values.dtype)
    bad = (~fine & (labels != ignore_index)).flatten(1)
    place, value = _place_of_class(bad, values)
    if not logits:
        return (
            f"Expected probabilities in 0..1, but got {value:g} at {place}; logits go to update()"
        )
    if value < math.inf:  # and not NaN
        return f"Expected a logit of finite NLL for the label, but got {value:g} at {place}"
    return f"Expected finite logits, but got {value:g} at {place}"


def _place_of_class(bad: Tensor, values: Tensor) -> tuple[str, float]:
    """Where the first True of `bad` (N, K·L) is, for `values` (N, K, *S), and the value there."""
    first = int(bad.flatten().nonzero()[0])
    k, sides = values.shape[1], values.shape[2:]
    c = first // max(math.prod(sides), 1) % k
    one = bad.view(len(bad), k, -1)[:, c]
    return f"{_place(one, values[:, c : c + 1])}, class {c}", values.flatten()[first].item()


def _place(bad: Tensor, values: Tensor) -> str:
    """Where the first True of `bad` (N, L) is, in the coordinates of `values` (N, K, *S)."""
    first = int(bad.flatten().nonzero()[0])
    image, pixel = divmod(first, max(math.prod(values.shape[2:]), 1))
    place = f"image {image} of the batch"
    if values.ndim > 2:
        position = np.unravel_index(pixel, values.shape[2:])
        place += f", pixel ({', '.join(str(int(i)) for i in position)})"
    return place
