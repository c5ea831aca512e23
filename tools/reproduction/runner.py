"""Runs a grid, in one process or several; it can be stopped and resumed at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reproduction.locks import try_lock
from reproduction.plan import Evaluation, Method, Training
from reproduction.store import Store

POLL = 2.0  # seconds between looks at what other processes have finished


class Worker(Protocol):
    """What makes a run. `reproduction.worker.TrainingWorker` is the real one."""

    def train(self, run: Training, store: Store) -> dict[str, Any]:
        """Train or resume `run` in its folder; the hold-out scores of its best epoch."""

    def evaluate(self, run: Training, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Write the report of each evaluation to its place in `store`."""


@dataclass(frozen=True)
class OpenTask:
    """A run that can be worked on now, and the evaluations it then needs."""

    run: Training
    evaluations: tuple[Evaluation, ...]


def open_tasks(methods: Sequence[Method], store: Store) -> Iterator[OpenTask]:
    """What is not done yet and can be started, in order; each run once."""
    seen: set[tuple[str, tuple[Evaluation, ...]]] = set()
    for task in (task for method in methods for task in _of_method(method, store)):
        key = (task.run.name, task.evaluations)
        if key not in seen and store.failure(task.run) is None:
            seen.add(key)
            yield task


def _of_method(method: Method, store: Store) -> Iterator[OpenTask]:
    try:
        hyper = store.choice(method)
    except ValueError:
        return
    if hyper is None:
        yield from (OpenTask(run, ()) for run in method.candidates() if store.trained(run) is None)
        return
    for run in method.chosen(hyper):
        missing = store.missing(run, method)
        if missing or store.trained(run) is None:
            yield OpenTask(run, tuple(missing))


def work(
    methods: Sequence[Method], store: Store, worker: Worker, *, poll: float = POLL
) -> list[str]:
    """Do every task that no other process is doing, until nothing is left for anyone.

    A task whose lock another process holds is left to it. While the others' results are awaited
    (hyper-parameters to be chosen, or a process that may yet die) this one waits.

    Returns:
        `failures`.
    """
    while tasks := list(open_tasks(methods, store)):
        worked = False
        for task in tasks:
            with try_lock(store.folder(task.run)) as mine:
                if mine:
                    worked = _do(task, store, worker) or worked
            if worked:
                break  # what can be started may have changed
        if not worked:
            time.sleep(poll)
    return failures(methods, store)


def failures(methods: Sequence[Method], store: Store) -> list[str]:
    """The runs that could not be made, each with its reason."""
    runs = dict.fromkeys(run for method in methods for run in every_run(method, store))
    reasons = ((run.name, store.failure(run)) for run in runs)
    return [f"{name}: {reason}" for name, reason in reasons if reason is not None]


def every_run(method: Method, store: Store) -> list[Training]:
    """The runs of a method as far as they are known: candidates, then those reported."""
    runs = method.candidates() if len(method.grid) > 1 else []
    try:
        hyper = store.choice(method)
    except ValueError:
        return runs
    return runs if hyper is None else runs + method.chosen(hyper)


def progress(methods: Sequence[Method], store: Store) -> tuple[int, int]:
    """(done, all): how many of the trainings of a grid are complete."""
    done: dict[str, bool] = {}
    unknown = 0  # runs whose hyper-parameters are still to be chosen
    for method in methods:
        runs = every_run(method, store)
        done |= {run.name: store.trained(run) is not None for run in runs}
        if len(method.grid) > 1 and len(runs) == len(method.grid):
            unknown += len(method.seeds) - 1
    return sum(done.values()), len(done) + unknown


def _do(task: OpenTask, store: Store, worker: Worker) -> bool:
    """Do a task under its lock; False if another process did it in the meantime."""
    run = task.run
    missing = [e for e in task.evaluations if not store.report(run, e).exists()]
    if store.failure(run) is not None or (store.trained(run) is not None and not missing):
        return False
    try:
        if store.trained(run) is None:
            store.set_trained(run, worker.train(run, store))
        if missing:
            worker.evaluate(run, store, missing)
            if unwritten := [e for e in missing if not store.report(run, e).exists()]:
                raise RuntimeError(f"no report was written for {unwritten}")
    except (ValueError, ArithmeticError, RuntimeError, OSError) as error:
        store.set_failure(run, " ".join(str(error).split()) or type(error).__name__)
    return True
