"""Small batches of logits and labels that every adapter is tested with."""

from __future__ import annotations

import pytest
import torch

from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.scores import SCORES

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


def assert_same(found: Report, expected: Report, rel: float = 1e-9) -> None:
    """The same pixels, bins and scores; adding images in another order may round sums apart."""
    assert found.protocol == expected.protocol
    for name in ("top", "classes"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine.count == theirs.count).all() and (mine.hits == theirs.hits).all()
    assert (found.confusion == expected.confusion).all()
    for name, score in SCORES.items():
        if score.scope != "classes":
            a, b = float(getattr(found, name)), float(getattr(expected, name))
            assert a == pytest.approx(b, rel=rel, abs=1e-12, nan_ok=True), name
