"""Train and evaluate a grid of methods and seeds, and write its tables. Resumable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from segcal.commands.options import UNITS, add_options

if TYPE_CHECKING:
    from segcal.sweep.definition import Method
    from segcal.sweep.runner import Runs


GRID = {
    "--seeds N": "seeds of each method, instead of those of the file",
    "--no-tune": "use the first value of every list of hyper-parameters instead of choosing",
    "--runs DIR *": "folder of runs to reuse: complete runs with the same settings and data are "
    "not trained again",
    "--data DIR": "data folder, in place of data/ in the configs",
    "--same-data OLD=DIR *": "the data in DIR (or OLD=DIR) is what the runs were trained on in "
    "OLD: it was moved, or only the times of its files have changed",
    "--device NAME=auto": "auto, cpu, cuda, cuda:1 or mps",
    "--into FILE.md": "file to put the tables in",
    "--dry-run": "print the plan and its cost; train nothing",
    "--jobs N=1": "runs at a time",
    "--cpus-per-run SHARE=1": "with --ray",
    "--gpus-per-run SHARE": "with --ray; default: 1 if there are any",
    "--no-train": "train nothing: evaluate and show what is already trained",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which sweeps, and where and how they are made."""
    about = "definition of the sweep: a file, or the name of one that comes with segcal"
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP.yaml", help=about)
    add_options(parser, {"--small": "run the version that the file calls small", **UNITS})
    add_grid(parser, Path("runs/sweep"))


def add_grid(parser: argparse.ArgumentParser, out: Path) -> None:
    """Where and how a grid is made; `out` is the default folder."""
    add_options(parser, {f"--out DIR={out}": "folder of runs and tables", **GRID})
    about = (
        "train on a Ray cluster: its address, auto for a running one, or no value to start one on "
        "this machine"
    )
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=about)


def run(options: argparse.Namespace) -> int:
    """Make the tables of the sweeps; 1 if a run failed, else 0."""
    from segcal.sweep.definition import read_sweep
    from segcal.sweep.results import write_sweeps

    runs = open_runs(options)
    sweeps = [
        read_sweep(name, small=options.small, at_hand=runs.at_hand).changed(
            seeds=options.seeds, tune=not options.no_tune
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
            failures = work(methods, runs, pool, train=not options.no_train, say=say)
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
