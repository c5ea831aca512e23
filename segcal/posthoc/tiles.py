"""A seeded sample of tiles: small squares of a hold-out's logits, labels and images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from segcal.posthoc.sample import Smallest, in_validation, keys
from segcal.posthoc.stream import HoldoutBatch, Stream

SIDE = 64


@dataclass(frozen=True, eq=False)
class Tiles:
    """M tiles of h × w pixels, this rank's share.

    Attributes:
        logits: (M, C, h, w) float32.
        images: (M, channels, h, w) float32; no channels without images.
        target: (M, h, w) labels, 0 where ignored.
        valid: (M, h, w) bool, False where ignored.
        place: (M,) each tile's place among those of all ranks, in an order that does not depend
            on how the ranks share the images.
    """

    logits: Tensor
    images: Tensor
    target: Tensor
    valid: Tensor
    place: Tensor

    def __getitem__(self, index: Tensor) -> Tiles:
        return Tiles(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.logits)


def as_planes(tensor: Tensor) -> Tensor:
    """(N, C, H, W) of (N, C, *S); of more spatial axes than two, all but the last are stacked."""
    if tensor.ndim == 4:
        return tensor
    width = tensor.shape[-1] if tensor.ndim > 2 else 1
    return tensor.reshape(*tensor.shape[:2], math.prod(tensor.shape[2:-1]), width)


def image_planes(images: Tensor | None, like: Tensor) -> Tensor:
    """(N, channels, H, W) images at the size, dtype and device of the planes `like`."""
    if images is None:
        return like[:, :0]
    planes = as_planes(images).to(like)
    if planes.shape[2:] == like.shape[2:]:
        return planes
    return interpolate(planes, like.shape[2:], mode="bilinear", antialias=True)


class TileSampler:
    """Samples tiles of up to SIDE × SIDE pixels, `pixels` in all, from the batches it is shown.

    Each image is cut into tiles, the last ones of a row or column overlapping those before them;
    each tile with a valid pixel has the same chance.
    """

    def __init__(self, pixels: int, seed: int) -> None:
        self._pixels = pixels
        self._seed = seed
        self._side: tuple[int, int] | None = None  # of the first batch's tiles, kept for all

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        logits = as_planes(batch.logits)
        n, _, height, width = logits.shape
        if self._side is None:
            # At least two tiles an image, so that a single image can be fitted and validated.
            self._side = min(SIDE, -(-height // 2)), min(SIDE, -(-width // 2))
            self._smallest = Smallest(max(2, self._pixels // (self._side[0] * self._side[1])))
        layers = (
            logits.float().nan_to_num(0, 0, 0),  # valid pixels are finite, but have neighbours
            image_planes(batch.images, logits.float()),
            batch.pixels.target.reshape(n, height, width),
            batch.pixels.valid.reshape(n, height, width),
        )
        corners = [
            (y, x) for y in _starts(height, self._side[0]) for x in _starts(width, self._side[1])
        ]
        all_keys = keys(self._seed, batch.numbers, len(corners))
        for i, j in zip(*np.nonzero(all_keys < self._smallest.limit), strict=True):
            tile = [self._cut(layer[i], *corners[j]) for layer in layers]
            if tile[-1].any():
                of_tile = torch.tensor([[int(all_keys[i, j])], [batch.numbers[i]]])
                self._smallest.offer(of_tile[0], *(t[None] for t in tile), of_tile[1])

    def _cut(self, layer: Tensor, y: int, x: int) -> Tensor:
        assert self._side is not None
        height, width = self._side
        tile = layer[..., y : y + height, x : x + width]
        # An image smaller than the first batch's is filled up with pixels that are not valid.
        return pad(tile, (0, width - tile.shape[-1], 0, height - tile.shape[-2])).clone()

    def finish(self, stream: Stream, num_classes: int, image_channels: int) -> tuple[Tiles, Tiles]:
        """The tiles to fit on, and those for validation, once `stream` was read."""
        none = torch.zeros(0, dtype=torch.int64)
        smallest = Smallest(1) if self._side is None else self._smallest
        key, logits, images, target, valid, number = smallest.take(stream) or (
            none,
            torch.zeros(0, num_classes, 1, 1),
            torch.zeros(0, image_channels, 1, 1),
            none.reshape(0, 1, 1),
            none.reshape(0, 1, 1).bool(),
            none,
        )
        everyone = stream.concatenate(key).sort().values
        if len(everyone) < 2:
            raise ValueError(
                "Expected valid pixels in at least two tiles of the hold-out, one to fit and one "
                "for validation, but got them in one"
            )
        place = torch.searchsorted(everyone, key)
        validation = in_validation(number)
        sides = torch.stack([validation.sum(), (~validation).sum()]).double()
        if not stream.sum_over_ranks(sides).all():
            validation = in_validation(place)  # a single image: its tiles are split instead
        tiles = Tiles(logits, images, target, valid, place)
        return tiles[~validation], tiles[validation]


def _starts(length: int, side: int) -> range | list[int]:
    """Where tiles of `side` begin along an axis, so that they cover it."""
    if length <= side:
        return [0]
    return [*range(0, length - side, side), length - side]
