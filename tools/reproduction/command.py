"""The command line of `tools/reproduce.py`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from reproduction import figures, opening, paper
from reproduction.experiments import EXPERIMENTS, missing, title
from reproduction.render import make_sheet
from reproduction.results import Setting, numbers
from segcal.commands.options import add_pool_options, spell
from segcal.commands.sweep import work_off, write_sweep
from segcal.files import locked
from segcal.sweep.definition import Sweep
from segcal.sweep.figures import write_figures
from segcal.sweep.plan import Method, in_words, merge_methods
from segcal.sweep.progress import Progress, failures
from segcal.sweep.render import put_into, sheet_markdown, write_sheet
from segcal.sweep.results import Results
from segcal.sweep.runner import open_tasks
from segcal.sweep.store import Store
from segcal.sweep.worker import TrainingWorker
from segcal.training.loader import WorkerDied

FIGURES = {"opening": opening.OPENING, **figures.FIGURES}
Entry = paper.Table | paper.Figure | Sweep


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
    add("--no-tune", dest="tune", action="store_false", help="usual hyper-parameters, no grids")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (auto)")
    add("--dry-run", action="store_true", help="print the trainings that can start; train nothing")
    add("--into", type=Path, metavar="FILE.md", help="also put the tables into this file")
    add_pool_options(found)
    return found


def reproduce(description: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    options = parser(description).parse_args(spell(arguments, "-"))
    try:
        setting = _setting(options)
        if options.list or not options.names:
            print(listing(setting))
            return 0
        command = shlex.join(["python", "tools/reproduce.py", *arguments])
        wanted = [at_scale(paper.find(name), setting) for name in options.names]
        return _reproduce(wanted, setting, options, command)
    except (ValueError, OSError) as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _setting(options: argparse.Namespace) -> Setting:
    if options.seeds < 1:
        raise ValueError(f"Expected --seeds of at least 1, but got {options.seeds}")
    return Setting(
        scale=options.scale,
        data=options.data or Path(os.environ.get("SEGCAL_SHARED_DATA", "data")),
        seeds=tuple(range(options.seeds)),
        tune=options.tune,
        store=Store(options.out / options.scale / "runs"),
    )


def at_scale(entry: Entry, setting: Setting) -> Entry:
    """The entry; of our own tables, the one at the scale of the setting."""
    return setting.sweep(entry) if isinstance(entry, Sweep) else entry


def methods_of(entry: Entry, setting: Setting) -> list[Method]:
    """All that a table or figure needs."""
    if isinstance(entry, Sweep):
        return entry.methods()
    if isinstance(entry, paper.Table):
        return setting.methods(entry)
    return merge_methods(FIGURES[entry.name].needs(setting))


def listing(setting: Setting) -> str:
    """Every table and figure: what it is called, how far it is, and which data is missing."""
    lines = [f"at --scale {setting.scale}, in {setting.store.root.parent}:"]
    kinds: dict[str, Iterable[Entry]] = {
        "tables": paper.tables().values(),
        "figures": paper.figures().values(),
        "tables of our own": paper.own_tables().values(),
    }
    for kind, entries in kinds.items():
        lines += ["", kind]
        for entry in entries:
            label = f" ({paper.label_of(entry)})" if paper.label_of(entry) else ""
            lines.append(f"  {entry.name:<22} {entry.title}{label}")
            lines.append(f"  {'':<22} {_state(at_scale(entry, setting), setting)}")
    return "\n".join(lines)


def _state(entry: Entry, setting: Setting) -> str:
    methods = methods_of(entry, setting)
    now = Progress.of(methods, setting.store)
    parts = [f"{now.done} of {now.total} runs done"]
    needed = (
        missing(config, setting.data) for config in {method.config: None for method in methods}
    )
    if lacking := [what for what in needed if what is not None]:
        parts.append(f"missing {', '.join(dict.fromkeys(lacking))}")
    return "; ".join(parts)


def _reproduce(
    wanted: Sequence[Entry], setting: Setting, options: argparse.Namespace, command: str
) -> int:
    methods = merge_methods(method for entry in wanted for method in methods_of(entry, setting))
    for method in methods:
        if (lacking := missing(method.config, setting.data)) is not None:
            raise ValueError(
                f"Expected {lacking} for {method.config}, but there is none; "
                "data/README.md says where data goes, --list what can be made"
            )
    worker = TrainingWorker(setting.data.resolve(), options.device)
    if options.dry_run:
        for task in open_tasks(methods, setting.store):
            print(worker.command(task.run, setting.store))
        return 0
    folder = setting.store.root.parent
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait=False):
        failed = work_off(methods, setting.store, worker, options)
        for entry in wanted:
            if isinstance(entry, paper.Figure) and failures(
                methods_of(entry, setting), setting.store
            ):
                print(f"{entry.name}: not drawn, for want of the runs that failed", file=sys.stderr)
                continue
            for path in _write(entry, setting, command, options.into):
                print(path)
    return 1 if failed else 0


def _write(entry: Entry, setting: Setting, command: str, into: Path | None) -> list[Path]:
    folder = setting.store.root.parent
    if isinstance(entry, paper.Figure):
        maker = FIGURES[entry.name]
        return write_figures(lambda: maker.draw(setting), entry.name, folder)
    mark = f"reproduce {entry.name} --scale {setting.scale}"
    if isinstance(entry, Sweep):
        results = Results(entry, setting.store)
        return write_sweep(results, folder, command, _how(setting), into, mark)
    sheet = make_sheet(
        entry,
        numbers(entry, setting),
        {
            name: title(name, setting.scale, setting.data)
            for name in (*entry.rows, *entry.columns)
            if name in EXPERIMENTS
        },
        command,
        _remarks(entry, setting),
    )
    if into is not None:
        put_into(into, mark, sheet_markdown(sheet))
    return write_sheet(sheet, folder)


def _how(setting: Setting) -> list[str]:
    """What is true of every table at this scale."""
    said = [
        "Best epoch and hyper-parameters by accuracy on the hold-out, never on the test data."
        if setting.tune
        else "Best epoch by accuracy on the hold-out; usual hyper-parameters.",
    ]
    if setting.scale == "small":
        said.insert(0, "A small stand-in on a CPU: not comparable with the paper's numbers.")
    return said


def _remarks(entry: paper.Table, setting: Setting) -> list[str]:
    """How the numbers came about."""
    seeds = len(setting.seeds)
    first = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    said = [first, *_how(setting)]
    for method in setting.methods(entry):
        hyper = setting.store.choice(method) if setting.tune and len(method.grid) > 1 else None
        if hyper:
            chosen = ", ".join(f"{name} {in_words(value)}" for name, value in hyper)
            said.append(f"{method.config}, {method.loss}: {chosen} chosen of {len(method.grid)}.")
    return said
