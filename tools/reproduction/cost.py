"""The place where the cost of a training is estimated, from the FLOPs of one forward pass.

A step costs three forward passes: one forward, two backward. Times are those of a GPU that sustains
`RATE`; small networks are bound by other things than arithmetic and take longer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from segcal.config import TrainConfig
from segcal.models.build import build_model

RATE = 3e12  # FLOP/s in float32, about a quarter of the peak of the paper's GTX 1080 Ti

# Training samples without the hold-out, side of the images, classes.
SIZES = {
    "cifar10": (45000, 32, 10),
    "cifar100": (45000, 32, 100),
    "svhn": (65931, 32, 10),
    "mnist": (54000, 28, 10),
    "rotated_mnist": (54000, 28, 10),
    "tiny_imagenet": (90000, 64, 200),
    "pacs": (1503, 224, 7),
    "mendeley": (4709, 224, 2),
    "voc2012": (1318, 480, 21),
}


def training_flops(config: TrainConfig) -> float:
    """FLOPs of a whole training of `config`; nothing is computed but the count."""
    samples, side, classes = SIZES[config.data.name]
    bare = replace(config.model, encoder_weights=None)
    with torch.device("meta"):
        model = build_model(bare, num_classes=classes).eval()
        image = torch.empty(1, 3, side, side)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return 3.0 * counter.get_total_flops() * samples * config.epochs


def in_words(flops: float) -> str:
    """A number of FLOPs, and the time they would take: what configs say under `cost`."""
    minutes = flops / RATE / 60
    time = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
    return f"{flops:.1e} FLOP (counted), an estimate of {time} at 3e12 FLOP/s on one GPU."
