"""Builds the optimizer, its parameter groups and their learning rate at each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from segcal.training.options import OptimConfig, ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, *, total: int, per_epoch: int) -> float:
    """The factor on the learning rate at optimizer step `step` of 0 … `total` − 1.

    Args:
        schedule: the schedule.
        step: number of steps taken before this one.
        total: steps of the whole run.
        per_epoch: steps of one epoch.
    """
    done = step / total
    if schedule.name == "poly":
        factor = (1 - done) ** schedule.power
    elif schedule.name == "cosine":
        factor = (1 + math.cos(math.pi * done)) / 2
    elif schedule.name == "multistep":
        factor = schedule.decay ** sum(step >= m * per_epoch for m in schedule.milestones)
    else:
        factor = 1.0
    warmup_steps = schedule.warmup * per_epoch
    if step < warmup_steps:
        start = schedule.warmup_factor
        factor *= start + (1 - start) * step / warmup_steps
    return factor


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer of all parameters that require a gradient, in one group or two."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    groups = _groups(model, config)
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, momentum=config.momentum, nesterov=config.nesterov, **options
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=config.betas, **options)


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups; `initial_lr` of each is the rate that the schedule's factor multiplies."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("Expected a model with parameters to train, but got none")
    if config.encoder_lr is None:
        return [{"params": trained, "initial_lr": config.lr}]
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, nn.Module):
        raise ValueError(
            f"Expected a model with an encoder for optim.encoder_lr={config.encoder_lr}, "
            f"but {type(model).__name__} has none"
        )
    inside = {id(p) for p in encoder.parameters()}
    return [
        {
            "params": [p for p in trained if id(p) in inside],
            "initial_lr": config.encoder_lr,
            "lr": config.encoder_lr,
        },
        {"params": [p for p in trained if id(p) not in inside], "initial_lr": config.lr},
    ]


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to its `initial_lr` times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
