"""Train and evaluate a grid of methods and seeds, and write its tables. Resumable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from segcal.commands.options import add_units, at_least, checked

if TYPE_CHECKING:
    from segcal.sweep.definition import Method
    from segcal.sweep.runner import Runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which sweeps, and where and how they are made."""
    parser.add_argument(
        "sweeps",
        nargs="+",
        metavar="SWEEP.yaml",
        help="definition of the sweep: a file, or the name of one that comes with segcal",
    )
    parser.add_argument(
        "--small", action="store_true", help="run the version that the file calls small"
    )
    add_grid(parser, Path("runs/sweep"))
    add_units(parser)


def add_grid(parser: argparse.ArgumentParser, out: Path) -> None:
    """Where and how a grid is made; `out` is the default folder."""
    add = parser.add_argument
    add("--out", type=Path, default=out, help=f"folder of runs and tables; default: {out}")
    add("--seeds", type=at_least(1), metavar="N", help="seeds of each method, for the file's")
    add(
        "--no-tune",
        dest="tune",
        action="store_false",
        help="use the first value of every list of hyper-parameters instead of choosing",
    )
    add(
        "--runs",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of runs to reuse: complete runs with the same settings and data are not "
        "trained again",
    )
    add("--data", type=Path, help="data folder, in place of data/ in the configs")
    add(
        "--same-data",
        type=checked(_moved),
        action="append",
        default=[],
        metavar="[OLD=]DIR",
        help="the data in DIR is what the runs were trained on in OLD: it was moved, or only the "
        "times of its files have changed",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps; default: auto")
    add("--into", type=Path, metavar="FILE.md", help="file to put the tables in")
    add("--dry-run", action="store_true", help="print the plan and its cost; train nothing")
    add("--jobs", type=at_least(1), default=1, metavar="N", help="runs at a time; default: 1")
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="train on a Ray cluster: its address, auto for a running one, or no value to start "
        "one on this machine",
    )
    share = checked(_share)
    add("--cpus-per-run", type=share, default=1.0, metavar="N", help="with --ray; default: 1")
    add("--gpus-per-run", type=share, metavar="N", help="with --ray; default: 1 if there are any")
    add(
        "--no-train",
        dest="train",
        action="store_false",
        help="train nothing: evaluate and show what is already trained",
    )


def _moved(text: str) -> tuple[Path, Path]:
    old, _, new = text.rpartition("=")
    return Path(new), Path(old or new)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is no number of at least 0")
    return value


def run(options: argparse.Namespace) -> int:
    """Make the tables of the sweeps; 1 if a run failed, else 0."""
    from segcal.sweep.definition import read_sweep
    from segcal.sweep.results import write_sweeps

    runs = open_runs(options)
    sweeps = [
        read_sweep(name, small=options.small, at_hand=runs.at_hand).changed(
            seeds=options.seeds, tune=options.tune
        )
        for name in options.sweeps
    ]
    return make(
        [method for sweep in sweeps for method in sweep.methods],
        runs,
        options,
        lambda: write_sweeps(sweeps, runs, options.out, options.typed, options.into),
    )


def open_runs(options: argparse.Namespace) -> Runs:
    """The runs in --out, with those that --runs adds."""
    from segcal.sweep.runner import Runs

    return Runs(
        options.out.resolve() / "runs",
        data=None if options.data is None else options.data.resolve(),
        device=options.device,
        elsewhere=[folder.resolve() for folder in options.runs],
        moved=dict(options.same_data),
    )


def make(
    methods: Sequence[Method],
    runs: Runs,
    options: argparse.Namespace,
    write: Callable[[], Iterable[Path]],
) -> int:
    """Do the work, or print the plan of --dry-run; then write. 1 if a run failed, else 0."""
    from segcal.files import locked
    from segcal.sweep.pools import open_pool
    from segcal.sweep.runner import plan, work

    if options.dry_run:
        print(*plan(methods, runs), sep="\n")
        try:
            runs.require_data(methods)
        except (ValueError, OSError) as error:
            print(f"before it can start: {error}")
        return 0
    runs.require_data(methods)
    options.out.mkdir(parents=True, exist_ok=True)
    pool = open_pool(
        runs, options.jobs, options.ray, cpus=options.cpus_per_run, gpus=options.gpus_per_run
    )
    try:
        with locked(options.out, wait=False):
            say = partial(print, flush=True)
            failures = work(methods, runs, pool, train=options.train, say=say)
            for path in write():
                print(path)
    except KeyboardInterrupt:
        print("saved; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        pool.close()
    for training, reason in failures.items():
        print(f"failed: {training.label}: {reason}", file=sys.stderr)
    return 1 if failures else 0
