"""Pools that make the runs of a sweep: this process, several on this machine, or Ray."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from segcal.sweep.definition import Method, Training
from segcal.sweep.runner import Outcome, Runs
from segcal.training.signals import Interrupted

_SAVING = 300  # seconds that runs on Ray have to save themselves when the sweep is stopped


class Pool:
    """Runs made one after the other, in this process."""

    size = 1

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._under_way: dict[Any, Any] = {}

    def start(self, training: Training, methods: Sequence[Method]) -> None:
        """Make a run and evaluate it for the methods."""
        self._under_way[training] = self.runs.do(training, methods)

    def wait(self) -> tuple[Training, Outcome]:
        """Wait for the first that is done."""
        return self._under_way.popitem()

    def stop(self, number: int) -> None:
        """Stop all that is under way, on the signal `number`, and wait until it is saved."""

    def close(self) -> None:
        """Give back what is held."""


class Processes(Pool):
    """Each run in a new process, `size` at a time, which share the machine's cores."""

    def __init__(self, runs: Runs, size: int) -> None:
        super().__init__(runs)
        self.size = size

    def start(self, training: Training, methods: Sequence[Method]) -> None:
        """Start a process for the run."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe(duplex=False)
        threads = max((os.cpu_count() or 1) // self.size, 1)
        process = spawn.Process(target=_work, args=(self.runs, training, methods, theirs, threads))
        process.start()
        theirs.close()
        self._under_way[ours] = training, process

    def wait(self) -> tuple[Training, Outcome]:
        """Wait for the first; a process that died has failed."""
        ours = wait(list(self._under_way))[0]
        assert isinstance(ours, Connection)
        training, process = self._under_way.pop(ours)
        try:
            outcome = ours.recv()
        except EOFError:
            process.join()
            outcome = (
                f"its process ended with status {process.exitcode}, killed or out of memory; "
                "the same command continues from its last checkpoint"
            )
        process.join()
        return training, outcome

    def stop(self, number: int) -> None:
        """Wait until every process has saved its run; a further signal ends them at once."""
        processes = [process for _, process in self._under_way.values()]
        if number != signal.SIGINT:  # Ctrl-C reaches all processes of a terminal by itself
            for process in processes:
                process.terminate()
        try:
            for process in processes:
                process.join()
        except KeyboardInterrupt:
            for process in processes:
                process.kill()
            raise


def _work(
    runs: Runs, training: Training, methods: Sequence[Method], result: Connection, threads: int
) -> None:
    torch.set_num_threads(threads)
    folder = runs.folder(training)
    folder.mkdir(parents=True, exist_ok=True)
    # What several processes print would be mixed up.
    sys.stdout = sys.stderr = (folder / "output.txt").open("a", encoding="utf-8")
    try:
        result.send(runs.do(training, methods))
    except KeyboardInterrupt:  # the run was saved
        raise SystemExit(1) from None


class OnRay(Pool):
    """Runs on a Ray cluster, whose nodes see the files of the sweep at the same paths.

    A run whose worker or node dies is tried again, up to five times, and goes on from its last
    checkpoint. The address is where the cluster is, or auto; "" starts one on this machine, for
    this process. A run has one GPU if the cluster has any, unless `gpus` says otherwise.
    """

    size = 10**6  # Ray has a queue of its own, by which a cluster may grow

    def __init__(
        self, runs: Runs, address: str = "", *, cpus: float = 1, gpus: float | None = None
    ) -> None:
        super().__init__(runs)
        self._ray, self._joined = _join(address)
        has = self._ray.cluster_resources()
        if gpus is None:
            gpus = 1 if has.get("GPU") else 0
        for name, needed in (("CPU", cpus), ("GPU", gpus)):
            if needed > has.get(name, 0):
                raise ValueError(
                    f"a run needs {needed:g} {name}, but the cluster has {has.get(name, 0):g}"
                )
        self._do = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=5)(_work_on_ray)
        self._shared = self._ray.put(runs)

    def start(self, training: Training, methods: Sequence[Method]) -> None:
        """Give the run to the cluster."""
        remote = self._do.options(name=training.label)
        self._under_way[remote.remote(self._shared, training, methods, os.getcwd())] = training

    def wait(self) -> tuple[Training, Outcome]:
        """Wait for the first."""
        (handle, *_), _ = self._ray.wait(list(self._under_way), num_returns=1)
        try:
            outcome = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            lines = str(cause).strip().splitlines() or [""]
            outcome = f"{type(cause).__name__}: {lines[0]}"
        return self._under_way.pop(handle), outcome

    def stop(self, number: int) -> None:
        """Interrupt every run, which saves it, and wait until all have ended."""
        handles = list(self._under_way)
        for handle in handles:
            self._ray.cancel(handle, force=False)
        if handles:
            self._ray.wait(handles, num_returns=len(handles), timeout=_SAVING)

    def close(self) -> None:
        """Leave the cluster, if the pool has joined it; one of this process alone ends."""
        if self._joined:
            self._ray.shutdown()


def _work_on_ray(runs: Runs, training: Training, methods: Sequence[Method], folder: str) -> Outcome:
    if os.path.isdir(folder):  # paths mean what they mean to the command
        os.chdir(folder)
    return runs.do(training, methods)


def _join(address: str) -> tuple[Any, bool]:
    """The module `ray`, connected to a cluster, and whether it was not connected before."""
    try:
        import ray
    except ImportError:
        raise ValueError('--ray needs Ray: pip install "segcal[ray]"') from None
    if ray.is_initialized():
        return ray, False
    if address not in ("", "auto", "local"):  # Ray would try for minutes where nothing answers
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"--ray takes auto or HOST:PORT, but got {address!r:.200}")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise ValueError(f"there is no Ray cluster at {address}: {error}") from None
    own: dict[str, Any] = {}
    if not address:
        own = {"include_dashboard": False, "object_store_memory": 200 * 2**20}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        place, reason = address or "this machine", str(error).partition("\n")[0]
        raise ValueError(f"there is no Ray cluster at {place}: {reason}") from None
    return ray, True


def open_pool(
    runs: Runs, jobs: int = 1, ray: str | None = None, *, cpus: float = 1, gpus: float | None = None
) -> Pool:
    """A pool of `jobs` processes, or of a Ray cluster; SIGTERM then stops it as Ctrl-C does."""

    def stop(number: int, _: Any) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, stop)
    if ray is not None:
        return OnRay(runs, ray, cpus=cpus, gpus=gpus)
    return Pool(runs) if jobs == 1 else Processes(runs, jobs)
