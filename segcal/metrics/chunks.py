"""The place where a batch is cut into pieces that fit the cache, and shared among threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from segcal.metrics import device
from segcal.pixels import flatten

CHUNK = 2**20  # probabilities a thread works on at a time
ALL_CHUNKS = 2**21  # probabilities all threads together work on; this bounds memory
ACCELERATOR_CHUNK = 2**22  # there: fewer, larger kernels

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Chunk:
    """P pixels: a piece of one image, or several whole images."""

    values: Tensor  # (K, P) logits or probabilities, as given
    target: Tensor  # (P,) labels; 0 where ignored
    valid: Tensor  # (P,) False where ignored
    images: slice  # which images of the batch
    groups: int  # G, images to be told apart: all of the chunk, or 1
    out_of_range: Tensor  # () labels that are no class

    @property
    def group(self) -> Tensor | int:
        """(P,) which of the G images each pixel is of; 0 if there is one."""
        if self.groups == 1:
            return 0
        numbers = torch.arange(self.groups, device=self.valid.device)
        return numbers.repeat_interleave(len(self.valid) // self.groups)


@dataclass(frozen=True)
class Plan:
    """How a batch of (N, K, L) values is cut: which images and which of their pixels.

    Attributes:
        cuts: (first image, last, first pixel, last) of each chunk.
        workers: how many threads share them.
        size: K · P of the largest chunk.
    """

    cuts: list[tuple[int, int, int, int]]
    workers: int
    size: int

    @classmethod
    def of(cls, values: Tensor, *, table: int) -> Plan:
        """The plan for (N, K, *S) values, if each image needs memory for `table` pixels at least.

        A chunk is a piece of one image, or several whole images.
        """
        n, k = values.shape[:2]
        length = math.prod(values.shape[2:])
        on_cpu = device.on_cpu(values)
        most = torch.get_num_threads() if on_cpu else 1
        workers = max(min(most, values.numel() // CHUNK, ALL_CHUNKS // 2**18), 1)
        numbers = min(CHUNK, ALL_CHUNKS // workers) if on_cpu else ACCELERATOR_CHUNK
        room = max(numbers // k, 1)  # pixels a chunk
        if length >= room:
            cuts = [(i, i + 1, s, s + room) for i in range(n) for s in range(0, length, room)]
        else:
            step = max(room // max(length, table), 1)
            cuts = [(i, min(i + step, n), 0, length) for i in range(0, n, step) if length]
        largest = max(((j - i) * min(e - s, length) for i, j, s, e in cuts), default=0)
        return cls(cuts, min(workers, max(len(cuts), 1)), k * largest)

    def share(self, worker: int) -> list[tuple[int, int, int, int]]:
        """The cuts of one worker."""
        return self.cuts[worker :: self.workers]


def chunks(
    values: Tensor,
    labels: Tensor,
    ignore_index: int,
    cuts: list[tuple[int, int, int, int]],
    *,
    per_image: bool,
) -> Iterator[Chunk]:
    """The pieces of (N, K, *S) values and (N, *S) labels at `cuts`; copies only small images."""
    n, k = values.shape[:2]
    length = math.prod(values.shape[2:])
    dense, flat = values.reshape(n, k, length), labels.reshape(n, length)
    for i, j, s, e in cuts:
        part = flatten(dense[i:j, :, s:e], flat[i:j, s:e], ignore_index)
        yield Chunk(
            part.dense[0] if j - i == 1 else part.dense.movedim(1, 0).flatten(1),
            part.target.flatten(),
            part.valid.flatten(),
            slice(i, j),
            j - i if per_image else 1,
            part.out_of_range,
        )


class Scratch:
    """Memory for the (K, P) tensors of one chunk after another.

    Fresh memory costs more than the work done in it: the system hands it out page by page.

    Args:
        size: K · P of the largest chunk.
        dtype: of the probabilities.
        device: of the probabilities.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        dtypes = {"values": dtype, "probs": dtype, "wide": torch.float64}
        dtypes |= {"equal": torch.bool, "above": torch.bool}
        self._buffers = {
            name: torch.empty(size, dtype=dtype, device=device) for name, dtype in dtypes.items()
        }

    def take(self, name: str, like: Tensor) -> Tensor:
        """The buffer called `name`: contiguous, of the shape of `like`, contents undefined."""
        return self._buffers[name][: like.numel()].view(like.shape)


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """[function(item) for item in items], each in a thread of its own, where torch uses no others.

    Threads that share every small operation meet at its end, and if the machine is busy each
    meeting costs more than the operation. Threads with a share of the chunks meet once.
    """
    threads = torch.get_num_threads()

    def alone(item: _Item) -> _Result:
        torch.set_num_threads(1)  # holds for this thread, and for those not yet started
        return function(item)

    try:
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)
