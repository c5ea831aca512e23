"""One optimizer step: forward, loss, backward and update, on any device."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segcal import distributed
from segcal.data.samples import Batch
from segcal.losses import Criterion
from segcal.training.config import OptimConfig, ScheduleConfig, TrainConfig

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MIXUP = 0x6D6978  # keeps its random numbers apart from those of the order and the augmentation
_WARMUP = 2.5  # epochs of the usual warm-up of a training of 25 or more


def lr_factor(schedule: ScheduleConfig, step: int, *, total: int, per_epoch: int) -> float:
    """The factor on the learning rate at optimizer step `step` of 0 … `total` − 1."""
    done = step / total
    if schedule.name == "poly":
        factor = (1 - done) ** schedule.power
    elif schedule.name == "cosine":
        factor = (1 + math.cos(math.pi * done)) / 2
    elif schedule.name == "multistep":
        factor = schedule.decay ** sum(step >= m * per_epoch for m in schedule.milestones)
    else:
        factor = 1.0
    epochs = total / per_epoch
    warmup = min(_WARMUP, epochs / 10) if schedule.warmup is None else schedule.warmup
    warmup_steps = warmup * per_epoch
    if step < warmup_steps:
        start = schedule.warmup_factor
        factor *= start + (1 - start) * step / warmup_steps
    return factor


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer of all parameters that require a gradient, in one group or two.

    `initial_lr` of a group is the rate that the schedule's factor multiplies.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("this model has no parameters to train")
    groups: list[dict[str, Any]] = [{"params": trained, "initial_lr": config.lr}]
    if config.encoder_lr is not None:
        encoder = getattr(model, "encoder", None)
        if not isinstance(encoder, nn.Module):
            raise ValueError(
                f"optim.encoder_lr: {type(model).__name__} has no encoder; leave the option out"
            )
        inside = {id(p) for p in encoder.parameters()}
        rate = config.encoder_lr
        groups = [
            {"params": [p for p in trained if id(p) in inside], "initial_lr": rate, "lr": rate},
            {"params": [p for p in trained if id(p) not in inside], "initial_lr": config.lr},
        ]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, momentum=config.momentum, nesterov=config.nesterov, **options
        )
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=config.betas, **options)


def partners(samples: int, device: torch.device) -> Tensor:
    """(N,) which sample each one is mixed with: its neighbour in the batch, whose order is random.

    So pairs stay together however an even batch is divided; the last of an odd number stays alone.
    """
    return (torch.arange(samples, device=device) ^ 1).clamp_max_(samples - 1)


def mixed_share(mixup: float, seed: int, step: int) -> float:
    """λ ~ Beta(mixup, mixup) of a step, the same in every process, micro-batch and resumed run."""
    return float(np.random.default_rng((seed, step, _MIXUP)).beta(mixup, mixup))


@torch.no_grad()
def average_weights(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Update an exponential moving average of the weights and buffers of `model` after a step.

    w̄ ← d·w̄ + (1 − d)·w after step t, with d = min(decay, (1 + t)/(10 + t)), so that the random
    first weights are soon forgotten. Counts are copied.
    """
    decay = min(decay, 1 - (1 + (step + 1) / 9) ** -1)
    states = average.state_dict().values(), model.state_dict().values()
    for mean, value in zip(*states, strict=True):
        if mean.is_floating_point():
            mean.lerp_(value, 1 - decay)
        else:
            mean.copy_(value)


class Learner:
    """A model in training, with everything that an optimizer step changes.

    `model` is without the wrappers of DistributedDataParallel and torch.compile, `ema` the average
    of its weights, and `steps` how many steps it has taken.
    """

    def __init__(
        self, model: nn.Module, criterion: Criterion, options: TrainConfig, device: torch.device
    ) -> None:
        self.options, self.device = options, device
        self._layout = torch.channels_last if options.channels_last else torch.preserve_format
        if distributed.is_distributed() and options.sync_bn and device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device, memory_format=self._layout)  # type: ignore[call-overload]
        self.criterion = criterion.to(device)
        self.optimizer = build_optimizer(self.model, options.optim)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
        self._ddp: DistributedDataParallel | None = None
        if distributed.is_distributed():
            self._ddp = DistributedDataParallel(
                self.model, device_ids=[device] if device.type == "cuda" else None
            )
        self._forward: nn.Module = self._ddp or self.model
        if options.compile:
            self._forward = torch.compile(self._forward)  # type: ignore[assignment]
        # After DistributedDataParallel has sent the weights of the first process to all.
        self.ema: nn.Module | None = None
        if options.ema is not None:
            self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.steps = 0

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate and to save: the averaged one, if there is an average."""
        return self.model if self.ema is None else self.ema

    def step(self, batches: Sequence[Batch], lr_factor: float) -> dict[str, Tensor]:
        """Take one step on a batch given as micro-batches; the loss terms stay on the device."""
        options = self.options
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        labels = [labels.to(self.device, non_blocking=True) for _, labels in batches]
        # What each micro-batch counts, so that means over pixels are those of the whole batch.
        shares: Sequence[Tensor | float] = [1.0]
        if len(labels) > 1:
            masses = torch.stack([self.criterion.mass(part) for part in labels])
            distributed.sum_(masses)
            shares = (masses / torch.where(masses.sum() > 0, masses.sum(), 1)).unbind()
        mixup = options.mixup
        mixed = None if mixup is None else mixed_share(mixup, options.seed, self.steps)
        totals: dict[str, Tensor] = {}
        for number, (images, _) in enumerate(batches):
            # The last micro-batch reduces the sum of all gradients over the processes.
            waiting = self._ddp if number < len(batches) - 1 else None
            with nullcontext() if waiting is None else waiting.no_sync():
                terms = self._terms(images, labels[number], mixed)
                terms = {name: term * shares[number] for name, term in terms.items()}
                self.scaler.scale(terms["loss"]).backward()
            for name, term in terms.items():
                totals[name] = totals.get(name, 0) + term.detach()
        if options.optim.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), options.optim.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.ema is not None and options.ema is not None:
            average_weights(self.ema, self.model, options.ema, self.steps)
        return totals

    def _terms(self, images: Tensor, labels: Tensor, mixed: float | None) -> dict[str, Tensor]:
        layout = self._layout if images.ndim == 4 else torch.preserve_format
        images = images.to(self.device, non_blocking=True, memory_format=layout)
        if mixed is not None:
            partner = partners(len(images), self.device)
            if not images.is_floating_point():
                raise ValueError(f"Expected images to mix with mixup, but got {images.dtype}")
            images = mixed * images + (1 - mixed) * images[partner]
        amp = _AMP.get(self.options.precision)
        with torch.autocast(self.device.type, dtype=amp, enabled=amp is not None):
            logits = self._forward(images)
        terms = self.criterion.terms(logits, labels)
        if mixed is None:
            return terms
        others = self.criterion.terms(logits, labels[partner])
        return {name: mixed * term + (1 - mixed) * others[name] for name, term in terms.items()}

    def share_buffers(self) -> None:
        """Send the buffers of the first process to all: running means differ between processes."""
        if distributed.is_distributed():
            for buffer in self.evaluated.buffers():
                dist.broadcast(buffer, 0)

    def is_finite(self) -> bool:
        """Whether all weights are finite. Waits for the device."""
        flags = [p.isfinite().all() for p in self.model.parameters()]
        return bool(torch.stack(flags).all())

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "criterion": self.criterion.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.criterion.load_state_dict(state["criterion"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
