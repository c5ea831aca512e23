r"""What the losses read of a batch: statistics of the softmax, in one pass over the logits.

Most losses depend on the softmax p only through a few small statistics. Computed together, they
cost one softmax forward and one fused pass backward (under plain autograd `fl+mdca` takes 2.2 times
as long on a CPU), and the losses themselves are ordinary formulas on (N, L) or (N, C) tensors.

The backward passes of all statistics have one form. With δ the indicator, for pixel i and class c

    dL/dz_ic = p_ic (w_ic + s_i p_ic + b_i) + h_i p_ic log p_ic
               + a_i δ[c = y_i] + d_i δ[c = ŷ_i] + r_i δ[c = j_i] + e_i

where all but b come from the statistics' own gradients and b_i makes each column sum to 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segcal.distributed import sum_over_ranks
from segcal.pixels import Pixels

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


# What the backward pass of a statistic reads besides probs.
_NEEDED = {
    "entropy": "log_probs",  # (N, C, L); finite
    "confidence": "predicted",  # (N, L) int64
    "correct": "predicted",
    "below_true": "below",  # (N, L) int64, the class of the largest p_ic below p_iy
}


@dataclass(frozen=True, eq=False)
class LossBatch:
    """What a loss sees of a batch besides statistics of the softmax."""

    pixels: Pixels
    weight: Tensor | None = None  # (K,) class weights of the base loss
    sync: bool = True  # whether sums are over all ranks

    def __post_init__(self) -> None:
        classes = self.pixels.problems or self.pixels.num_classes
        if self.weight is not None and self.weight.shape != (classes,):
            raise ValueError(
                f"The class weights have the shape {tuple(self.weight.shape)}; give ({classes},), "
                "one for each class"
            )

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks, differentiable."""
        return sum_over_ranks(values, sync=self.sync)

    def mean(self, loss: Tensor) -> Tensor:
        """(Weighted) mean over the valid pixels of all ranks of an (N, L) loss, 0 where ignored."""
        share = self.pixels.valid
        if self.weight is not None:
            if self.pixels.problems is None:
                weight = self.weight[self.pixels.target]
            else:
                rows = torch.arange(len(share), device=share.device)
                weight = self.weight[self.pixels.problem(rows)].unsqueeze(1)
            share = weight.to(loss) * share
            loss = loss * share
        wide = accumulator(loss)
        # Rows are summed pairwise in the loss's own precision, which is exact enough and fast.
        sums = torch.stack([loss.sum(1).sum(dtype=wide), share.sum(dtype=wide)])
        total, mass = self.sum(sums)
        return (total / torch.where(mass > 0, mass, 1)).to(loss.dtype)


def problem_mean(values: Tensor, share: Tensor) -> Tensor:
    """The mean of the (G,) `values` with weights `share`, 0 if these are all 0; G classes or 1."""
    mass = share.sum()
    return (values * share).sum() / torch.where(mass > 0, mass, 1)


def accumulator(x: Tensor) -> torch.dtype:
    """float64 where the device has it: totals over a batch of pixels outgrow float32."""
    return x.dtype if x.device.type == "mps" else torch.float64


