"""Pools without a cluster: this process alone, or several on this machine."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from segcal.data.samples import WorkerDied
from segcal.sweep.runner import OpenTask, Pool, Worker, do
from segcal.sweep.store import Store

Outcome = Future[str | None]  # of `do`


class Alone:
    """Tasks one after the other, in this process."""

    size = 1

    def has_room(self, under_way: int) -> bool:
        """For one task."""
        return not under_way

    def submit(self, task: OpenTask, store: Store, worker: Worker) -> Outcome:
        """Do the task."""
        future: Outcome = Future()
        future.set_result(do(task, store, worker))
        return future

    def wait(self, handles: Sequence[Outcome]) -> list[tuple[Outcome, str | None]]:
        """All are done."""
        return [(future, future.result()) for future in handles]

    def stop(self, handles: Sequence[Outcome]) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Tasks in `size` new processes, which share the machine's cores."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._executor = ProcessPoolExecutor(
            size,
            multiprocessing.get_context("spawn"),
            _prepare,
            (max((os.cpu_count() or 1) // size, 1),),
        )

    def has_room(self, under_way: int) -> bool:
        """For as many tasks as there are processes: none waits where it cannot be stopped."""
        return under_way < self.size

    def submit(self, task: OpenTask, store: Store, worker: Worker) -> Outcome:
        """Give the task to a process."""
        return self._executor.submit(_do, task, store, worker)

    def wait(self, handles: Sequence[Outcome]) -> list[tuple[Outcome, str | None]]:
        """Wait for the first; what it raised becomes its reason."""
        done, _ = wait(handles, return_when=FIRST_COMPLETED)
        return [(future, _outcome(future)) for future in done]

    def stop(self, handles: Sequence[Outcome]) -> None:
        """Ask every process to save its run, and wait until all have ended."""
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        try:
            self.close()
        except KeyboardInterrupt:  # a second signal
            for process in processes:
                process.kill()
            raise

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown(cancel_futures=True)


def _prepare(threads: int) -> None:
    """Begin a process of the pool.

    Signals interrupt its tasks alone: a process that died between two of them would take the
    others with it, before they have saved their runs.
    """
    torch.set_num_threads(threads)
    _set_signals(signal.SIG_IGN)


def _do(task: OpenTask, store: Store, worker: Worker) -> str | None:
    _set_signals(signal.default_int_handler)
    try:
        return do(task, store, worker)
    finally:
        _set_signals(signal.SIG_IGN)


def _set_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _outcome(future: Outcome) -> str | None:
    try:
        return future.result()
    except BrokenProcessPool:
        raise WorkerDied(
            "a process of the grid died: killed, or out of memory; the same command goes on from "
            "its checkpoints"
        ) from None
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def open_pool(options: argparse.Namespace) -> Pool:
    """The pool that a command line asks for."""
    if options.ray is not None:
        from segcal.sweep.ray_pool import RayPool  # only here: few have Ray

        return RayPool(options.ray, cpus=options.cpus_per_run, gpus=options.gpus_per_run)
    return Alone() if options.jobs == 1 else Processes(options.jobs)
