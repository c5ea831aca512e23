"""Views of one network: test-time augmentation and dropout, whose predictions are pooled.

views(network, "flip,scale:0.75,1.25", dropout=20)

Each view is a network itself. It changes the images, and undoes that on the logits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from segcal.sources.source import logits_of, resize


class Flipped(nn.Module):
    """The network on images that are mirrored left to right."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """(N, channels, *S) to (N, C, *S) logits, mirrored back; those of labels stay."""
        logits = logits_of(self.network(images.flip(-1)))
        return logits.flip(-1) if logits.ndim == images.ndim else logits


class Scaled(nn.Module):
    """The network on images of another size.

    Sides remain multiples of 32, 16, 8, 4 or 2 if they are: networks may need that.
    """

    def __init__(self, network: nn.Module, scale: float) -> None:
        super().__init__()
        self.network, self.scale = network, scale

    def forward(self, images: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, C, H, W) logits at the size of the images."""
        size = []
        for side in images.shape[2:]:
            step = next(step for step in (32, 16, 8, 4, 2, 1) if side % step == 0)
            size.append(max(round(side * self.scale / step), 1) * step)
        mode = "trilinear" if images.ndim == 5 else "bilinear"
        logits = logits_of(self.network(interpolate(images, size, mode=mode)))
        return resize(logits, images.shape[2:]) if logits.ndim == images.ndim else logits


class Dropped(nn.Module):
    """The network with its dropout layers at work, and everything else as in evaluation.

    The masks of an image depend on its pixels and on `sample`, not on the batch that it is in.
    Layers are modules such as `nn.Dropout`; dropout as a function, as in attention, stays off.
    """

    def __init__(self, network: nn.Module, sample: int) -> None:
        super().__init__()
        self.network, self.sample = network, sample
        self.layers = [m for m in network.modules() if _drops(m)]

    def forward(self, images: Tensor) -> Tensor:
        seeds = [zlib.crc32(image.contiguous().cpu().numpy().tobytes()) for image in images]
        with self._at_work(seeds):
            return logits_of(self.network(images))

    @contextmanager
    def _at_work(self, seeds: Sequence[int]) -> Iterator[None]:
        called = [0]

        def drop(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            x = inputs[0]
            called[0] += 1
            # Windows of attention are in the batch too, image by image.
            per_image = len(x) // len(seeds) if len(x) % len(seeds) == 0 else len(x)
            devices = [] if x.device.type == "cpu" else [x.device]
            parts = []
            layer.training = True
            try:
                with torch.random.fork_rng(devices):
                    for seed, part in zip(seeds, x.split(per_image), strict=False):
                        torch.manual_seed(seed * 1_000_003 + self.sample * 1009 + called[0])
                        parts.append(layer.forward(part.clone()))
            finally:
                layer.training = False
            return torch.cat(parts)

        hooks = [layer.register_forward_hook(drop) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def parse_tta(text: str) -> tuple[bool, tuple[float, ...]]:
    """Whether to flip, and the scales, of a text such as flip or flip,scale:0.75,1.25."""
    number = r"\d+\.?\d*|\.\d+"
    found = re.fullmatch(rf"(flip)?,?(?:scale:((?:{number})(?:,(?:{number}))*))?", text.strip())
    scales = [1.0, *map(float, found[2].split(","))] if found and found[2] else [1.0]
    if found is None or not text.strip() or not all(0.1 <= scale <= 10 for scale in scales):
        raise ValueError(
            f"{text!r} is no test-time augmentation: write flip, scale:0.75,1.25 or "
            "flip,scale:0.75,1.25"
        )
    return found[1] is not None, tuple(dict.fromkeys(scales))


def views(network: nn.Module, tta: str = "", dropout: int = 0) -> tuple[nn.Module, ...]:
    """The views of a network: every sample of dropout under every augmentation.

    `tta` is such as flip,scale:0.75,1.25; the images as they are always belong to it. `dropout` is
    how many samples there are with dropout. The network is in eval mode.
    """
    flip, scales = parse_tta(tta) if tta else (False, (1.0,))
    samples: list[nn.Module] = [network]
    if dropout:
        if not any(map(_drops, network.modules())):
            raise ValueError("the network has no dropout layers, so --mc-dropout changes nothing")
        samples = [Dropped(network, sample) for sample in range(dropout)]
    found = []
    for sample, scale, mirrored in product(samples, scales, (False, True)[: 1 + flip]):
        view = sample if scale == 1 else Scaled(sample, scale)
        found.append(Flipped(view) if mirrored else view)
    return tuple(view.eval() for view in found)
