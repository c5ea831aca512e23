"""Shapes and ignored labels: everything else sees flat pixels and their masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_LABEL_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32),
)
_MAX_LISTED = 8  # offending label values named in an error


@dataclass(frozen=True, eq=False)
class Pixels:
    """Logits and labels with the spatial axes folded into one, and ignored pixels masked.

    Attributes:
        dense: (N, C, L) logits as given; L = 1 for classification.
        target: (N, L) int64 labels, 0 where ignored.
        valid: (N, L) bool, False where ignored.
        out_of_range: () int64, how many labels were neither a class nor the ignore index; those
            pixels are masked. Always 0 on the CPU, where `flatten` raises, unless it is compiled.
        spatial: the sides in S that are longer than 1, whose product is L.
        problems: K of a multi-label batch of M images: N = M·K, C = 2, and row m·K + k is class k
            of image m. None for softmax outputs.
    """

    dense: Tensor
    target: Tensor
    valid: Tensor
    out_of_range: Tensor
    spatial: tuple[int, ...]
    problems: int | None = None

    @property
    def num_classes(self) -> int:
        """C, the number of classes; 2 for a multi-label batch."""
        return self.dense.shape[1]

    def problem(self, row: Tensor) -> Tensor:
        """Which problem a row of the batch belongs to: its class in a multi-label batch, else 0."""
        return row % (self.problems or 1)

    def per_problem(self, rows: Tensor) -> Tensor:
        """(N, …) summed over the images: (problems, …), with one problem for softmax outputs."""
        problems = self.problems or 1
        return rows.reshape(len(rows) // problems, problems, *rows.shape[1:]).sum(0)

    def never_empty(self) -> Pixels:
        """These pixels, or an ignored one (per problem) for a rank that has none of the batch."""
        if self.valid.numel():
            return self
        n, length = self.valid.shape
        rows, columns = n or self.problems or 1, length or 1
        dense = F.pad(self.dense, (0, columns - length, 0, 0, 0, rows - n))
        target = self.target.new_zeros(rows, columns)
        spatial = self.spatial if length else (1,) * len(self.spatial)
        return replace(self, dense=dense, target=target, valid=target.bool(), spatial=spatial)

    def class_counts(self) -> Tensor:
        """(N, C) int64, the valid pixels of each class in each row."""
        counts = self.target.new_zeros(self.dense.shape[:2])
        return counts.scatter_add_(1, self.target, self.valid.long())


def resolve_ignore_index(ignore_index: int | None, num_classes: int) -> int:
    """The label that is not counted; for None it is 255, or -100 beyond 255 classes."""
    if ignore_index is None:
        return 255 if num_classes <= 255 else -100
    require_ignore_index(ignore_index)
    if 0 <= ignore_index < num_classes:
        raise ValueError(
            f"ignore_index={ignore_index} is one of the {num_classes} classes "
            f"0..{num_classes - 1}: give the pixels that shall not count another label"
        )
    return int(ignore_index)


def require_ignore_index(value: object) -> None:
    """Raise a ValueError if `value` cannot be a label."""
    if not isinstance(value, Integral) or not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"ignore_index must be an integer, but it is {value!r}")


def flatten(
    logits: Tensor, labels: Tensor, ignore_index: int | None = None, *, multilabel: bool = False
) -> Pixels:
    """Fold (N, C, *S) logits and (N, *S) labels into `Pixels`, masking ignored labels.

    Args:
        logits: (N, C, *S) of any floating dtype. S = () is classification, (H, W) segmentation.
        labels: (N, *S) of an integer dtype; (N,) is also taken when every side in S is 1.
        ignore_index: the label of pixels that do not count; None as in `resolve_ignore_index`.
        multilabel: the logits are of K sigmoid outputs, and the labels those that
            `fold_multilabel` takes.

    A wrong shape or dtype is a ValueError, and so are labels outside 0..C-1 on the CPU. On an
    accelerator, where a look at the labels would stall the queue, and under torch.compile bad
    labels are counted in `Pixels.out_of_range`.
    """
    problems = None
    if multilabel:
        outputs, (logits, labels) = logits, fold_multilabel(logits, labels)
        problems = outputs.shape[1]
    check_shapes(logits, labels)
    n, c, *sides = logits.shape
    ignore_index = resolve_ignore_index(ignore_index, c)
    length = math.prod(sides)
    dense = logits.reshape(n, c, length)
    given = labels.reshape(n, length).long()
    valid = given != ignore_index
    target = given.masked_fill(~valid, 0)
    outside = torch.zeros((), dtype=torch.int64)
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        bad = (target < 0) | (target >= c)
        valid, target, outside = valid & ~bad, target.masked_fill(bad, 0), bad.sum()
    elif target.numel():
        low, high = target.aminmax()
        if low < 0 or high >= c:
            bad = (target < 0) | (target >= c)
            values, number = target[bad].unique().tolist(), int(bad.sum())
            shown = ", ".join(map(str, values[:_MAX_LISTED])) + ", …" * (len(values) > _MAX_LISTED)
            advice = f"; if label {values[0]} means ignored, state --ignore-index {values[0]}"
            raise ValueError(
                f"Expected labels in 0..{c - 1} ({c} classes) or ignore_index={ignore_index}, "
                f"but got {shown} in {number} pixel{'' if number == 1 else 's'}, first at "
                f"{_place(bad, sides, problems)}" + (advice if len(values) == 1 else "")
            )
    spatial = tuple(side for side in sides if side != 1)
    return Pixels(dense, target, valid, outside, spatial, problems)


def _place(bad: Tensor, sides: Sequence[int], problems: int | None) -> str:
    """Where the first True of (N, L) or, with K problems, (N·K, L) is."""
    row, pixel = divmod(int(bad.flatten().nonzero()[0]), bad.shape[1])
    image, c = divmod(row, problems or 1)
    place = f"image {image} of the batch"
    if len(sides):
        position = np.unravel_index(pixel, tuple(sides))
        place += f", pixel ({', '.join(str(int(i)) for i in position)})"
    return place if problems is None else f"{place}, class {c}"


MOST_NLL = 1e300  # of a pixel; the sum over pixels must stay finite too


def check_batch(
    values: Tensor,
    labels: Tensor | None = None,
    ignore_index: int | None = None,
    *,
    probs: bool = False,
    multilabel: bool = False,
) -> None:
    """Raise a ValueError that names the first pixel that cannot be counted, if there is one.

    Logits may be -inf, which masks a class, but not for the class of the label, nor for all
    classes; NaN and +inf are errors. Probabilities lie in 0..1 and sum to 1, up to rounding; see
    `is_distribution`. Ignored pixels may hold anything. Without labels all pixels are checked, as
    if the predicted class were the label. On an accelerator this waits for the device.
    """
    if labels is None:
        _check_values(values)
        positive = values > (0.5 if probs else 0)
        labels = positive.long() if multilabel else values.argmax(1)
    pixels = flatten(values, labels, ignore_index, multilabel=multilabel)
    target, sides, problems = pixels.target, values.shape[2:], pixels.problems
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    wide = wide.reshape(len(target), -1, target.shape[1])  # (N, C, L), or (N·K, 1, L) of sigmoids
    true = wide.gather(1, target.unsqueeze(1) * (problems is None)).squeeze(1).double()
    if probs and multilabel:
        below = rounding_of(values.dtype)[0]
        fine = (true >= -below) & (true <= 1 + below)
    elif probs:
        fine = is_distribution(wide, 1, rounded_to=values.dtype)
    elif multilabel:
        fine = (true < math.inf) & (torch.where(target == 1, -true, true) <= MOST_NLL)
    else:
        fine = wide.amax(1).double() - true <= MOST_NLL  # not so for NaN
    bad = pixels.valid & ~fine
    if not bad.any():
        return
    row, pixel = divmod(int(bad.flatten().nonzero()[0]), bad.shape[1])
    column, label = wide[row, :, pixel], int(target[row, pixel])
    place = _place(bad, sides, problems)
    if probs and multilabel:
        raise ValueError(
            f"Expected probabilities in 0..1, but got {column.item():g} at {place}; "
            "logits go to update()"
        )
    if probs:
        raise ValueError(
            "Expected probabilities, in 0..1 and of sum 1 over dimension 1, but got values in "
            f"{column.min():g}..{column.max():g} of sum {column.sum():g} at {place}; "
            "logits go to update()"
        )
    odd = (~(column < math.inf)).nonzero().flatten().tolist()
    c = 0 if multilabel else odd[0] if odd else label
    got = f"{column[c]:g} at {place}" + ("" if multilabel else f", class {c}")
    if odd:
        raise ValueError(f"Expected finite logits, or -inf for masked classes, but got {got}")
    raise ValueError(f"Expected a logit of finite NLL for the class of the label, but got {got}")


def rounding_of(dtype: torch.dtype) -> tuple[float, float]:
    """How far rounding to `dtype` may take a probability below 0, and the sum of all from 1.

    Sums of averaged networks and of resized maps are off by up to 1e-4 in any dtype.
    """
    slack = 8 * torch.finfo(dtype).eps
    return slack, max(1e-4, slack)


def is_distribution(
    values: Tensor, dim: int, *, rounded_to: torch.dtype | None = None, partial: bool = False
) -> Tensor:
    """Whether the values along `dim` are probabilities: at least 0, and of sum 1; not so for NaN.

    `rounded_to` is the dtype that the values were once rounded to, if not their own. With `partial`
    some probabilities are not known and 0 in their place, so the sum may be less.
    """
    below, off = rounding_of(rounded_to or values.dtype)
    total = values.sum(dim, dtype=torch.promote_types(values.dtype, torch.float32))
    least = 0.0 if partial else 1 - off
    return (values.amin(dim) >= -below) & (total >= least) & (total <= 1 + off)


def look_like_scores(values: Tensor) -> bool:
    """Whether supposed (N, C, *S) logits all lie in 0..1.5, as the scores of mask heads do.

    MaskFormer, Mask2Former, OneFormer and EoMT give the sum over queries of softmax(class) times
    sigmoid(mask): not of sum 1, and with a nearly uniform softmax. Waits for the device.
    """
    return values.numel() > 0 and bool(((values >= 0) & (values <= 1.5)).all())


def scores_to_probs(scores: Tensor) -> Tensor:
    """(N, C, *S) probabilities from scores of at least 0: divided by their sum over the classes.

    A pixel whose scores are all 0 gets 1/C for each class.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    total = wide.sum(1, keepdim=True)
    return torch.where(total == 0, 1 / scores.shape[1], wide / torch.where(total == 0, 1, total))


