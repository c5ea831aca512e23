"""The command line of `tools/reproduce.py`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import NoReturn

from reproduction import figures, opening, paper, render, runner
from reproduction.experiments import EXPERIMENTS, missing, title
from reproduction.plan import Method, merge_methods
from reproduction.pool import work_together
from reproduction.results import Setting, comparisons, numbers
from reproduction.store import Store
from reproduction.worker import TrainingWorker
from segcal.commands.options import spell
from segcal.data.options import DataConfig

FIGURES = {"opening": opening.OPENING, **figures.FIGURES}
TableOrFigure = paper.Table | paper.Figure


def parser(description: str) -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="tools/reproduce.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("names", nargs="*", metavar="NAME", help="tables and figures, by our name or the paper's")
    add("--list", action="store_true", help="name every table and figure, and how far it is")
    add("--scale", choices=("small", "full"), default="full", help="small: for a CPU (full)")
    add("--seeds", type=int, default=3, metavar="N", help="trainings of each loss (3)")
    add("--out", type=Path, default=Path("runs/reproduce"), help="folder of all runs and tables")
    add("--data", type=Path, help="folder of the data sets ($SEGCAL_SHARED_DATA, or data)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    add("--no-tune", dest="tune", action="store_false", help="usual hyper-parameters, no grids")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (auto)")
    add("--dry-run", action="store_true", help="print the trainings that can start; train nothing")
    add("--into", type=Path, metavar="FILE.md", help="also put the tables into this file")
    return found


def reproduce(description: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    options = parser(description).parse_args(spell(arguments, "-"))
    signal.signal(signal.SIGTERM, _stop)
    try:
        setting = _setting(options)
        if options.list or not options.names:
            print(listing(setting))
            return 0
        command = shlex.join(["python", "tools/reproduce.py", *arguments])
        return _reproduce([paper.find(name) for name in options.names], setting, options, command)
    except (ValueError, OSError) as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _setting(options: argparse.Namespace) -> Setting:
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"Expected --{name} of at least 1, but got {getattr(options, name)}")
    return Setting(
        scale=options.scale,
        data=options.data or Path(os.environ.get("SEGCAL_SHARED_DATA", "data")),
        seeds=tuple(range(options.seeds)),
        tune=options.tune,
        store=Store(options.out / options.scale / "runs"),
    )


def methods_of(entry: TableOrFigure, setting: Setting) -> list[Method]:
    """All that a table or figure needs."""
    if isinstance(entry, paper.Table):
        return setting.methods(entry)
    return merge_methods(FIGURES[entry.name].needs(setting))


def listing(setting: Setting) -> str:
    """Every table and figure: what it is called, how far it is, and which data is missing."""
    lines = [f"at --scale {setting.scale}, in {setting.store.root.parent}:"]
    kinds: dict[str, Iterable[TableOrFigure]] = {
        "tables": paper.tables().values(),
        "figures": paper.figures().values(),
        "tables of our own": paper.own_tables().values(),
    }
    for kind, entries in kinds.items():
        lines += ["", kind]
        for entry in entries:
            label = f" ({entry.label})" if entry.label else ""
            lines.append(f"  {entry.name:<22} {entry.title}{label}")
            lines.append(f"  {'':<22} {_state(entry, setting)}")
    return "\n".join(lines)


def _state(entry: TableOrFigure, setting: Setting) -> str:
    methods = methods_of(entry, setting)
    done, total = runner.progress(methods, setting.store)
    parts = [f"{done} of {total} runs done"]
    if lacking := dict.fromkeys(what for method in methods for what in _lacking(method, setting)):
        parts.append(f"missing {', '.join(lacking)}")
    return "; ".join(parts)


def _lacking(method: Method, setting: Setting) -> list[str]:
    """What is missing to train and evaluate a method: a config, data, an option of the data."""
    kinds = {shift[0] for _, shift in method.evaluations if shift is not None}
    known = {field.name for field in fields(DataConfig)}
    lacking = [f"option data.{kind}" for kind in sorted(kinds - known)]
    config = missing(method.config, setting.data)
    return lacking if config is None else [config, *lacking]


def _reproduce(
    wanted: Sequence[TableOrFigure], setting: Setting, options: argparse.Namespace, command: str
) -> int:
    methods = merge_methods(method for entry in wanted for method in methods_of(entry, setting))
    for method in methods:
        if lacking := _lacking(method, setting):
            raise ValueError(
                f"Expected {' and '.join(lacking)} for {method.config}, but there is none; "
                "data/README.md says where data goes, --list what can be made"
            )
    worker = TrainingWorker(setting.data, options.device)
    if options.dry_run:
        for task in runner.open_tasks(methods, setting.store):
            print(worker.command(task.run, setting.store))
        return 0
    for method in methods:
        for run in runner.every_run(method, setting.store):
            setting.store.forget_failure(run)
    failures = work_together(methods, setting.store, worker, jobs=options.jobs)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    for entry in wanted:
        if isinstance(entry, paper.Figure) and runner.failures(
            methods_of(entry, setting), setting.store
        ):
            print(f"{entry.name}: not drawn, for want of the runs that failed", file=sys.stderr)
            continue
        for path in _write(entry, setting, command, options.into):
            print(path)
    return 1 if failures else 0


def _write(entry: TableOrFigure, setting: Setting, command: str, into: Path | None) -> list[Path]:
    folder = setting.store.root.parent
    if isinstance(entry, paper.Figure):
        return figures.write_figure(FIGURES[entry.name], entry.name, setting, folder)
    sheet = render.Sheet(
        table=entry,
        numbers=numbers(entry, setting),
        titles={
            name: title(name, setting.scale, setting.data)
            for name in (*entry.rows, *entry.columns)
            if name in EXPERIMENTS
        },
        command=command,
        remarks=_remarks(entry, setting),
        comparisons=comparisons(entry, setting),
    )
    if into is not None:
        mark = f"reproduce {entry.name} --scale {setting.scale}"
        render.put_into(into, mark, render.sheet_markdown(sheet))
    drawn = (
        figures.write_figure(figures.of_table(entry), entry.name, setting, folder)
        if entry.drawn
        else []
    )
    return [*render.write_sheet(sheet, folder), *drawn]


def _remarks(entry: paper.Table, setting: Setting) -> list[str]:
    """How the numbers came about."""
    seeds = len(setting.seeds)
    said = [
        f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed.",
        "Best epoch and hyper-parameters by accuracy on the hold-out, never on the test data."
        if setting.tune
        else "Best epoch by accuracy on the hold-out; usual hyper-parameters.",
    ]
    if setting.scale == "small":
        said.insert(0, "A small stand-in on a CPU: not comparable with the paper's numbers.")
    for method in setting.methods(entry):
        hyper = setting.store.choice(method) if setting.tune and len(method.grid) > 1 else None
        if hyper:
            chosen = ", ".join(f"{name} {value:g}" for name, value in hyper)
            said.append(f"{method.config}, {method.loss}: {chosen} chosen of {len(method.grid)}.")
    return said