def require(condition: bool, rule: str, got: object) -> None:
    """Raise a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(f"The loss needs {rule}, but got {got}")


def statistics(pixels: Pixels, names: Iterable[str]) -> dict[str, Tensor]:
    """The named `STATISTICS` of softmax(pixels.dense), in float32 at least."""
    wanted = set(names)
    if not wanted:
        return {}
    wanted |= {"probs"} | {_NEEDED[name] for name in wanted & _NEEDED.keys()}
    returned = tuple(sorted(wanted))
    values = _SoftmaxStatistics.apply(pixels.dense, pixels.target, pixels.valid, returned)
    return dict(zip(returned, values, strict=True))


class _SoftmaxStatistics(torch.autograd.Function):
    """The backward pass is differentiable steps on inputs and outputs: so it has a derivative."""

    @staticmethod
    def forward(
        logits: Tensor, target: Tensor, valid: Tensor, names: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        ignored = ~valid
        log_probs = logits.log_softmax(1, dtype=dtype)  # (N, C, L)
        out: dict[str, Tensor] = {}
        if "true_log_prob" in names:
            true = log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
            out["true_log_prob"] = true.masked_fill_(ignored, 0)
        if "mean_log_prob" in names:
            out["mean_log_prob"] = log_probs.mean(1).masked_fill_(ignored, 0)
        # The log-probabilities are needed again for the entropy alone; else turn them into
        # probabilities where they lie. Zeros at ignored pixels keep those out of every sum.
        probs = log_probs.exp() if "entropy" in names else log_probs.exp_()
        out["probs"] = probs.masked_fill_(ignored.unsqueeze(1), 0)
        if "entropy" in names:
            # p log p is 0 at p = 0: no −inf may meet that zero, and ignored pixels may hold NaN.
            out["log_probs"] = log_probs.nan_to_num_(0, 0, torch.finfo(dtype).min)
            out["entropy"] = (probs * log_probs).sum(1).neg_()
        if "square_sum" in names:
            out["square_sum"] = probs.square().sum(1).masked_fill_(ignored, 1)
        if "class_sum" in names:
            out["class_sum"] = probs.sum(2)
        if "predicted" in names:
            out["confidence"], out["predicted"] = probs.max(1)
            out["correct"] = ((out["predicted"] == target) & valid).to(dtype)
        if "below_true" in names:
            true = probs.gather(1, target.unsqueeze(1))
            out["below_true"], out["below"] = torch.where(probs < true, probs, 0).max(1)
        return tuple(out[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, valid, ctx.names = inputs
        ctx.logits_dtype = logits.dtype
        ctx.save_for_backward(target, valid, *output)
        constant = {"correct", "predicted", "below"}
        ctx.mark_non_differentiable(
            *(x for name, x in zip(ctx.names, output, strict=True) if name in constant)
        )
        if not torch.compiler.is_compiling():  # which has zeros in place of None
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        target, valid, *saved = ctx.saved_tensors
        out = dict(zip(ctx.names, saved, strict=True))
        grad = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None}
        if not grad:
            return None, None, None, None
        probs, ignored = out["probs"], ~valid
        k = probs.shape[1]
        column = torch.zeros_like(probs[:, 0])  # b, (N, L)
        result = None  # (N, C, L), the only one allocated here, but for the entropy
        if (dense := grad.get("probs")) is not None:
            result = probs * dense
            column = column - result.sum(1)
        if (w := grad.get("class_sum")) is not None:
            w = w.to(probs.dtype)
            column = column - torch.bmm(w.unsqueeze(1), probs).squeeze(1)
        if (a := grad.get("true_log_prob")) is not None:
            a = a.masked_fill(ignored, 0)
            column = column - a
        if (s := grad.get("square_sum")) is not None:
            s = 2 * s.masked_fill(ignored, 0)
            column = column - s * out["square_sum"]
        if (h := grad.get("entropy")) is not None:
            h = -h.masked_fill(ignored, 0)
            column = column + h * out["entropy"]
        if (e := grad.get("mean_log_prob")) is not None:
            e = (e / k).masked_fill(ignored, 0)
            column = column - k * e
        if (d := grad.get("confidence")) is not None:
            d = d * out["confidence"]  # 0 where ignored
            column = column - d
        if (r := grad.get("below_true")) is not None:
            r = r * out["below_true"]  # 0 where there is none
            column = column - r
        if (log_grad := grad.get("log_probs")) is not None:  # of a second derivative
            log_grad = log_grad.masked_fill(ignored.unsqueeze(1), 0)
            column = column - log_grad.sum(1)
        if result is None:
            result = probs * column.unsqueeze(1)
        else:
            result.addcmul_(probs, column.unsqueeze(1))
        if w is not None:
            result.addcmul_(probs, w.unsqueeze(2))
        if s is not None:
            result.addcmul_(probs.square(), s.unsqueeze(1))
        if h is not None:
            result.addcmul_(probs * out["log_probs"], h.unsqueeze(1))
        if e is not None:
            result += e.unsqueeze(1)
        if log_grad is not None:
            result += log_grad
        if a is not None:
            result.scatter_add_(1, target.unsqueeze(1), a.unsqueeze(1))
        if d is not None:
            result.scatter_add_(1, out["predicted"].unsqueeze(1), d.unsqueeze(1))
        if r is not None:
            result.scatter_add_(1, out["below"].unsqueeze(1), r.unsqueeze(1))
        return result.to(ctx.logits_dtype), None, None, None
