"""Local temperature scaling: a temperature for each pixel, learned from a sample of tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

from segcal.pixels import flatten
from segcal.posthoc.calibrator import Calibrator, Holdout, HoldoutBatch, Sample, without_masks
from segcal.posthoc.temperature import T_MAX, T_MIN, least_nll, nll_derivatives

TILE_SIDE = 64
_BATCH_PIXELS = 1 << 15
_LEAST_BATCHES = 16  # per epoch, for small hold-outs
_FARTHEST = 1e3  # of the network's input, so that huge logits do not overflow


class LocalTemperatureScaling(Calibrator):
    """Local temperature scaling (Ding et al. 2021): logits / T, with a T for each pixel.

    A small convolutional network sees the logits, centred over the classes, and the image where
    there is one, and gives log T. It starts as the constant best T and is trained with Adam on NLL.
    The predicted class never changes.

    The batches of the hold-out may be (logits, labels) or (logits, labels, images); a calibrator
    fitted with images needs them again in `calibrator(logits, images)`. Images may have any range
    and number of channels, and are resized to the logits if they differ.

    One pass over the batches samples tiles of 64 × 64 pixels, as many as `max_pixels` allows; every
    rank trains on all of them. The images are cut into three parts (a single image into three parts
    of its tiles). The network is trained on two of them and judged on the third, for each of the
    three; that says whether it is better than the logits as they are, and after which epoch. It is
    then trained on all tiles.

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

    def _start(self, num_classes: int, image_channels: int) -> None:
        self.num_classes_ = num_classes
        self.image_channels_ = image_channels
        self.epoch_ = 0
        self.register_buffer("temperature_", torch.ones(()))
        self.register_buffer("logit_scale_", torch.ones(()))
        self.register_buffer("image_mean_", torch.zeros(image_channels, 1, 1))
        self.register_buffer("image_scale_", torch.ones(image_channels, 1, 1))
        self.network_ = _network(num_classes + image_channels, self.width, self.seed)

    def _fit(self, holdout: Holdout) -> tuple[float, float]:
        sampler = TileSampler(holdout, self.max_pixels, self.seed)
        holdout.survey(sampler)
        fold, *tiles = sampler.finish()
        self._start(holdout.num_classes, holdout.image_channels)
        self.to(fold.device)
        before, parts = self._nll(tiles), []
        for f in fold.unique():
            fitting, held = ([part[where] for part in tiles] for where in (fold != f, fold == f))
            parts.append([self._nll(held) for _ in self._train(*fitting)])
        nlls = [sum(nll) for nll in zip(*parts, strict=True)]
        after = min(nlls)
        self.epoch_ = nlls.index(after)
        for _ in islice(self._train(*tiles), self.epoch_ + 1):
            pass
        before, after = (nll / int((tiles[2] >= 0).sum()) for nll in (before, after))
        # Ranks with other hardware or more threads may round differently: the first one's values.
        state = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        values = state, self.epoch_, before, after
        state, self.epoch_, before, after = holdout.everyone(values)[0]
        self.load_state_dict(state)
        return before, after

    def _normalise(self, logits: Tensor, images: Tensor, labels: Tensor) -> None:
        """Set the constant temperature, and the scales that give the network inputs near 1."""
        pixels = flatten(logits, labels, -1)
        self.temperature_.fill_(1 / least_nll(lambda beta: nll_derivatives(pixels, beta))[0])
        valid = labels >= 0
        centred = (logits - logits.mean(1, keepdim=True)).movedim(1, -1)[valid]  # (P, C)
        scale = centred.square().mean(dtype=torch.float64).sqrt()
        self.logit_scale_.copy_(torch.where(scale > 0, scale, 1))
        if self.image_channels_:
            seen = images.movedim(1, -1)[valid].double()  # (P, channels)
            scale = seen.std(0, correction=0)
            self.image_mean_.copy_(seen.mean(0)[:, None, None])
            self.image_scale_.copy_(torch.where(scale > 0, scale, 1)[:, None, None])

    def _train(self, logits: Tensor, images: Tensor, labels: Tensor) -> Iterator[None]:
        """Train on tiles; stops before the first epoch and after each."""
        self.network_ = _network(logits.shape[1] + images.shape[1], self.width, self.seed).to(
            logits
        )
        self._normalise(logits, images, labels)
        yield
        size = max(1, min(_BATCH_PIXELS // labels[0].numel(), len(labels) // _LEAST_BATCHES))
        order = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.Adam(self.network_.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(labels), generator=order).split(size):
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss = self._nll_sum(logits[batch], images[batch], labels[batch])
                    (loss / (labels[batch] >= 0).sum()).backward()
                optimizer.step()
            yield

    def _nll(self, tiles: Sequence[Tensor]) -> float:
        """Σ of the NLL over tiles."""
        return sum(
            float(self._nll_sum(*part))
            for part in zip(*(part.split(8) for part in tiles), strict=True)
        )

    def _nll_sum(self, logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        scaled = logits / self._temperatures(logits, images)
        return cross_entropy(scaled, labels, ignore_index=-1, reduction="none").sum(
            dtype=torch.float64
        )


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
        self._sample = Sample(holdout, 2, seed)

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        logits = _as_planes(batch.logits).float()
        n, _, height, width = logits.shape
        if self._side is None:
            # At least two tiles per image, so that a single image can be fitted and validated.
            self._side = min(TILE_SIDE, -(-height // 2)), min(TILE_SIDE, -(-width // 2))
            count = max(2, self._pixels // (self._side[0] * self._side[1]))
            self._sample = Sample(self._holdout, count, self._seed)
        labels = batch.labels.reshape(n, height, width)
        planes = _image_planes(batch.images, logits)
        # Valid pixels are finite, but they have neighbours. The largest logit is 0: a constant
        # common to all pixels would add up its rounding errors over the steps of the training.
        logits = logits.nan_to_num(0, 0, 0)
        layers = logits - logits.amax(1, keepdim=True), planes, labels
        corners = [
            (y, x) for y in _starts(height, self._side[0]) for x in _starts(width, self._side[1])
        ]
        numbers, images = self._sample.numbers(batch, len(corners))
        for i, j in (numbers < self._sample.limit).nonzero().tolist():
            (y, x), (h, w) = corners[j], self._side
            cut = [layer[i, ..., y : y + h, x : x + w] for layer in layers]
            if (cut[2] < 0).all():
                continue
            # An image smaller than the first batch's is filled up with pixels that are not valid.
            missing = (0, w - cut[2].shape[1], 0, h - cut[2].shape[0])
            tile = [pad(c, missing, value=v)[None] for c, v in zip(cut, (0, 0, -1), strict=True)]
            device = logits.device
            self._sample.offer(numbers[i, j, None].to(device), images[i, None].to(device), *tile)

    def finish(self) -> tuple[Tensor, ...]:
        """(fold, logits, images, labels) of the tiles of all ranks.

        logits (M, C, h, w) and images (M, channels, h, w) are float32; without images there are no
        channels. labels (M, h, w) are -1 where ignored. Tiles of one `fold` (M,) are validated by
        a fit on the others.
        """
        if len(sides := {side for side in self._holdout.everyone(self._side) if side}) > 1:
            raise ValueError(f"The first images of all ranks must agree in size: {sides}")
        fold, *tiles = self._sample.finish()
        if len(fold) < 2:
            raise ValueError(
                "The hold-out has valid pixels in one tile only: lts needs one tile to fit on and "
                "one for validation"
            )
        return fold, *tiles


def _starts(length: int, side: int) -> range | list[int]:
    """Where tiles of `side` begin along an axis, so that they cover it."""
    if length <= side:
        return [0]
    return [*range(0, length - side, side), length - side]
