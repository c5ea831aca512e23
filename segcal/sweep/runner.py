"""Runs a grid on a pool of workers; it can be stopped and resumed at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from segcal.metrics.scores import SCORES
from segcal.sweep.plan import Evaluation, Method, Training
from segcal.sweep.store import GridProgress, Store, failures, in_time
from segcal.training.signals import Interrupted


class Worker(Protocol):
    """What makes a run. `segcal.sweep.worker.TrainingWorker` is the real one."""

    def train(self, run: Training, store: Store) -> dict[str, Any]:
        """Train or resume `run` in its folder; the hold-out scores of its best epoch."""

    def evaluate(self, run: Training, store: Store, evaluations: Sequence[Evaluation]) -> None:
        """Write the report of each evaluation to its place in `store`."""


@dataclass(frozen=True)
class OpenTask:
    """A run that can be worked on now, and the evaluations it then needs."""

    run: Training
    evaluations: tuple[Evaluation, ...]


class Pool(Protocol):
    """Where tasks are worked on."""

    @property
    def size(self) -> int:
        """How many tasks it works on at a time."""

    def has_room(self, under_way: int) -> bool:
        """Whether to submit another task while so many are under way."""

    def submit(self, task: OpenTask, store: Store, worker: Worker) -> Any:
        """Begin `do`; a handle for `wait`."""

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, str | None]]:
        """Wait until at least one is done; those that are, with what `do` returned.

        A task that raised is done too: what it raised is the reason.
        """

    def stop(self, handles: Sequence[Any]) -> None:
        """Save and end the tasks under way."""

    def close(self) -> None:
        """End the workers, when nothing is under way."""


def open_tasks(methods: Sequence[Method], store: Store) -> Iterator[OpenTask]:
    """What is not done yet and can be started, in order; each run once."""
    seen: dict[Training, list[Evaluation]] = {}
    for run, evaluations in (task for method in methods for task in _of_method(method, store)):
        if store.failure(run) is None:
            known = seen.setdefault(run, [])
            known += [evaluation for evaluation in evaluations if evaluation not in known]
    yield from (OpenTask(run, tuple(evaluations)) for run, evaluations in seen.items())


def _of_method(method: Method, store: Store) -> Iterator[tuple[Training, list[Evaluation]]]:
    hyper = store.choice(method)
    if hyper is None:
        yield from ((run, []) for run in method.candidates() if store.trained(run) is None)
        return
    for run in method.chosen(hyper):
        missing = store.missing(run, method)
        if missing or store.trained(run) is None:
            yield run, missing


def work(
    methods: Sequence[Method],
    store: Store,
    worker: Worker,
    pool: Pool,
    *,
    train: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Do every task, as hyper-parameters are chosen, until nothing is left.

    Args:
        methods: of the grid.
        store: its files.
        worker: makes the runs.
        pool: where.
        train: whether to train what is not trained yet, or only to evaluate what is.
        say: called with a line for each task that is done.

    Returns:
        `failures`.

    Raises:
        KeyboardInterrupt: a signal stopped the work; every run under way was saved.
    """
    under_way: dict[Any, OpenTask] = {}
    try:
        while True:
            busy = {task.run for task in under_way.values()}
            for task in open_tasks(methods, store):
                can_start = train or store.trained(task.run) is not None
                if can_start and task.run not in busy and pool.has_room(len(under_way)):
                    under_way[pool.submit(task, store, worker)] = task
            if not under_way:
                return failures(methods, store)
            for handle, reason in pool.wait(list(under_way)):
                task = under_way.pop(handle)
                if reason is not None:
                    store.set_failure(task.run, reason)
                say(_line(task, reason, methods, store, pool.size))
    except KeyboardInterrupt:
        pool.stop(list(under_way))
        raise


def do(task: OpenTask, store: Store, worker: Worker) -> str | None:
    """Train and evaluate as a task says; None, or in one line why it cannot be done.

    Raises:
        KeyboardInterrupt: a signal stopped it; the run was saved.
    """
    run = task.run
    try:
        started = time.monotonic()
        scores = store.trained(run)
        if scores is None:
            scores = worker.train(run, store)
            store.set_trained(run, {"seconds": round(time.monotonic() - started, 1), **scores})
        missing = [e for e in task.evaluations if not store.report(run, e).exists()]
        if missing:
            started = time.monotonic()
            worker.evaluate(run, store, missing)
            if unwritten := [e.name for e in missing if not store.report(run, e).exists()]:
                raise RuntimeError(f"no report was written for {', '.join(unwritten)}")
            each = round((time.monotonic() - started) / len(missing), 2)
            store.set_trained(run, {**(store.trained(run) or {}), "seconds_per_report": each})
    except Interrupted:
        raise KeyboardInterrupt from None
    except (ValueError, ArithmeticError, RuntimeError, OSError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _line(
    task: OpenTask, reason: str | None, methods: Sequence[Method], store: Store, size: int
) -> str:
    now = GridProgress.of(methods, store)
    start = f"[{now.done}/{now.total}] {task.run.name}: "
    if reason is not None:
        return f"{start}failed: {reason}"
    scores, count = store.trained(task.run) or {}, len(task.evaluations)
    return (
        f"{start}hold-out accuracy {SCORES['accuracy'].brief(scores['accuracy'])}, "
        f"ECE {SCORES['ece'].brief(scores['ece'])}"
        + (f", {count} report{'s' * (count > 1)}" if count else "")
        + (f"; about {in_time(now.seconds / size)} left" if now.seconds else "")
    )
