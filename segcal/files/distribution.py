"""The one answer to "are these values probabilities?"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def rounding_of(dtype: torch.dtype) -> tuple[float, float]:
    """How far rounding to `dtype` may take a probability below 0, and the sum of all from 1.

    Eight units in the last place; sums may be off by 1e-4 in any dtype, as averages of several
    networks or resized maps are.
    """
    import torch

    slack = 8 * torch.finfo(dtype).eps
    return slack, max(1e-4, slack)


def is_distribution(values: Tensor, dim: int, *, rounded_to: torch.dtype | None = None) -> Tensor:
    """Whether the values along `dim` are probabilities: at least 0, and of sum 1.

    Args:
        values: of any floating dtype; NaN and infinity are no probabilities.
        dim: the classes; the result is bool, without this dimension.
        rounded_to: the dtype that the values were once rounded to, if not their own.
    """
    import torch

    below, off = rounding_of(rounded_to or values.dtype)
    total = values.sum(dim, dtype=torch.promote_types(values.dtype, torch.float32))
    return (values.amin(dim) >= -below) & ((total - 1).abs() <= off)
