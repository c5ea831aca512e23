"""Values with known slopes: the backward of losses that are piecewise linear in the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segcal.losses.softmax import first_order


def with_slope(logits: Tensor, value: Tensor, slope: Tensor, denominator: int) -> Tensor:
    """(N, L) `value`, whose derivative by each (N, C, L) logit is `slope` / `denominator`.

    The slopes may be of a small integer dtype, which saves most of the memory between the passes.
    """
    result: Tensor = _WithSlope.apply(logits, value, slope, denominator)
    return result


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, slope: Tensor, denominator: int) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.denominator, ctx.logits_dtype = denominator, logits.dtype
        return value.view_as(value)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        out = slope.to(grad.dtype).mul_((grad / ctx.denominator).unsqueeze(1))
        return out.to(ctx.logits_dtype), None, None, None
