"""The order in which a run sees its training samples.

It depends on (seed, epoch) alone. The number of processes, workers or restarts does not
change what a run learns from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Sampler

from segcal import distributed


@dataclass(frozen=True)
class EpochOrder(Sampler[list[tuple[int, int]]]):
    """Samples batches of `(epoch, index)` for this process over all epochs, from any step on.

    Step s of an epoch uses samples s·B … s·B + B − 1 of the epoch's permutation, where B is the
    batch size over all processes. Each process takes its own slice of them, in `accumulate`
    micro-batches. The samples left over at the end of an epoch are dropped: a tiny last batch
    distorts the batch statistics.
    """

    samples: int
    batch_size: int  # B, a multiple of world_size * accumulate
    epochs: int
    seed: int
    accumulate: int = 1
    first_step: int = 0  # counted from the beginning of the first epoch
    rank: int = field(default_factory=distributed.rank)
    world_size: int = field(default_factory=distributed.world_size)

    def __post_init__(self) -> None:
        if self.batch_size % (self.world_size * self.accumulate):
            raise ValueError(
                f"Expected a batch_size that is a multiple of {self.world_size} process(es) x "
                f"accumulate={self.accumulate}, but got {self.batch_size}"
            )
        if self.samples < self.batch_size:
            raise ValueError(
                f"Expected at least batch_size={self.batch_size} training samples, but got "
                f"{self.samples}; lower --batch_size"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    def __len__(self) -> int:
        return (self.epochs * self.steps_per_epoch - self.first_step) * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        share = self.batch_size // self.world_size
        micro = share // self.accumulate
        first_epoch, first_step = divmod(self.first_step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            order = permutation(self.samples, self.seed, epoch)
            for step in range(first_step, self.steps_per_epoch):
                start = step * self.batch_size + self.rank * share
                for first in range(start, start + share, micro):
                    yield [(epoch, index) for index in order[first : first + micro]]
            first_step = 0


def permutation(samples: int, seed: int, epoch: int) -> list[int]:
    """0 … samples − 1 in the order of epoch `epoch`, the same on every machine."""
    mixed = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed >> np.uint64(1)))
    return torch.randperm(samples, generator=generator).tolist()
