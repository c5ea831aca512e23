"""Small batches of logits and labels that every adapter is tested with."""

from __future__ import annotations

import torch

from segcal.metrics import CalibrationMeter, Report

CLASSES = 4


def batches(count=3, images=2, size=(8, 6), seed=0):
    """`count` batches of (N, C, *S) logits and (N, *S) labels, a tenth of them 255."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        logits = 2 * torch.randn(images, CLASSES, *size, generator=generator)
        labels = torch.randint(0, CLASSES, (images, *size), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = 255
        made.append((logits, labels))
    return made


def report_of(pairs, **options) -> Report:
    """What the meter itself says of the batches."""
    meter = CalibrationMeter(CLASSES, **options)
    for logits, labels in pairs:
        meter.update(logits, labels)
    return meter.compute()
