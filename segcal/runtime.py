"""Device, processes, seeds and signals of a run, work that processes share, and Ray clusters."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from segcal import distributed

T = TypeVar("T")
RETRIES = 5  # of a task on Ray whose worker or node died
_OBJECT_STORE = 200 * 2**20  # bytes; what tasks return is kilobytes


def choose_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda, cuda:1, mps, or auto for the fastest there is.

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
    elif device.type not in ("cpu", "mps"):
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
            raise ValueError(
                f"Expected --device where numbers can be computed, but got {name}: "
                f"{' '.join(str(error).split()):.120}"
            ) from None
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("Expected a machine with MPS for --device mps, but this one has none")
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of torchrun inside the block; without torchrun, do nothing."""
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, numpy and random, differently in each process."""
    mixed = np.random.SeedSequence((seed, distributed.rank())).generate_state(3)
    torch.manual_seed(int(mixed[0]))
    np.random.seed(mixed[1])
    random.seed(int(mixed[2]))


class Interrupted(Exception):
    """A signal stopped the run, which has saved a checkpoint.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class StopSignals:
    """Inside the block, the first SIGINT or SIGTERM is only remembered; a second one acts as usual.

    Attributes:
        received: number of the signal that came, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._usual: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
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
        """The signal that any process received, or 0. All processes must call this together."""
        if not distributed.is_distributed():
            return self.received
        flag = torch.tensor(self.received, device=distributed.communication_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag.item())


def join_ray(address: str = "") -> tuple[Any, Callable[[], None]]:
    """The module `ray`, connected to the cluster at `address`, and a function that disconnects.

    "" starts a cluster on this machine. A process that is already connected stays connected.

    Raises:
        ValueError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(
            'Expected Ray to be installed for --ray, but it is not: pip install "segcal[ray]"'
        ) from None
    if ray.is_initialized():
        return ray, lambda: None
    _expect_listener(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anyone
    own: dict[str, Any] = {"object_store_memory": _OBJECT_STORE, "include_dashboard": False}
    own["_system_config"] = {"worker_niceness": 0}  # as fast as processes without Ray
    options: dict[str, Any] = {} if address else own
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"Expected a Ray cluster at {address or 'this machine'}, but got {lines[0]}"
        ) from None
    return ray, ray.shutdown


def _expect_listener(address: str) -> None:
    """Raise a ValueError if nothing answers at the address: Ray would try for minutes."""
    if address in ("", "auto", "local"):
        return
    found = re.fullmatch(r"(?:ray://)?(\[[^\]]+\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ValueError(
            f"Expected auto or HOST:PORT as the address of a Ray cluster, but got {address!r:.200}"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"Expected a Ray cluster at {address}, but got {error}") from None


def in_processes(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What independent calls return, on as many cores as torch may use; see `begin`."""
    return begin(calls)()


def begin(calls: Sequence[Callable[[], T]]) -> Callable[[], list[T]]:
    """Start independent calls in other processes; returns a function that gives their results.

    They start in their order, so the longest should be the first. The processes are forked: what
    calls return must be picklable, but the calls need not be. They must not compute with torch,
    whose threads a forked process lacks. A call that fails there is made again here, and raises.
    """
    threads = torch.get_num_threads() if sys.platform == "linux" else 1
    helpers = max(0, min(threads, len(calls)) - 1)
    if helpers == 0:
        return lambda: [call() for call in calls]
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    pipes = []
    for _ in range(helpers):
        ours, theirs = context.Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads, which may wait
            context.Process(target=_help, args=(calls, following, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)

    def end() -> list[T]:
        found = _call_some(calls, following)
        for pipe in pipes:
            with suppress(EOFError):
                found |= pipe.recv()
        return [found[i] if i in found else call() for i, call in enumerate(calls)]

    return end


def _call_some(calls: Sequence[Callable[[], T]], following: Any) -> dict[int, T]:
    """What the calls return that no other process has taken, by their place."""
    found: dict[int, T] = {}
    while True:
        with following.get_lock():
            i = following.value
            following.value += 1
        if i >= len(calls):
            return found
        found[i] = calls[i]()


def _help(calls: Sequence[Callable[[], Any]], following: Any, pipe: Connection) -> None:
    """Send what some of the calls return; nothing if one fails or nobody waits any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process stops all
    with suppress(Exception):
        pipe.send(_call_some(calls, following))
