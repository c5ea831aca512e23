r"""The one pass over the (N, C, L) logits that the losses share, with a hand-written backward.

Most losses depend on the softmax p only through a few small statistics. They are computed here
together, so that `fl+mdca` costs one softmax forward and one fused pass backward, and the losses
themselves stay ordinary formulas on (N, L) or (N, C) tensors under plain autograd.

All backward passes have one form. With δ the indicator, for pixel i and class c

    dL/dz_ic = p_ic (w_ic + s_i p_ic + b_i) + h_i p_ic log p_ic
               + a_i δ[c = y_i] + d_i δ[c = ŷ_i] + r_i δ[c = j_i] + e_i

where all but b come from the statistics' own gradients and b_i makes each column sum to 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from segcal.pixels import Cut, Pixels, cut

STATISTICS = (
    # At ignored pixels these three are what a perfect prediction has, so its losses are 0.
    "true_log_prob",  # (N, L) log p_iy; 0 where ignored
    "mean_log_prob",  # (N, L) mean over classes of log p_ic; 0 where ignored
    "square_sum",  # (N, L) Σ_c p_ic²; 1 where ignored
    "entropy",  # (N, L) −Σ_c p_ic log p_ic; 0 where ignored
    "class_sum",  # (N, C) Σ over the valid pixels of a row of p_ic
    "confidence",  # (N, L) max_c p_ic; 0 where ignored
    "correct",  # (N, L) 1 where argmax_c p_ic is the label, else 0; carries no gradient
    "below_true",  # (N, L) the largest p_ic below p_iy, 0 where there is none or ignored
    "probs",  # (N, C, L) p_ic itself; 0 where ignored
)

_BLOCK = 1 << 19  # values

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def first_order(backward: _Backward) -> _Backward:
    """Make a hand-written backward refuse `create_graph=True`.

    Its second derivative would be missing. torch's `once_differentiable` raises only where the
    incoming gradient has a graph, and that of nll is a constant.
    """

    @functools.wraps(backward)
    def checked(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("Expected create_graph=False: losses have no second derivative")
        return backward(*arguments)

    return cast("_Backward", checked)


def statistics(pixels: Pixels, names: Iterable[str]) -> dict[str, Tensor]:
    """The named `STATISTICS` of softmax(pixels.dense), in float32 at least.

    What one call computes shares a softmax and a backward pass.
    """
    wanted = [name for name in STATISTICS if name in set(names)]
    if not wanted:
        return {}
    values = _SoftmaxStatistics.apply(pixels.dense, pixels.target, pixels.valid, wanted)
    return dict(zip(wanted, values, strict=True))


class _SoftmaxStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, valid: Tensor, names: list[str]
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        ignored = ~valid
        log_probs = logits.log_softmax(1, dtype=dtype)  # (N, C, L)
        out: dict[str, Tensor] = {}
        saved: dict[str, Tensor | None] = {"target": target, "ignored": ignored}
        if "true_log_prob" in names:
            true = log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
            out["true_log_prob"] = true.masked_fill_(ignored, 0)
        if "mean_log_prob" in names:
            out["mean_log_prob"] = log_probs.mean(1).masked_fill_(ignored, 0)
        # The log-probabilities are needed again for the entropy alone; else turn them into
        # probabilities where they lie. Zeros at ignored pixels keep those out of every sum below
        # and out of the backward.
        probs = log_probs.exp() if "entropy" in names else log_probs.exp_()
        probs.masked_fill_(ignored.unsqueeze(1), 0)
        saved["probs"] = probs
        if "entropy" in names:
            # p log p is 0 at p = 0: no −inf may meet that zero, and ignored pixels may hold NaN.
            least = torch.finfo(dtype).min
            products = log_probs.nan_to_num_(0, 0, least).mul_(probs)
            saved["products"] = products
            saved["entropy"] = out["entropy"] = products.sum(1).neg_()
        if "square_sum" in names:
            saved["square_sum"] = out["square_sum"] = probs.square().sum(1).masked_fill_(ignored, 1)
        if "class_sum" in names:
            out["class_sum"] = probs.sum(2)
        if "confidence" in names or "correct" in names:
            out["confidence"], saved["predicted"] = probs.max(1)
            saved["confidence"] = out["confidence"]
            out["correct"] = ((saved["predicted"] == target) & valid).to(dtype)
            ctx.mark_non_differentiable(out["correct"])
        if "below_true" in names:
            largest, place = torch.empty_like(target, dtype=dtype), torch.empty_like(target)
            for block in blocks(probs.shape, probs.device):
                part = probs[block[0], :, block[1]]
                below = part < part.gather(1, target[block].unsqueeze(1))
                largest[block], place[block] = torch.where(below, part, 0).max(1)
            out["below_true"] = saved["below_true"] = largest
            saved["below"] = place
        if "probs" in names:
            out["probs"] = probs
        ctx.saved = list(saved)
        ctx.save_for_backward(*saved.values())
        ctx.names = names
        ctx.logits_dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return tuple(out[name] for name in names)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        probs, ignored = saved["probs"], saved["ignored"]
        grad = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None}
        grad.pop("correct", None)
        if not grad:
            return None, None, None, None
        k = probs.shape[1]
        column = torch.zeros_like(probs[:, 0])  # b, (N, L)
        out = None  # (N, C, L), the only one allocated here
        if (dense := grad.get("probs")) is not None:
            out = probs * dense
            column -= out.sum(1)
        if (w := grad.get("class_sum")) is not None:
            w = w.to(probs.dtype)
            column -= torch.bmm(w.unsqueeze(1), probs).squeeze(1)
        if (a := grad.get("true_log_prob")) is not None:
            a = a.masked_fill(ignored, 0)
            column -= a
        if (s := grad.get("square_sum")) is not None:
            s = 2 * s.masked_fill(ignored, 0)
            column -= s * saved["square_sum"]
        if (h := grad.get("entropy")) is not None:
            h = -h.masked_fill(ignored, 0)
            column += h * saved["entropy"]
        if (e := grad.get("mean_log_prob")) is not None:
            e = (e / k).masked_fill(ignored, 0)
            column -= k * e
        if (d := grad.get("confidence")) is not None:
            d = d * saved["confidence"]  # 0 where ignored
            column -= d
        if (r := grad.get("below_true")) is not None:
            r = r * saved["below_true"]  # 0 where there is none
            column -= r
        if out is None:
            out = probs * column.unsqueeze(1)
        else:
            out.addcmul_(probs, column.unsqueeze(1))
        if w is not None:
            out.addcmul_(probs, w.unsqueeze(2))
        if s is not None:
            out.addcmul_(probs.square(), s.unsqueeze(1))
        if h is not None:
            out.addcmul_(saved["products"], h.unsqueeze(1))
        if e is not None:
            out += e.unsqueeze(1)
        if a is not None:
            out.scatter_add_(1, saved["target"].unsqueeze(1), a.unsqueeze(1))
        if d is not None:
            out.scatter_add_(1, saved["predicted"].unsqueeze(1), d.unsqueeze(1))
        if r is not None:
            out.scatter_add_(1, saved["below"].unsqueeze(1), r.unsqueeze(1))
        return out.to(ctx.logits_dtype), None, None, None


def blocks(shape: torch.Size, device: torch.device) -> list[Cut]:
    """Rows and columns that cut (N, C, L) into blocks that a CPU's cache holds.

    On an accelerator there is one block: launches cost more than memory there.
    """
    n, c, length = shape
    return cut(shape, max(1, _BLOCK // c) if device.type == "cpu" else n * length)


def accumulator(x: Tensor) -> torch.dtype:
    """float64 where the device has it: totals over a batch of pixels outgrow float32."""
    return x.dtype if x.device.type == "mps" else torch.float64


def with_slope(logits: Tensor, value: Tensor, slope: Tensor, denominator: int) -> Tensor:
    """(N, L) `value`, whose derivative by each (N, C, L) logit is `slope` / `denominator`.

    For losses that are piecewise linear in the logits. The slopes may be of a small integer dtype,
    which saves most of the memory between the passes.
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
