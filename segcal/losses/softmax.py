r"""The one pass over the (N, C, L) logits that every loss shares, with a hand-written backward.

Each loss of the paper depends on the softmax p only through a few small statistics. They are
computed here together, so that `fl+mdca` costs one softmax forward and one fused pass backward,
and the losses themselves stay ordinary formulas on (N, L) or (K,) tensors under plain autograd.

All backward passes have one form. With δ the indicator, for pixel i and class c

    dL/dz_ic = p_ic (w_c + s_i p_ic + b_i) + a_i δ[c = y_i] + d_i δ[c = ŷ_i] + e_i

where w, s, a, d, e come from the statistics' own gradients and b_i makes each column sum to 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from segcal.pixels import Pixels

STATISTICS = (
    # At ignored pixels these three are what a perfect prediction has, so its losses are 0.
    "true_log_prob",  # (N, L) log p_iy; 0 where ignored
    "mean_log_prob",  # (N, L) mean over classes of log p_ic; 0 where ignored
    "square_sum",  # (N, L) Σ_c p_ic²; 1 where ignored
    "class_sum",  # (K,) Σ over valid pixels of p_ic
    "confidence",  # (N, L) max_c p_ic; 0 where ignored
    "correct",  # (N, L) 1 where argmax_c p_ic is the label, else 0; carries no gradient
)


def statistics(pixels: Pixels, names: Iterable[str]) -> dict[str, Tensor]:
    """The named `STATISTICS` of softmax(pixels.dense), in float32 at least.

    What one call computes shares a softmax and a backward pass.
    """
    wanted = [name for name in STATISTICS if name in set(names)]
    values = _SoftmaxStatistics.apply(pixels.dense, pixels.target, pixels.valid, wanted)
    return dict(zip(wanted, values, strict=True))


class _SoftmaxStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, valid: Tensor, names: list[str]
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        ignored = ~valid
        log_probs = logits.log_softmax(1, dtype=dtype)  # (N, K, L)
        out: dict[str, Tensor] = {}
        if "true_log_prob" in names:
            true = log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
            out["true_log_prob"] = true.masked_fill_(ignored, 0)
        if "mean_log_prob" in names:
            out["mean_log_prob"] = log_probs.mean(1).masked_fill_(ignored, 0)
        # The log-probabilities are not needed again: turn them into probabilities where they lie.
        # Zeros at ignored pixels keep those out of every sum below and out of the backward.
        probs = log_probs.exp_().masked_fill_(ignored.unsqueeze(1), 0)
        predicted = None
        if "square_sum" in names:
            out["square_sum"] = probs.square().sum(1).masked_fill_(ignored, 1)
        if "class_sum" in names:
            out["class_sum"] = probs.sum(2).sum(0, dtype=accumulator(probs))
        if "confidence" in names or "correct" in names:
            out["confidence"], predicted = probs.max(1)
            out["correct"] = ((predicted == target) & valid).to(dtype)
            ctx.mark_non_differentiable(out["correct"])
        values = tuple(out[name] for name in names)
        saved = {name: out.get(name) for name in ("square_sum", "confidence")}
        ctx.save_for_backward(
            probs, target, ignored, saved["square_sum"], saved["confidence"], predicted
        )
        ctx.names = names
        ctx.logits_dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable  # the saved probabilities carry no graph: a second derivative must raise
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        probs, target, ignored, square_sum, confidence, predicted = ctx.saved_tensors
        grad = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None}
        grad.pop("correct", None)
        if not grad:
            return None, None, None, None
        k = probs.shape[1]
        column = torch.zeros_like(probs[:, 0])  # b, (N, L)
        if (w := grad.get("class_sum")) is not None:
            w = w.to(probs.dtype)
            column -= torch.matmul(w, probs)
        if (a := grad.get("true_log_prob")) is not None:
            a = a.masked_fill(ignored, 0)
            column -= a
        if (s := grad.get("square_sum")) is not None:
            s = 2 * s.masked_fill(ignored, 0)
            column -= s * square_sum
        if (e := grad.get("mean_log_prob")) is not None:
            e = (e / k).masked_fill(ignored, 0)
            column -= k * e
        if (d := grad.get("confidence")) is not None:
            d = d * confidence  # 0 where ignored
            column -= d
        out = probs * column.unsqueeze(1)  # (N, K, L), the only one allocated here
        if w is not None:
            out.addcmul_(probs, w.view(1, -1, 1))
        if s is not None:
            out.addcmul_(probs.square(), s.unsqueeze(1))
        if e is not None:
            out += e.unsqueeze(1)
        if a is not None:
            out.scatter_add_(1, target.unsqueeze(1), a.unsqueeze(1))
        if d is not None:
            out.scatter_add_(1, predicted.unsqueeze(1), d.unsqueeze(1))
        return out.to(ctx.logits_dtype), None, None, None


def accumulator(x: Tensor) -> torch.dtype:
    """float64 where the device has it: totals over a batch of pixels outgrow float32."""
    return x.dtype if x.device.type == "mps" else torch.float64
