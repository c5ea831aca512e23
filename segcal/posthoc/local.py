"""Local temperature scaling: a temperature for each pixel, learned from a sample of tiles."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

from segcal.pixels import flatten
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.pixelwise import unmasked
from segcal.posthoc.sample import Smallest, keys, validation_of
from segcal.posthoc.stream import HoldoutBatch, Stream, Survey
from segcal.posthoc.temperature import T_MAX, T_MIN, least_nll, sums_of

TILE_SIDE = 64
_BATCH_PIXELS = 1 << 15
_LEAST_BATCHES = 16  # per epoch, for small hold-outs


class LocalTemperatureScaling(Calibrator):
    """Local temperature scaling (Ding et al. 2021): logits / T, with a T for each pixel.

    A small convolutional network sees the logits, and the image where there is one, and gives
    log T. It starts as the constant best T and is trained with Adam on NLL. The predicted class
    never changes.

    The batches of the hold-out may be (logits, labels) or (logits, labels, images); a calibrator
    fitted with images needs them again in `calibrator(logits, images)`. Images may have any range and
    number of channels, and are resized to the logits if they differ.

    One pass over the batches samples tiles of 64 × 64 pixels, as many as `max_pixels` allows. Every
    fifth image is for validation (of a single image, every fifth tile): the epoch of least NLL
    there is kept.

    Args:
        width: channels of the network.
        epochs: of training, over the tiles.
        lr: step of Adam.
        max_pixels: in the tiles, 4·(C + channels) bytes each.
        seed: of tiles, first weights and order of training.
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks; False fits this rank's share alone.

    Attributes:
        image_channels_: channels of the images, 0 without.
        epoch_: the epoch that was kept; 0 is the constant temperature.
        temperature_: () the constant best T.
        network_: gives log T minus log `temperature_`.
    """

    name = "lts"
    reads_images = True

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
        ignore_index: int = 255,
        sync: bool = True,
    ) -> None:
        super().__init__(ignore_index=ignore_index, sync=sync)
        self.width = width
        self.epochs = epochs
        self.lr = lr
        self.max_pixels = max_pixels
        self.seed = seed
        self._require_positive("width", "epochs", "lr", "max_pixels")

    def temperatures(self, logits: Tensor, images: Tensor | None = None) -> Tensor:
        """(N, 1, *S) the temperature of each pixel, for logits (N, C, *S)."""
        planes, _ = unmasked(as_planes(logits).to(self.temperature_.dtype))
        t = self._temperatures(planes, image_planes(self._known(images), planes))
        return t.reshape(logits.shape[0], 1, *logits.shape[2:])

    def _transform(self, logits: Tensor, images: Tensor | None) -> Tensor:
        return (logits / self.temperatures(logits, images)).to(logits.dtype)

    def _known(self, images: Tensor | None) -> Tensor | None:
        """The images if this calibrator was fitted with images, else None."""
        if not self.image_channels_:
            return None
        if images is None or images.ndim < 2 or images.shape[1] != self.image_channels_:
            raise ValueError(
                f"Expected images of {self.image_channels_} channels, as fitted with, "
                f"but got {None if images is None else tuple(images.shape)}"
            )
        return images

    def _temperatures(self, planes: Tensor, images: Tensor) -> Tensor:
        """(N, 1, H, W) of planes (N, C, H, W) and images (N, channels, H, W)."""
        centred = (planes - planes.mean(1, keepdim=True)) / self.logit_scale_
        coloured = (images - self.image_mean_) / self.image_scale_
        log_t = self.network_(torch.cat([centred, coloured], 1)) + self.temperature_.log()
        return log_t.clamp(math.log(T_MIN), math.log(T_MAX)).exp()

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.image_channels_ = image_channels
        self.epoch_ = 0
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("logit_scale_", torch.ones(()))
        self.register_buffer("image_mean_", torch.zeros(image_channels, 1, 1))
        self.register_buffer("image_scale_", torch.ones(image_channels, 1, 1))
        self.network_ = _network(num_classes + image_channels, self.width, self.seed)

    def _fit(self, stream: Stream) -> tuple[Survey, float, float]:
        sampler = TileSampler(self.max_pixels, self.seed)
        survey = stream.survey(sampler)
        fitting, validation = sampler.finish(stream, survey.num_classes, survey.image_channels)
        self._start(survey.num_classes, survey.image_channels)
        self.to(fitting.logits.device)
        before = self._nll(validation, stream)
        self._normalise(fitting, stream)
        after = self._train(fitting, validation, stream)
        return survey, before, after

    def _normalise(self, tiles: Tiles, stream: Stream) -> None:
        """Set the constant temperature, and the scales that give the network inputs near 1."""
        valid = tiles.valid.unsqueeze(1)
        centred = (tiles.logits - tiles.logits.mean(1, keepdim=True)) * valid
        images = tiles.images * valid
        sums = [
            valid.sum().double()[None],
            centred.square().mean(1).sum(dtype=torch.float64)[None],
            images.sum((0, 2, 3), dtype=torch.float64),
            images.square().sum((0, 2, 3), dtype=torch.float64),
        ]
        count, square, mean, power = stream.sum_over_ranks(torch.cat(sums)).split(
            [1, 1, self.image_channels_, self.image_channels_]
        )
        mean = mean / count
        self.logit_scale_.copy_(_positive((square / count).sqrt())[0])
        self.image_mean_.copy_(mean.view_as(self.image_mean_))
        scale = (power / count - mean.square()).clamp_min(0).sqrt()
        self.image_scale_.copy_(_positive(scale).view_as(self.image_scale_))
        pixels = flatten(tiles.logits, tiles.target.masked_fill(~tiles.valid, -1), ignore_index=-1)
        self.temperature_.fill_(1 / least_nll(sums_of(pixels, stream))[0])

    def _train(self, fitting: Tiles, validation: Tiles, stream: Stream) -> float:
        """Train on `fitting`, keep the epoch of least NLL on `validation`; return that NLL."""
        places = stream.concatenate(fitting.place).sort().values
        area = stream.concatenate(torch.tensor([fitting.valid[:1].numel()])).max()  # of a tile
        most = max(1, min(_BATCH_PIXELS // int(area), len(places) // _LEAST_BATCHES))
        order = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.Adam(self.network_.parameters(), lr=self.lr)
        best = (self._nll(validation, stream), 0, copy.deepcopy(self.network_.state_dict()))
        for epoch in range(1, self.epochs + 1):
            for batch in places[torch.randperm(len(places), generator=order)].split(most):
                self._step(fitting[torch.isin(fitting.place, batch)], optimizer, stream)
            nll = self._nll(validation, stream)
            if nll < best[0]:
                best = (nll, epoch, copy.deepcopy(self.network_.state_dict()))
        self.epoch_ = best[1]
        self.network_.load_state_dict(best[2])
        return best[0]

    def _step(self, tiles: Tiles, optimizer: torch.optim.Optimizer, stream: Stream) -> None:
        """One step down the mean NLL over the tiles of all ranks."""
        weights = [*self.network_.parameters()]
        with torch.enable_grad():
            gradients = torch.autograd.grad(self._nll_sum(tiles), weights)
        flat = torch.cat([g.flatten().double() for g in gradients] + [tiles.valid.sum()[None]])
        *sums, count = stream.sum_over_ranks(flat).split([w.numel() for w in weights] + [1])
        for weight, total in zip(weights, sums, strict=True):
            weight.grad = (total / count).view_as(weight).to(weight.dtype)
        optimizer.step()

    def _nll(self, tiles: Tiles, stream: Stream) -> float:
        """The mean NLL over the tiles of all ranks."""
        parts = torch.arange(len(tiles)).split(8)
        nll = sum((self._nll_sum(tiles[part]).double() for part in parts), torch.zeros(()))
        total, count = stream.sum_over_ranks(torch.stack([nll.cpu(), tiles.valid.sum().cpu()]))
        return float(total / count)

    def _nll_sum(self, tiles: Tiles) -> Tensor:
        scaled = tiles.logits / self._temperatures(tiles.logits, tiles.images)
        nll = cross_entropy(scaled, tiles.target, reduction="none")
        return nll.masked_fill(~tiles.valid, 0).sum(dtype=torch.float64)


def _network(channels: int, width: int, seed: int) -> nn.Sequential:
    """(N, channels, H, W) to (N, 1, H, W), 0 at first; each pixel sees 15 × 15 around it."""
    network = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=4, dilation=4),
        nn.ReLU(),
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


def _positive(scale: Tensor) -> Tensor:
    """`scale`, or 1 where nothing varies."""
    return torch.where(scale > 0, scale, 1)


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
    """Samples tiles of at most 64 × 64 pixels, `pixels` in all, from the batches it is shown.

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
            # At least two tiles per image, so that a single image can be fitted and validated.
            self._side = min(TILE_SIDE, -(-height // 2)), min(TILE_SIDE, -(-width // 2))
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
        validation = validation_of(stream, number, place)
        tiles = Tiles(logits, images, target, valid, place)
        return tiles[~validation], tiles[validation]


def _starts(length: int, side: int) -> range | list[int]:
    """Where tiles of `side` begin along an axis, so that they cover it."""
    if length <= side:
        return [0]
    return [*range(0, length - side, side), length - side]
