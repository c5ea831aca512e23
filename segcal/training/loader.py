"""Data loaders, and the order in which a run sees its training samples.

The order depends on (seed, epoch) alone. The number of processes, workers or restarts does not
change what a run learns from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from segcal import distributed

Batch = tuple[torch.Tensor, torch.Tensor]
_DIED = re.compile(r"DataLoader worker \(pid[^.]*")  # how torch's message begins


class MapDataset(Protocol):
    """A map-style data set of (image, label); training sets are indexed by `(epoch, index)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Batch: ...


class EpochOrder(Sampler[list[tuple[int, int]]]):
    """Samples batches of `(epoch, index)` for this process over all epochs, from any step on.

    Step s of an epoch uses samples s·B … s·B + B − 1 of the epoch's permutation, where B is the
    batch size over all processes. Each process takes its own slice of them, in `accumulate`
    micro-batches. The samples left over at the end of an epoch are dropped: a tiny last batch
    distorts the batch statistics.

    Args:
        samples: number of training samples.
        batch_size: B, a multiple of `world_size * accumulate`.
        accumulate: micro-batches that each process splits its slice into.
        epochs: number of epochs in all.
        seed: seed of the permutations.
        first_step: step to start at, counted from the beginning of the first epoch.
        rank: rank of this process; None asks torch.distributed.
        world_size: number of processes; None asks torch.distributed.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        epochs: int,
        seed: int,
        accumulate: int = 1,
        first_step: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank = distributed.rank() if rank is None else rank
        self.world_size = distributed.world_size() if world_size is None else world_size
        if batch_size % (self.world_size * accumulate):
            raise ValueError(
                f"Expected a batch_size that {self.world_size} process(es) x accumulate="
                f"{accumulate} divide, but got {batch_size}"
            )
        if samples < batch_size:
            raise ValueError(
                f"Expected at least batch_size={batch_size} training samples, but got {samples}; "
                "lower --batch_size"
            )
        self.samples, self.batch_size, self.accumulate = samples, batch_size, accumulate
        self.epochs, self.seed, self.first_step = epochs, seed, first_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
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


class WorkerDied(RuntimeError):
    """A worker of a data loader ended without an error of its own: killed, or out of memory."""


class Batches:
    """A data loader that raises its workers' errors as they were raised, without their tracebacks.

    The death of a worker raises `WorkerDied`.

    Args:
        loader: the data loader.
        before_each: called before each batch is yielded; may raise.
    """

    def __init__(self, loader: DataLoader[Any], before_each: Callable[[], object]) -> None:
        self.loader, self.before_each = loader, before_each

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set that the loader reads."""
        return self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self.loader:
                self.before_each()
                yield batch
        except Exception as error:
            name, text = type(error).__name__, str(error)
            # The cause, where there is one, knows the signal.
            died = _DIED.match(str(error.__cause__)) or _DIED.match(text)
            if died:
                raise WorkerDied(
                    f"{died[0]}; if memory or shared memory ran out, lower --workers or "
                    "--batch-size"
                ) from None
            if not text.startswith(f"Caught {name} in DataLoader worker"):
                raise
            raise type(error)(text.rpartition(f"{name}: ")[2].strip()) from None


def train_loader(dataset: MapDataset, order: EpochOrder, *, workers: int, pin: bool) -> Batches:
    """One loader over all epochs: workers are started once, and prefetch across epochs."""
    return _batches(dataset, workers, pin, lambda: None, batch_sampler=order)


def eval_loader(
    dataset: MapDataset,
    *,
    batch_size: int,
    workers: int,
    pin: bool,
    before_each: Callable[[], object] = lambda: None,
) -> Batches:
    """This process's share of `dataset`, in order: each sample is read by exactly one process.

    Shares are not padded to equal length as by DistributedSampler, which would count samples twice.
    """
    share = range(distributed.rank(), len(dataset), distributed.world_size())
    return _batches(dataset, workers, pin, before_each, batch_size=batch_size, sampler=share)


def _batches(
    dataset: MapDataset, workers: int, pin: bool, before_each: Callable[[], object], **options: Any
) -> Batches:
    return Batches(
        DataLoader(
            cast("Dataset[Batch]", dataset),
            num_workers=workers,
            pin_memory=pin,
            worker_init_fn=_leave_signals_to_the_trainer if workers else None,
            # A generator of its own, so that a new loader takes no numbers from the run's.
            generator=torch.Generator(),
            **options,
        ),
        before_each,
    )


def _leave_signals_to_the_trainer(_: int) -> None:
    """Leave the process group, to which Ctrl-C is sent: the trainer alone handles it."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
