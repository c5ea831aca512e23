"""`segcal sweep`: trains and evaluates a grid, and writes its tables."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from segcal.commands.train import header
from segcal.files import locked
from segcal.sweep.definition import Sweep, read_sweep
from segcal.sweep.figures import draw_sweep, save_figures
from segcal.sweep.plan import Method, merge_methods
from segcal.sweep.pools import open_pool
from segcal.sweep.results import Results
from segcal.sweep.runner import open_tasks, work
from segcal.sweep.store import GridProgress, Store, every_run, in_time
from segcal.sweep.worker import TrainingWorker, find_config
from segcal.training.config import RECIPES
from segcal.viz.tables import put_into


def run_sweeps(options: argparse.Namespace, arguments: Sequence[str], prog: str) -> int:
    """Make the tables of the sweeps that the options name; 1 if a run failed, else 0."""
    worker = worker_of(options)
    sweeps = [find_sweep(name, worker, options) for name in options.sweeps]
    command = shlex.join([*prog.split(), *arguments])

    def write(store: Store) -> Iterator[Path]:
        for sweep in sweeps:
            remarks, mark = [weights_remark(sweep, worker, store)], f"sweep {sweep.name}"
            results = Results(sweep, store)
            yield from write_sweep(results, options.out, command, remarks, options.into, mark)

    return make(sweeps, worker, options, write)


def worker_of(options: argparse.Namespace) -> TrainingWorker:
    """What trains and evaluates, with the data and device of the options."""
    data = None if options.data is None else options.data.resolve()
    return TrainingWorker(data, options.device)


def find_sweep(name: str, worker: TrainingWorker, options: argparse.Namespace) -> Sweep:
    """The sweep of a file, or of a name that comes with segcal, changed as the options say."""
    ours = RECIPES / "sweeps" / f"{name}.yaml"
    path = ours if ours.exists() and not Path(name).exists() else Path(name)
    sweep = read_sweep(
        path,
        small=options.small,
        at_hand=lambda config: worker.missing(config, fetch=False) is None,
    )
    sweep = sweep if options.seeds is None else sweep.with_seeds(options.seeds)
    return sweep if options.tune else sweep.untuned()


def make(
    sweeps: Sequence[Sweep],
    worker: TrainingWorker,
    options: argparse.Namespace,
    write: Callable[[Store], Iterable[Path]],
) -> int:
    """Train and evaluate sweeps in `options.out`, or say what that takes; 1 if a run failed.

    Args:
        sweeps: what to make.
        worker: makes the runs.
        options: those of `segcal sweep`.
        write: writes tables and figures from what is there, and returns their paths.
    """
    methods = merge_methods(method for sweep in sweeps for method in sweep.methods())
    store = Store(options.out.resolve() / "runs")
    store = Store(store.root, worker.found_in(options.runs, methods, store))
    worker.expect_same(methods, store)
    if options.dry_run:
        _estimate(sweeps, methods, store, worker)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with locked(options.out, wait=False):
        failures = _work_off(methods, store, worker, options)
        for path in write(store):
            print(path)
    return 1 if failures else 0


def write_sweep(
    results: Results,
    folder: Path,
    command: str,
    remarks: Sequence[str],
    into: Path | None,
    mark: str,
) -> list[Path]:
    """Write the tables and diagrams of a sweep, also between the comments of `mark` in `into`."""
    sheet = results.sheet(command, remarks)
    if into is not None:
        put_into(into, mark, sheet.markdown())
    drawn = save_figures(lambda: draw_sweep(results), results.sweep.name, folder)
    pictures = [path.read_bytes() for path in drawn if path.suffix == ".png"]
    return [*replace(sheet, pictures=pictures).write(folder), *drawn]


def _work_off(
    methods: Sequence[Method], store: Store, worker: TrainingWorker, options: argparse.Namespace
) -> list[str]:
    """Do what is left of a grid on the pool that is asked for; the runs that failed."""
    runs = dict.fromkeys(run for method in methods for run in every_run(method, store))
    for run in runs:
        store.forget_failure(run)
        if run.name in store.found:
            store.set_trained(run, store.trained(run) or {})
    signal.signal(signal.SIGTERM, _stop)
    pool = open_pool(options)
    try:
        say = partial(print, flush=True)
        failures = work(methods, store, worker, pool, train=options.train, say=say)
    except KeyboardInterrupt:
        print("saved; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        pool.close()
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return failures


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _estimate(
    sweeps: Sequence[Sweep], methods: Sequence[Method], store: Store, worker: TrainingWorker
) -> None:
    """Print how many runs there are and what is left to do; then the trainings that can start."""
    now = GridProgress.of(methods, store)
    found = f", {len(store.found)} of them found in --runs" if store.found else ""
    most = " at most" if any(len(sweep.select) > 1 for sweep in sweeps) else ""
    print(f"{now.total} trainings{most}, {now.done} done{found}; {now.reports} reports to make")
    if now.seconds is not None:
        print(f"about {in_time(now.seconds)} left on one worker, as the runs that are done took")
    else:
        configs = (config for sweep in sweeps for config in sweep.configs)
        for config in dict.fromkeys(map(find_config, configs)):
            costs = [text for text in header(config) if text.startswith("cost: ")]
            cost = costs[0] if costs else "cost unknown until the first run is done"
            print(f"one training, by {config}: {cost.removeprefix('cost: ')}")
    for task in open_tasks(methods, store):
        if store.trained(task.run) is None:
            print(worker.command(task.run, store))


def weights_remark(sweep: Sweep, worker: TrainingWorker, store: Store) -> str:
    """Which epoch is evaluated."""
    config = worker.config(sweep.methods()[0].candidates()[0], store)
    if config.eval_every >= config.epochs:
        return "The weights of the last epoch are evaluated."
    return f"The weights of the epoch with the best {config.select} on the hold-out are evaluated."
