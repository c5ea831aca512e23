"""Pools of workers: this process alone, several on this machine, or a Ray cluster."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from segcal.data.samples import WorkerDied
from segcal.runtime import RETRIES, join_ray
from segcal.sweep.runner import OpenTask, Pool, Worker, do
from segcal.sweep.store import Store

Outcome = Future[str | None]  # of `do`
_SAVING = 300  # seconds that runs on Ray have to save themselves when the sweep is stopped


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


class RayPool:
    """Tasks of a Ray cluster, which sees the files of the grid at the same paths.

    They are tried again where a worker or a node dies.

    Args:
        address: of the cluster, or auto; "" starts one on this machine, for this process alone.
        cpus: of a run.
        gpus: of a run; None for one if the cluster has any.
        retries: of a run whose worker or node died.
    """

    def __init__(
        self,
        address: str = "",
        *,
        cpus: float = 1,
        gpus: float | None = None,
        retries: int = RETRIES,
    ) -> None:
        self._ray, self._leave = join_ray(address)
        has = self._ray.cluster_resources()
        gpus = float(bool(has.get("GPU"))) if gpus is None else gpus
        self._needs = {"CPU": cpus, "GPU": gpus}
        for name, needed in self._needs.items():
            if needed > has.get(name, 0):
                self.close()
                raise ValueError(
                    f"Expected a cluster with {needed:g} {name} for a run, but it has "
                    f"{has.get(name, 0):g}"
                )
        self._do = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_do_on_ray)

    @property
    def size(self) -> int:
        """Runs at a time on the nodes that there are now."""
        has = self._ray.cluster_resources()
        return max(min(int(has.get(n, 0) / need) for n, need in self._needs.items() if need), 1)

    def has_room(self, under_way: int) -> bool:
        """Always: Ray has a queue, by which a cluster may grow."""
        return True

    def submit(self, task: OpenTask, store: Store, worker: Worker) -> Any:
        """Give the task to the cluster."""
        return self._do.options(name=task.run.name).remote(task, store, worker, os.getcwd())

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, str | None]]:
        """Wait for the first."""
        done, _ = self._ray.wait(list(handles), num_returns=1)
        return [(handle, self._outcome(handle)) for handle in done]

    def _outcome(self, handle: Any) -> str | None:
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            lines = str(cause).strip().splitlines() or [""]
            return f"{type(cause).__name__}: {lines[0]}"

    def stop(self, handles: Sequence[Any]) -> None:
        """Interrupt every run, which saves it, and wait until all have ended."""
        for handle in handles:
            self._ray.cancel(handle, force=False)
        if handles:
            self._ray.wait(list(handles), num_returns=len(handles), timeout=_SAVING)

    def close(self) -> None:
        """Leave the cluster; one that was started for this process ends."""
        self._leave()


def _do_on_ray(task: OpenTask, store: Store, worker: Worker, folder: str) -> str | None:
    """`do`, where paths mean what they mean to the driver."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return do(task, store, worker)


def open_pool(options: argparse.Namespace) -> Pool:
    """The pool that a command line asks for."""
    if options.ray is not None:
        return RayPool(options.ray, cpus=options.cpus_per_run, gpus=options.gpus_per_run)
    return Alone() if options.jobs == 1 else Processes(options.jobs)
