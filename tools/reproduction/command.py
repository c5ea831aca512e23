"""The command line of `tools/reproduce.py`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reproduction import figures, opening, paper
from reproduction.render import make_sheet, numbers
from segcal.commands.options import add_grid_options, spell
from segcal.commands.sweep import find_sweep, make, weights_remark, worker_of, write_sweep
from segcal.data.samples import WorkerDied
from segcal.sweep.definition import Sweep
from segcal.sweep.figures import save_figures
from segcal.sweep.plan import merge_methods
from segcal.sweep.results import Results
from segcal.sweep.store import GridProgress, Store, failures
from segcal.sweep.worker import TrainingWorker
from segcal.viz.tables import put_into

MAKERS = {"opening": opening.OPENING, **figures.FIGURES}


def parser(description: str) -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="tools/reproduce.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("names", nargs="*", metavar="NAME", help="tables and figures, by our name or the paper's")
    add("--list", action="store_true", help="list every table and figure, and its progress")
    add(
        "--scale", choices=("small", "full"), default="full", help="small: for a CPU; default: full"
    )
    add_grid_options(found, Path("runs/reproduce"))
    return found


def reproduce(description: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    options = parser(description).parse_args(spell(arguments, "-"))
    options.small = options.scale == "small"
    options.out = options.out / options.scale
    options.data = options.data or Path(os.environ.get("SEGCAL_SHARED_DATA", "data"))
    try:
        if options.list or not options.names:
            print(listing(options))
            return 0
        command = shlex.join(["python", "tools/reproduce.py", *arguments])
        return _reproduce([paper.find(name) for name in options.names], options, command)
    except (ValueError, OSError) as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def sweeps_of(
    entry: paper.PaperItem, worker: TrainingWorker, options: argparse.Namespace
) -> list[Sweep]:
    """What is trained and evaluated for a table or figure."""
    if isinstance(entry, paper.Figure):
        maker = MAKERS[entry.name]
        return maker.parts(find_sweep(f"paper/{maker.sweep}", worker, options))
    folder = "paper/" if isinstance(entry, paper.Table) else ""
    return [find_sweep(f"{folder}{entry.name}", worker, options)]


def listing(options: argparse.Namespace) -> str:
    """Every table and figure: what it is called, how far it is, and which data is missing."""
    worker, store = worker_of(options), Store(options.out / "runs")
    lines = [f"at --scale {options.scale}, in {options.out}:"]
    kinds: dict[str, Mapping[str, paper.PaperItem]] = {
        "tables": paper.tables(),
        "figures": paper.figures(),
        "tables of our own": paper.own_tables(),
    }
    for kind, entries in kinds.items():
        lines += ["", kind]
        for entry in entries.values():
            sweeps = sweeps_of(entry, worker, options)
            title = entry.title if isinstance(entry, paper.Figure) else sweeps[0].title
            label = f" ({entry.label})" if entry.label else ""
            now = GridProgress.of(
                merge_methods(m for each in sweeps for m in each.methods()), store
            )
            lacking = _missing(sweeps, worker)
            missing = f"; missing: data of {', '.join(lacking)}" if lacking else ""
            lines.append(f"  {entry.name:<22} {title}{label}")
            lines.append(f"  {'':<22} {now.done} of {now.total} runs done{missing}")
    return "\n".join(lines)


def _missing(sweeps: Sequence[Sweep], worker: TrainingWorker) -> dict[str, str]:
    """The configs that cannot be trained, and why."""
    configs = dict.fromkeys(config for sweep in sweeps for config in sweep.configs)
    reasons = {config: worker.missing(config) for config in configs}
    return {config: reason for config, reason in reasons.items() if reason is not None}


def _reproduce(wanted: Sequence[paper.PaperItem], options: argparse.Namespace, command: str) -> int:
    worker = worker_of(options)
    plan = [(entry, sweeps_of(entry, worker, options)) for entry in wanted]
    everything = [sweep for _, sweeps in plan for sweep in sweeps]
    for config, reason in _missing(everything, worker).items():
        raise ValueError(f"{reason} (for {config}; --list says what can be made)")

    def write(store: Store) -> Iterator[Path]:
        for entry, sweeps in plan:
            results = [Results(sweep, store) for sweep in sweeps]
            yield from _write(entry, results, worker, options, command)

    return make(everything, worker, options, write)


def _write(
    entry: paper.PaperItem,
    results: Sequence[Results],
    worker: TrainingWorker,
    options: argparse.Namespace,
    command: str,
) -> list[Path]:
    first = results[0]
    if isinstance(entry, paper.Figure):
        methods = [method for each in results for method in each.sweep.methods()]
        if failures(methods, first.store):
            print(f"{entry.name}: not drawn, because some of its runs failed", file=sys.stderr)
            return []
        return save_figures(lambda: MAKERS[entry.name].draw(results), entry.name, options.out)
    mark = f"reproduce {entry.name} --scale {options.scale}"
    said = [weights_remark(first.sweep, worker, first.store)]
    if options.small:
        said.insert(0, _stand_in(first.sweep))
    if isinstance(entry, paper.OwnTable):
        return write_sweep(first, options.out, command, said, options.into, mark)
    said = [*first.remarks(), *said]
    sheet = make_sheet(entry, first.sweep, numbers(entry, first), command, said)
    if options.into is not None:
        put_into(options.into, mark, sheet.markdown())
    return sheet.write(options.out)


def _stand_in(sweep: Sweep) -> str:
    """What was trained and evaluated instead."""
    made = ", ".join(dict.fromkeys(sweep.configs))
    shifted = f" under {', '.join(sweep.shifts())}" if sweep.shifts() else ""
    return f"Stand-ins for a CPU ({made}{shifted}): not comparable with the paper's numbers."
