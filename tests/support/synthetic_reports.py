"""Predictions and reports of synthetic networks: calibrated, over- or under-confident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from segcal.metrics import CalibrationMeter, Report

K = 3
SHAPE = (96, 128)


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


def images(n, generator, overconfidence=0.3, pixels=64):
    """Logits too sharp by `overconfidence`, more in some images; labels drawn from the truth."""
    truth = 2 * torch.randn(n, K, pixels, generator=generator, dtype=torch.float64)
    truth += torch.randn(n, K, 1, generator=generator, dtype=torch.float64)
    draw = torch.rand(n, 1, pixels, generator=generator, dtype=torch.float64)
    labels = (truth.softmax(1).cumsum(1) < draw).sum(1).clamp(max=K - 1)
    spread = 0.2 * torch.randn(n, 1, 1, generator=generator, dtype=torch.float64)
    return truth * (overconfidence + spread).exp(), labels


def measured(logits, labels, names=None):
    """A meter with per-image tables that has seen the batch."""
    meter = CalibrationMeter(K, per_image=True)
    meter.update(logits, labels, names=names)
    return meter


def predictor(confidence, seed=0, num_classes=4, shape=SHAPE):
    """(C, H, W) probabilities of the given confidence, and labels that make them calibrated."""
    rng = np.random.default_rng(seed)
    confidence = np.broadcast_to(confidence, shape)
    predicted = rng.integers(num_classes, size=shape)
    probs = np.repeat((1 - confidence)[None] / (num_classes - 1), num_classes, axis=0)
    np.put_along_axis(probs, predicted[None], confidence[None], axis=0)
    right = rng.random(shape) < confidence
    labels = np.where(right, predicted, (predicted + 1) % num_classes)
    return probs, labels.astype(np.uint8)


def constant_report(confidence: float, right: int, total: int = 10, **settings: Any) -> Report:
    """The report of a network that predicts class 0 of 2 with one confidence everywhere.

    Its scores are easy: accuracy = right / total, ece = mce = sce = |confidence - accuracy|,
    miou = accuracy / 2 (class 1 is in the truth and never predicted), auroc = 1/2.
    """
    meter = CalibrationMeter(2, **settings)
    probs = torch.tensor([confidence, 1 - confidence], dtype=torch.float64)
    labels = (torch.arange(total) >= right).long()
    meter.update_probs(probs.view(1, 2, 1, 1).expand(1, 2, 1, total), labels.view(1, 1, total))
    return meter.compute()
