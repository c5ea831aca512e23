"""The place for what a run needs of its machine: device, processes, seeds and signals."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist

from segcal import distributed


def choose_device(name: str) -> torch.device:
    """The device called `name` (cpu, cuda, cuda:1, mps); auto is the best there is.

    Under torchrun `cuda` is the GPU of this process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"Expected --device auto, cpu, cuda, cuda:N or mps, but got {name}"
        ) from None
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"Expected --device among {torch.cuda.device_count()} CUDA GPU(s), "
                f"but got cuda:{index}"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("Expected --device mps on a machine that has it, but this one has not")
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started, for as long as the block lasts; else do nothing."""
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed every generator, each process with numbers of its own."""
    mixed = np.random.SeedSequence((seed, distributed.rank())).generate_state(3)
    torch.manual_seed(int(mixed[0]))
    np.random.seed(mixed[1])
    random.seed(int(mixed[2]))


class Interrupted(Exception):
    """The run was told to stop by a signal, and has saved itself.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class StopSignals:
    """While entered, SIGINT and SIGTERM only leave a note; a second one acts as usual."""

    def __init__(self) -> None:
        self.received = 0
        self._usual: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread answer signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._usual[number])  # type: ignore[arg-type]
        os.write(2, b"\nstopping after this step; a second signal stops at once\n")

    def agreed(self) -> int:
        """The signal that any process received, or 0. Every process must ask at the same step."""
        if not distributed.is_distributed():
            return self.received
        flag = torch.tensor(self.received, device=distributed.communication_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag.item())
