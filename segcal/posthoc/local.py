"""Local temperature scaling: a temperature for each pixel, learned from a sample of tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

from segcal.pixels import flatten
from segcal.posthoc.calibrator import SampledCalibrator, without_masks
from segcal.posthoc.holdout import Draw, Holdout, HoldoutBatch
from segcal.posthoc.minimise import T_MAX, T_MIN, best_beta

TILE_SIDE = 64
_BATCH_PIXELS = 1 << 15
_LEAST_BATCHES = 16  # per epoch, for small hold-outs
_FARTHEST = 1e3  # of the network's input, so that huge logits do not overflow


class LocalTemperatureScaling(SampledCalibrator):
    """Local temperature scaling (Ding et al. 2021): logits / T, with a T for each pixel.

    A small convolutional network sees the logits, centred over the classes, and the image where
    there is one, and gives log T. It starts as the constant best T and is trained with Adam on NLL.
    The predicted class never changes.

    The batches of the hold-out may be (logits, labels) or (logits, labels, images); a calibrator
    fitted with images needs them again in `calibrator(logits, images)`. Images may have any range
    and number of channels, and are resized to the logits if they differ.

    One pass over the batches samples tiles of 64 × 64 pixels, as many as `max_pixels` allows; every
    rank trains on all of them. `SampledCalibrator` says how the fit is judged; the epoch of least
    NLL is chosen.

    SiLU has no kinks, at which the last bits of a logit would decide where training goes.

    Args:
        width: channels of the network.
        epochs: of training, over the tiles.
        lr: step of Adam.
        max_pixels: in the tiles, 4·(C + channels) bytes each.
        seed: of tiles, first weights and order of training.
        **options: of `Calibrator`.

    Attributes:
        image_channels_: channels of the images, 0 without.
        epoch_: how many epochs it was trained for; 0 is the constant temperature.
        temperature_: () the constant best T.
        network_: gives log T minus log `temperature_`.
    """

    name = "lts"
    _as_good = 1.0
    reads_images = True
    keeps_mask = True

    image_channels_: int
    epoch_: int
    temperature_: Tensor
    logit_scale_: Tensor
    image_mean_: Tensor
    image_scale_: Tensor

    def __init__(
        self,
        *,
        width: int = 16,
        epochs: int = 12,
        lr: float = 1e-3,
        max_pixels: int = 1 << 20,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.width = width
        self.epochs = epochs
        self.lr = lr
        self.max_pixels = max_pixels
        self.seed = seed
        self._require_positive("width", "epochs", "lr", "max_pixels")

    def temperatures(self, logits: Tensor, images: Tensor | None = None) -> Tensor:
        """(N, 1, *S) the temperature of each pixel, for logits (N, C, *S)."""
        if not self.image_channels_:
            images = None
        elif images is None or images.ndim < 2 or images.shape[1] != self.image_channels_:
            raise ValueError(
                f"This calibrator was fitted with images of {self.image_channels_} channels, but "
                f"got {'none' if images is None else tuple(images.shape)}"
            )
        planes, _ = without_masks(_as_planes(logits).to(self.temperature_.dtype))
        t = self._temperatures(planes, _image_planes(images, planes))
        return t.reshape(logits.shape[0], 1, *logits.shape[2:])

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        scaled = (logits / self.temperatures(logits, images)).to(logits.dtype)
        return scaled.clamp_max(torch.finfo(logits.dtype).max)  # huge logits stay finite

    def _temperatures(self, planes: Tensor, images: Tensor) -> Tensor:
        """(N, 1, H, W) of planes (N, C, H, W) and images (N, channels, H, W)."""
        centred = (planes - planes.mean(1, keepdim=True)) / self.logit_scale_
        centred = centred.clamp(-_FARTHEST, _FARTHEST)
        coloured = (images - self.image_mean_) / self.image_scale_
        log_t = self.network_(torch.cat([centred, coloured], 1)) + self.temperature_.log()
        return log_t.clamp(math.log(T_MIN), math.log(T_MAX)).exp()

    def _identity(self, num_classes: int, image_channels: int) -> dict[str, Any]:
        return {
            "image_channels_": image_channels,
            "epoch_": 0,
            "temperature_": torch.ones(()),
            "logit_scale_": torch.ones(()),
            "image_mean_": torch.zeros(image_channels, 1, 1),
            "image_scale_": torch.ones(image_channels, 1, 1),
            "network_": _network(num_classes + image_channels, self.width, self.seed),
        }

    def _sampler(self, holdout: Holdout) -> TileSampler:
        return TileSampler(holdout, self.max_pixels, self.seed)

    def _try(self, fitting: TileSample, validation: TileSample) -> list[float]:
        return [self._nll(validation) for _ in self._train(fitting)]

    def _learn(self, sample: TileSample, choice: int) -> None:
        self.epoch_ = choice
        for _ in islice(self._train(sample), choice + 1):
            pass

    def _nll(self, sample: TileSample) -> float:
        parts = torch.arange(len(sample.fold), device=sample.fold.device).split(8)
        return sum(float(self._nll_of(sample[part])) for part in parts)

    def _nll_of(self, tiles: TileSample) -> Tensor:
        return tiles.nll(tiles.x / self._temperatures(tiles.x, tiles.images))

    def _normalise(self, tiles: TileSample) -> None:
        """Set the constant temperature, and the scales that give the network inputs near 1."""
        self.temperature_.fill_(1 / best_beta(flatten(tiles.x, tiles.labels, -1)))
        valid = tiles.labels >= 0
        centred = (tiles.x - tiles.x.mean(1, keepdim=True)).movedim(1, -1)[valid]  # (P, C)
        scale = centred.square().mean(dtype=torch.float64).sqrt()
        self.logit_scale_.copy_(torch.where(scale > 0, scale, 1))
        if self.image_channels_:
            seen = tiles.images.movedim(1, -1)[valid].double()  # (P, channels)
            scale = seen.std(0, correction=0)
            self.image_mean_.copy_(seen.mean(0)[:, None, None])
            self.image_scale_.copy_(torch.where(scale > 0, scale, 1)[:, None, None])

    def _train(self, tiles: TileSample) -> Iterator[None]:
        """Train on tiles; stops before the first epoch and after each."""
        channels = tiles.x.shape[1] + tiles.images.shape[1]
        self.network_ = _network(channels, self.width, self.seed).to(tiles.x)
        self._normalise(tiles)
        yield
        count = len(tiles.labels)
        size = max(1, min(_BATCH_PIXELS // tiles.labels[0].numel(), count // _LEAST_BATCHES))
        order = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.Adam(self.network_.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for index in torch.randperm(count, generator=order).split(size):
                batch = tiles[index]
                optimizer.zero_grad()
                with torch.enable_grad():
                    (self._nll_of(batch) / (batch.labels >= 0).sum()).backward()
                optimizer.step()
            yield


def _network(channels: int, width: int, seed: int) -> nn.Sequential:
    """(N, channels, H, W) to (N, 1, H, W), 0 at first; each pixel sees 15 × 15 around it."""
    network = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=2, dilation=2),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=4, dilation=4),
        nn.SiLU(),
        nn.Conv2d(width, 1, 1),
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        if weight.ndim > 1:
            nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(weight)
    for weight in network[-1].parameters():
        nn.init.zeros_(weight)
    return network


def _as_planes(tensor: Tensor) -> Tensor:
    """(N, C, H, W) of (N, C, *S); of more spatial axes than two, all but the last are stacked."""
    if tensor.ndim == 4:
        return tensor
    width = tensor.shape[-1] if tensor.ndim > 2 else 1
    return tensor.reshape(*tensor.shape[:2], math.prod(tensor.shape[2:-1]), width)


def _image_planes(images: Tensor | None, like: Tensor) -> Tensor:
    """(N, channels, H, W) images at the size, dtype and device of the planes `like`."""
    if images is None:
        return like[:, :0]
    planes = _as_planes(images).to(like)
    if planes.shape[2:] == like.shape[2:]:
        return planes
    return interpolate(planes, like.shape[2:], mode="bilinear", antialias=True)


@dataclass(frozen=True, eq=False)
class TileSample:
    """M tiles that were drawn from the hold-out of all ranks.

    Attributes:
        x: (M, C, h, w) float32 logits.
        images: (M, channels, h, w) float32; without images there are no channels.
        labels: (M, h, w), -1 where ignored.
        fold: (M,) the part of the hold-out that the tile's image belongs to.
    """

    x: Tensor
    images: Tensor
    labels: Tensor
    fold: Tensor

    def __getitem__(self, index: Tensor) -> TileSample:
        return TileSample(*(part[index] for part in vars(self).values()))

    def nll(self, logits: Tensor) -> Tensor:
        """Σ over the labels of the NLL of calibrated logits (M, C, h, w)."""
        losses = cross_entropy(logits, self.labels, ignore_index=-1, reduction="none")
        return losses.sum(dtype=torch.float64)


class TileSampler:
    """Draws tiles of at most 64 × 64 pixels, `pixels` in all, from the batches it is shown.

    Each image is cut into tiles, the last ones of a row or column overlapping those before them;
    each tile with a valid pixel has the same chance.
    """

    def __init__(self, holdout: Holdout, pixels: int, seed: int) -> None:
        self._holdout = holdout
        self._pixels = pixels
        self._seed = seed
        self._side: tuple[int, int] | None = None  # of the first batch's tiles, kept for all
        self._draw = Draw(holdout, 2, seed)

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        logits = _as_planes(batch.logits).float()
        n, _, height, width = logits.shape
        if self._side is None:
            # At least two tiles per image, so that a single image can be fitted and validated.
            self._side = min(TILE_SIDE, -(-height // 2)), min(TILE_SIDE, -(-width // 2))
            count = max(2, self._pixels // (self._side[0] * self._side[1]))
            self._draw = Draw(self._holdout, count, self._seed)
        h, w = self._side
        labels = batch.labels.reshape(n, height, width)
        # Valid pixels are finite, but they have neighbours. The largest logit is 0: a constant
        # common to all pixels would add up its rounding errors over the steps of the training.
        logits = logits.nan_to_num(0, 0, 0)
        logits = logits - logits.amax(1, keepdim=True)
        # An image smaller than the first batch's is filled up with pixels that are not valid.
        missing = 0, max(0, w - width), 0, max(0, h - height)
        images = _image_planes(batch.images, logits)
        filled = (logits, 0), (images, 0), (labels, -1)
        layers = [pad(layer, missing, value=value) for layer, value in filled]
        windows = [
            (..., slice(y, y + h), slice(x, x + w))
            for y in _starts(height, h)
            for x in _starts(width, w)
        ]

        def columns(image: Tensor, place: Tensor) -> tuple[Tensor, ...]:
            where = list(zip(image.tolist(), place.tolist(), strict=True))
            x, planes, y = (torch.stack([p[i][windows[j]] for i, j in where]) for p in layers)
            return x, planes, y

        known = torch.stack([(layers[2][at] >= 0).flatten(1).any(1) for at in windows], 1)
        self._draw.offer(batch, known, columns)

    def finish(self) -> TileSample:
        """The sample of all ranks."""
        if len(sides := {side for side in self._holdout.everyone(self._side) if side}) > 1:
            raise ValueError(f"The first images of all ranks must agree in size: {sides}")
        fold, logits, images, labels = self._draw.finish()
        return TileSample(logits, images, labels, fold)


def _starts(length: int, side: int) -> range | list[int]:
    """Where tiles of `side` begin along an axis, so that they cover it."""
    if length <= side:
        return [0]
    return [*range(0, length - side, side), length - side]
