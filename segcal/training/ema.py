"""The place for the running average of the weights that may be evaluated in their stead."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of a model's parameters and buffers.

    w̄ ← d·w̄ + (1 − d)·w after each step, with d = min(decay, (1 + t)/(10 + t)) at step t, so that
    the random start is soon forgotten. Integer buffers are copied.

    Attributes:
        model: a copy of the model that holds the averages, in evaluation mode.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights of `model` after `step` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ours, theirs = _tensors(self.model), _tensors(model)
        pairs = list(zip(ours, theirs, strict=True))
        floating = [(a, b) for a, b in pairs if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floating], [b for _, b in floating], 1 - decay)
        for a, b in pairs:
            if not a.is_floating_point():
                a.copy_(b)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
