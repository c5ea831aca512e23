"""Views of one network: test-time augmentation and dropout, whose predictions are pooled.

views(network, "flip,scale:0.75,1.25", dropout=20)

Each view is a network itself. It changes the images, and undoes that on the logits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import interpolate
from torch.overrides import TorchFunctionMode

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
    """The network with its dropout at work, and everything else as in evaluation.

    The masks of an image depend on its pixels and on `sample`, not on the batch that it is in.
    """

    def __init__(self, network: nn.Module, sample: int) -> None:
        super().__init__()
        self.network, self.sample = network, sample

    def forward(self, images: Tensor) -> Tensor:
        seeds = [zlib.crc32(image.contiguous().cpu().numpy().tobytes()) for image in images]
        with _Dropping(seeds, self.sample) as dropping:
            logits = logits_of(self.network(images))
        if not dropping.calls:
            raise ValueError("the network has no dropout layers, so --mc-dropout changes nothing")
        return logits


class _Dropping(TorchFunctionMode):
    """Functions that drop out do so, whether they are told to be in training or not.

    They are called by layers, by `nn.MultiheadAttention`, and by networks that state how much to
    drop. A network that states 0 in evaluation, as transformers do in their attention, drops
    nothing.

    Args:
        seeds: of the images of the batch.
        sample: another number has other masks.
    """

    def __init__(self, seeds: Sequence[int], sample: int) -> None:
        super().__init__()
        self.seeds, self.sample, self.calls = seeds, sample, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return self._drop(func, *args, **kwargs)
        if func is functional.multi_head_attention_forward and args[_DROPOUT_P] > 0:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _drop(self, func: Any, input: Tensor, p: float = 0.5, *_: bool, **__: bool) -> Tensor:
        if p == 0:
            return input
        # Windows of attention are in the batch too, image by image.
        count = len(self.seeds) if len(input) % len(self.seeds) == 0 else 1
        parts = input.chunk(count)
        return torch.cat(self._seeded(count, input, lambda i: func(parts[i], p, True)))

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        query = args[0]  # (L, N, E), as are keys and values
        whole = query.ndim < 3 or query.shape[1] % len(self.seeds)
        count = 1 if whole else len(self.seeds)
        first = [x.chunk(count, 1) for x in args[:3]]
        masks = {
            name: mask.chunk(count)
            for name, axes in (("key_padding_mask", 2), ("attn_mask", 3))
            if (mask := kwargs.get(name)) is not None and mask.ndim == axes
        }

        def run(i: int) -> Any:
            own = {**kwargs, **{name: mask[i] for name, mask in masks.items()}, "training": True}
            attend = functional.multi_head_attention_forward
            return attend(*(x[i] for x in first), *args[3:], **own)

        outputs, weights = zip(*self._seeded(count, query, run), strict=True)
        return torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights)

    def _seeded(self, count: int, like: Tensor, run: Callable[[int], Any]) -> list[Any]:
        """What is made of each image, with random numbers of its own."""
        self.calls += 1
        found = []
        with torch.random.fork_rng([] if like.device.type == "cpu" else [like.device]):
            for i, seed in enumerate(self.seeds[:count]):
                torch.manual_seed(seed * 1_000_003 + self.sample * 1009 + self.calls)
                found.append(run(i))
        return found


_DROPOUT = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}
_DROPOUT_P = 10  # the place of dropout_p among the arguments of multi_head_attention_forward


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
        samples = [Dropped(network, sample) for sample in range(dropout)]
    found = []
    for sample, scale, mirrored in product(samples, scales, (False, True)[: 1 + flip]):
        view = sample if scale == 1 else Scaled(sample, scale)
        found.append(Flipped(view) if mirrored else view)
    return tuple(view.eval() for view in found)
