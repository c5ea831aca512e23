"""The place where shapes and ignored labels are handled: everything else sees flat pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LABEL_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MAX_LISTED = 8  # offending label values named in an error


@dataclass(frozen=True, eq=False)
class Pixels:
    """Logits and labels with the spatial axes folded into one, and ignored pixels masked.

    The logits keep the memory layout they came in, so building a `Pixels` copies nothing of size
    (N, C, L) and never waits for a device. `logits` and `labels` are the compact view: valid
    pixels only, one row a pixel.

    Attributes:
        dense: (N, C, L) logits as given; L = 1 for classification.
        target: (N, L) int64 labels, 0 where ignored.
        valid: (N, L) bool, False where ignored.
        out_of_range: () int64, how many labels were neither a class nor the ignore index; those
            pixels are masked. Always 0 on the CPU, where `flatten` raises instead.
    """

    dense: Tensor
    target: Tensor
    valid: Tensor
    out_of_range: Tensor

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return self.dense.shape[1]

    @property
    def logits(self) -> Tensor:
        """(P, C) logits of the valid pixels, in (N, *S) order. Copies, and waits for the device."""
        return self.dense.movedim(1, 2)[self.valid]

    @property
    def labels(self) -> Tensor:
        """(P,) labels of the valid pixels, in (N, *S) order. Copies, and waits for the device."""
        return self.target[self.valid]


def flatten(logits: Tensor, labels: Tensor, ignore_index: int = 255) -> Pixels:
    """Fold (N, C, *S) logits and (N, *S) labels into `Pixels`, masking ignored labels.

    Args:
        logits: (N, C, *S) of any floating dtype. S = () is classification, (H, W) segmentation.
        labels: (N, *S) of an integer dtype; (N,) is also taken when every side in S is 1.
        ignore_index: the label that means "do not count this pixel".

    Raises:
        ValueError: a wrong shape or dtype, or labels outside 0..C-1. The range is checked at once
            on the CPU; on an accelerator that would stall the queue, so there the count of bad
            labels is left in `Pixels.out_of_range` for the caller to look at when it suits.
    """
    check_shapes(logits, labels)
    n, c = logits.shape[:2]
    length = math.prod(logits.shape[2:])
    dense = logits.reshape(n, c, length)
    given = labels.reshape(n, length).long()
    ignored = given == ignore_index
    target = given.masked_fill(ignored, 0)
    if target.device.type == "cpu":
        _check_range(target, c, ignore_index)
        return Pixels(dense, target, ~ignored, torch.zeros((), dtype=torch.int64))
    outside = (target < 0) | (target >= c)
    return Pixels(dense, target.masked_fill(outside, 0), ~(ignored | outside), outside.sum())


def expected_labels(num_classes: int, ignore_index: int) -> str:
    """How every error about a label's value begins."""
    return (
        f"Expected labels in 0..{num_classes - 1} ({num_classes} classes) "
        f"or ignore_index={ignore_index}"
    )


def _check_range(target: Tensor, num_classes: int, ignore_index: int) -> None:
    if not target.numel():
        return
    low, high = target.aminmax()
    if low >= 0 and high < num_classes:
        return
    bad = target[(target < 0) | (target >= num_classes)]
    values = bad.unique().tolist()
    shown = ", ".join(map(str, values[:_MAX_LISTED])) + ", …" * (len(values) > _MAX_LISTED)
    raise ValueError(
        f"{expected_labels(num_classes, ignore_index)}, "
        f"but got {shown} in {bad.numel()} pixel{'s' * (bad.numel() != 1)}"
    )


def check_shapes(logits: Tensor, labels: Tensor) -> None:
    """Raise a ValueError unless the shapes, dtypes and devices are such as `flatten` takes."""
    if logits.ndim < 2:
        raise ValueError(f"Expected logits of shape (N, C, *S), but got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"Expected logits of a floating dtype, but got {logits.dtype}")
    if logits.shape[1] < 2:
        raise ValueError(
            f"Expected logits with at least 2 classes in dimension 1, but got "
            f"{tuple(logits.shape)}; for one sigmoid output z pass torch.cat([0 * z, z], 1)"
        )
    if labels.dtype not in _LABEL_DTYPES:
        raise ValueError(f"Expected labels of an integer dtype, but got {labels.dtype}")
    if labels.device != logits.device:
        raise ValueError(
            f"Expected labels on the logits' device {logits.device}, but got {labels.device}"
        )
    expected = (logits.shape[0], *logits.shape[2:])
    one_per_sample = math.prod(expected[1:]) == 1 and labels.shape == expected[:1]
    if labels.shape != expected and not one_per_sample:
        raise ValueError(
            f"Expected labels of shape {expected} for logits of shape {tuple(logits.shape)}, "
            f"but got {tuple(labels.shape)}"
        )
