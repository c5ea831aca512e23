"""The options of training, and the values they may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer.

    Attributes:
        name: sgd, adam or adamw.
        lr: Learning rate where the factor of the schedule is 1.
        encoder_lr: Learning rate of the model's encoder, a pretrained backbone; null is lr.
        momentum: Momentum of sgd.
        nesterov: Whether the momentum of sgd is Nesterov's.
        betas: Decay rates of the two running means of adam and adamw.
        weight_decay: L2 penalty (decoupled for adamw).
        clip: Largest norm of the gradient over all parameters; null is no clipping.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    encoder_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    clip: float | None = None

    def __post_init__(self) -> None:
        for key in ("lr", "encoder_lr", "clip"):
            value = getattr(self, key)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"Expected optim.{key} > 0, but got {value}")
        for key in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"Expected optim.{key} >= 0, but got {getattr(self, key)}")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("Expected optim.momentum > 0 with optim.nesterov, but got 0")


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of the learning rate: a factor on the rates of the optimizer.

    The factor changes at every step, not at every epoch. The warm-up multiplies it.

    Attributes:
        name: poly, (1 - t)^power with t the finished fraction of the training; cosine,
            (1 + cos(pi t)) / 2; multistep, times decay at each milestone; or constant.
        power: Exponent of poly.
        milestones: Epochs of multistep; 80 means after 80 epochs.
        decay: Factor of multistep at each milestone.
        warmup: Epochs (2 or 0.5) over which the factor rises linearly from warmup_factor to 1.
        warmup_factor: Factor at the start of the warm-up.
    """

    name: Literal["poly", "cosine", "multistep", "constant"] = "poly"
    power: float = 0.9
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    warmup: float = 0.0
    warmup_factor: float = 1 / 3

    def __post_init__(self) -> None:
        if self.name == "multistep" and not self.milestones:
            raise ValueError("Expected schedule.milestones for a multistep schedule, but got none")
        if self.name != "multistep" and self.milestones:
            raise ValueError(
                f"Expected schedule.name=multistep with schedule.milestones, but got {self.name}"
            )
        if (
            list(self.milestones) != sorted(set(self.milestones))
            or min(self.milestones, default=1) < 1
        ):
            raise ValueError(
                f"Expected rising schedule.milestones >= 1, but got {list(self.milestones)}"
            )
        for key in ("power", "decay", "warmup"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"Expected schedule.{key} >= 0, but got {getattr(self, key)}")
        if not 0 <= self.warmup_factor <= 1:
            raise ValueError(
                f"Expected schedule.warmup_factor in 0..1, but got {self.warmup_factor}"
            )


@dataclass(frozen=True)
class TrainOptions:
    """How to train. The defaults suit the embedded scenes.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Samples of one optimizer step, over all processes and micro-batches together,
            so that a config means the same on one GPU and on eight.
        accumulate: Micro-batches that a process splits its share of a batch into, to save memory;
            means over pixels are still over the whole batch, but batch statistics (batch
            normalisation, dice, mdca, dca, mmce, ace, dece) are over a micro-batch.
        mixup: Mix the images of a batch in pairs, and their losses likewise, with a weight sampled
            from Beta(mixup, mixup), such as 0.2; null is no mixup.
        optim: The optimizer.
        schedule: The schedule of the learning rate.
        precision: fp32, or automatic mixed precision with bf16 or fp16.
        channels_last: Store images channels-last, which is faster for most convolutions on GPUs.
        compile: Compile the model with torch.compile.
        ema: Decay of an exponential moving average of the weights; the averaged weights are
            then evaluated and saved as best; null is no average.
        sync_bn: Compute batch normalisation over the samples of all processes (GPUs only).
        workers: Processes that load data, for each training process.
        seed: Seed of the initial weights, the order of the data, augmentation and dropout.
        deterministic: Use deterministic algorithms on GPUs, which are slower; CPUs always do.
        eval_every: Epochs between evaluations on the hold-out.
        save_every: Steps between checkpoints, in addition to the one after each epoch.
        select: Hold-out score that decides which epoch is best: accuracy, miou, nll, ece or sce.
        tensorboard: Also write the log for TensorBoard.
    """

    epochs: int = 8
    batch_size: int = 16
    accumulate: int = 1
    mixup: float | None = None
    optim: OptimConfig = OptimConfig(name="adamw", lr=0.004, weight_decay=0.01)
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup=2.5, warmup_factor=0.04)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = False
    ema: float | None = None
    sync_bn: bool = True
    workers: int = 2
    seed: int = 0
    deterministic: bool = False
    eval_every: int = 1
    save_every: int | None = None
    select: Literal["accuracy", "miou", "nll", "ece", "sce"] = "accuracy"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "accumulate", "eval_every", "save_every"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"Expected {key} >= 1, but got {value}")
        for key in ("workers", "seed"):
            if getattr(self, key) < 0:
                raise ValueError(f"Expected {key} >= 0, but got {getattr(self, key)}")
        if self.mixup is not None and not 0 < self.mixup < math.inf:
            raise ValueError(f"Expected mixup > 0, but got {self.mixup}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"Expected ema between 0 and 1, but got {self.ema}")
