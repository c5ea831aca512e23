"""Estimates the cost of a training from the FLOPs of one step.

The FLOPs of the forward and the backward pass are counted, of frozen parts the forward pass alone.
Times are those of a GPU that sustains `RATE`; small networks are bound by other things than
arithmetic and take longer. `python tools/reproduction/cost.py configs/NAME.yaml …` prints them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from segcal.models import build as build_model
from segcal.training.config import TrainConfig, load_config

RATE = 3e12  # FLOP/s in float32, about a quarter of the peak of the paper's GTX 1080 Ti

# Training samples without the hold-out, shape of one, classes.
DATA_SIZES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "cifar10": (45000, (3, 32, 32), 10),
    "cifar100": (45000, (3, 32, 32), 100),
    "svhn": (65931, (3, 32, 32), 10),
    "mnist": (54000, (3, 28, 28), 10),
    "tiny_imagenet": (90000, (3, 64, 64), 200),
    "pacs": (1503, (3, 224, 224), 7),
    "mendeley": (4709, (3, 224, 224), 2),
    "voc2012": (1318, (3, 480, 480), 21),
    "newsgroups": (10183, (1000,), 20),
}


def training_flops(config: TrainConfig) -> float:
    """FLOPs of a whole training of `config`; nothing is computed but the count."""
    samples, shape, classes = DATA_SIZES[config.data.name]
    if config.data.imbalance is not None:  # of CIFAR-10
        kept = sum(int(5000 * config.data.imbalance ** (-c / 9)) for c in range(10))
        samples = round(0.9 * kept)
    text = len(shape) == 1
    words = [str(i) for i in range(config.data.max_words)] if text else []
    bare = replace(config.model, encoder_weights=None)
    batch = (2, *shape)  # normalisation over a batch cannot train on one sample
    with torch.device("meta"):
        model = build_model(bare, classes, words=words).train()
        inputs = torch.zeros(batch, dtype=torch.int64) if text else torch.empty(batch)
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    return counter.get_total_flops() / 2 * samples * config.epochs


def cost_in_words(config: TrainConfig) -> str:
    """What configs say of their cost: counted FLOPs, and the time they would take."""
    flops = training_flops(config)
    minutes = flops / RATE / 60
    time = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.0f} hours"
    return (
        f"{config.epochs} epochs, {flops:.1e} FLOP (counted); on one GPU that sustains {RATE:.0e} "
        f"FLOP/s {time}, an estimate."
    ).replace("e+", "e")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {cost_in_words(load_config(Path(name)))}")
