"""A data set and a network so small that whole runs take milliseconds."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.utils.data import Dataset

from segcal.data.splits import Splits
from segcal.losses import build_loss
from segcal.training.config import OptimConfig, ScheduleConfig, TrainConfig
from segcal.training.run import seed_torch
from segcal.training.trainer import Trainer

OPTIONS = TrainConfig(
    epochs=3,
    batch_size=8,
    workers=0,
    optim=OptimConfig(name="sgd", lr=0.1, weight_decay=1e-4),
    schedule=ScheduleConfig(name="poly", warmup=0.5),
    channels_last=False,
)


class Patches(Dataset):
    """(3, 4, 4) images of noise whose label (4, 4), in 0..2, is their brightest channel.

    Indexed with an epoch the noise changes, as augmentation would; some labels are 255.
    """

    skipped = ()

    def __init__(self, size=36, seed=0, on_read=lambda: None):
        self.size, self.seed, self.on_read = size, seed, on_read

    def __len__(self):
        return self.size

    def fingerprint(self):
        return ""

    def __getitem__(self, key):
        self.on_read()
        epoch, index = key if isinstance(key, tuple) else (0, key)
        generator = torch.Generator().manual_seed(self.seed * 1000003 + index)
        image = torch.randn(3, 4, 4, generator=generator)
        label = image.argmax(0)
        label[torch.rand(4, 4, generator=generator) < 0.1] = 255
        generator.manual_seed(epoch * 7919 + index)
        return image + 0.3 * torch.randn(3, 4, 4, generator=generator), label


class Uneven(Patches):
    """Many labels of every fourth image are ignored, and all of every fourth other one."""

    def __getitem__(self, key):
        image, label = super().__getitem__(key)
        index = key[1] if isinstance(key, tuple) else key
        label[:, (1, 4, 4, 0)[index % 4] :] = 255
        return image, label


def network(*, norm=True, dropout=True):
    """Convolutions with everything that has a state of its own: running means, random masks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Dropout2d(0.2 if dropout else 0.0),
        nn.Conv2d(8, 3, 1),
    )


def steady_network():
    """One that is the same function of each image however they are batched, run after run."""
    return network(norm=False, dropout=False)


def trainer(
    folder=None, *, model=network, train=None, holdout=None, loss="fl+mdca", device="cpu", **changes
):
    """A trainer on `Patches`, the same one every time; `model` is called once it is seeded."""
    options = dataclasses.replace(OPTIONS, **changes)
    seed_torch(options.seed)
    splits = Splits(
        train=Patches() if train is None else train,
        holdout=Patches(14, seed=1) if holdout is None else holdout,
        test=None,
        num_classes=3,
        class_names=("red", "green", "blue"),
        ignore_index=255,
        palette=None,
        uniform=True,
    )
    criterion = build_loss(loss, ignore_index=255)
    return Trainer(model(), criterion, splits, options, device=device, folder=folder)
