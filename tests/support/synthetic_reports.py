"""Reports of synthetic networks that are calibrated, or too sure, or not sure enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segcal.metrics import CalibrationMeter, Report


def synthetic_report(
    num_classes: int = 4,
    *,
    sharpness: float = 1.0,
    images: int = 8,
    side: int = 48,
    names: Sequence[str] | None = None,
    per_image: bool = False,
    seed: int = 0,
) -> Report:
    """The report of a network whose logits were multiplied by `sharpness`.

    Labels are drawn from the probabilities before that, so 1 is calibrated, more over-confident,
    less under-confident.
    """
    generator = torch.Generator().manual_seed(seed)
    meter = CalibrationMeter(num_classes, class_names=names, per_image=per_image)
    for _ in range(images):
        logits = 2 * torch.randn(1, num_classes, side, side, generator=generator)
        flat = logits.softmax(1).movedim(1, -1).reshape(-1, num_classes)
        labels = torch.multinomial(flat, 1, generator=generator).view(1, side, side)
        meter.update(sharpness * logits, labels)
    return meter.compute()
