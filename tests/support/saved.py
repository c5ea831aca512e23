"""Folders of saved predictions, small and always the same, for tests."""

from __future__ import annotations

import numpy as np

CLASSES, SIDE = 3, 8


def logits_and_labels(index, *, size=SIDE, temperature=1.0):
    """(C, size, size) logits of one image whose labels are drawn from them, made over-confident.

    Dividing the logits by `temperature` gives back the distribution the labels come from.
    """
    rng = np.random.default_rng(index)
    logits = rng.normal(scale=2.0, size=(CLASSES, size, size))
    probs = np.exp(logits) / np.exp(logits).sum(0)
    labels = (rng.random((1, size, size)) > probs.cumsum(0)).sum(0).clip(0, CLASSES - 1)
    labels[0, : size // 4] = 255
    return (temperature * logits).astype(np.float32), labels.astype(np.uint8)


def save_folder(folder, count=6, *, first=0, **options):
    """Write `count` files, one an image; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + count):
        logits, labels = logits_and_labels(index, **options)
        np.savez(folder / f"im{index:03d}.npz", logits=logits, labels=labels)
    return folder
