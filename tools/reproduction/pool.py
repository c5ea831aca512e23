"""Several processes that work on one grid, and stop together."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reproduction import runner
from reproduction.plan import Evaluation, Method, Training
from reproduction.runner import Worker
from reproduction.store import Store
from segcal.metrics.scores import SCORES
from segcal.runtime import Interrupted


def work_together(
    methods: Sequence[Method], store: Store, worker: Worker, *, jobs: int
) -> list[str]:
    """Work off a grid with `jobs` processes; the runs that failed, each with its reason.

    Raises:
        KeyboardInterrupt: a signal stopped the work; every run under way was saved.
        RuntimeError: a process died.
    """
    if jobs == 1:
        return _work(methods, store, worker, jobs=1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_process, args=(methods, store, worker, jobs)) for _ in range(jobs)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        raise
    codes = [process.exitcode for process in processes]
    if 130 in codes:
        raise KeyboardInterrupt
    if any(codes):
        raise RuntimeError(f"a process of the grid died (exit statuses {codes})")
    return runner.failures(methods, store)


def _process(methods: Sequence[Method], store: Store, worker: Worker, jobs: int) -> None:
    try:
        _work(methods, store, worker, jobs=jobs)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _work(methods: Sequence[Method], store: Store, worker: Worker, *, jobs: int) -> list[str]:
    if jobs > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // jobs, 1))
    try:
        return runner.work(methods, store, Narrated(worker, methods))
    except Interrupted:
        raise KeyboardInterrupt from None


@dataclass(frozen=True)
class Narrated:
    """A worker that prints a line when a training is complete."""

    worker: Worker
    methods: Sequence[Method]

    def train(self, run: Training, store: Store) -> dict[str, Any]:
        """Train or resume `run`."""
        started = time.monotonic()
        scores = self.worker.train(run, store)
        done, total = runner.progress(self.methods, store)
        print(
            f"[{done + 1}/{total}] {run.name}: hold-out "
            f"accuracy {SCORES['accuracy'].brief(scores['accuracy'])}, "
            f"ECE {SCORES['ece'].brief(scores['ece'])}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        return scores

    def evaluate(self, run: Training, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Evaluate `run`."""
        self.worker.evaluate(run, store, evaluations)
