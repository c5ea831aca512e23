"""A seeded sample of a hold-out's pixels, of bounded size.

The sample depends on the seed and on where each pixel is (number of its image, position in it)
alone: not on the batches, nor on how many ranks share the hold-out, if rank r of W has the images
r, r + W, r + 2W, ….
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segcal.pixels import Pixels, flatten
from segcal.posthoc.stream import HoldoutBatch, Stream

_VALIDATION_EVERY = 5  # one image in five validates a fit on the others


def keys(seed: int, numbers: range, length: int) -> np.ndarray:
    """(N, length) int64 ≥ 0: a pseudo-random key for each position in the images `numbers`."""
    image = np.asarray(numbers, dtype=np.uint64)[:, None]
    start = _mix(np.array([[seed % 2**64]], dtype=np.uint64)) + image
    keys = _mix(_mix(start) + np.arange(length, dtype=np.uint64))
    return (keys >> np.uint64(1)).astype(np.int64)


def in_validation(numbers: Tensor) -> Tensor:
    """Which of the images `numbers` validate a fit instead of taking part in it."""
    return numbers % _VALIDATION_EVERY == 1  # so that two images give one on each side


def validation_of(stream: Stream, numbers: Tensor, within: Tensor) -> Tensor:
    """`in_validation` of images or, if that leaves one side empty, of the places `within` them."""
    chosen = in_validation(numbers)
    sides = torch.stack([chosen.sum(), (~chosen).sum()]).double()
    return chosen if stream.sum_over_ranks(sides).all() else in_validation(within)


class Smallest:
    """The items with the smallest keys of all that were offered: a sample without replacement.

    Items are rows of tensors; beyond one offer, at most 5/4 of `size` are held.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.limit = np.iinfo(np.int64).max  # keys from here on are out
        self._keys: list[Tensor] = []
        self._items: list[tuple[Tensor, ...]] = []
        self._held = 0

    def offer(self, keys: Tensor, *items: Tensor) -> None:
        """Take in rows of `items` with their `keys`."""
        self._keys.append(keys)
        self._items.append(items)
        self._held += len(keys)
        if self._held > self.size + self.size // 4:
            self._prune(self.size)

    def take(self, stream: Stream) -> tuple[Tensor, ...] | None:
        """(keys, *items) in order of the keys, of the `size` smallest over all ranks; once.

        None on a rank that was offered nothing.
        """
        if self._held:
            self._prune(self.size)
        everyone = stream.concatenate(
            self._keys[0].cpu() if self._keys else torch.zeros(0, dtype=torch.int64)
        )
        if not self._held:
            return None
        last = everyone.sort().values[: self.size][-1]
        self._prune(int((self._keys[0].cpu() <= last).sum()))
        taken = self._keys.pop(), *self._items.pop()
        self._held = 0
        return taken

    def _prune(self, size: int) -> None:
        keys = torch.cat(self._keys)
        order = keys.argsort()[:size]
        self._keys = [keys[order]]
        self._items = [tuple(torch.cat(item)[order] for item in zip(*self._items, strict=True))]
        self._held = len(order)
        if self._held == self.size:
            self.limit = int(self._keys[0][-1])


@dataclass(frozen=True, eq=False)
class Sample:
    """P pixels of a hold-out: this rank's share of a sample, or all of it.

    Attributes:
        logits: (C, P) in float64.
        labels: (P,) of classes; of K sigmoid outputs (K, P) of 0, 1 or -1 for ignored labels.
        validation: (P,) bool, whether the pixel's image validates fits instead of taking part.
    """

    logits: Tensor
    labels: Tensor
    validation: Tensor

    @property
    def pixels(self) -> Pixels:
        """Logits and labels, flat."""
        return pixels_of(self.logits, self.labels)


def pixels_of(logits: Tensor, labels: Tensor) -> Pixels:
    """Logits (C, P) and labels as those of a `Sample`, flat: (1, C, P), or folded (K, 2, P)."""
    return flatten(logits[None], labels[None], ignore_index=-1, multilabel=labels.ndim == 2)


class PixelSampler:
    """Samples up to `size` valid pixels, all with equal chance, from the batches it is shown.

    With K sigmoid outputs, a pixel is valid if any of its labels is, and is sampled with all.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._smallest = Smallest(size)
        self._seed = seed

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        dense, target, valid = _unfolded(batch.pixels)
        length = dense.shape[2]
        all_keys = keys(self._seed, batch.numbers, length)
        n, at = (torch.from_numpy(i) for i in np.nonzero(all_keys < self._smallest.limit))
        key = torch.from_numpy(all_keys)[n, at]
        number = torch.tensor(batch.numbers)[n]
        n, at, key, number = (t.to(dense.device) for t in (n, at, key, number))
        keep = valid[n, at]
        n, at, key, number = n[keep], at[keep], key[keep], number[keep]
        self._smallest.offer(key, dense[n, :, at], target[n, :, at], number)

    def finish(self, stream: Stream, num_classes: int, *, gather: bool = False) -> Sample:
        """The sample, once `stream` was read.

        Args:
            stream: that was read.
            num_classes: C.
            gather: give every rank the whole sample, in an order that does not depend on how the
                ranks share the images.
        """
        none = torch.zeros(0, dtype=torch.int64)
        rows = num_classes if stream.multilabel else 1
        nothing = (none, torch.zeros(0, num_classes), none.view(0, 1).expand(0, rows), none)
        key, logits, labels, number = self._smallest.take(stream) or nothing
        if gather:
            parts = key, logits.double(), labels, number
            key, logits, labels, number = (stream.concatenate(part) for part in parts)
            order = key.argsort()
            key, logits, labels, number = (t[order] for t in (key, logits, labels, number))
        validation = validation_of(stream, number, key)
        labels = labels.T.contiguous() if stream.multilabel else labels[:, 0]
        return Sample(logits.double().T.contiguous(), labels, validation)


def _unfolded(pixels: Pixels) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, C, L), labels (N, 1, L) and valid (N, L) of images.

    For K sigmoid outputs: logits (N, K, L), labels (N, K, L) with -1 where ignored, and valid
    (N, L) where any label is.
    """
    if pixels.problems is None:
        return pixels.dense, pixels.target.unsqueeze(1), pixels.valid
    shape = (-1, pixels.problems, pixels.dense.shape[2])
    labels = pixels.target.masked_fill(~pixels.valid, -1).view(shape)
    return pixels.dense[:, 1].view(shape), labels, pixels.valid.view(shape).any(1)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014): 64 bits to 64 bits, every input bit moving every output."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # wraps
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