def countable(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on a device that can count in float64: the CPU instead of MPS."""
    return (logits.cpu(), labels.cpu()) if logits.device.type == "mps" else (logits, labels)


def each_rater(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every image with R raters becomes one that is R times as large, so each label counts 1/R.

    (N, C, *S) values become a view (N, C, R, *S), and labels (R, N, *S) become (N, R, *S); those of
    sigmoid outputs, (R, N, C, *S), become (N, C, R, *S).
    """
    axis = labels.ndim - values.ndim + 1  # of the raters, after N or after C
    sides = values.shape[2:]
    fits = values.ndim >= 2 and labels.shape[1:] == (len(values), *values.shape[1:axis], *sides)
    if axis not in (1, 2) or not fits or not len(labels):
        raise ValueError(
            f"Expected labels (R, N, *S) of R raters, or (R, N, C, *S) of sigmoid outputs, for "
            f"values (N, C, *S) of {tuple(values.shape)}, but got {tuple(labels.shape)}"
        )
    wide = values.unsqueeze(2).expand(-1, -1, len(labels), *sides)
    return wide, labels.movedim(0, axis)


def fold_multilabel(
    logits: Tensor, labels: Tensor, *, probs: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn K sigmoid outputs into N·K two-class problems: z becomes the two logits (0, z).

    softmax((0, z)) is (1 − sigmoid(z), sigmoid(z)), so everything that takes softmax outputs takes
    these. With `probs`, the outputs are after their sigmoid, and p becomes (1 − p, p).

    (N, K, *S) logits and labels become (N·K, 2, *S) and (N·K, *S); row n·K + k is class k of image
    n.
    """
    labels = multilabel_labels(logits, labels)
    z = logits.flatten(0, 1).unsqueeze(1)
    return torch.cat([1 - z if probs else torch.zeros_like(z), z], 1), labels.flatten(0, 1)


def multilabel_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """The labels of K sigmoid outputs in the outputs' shape (N, K, *S); K = 1 may lack its axis."""
    _check_tensors(logits, labels)
    if labels.shape == (logits.shape[0], *logits.shape[2:]) and logits.shape[1] == 1:
        labels = labels.unsqueeze(1)
    if labels.shape != logits.shape:
        raise ValueError(
            f"Expected multi-label labels of the logits' shape {tuple(logits.shape)}, "
            f"but got {tuple(labels.shape)}"
        )
    return labels


def label_mass(
    labels: Tensor, ignore_index: int, weight: Tensor | None = None, *, multilabel: bool = False
) -> Tensor:
    """The number of valid labels, or the sum of their classes' (K,) weights, as a scalar."""
    # Counts of a batch are whole in float32 up to 2**24; devices without float64 have no better.
    wide = torch.float32 if labels.device.type == "mps" else torch.float64
    valid = (labels != ignore_index).to(wide)
    if weight is None:
        return valid.sum()
    if multilabel:  # (N, K, *S), or (N, *S) for K = 1
        each = weight.view(-1, *[1] * (labels.ndim - 2)) if len(weight) > 1 else weight
    else:
        each = weight[labels.long().clamp(0, len(weight) - 1)]
    return (valid * each).sum()


def check_shapes(logits: Tensor, labels: Tensor) -> None:
    """Raise a ValueError unless `flatten` takes these shapes, dtypes and devices."""
    _check_tensors(logits, labels)
    if logits.shape[1] < 2:
        raise ValueError(
            f"Expected logits with at least 2 classes in dimension 1, but got "
            f"{tuple(logits.shape)}; one sigmoid output is multilabel=True, "
            "or torch.cat([0 * z, z], 1)"
        )
    expected = (logits.shape[0], *logits.shape[2:])
    one_per_sample = math.prod(expected[1:]) == 1 and labels.shape == expected[:1]
    if labels.shape != expected and not one_per_sample:
        raise ValueError(
            f"Expected labels of shape {expected} for logits of shape {tuple(logits.shape)}, "
            f"but got {tuple(labels.shape)}"
        )


def _check_values(values: Tensor) -> None:
    if values.ndim < 2:
        raise ValueError(f"Expected logits of shape (N, C, *S), but got {tuple(values.shape)}")
    if not values.is_floating_point():
        raise ValueError(f"Expected logits of a floating dtype, but got {values.dtype}")


def _check_tensors(logits: Tensor, labels: Tensor) -> None:
    _check_values(logits)
    if labels.dtype not in _LABEL_DTYPES:
        raise ValueError(f"Expected labels of an integer dtype, but got {labels.dtype}")
    if labels.device != logits.device:
        raise ValueError(
            f"Expected labels on the logits' device {logits.device}, but got {labels.device}"
        )
