"""The command line of `tools/reproduce.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reproduction import figures, opening, paper
from reproduction.render import make_sheet, numbers
from segcal.commands.options import Parser
from segcal.commands.sweep import add_grid, make, open_runs
from segcal.sweep.definition import Sweep, read_sweep
from segcal.sweep.results import Results, save_figures, write_sweeps
from segcal.sweep.runner import Runs, plan
from segcal.viz.tables import put_into

MAKERS = {"opening": opening.OPENING, **figures.FIGURES}


def parser(description: str) -> Parser:
    """The options."""
    found = Parser("python tools/reproduce.py", description)
    add = found.add_argument
    add("names", nargs="*", metavar="NAME", help="tables and figures, by our name or the paper's")
    add("--list", action="store_true", help="list every table and figure, and its progress")
    add(
        "--scale", choices=("small", "full"), default="full", help="small: for a CPU; default: full"
    )
    add_grid(found, Path("runs/reproduce"))
    return found


def read_options(description: str, arguments: Sequence[str]) -> argparse.Namespace:
    """What was typed; results of the two scales are in folders of their own."""
    options = parser(description).parse(arguments)
    options.out = options.out / options.scale
    options.data = options.data or Path("data")
    return options


def reproduce(description: str, arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    try:
        options = read_options(description, arguments)
        runs = open_runs(options)
        if options.list or not options.names:
            print(listing(runs, options))
            return 0
        wanted = [paper.find(name) for name in options.names]
        made = [(item, sweeps_of(item, runs, options)) for item in wanted]
        methods = [method for _, sweeps in made for sweep in sweeps for method in sweep.methods]

        def write() -> Iterator[Path]:
            for item, sweeps in made:
                yield from _write(item, sweeps, runs, options)

        return make(methods, runs, options, write)
    except (ValueError, OSError) as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def sweeps_of(item: paper.PaperItem, runs: Runs, options: argparse.Namespace) -> list[Sweep]:
    """What is trained and evaluated for a table or figure."""
    maker = MAKERS[item.name] if isinstance(item, paper.Figure) else None
    folder = "" if isinstance(item, paper.OwnTable) else "paper/"
    name = f"{folder}{item.name if maker is None else maker.sweep}"
    sweep = read_sweep(name, small=options.scale == "small", at_hand=runs.at_hand)
    sweep = sweep.changed(seeds=options.seeds, tune=not options.no_tune)
    return [sweep] if maker is None else maker.parts(sweep)


def listing(runs: Runs, options: argparse.Namespace) -> str:
    """Every table and figure: what it is called, how far it is, and which data is missing."""
    lines = [f"at --scale {options.scale}, in {options.out}:"]
    kinds: dict[str, Mapping[str, paper.PaperItem]] = {
        "tables": paper.tables(),
        "figures": paper.figures(),
        "tables of our own": paper.own_tables(),
    }
    for kind, items in kinds.items():
        lines += ["", kind]
        for item in items.values():
            sweeps = sweeps_of(item, runs, options)
            title = item.title if isinstance(item, paper.Figure) else sweeps[0].title
            label = f" ({item.label})" if item.label else ""
            configs = dict.fromkeys(config for sweep in sweeps for config in sweep.config)
            lacking = [config for config in configs if runs.lacks(config) is not None]
            missing = f"; missing: data of {', '.join(lacking)}" if lacking else ""
            methods = [method for sweep in sweeps for method in sweep.methods]
            lines.append(f"  {item.name:<22} {title}{label}")
            lines.append(f"  {'':<22} {plan(methods, runs)[0]}{missing}")
    return "\n".join(lines)


def _write(
    item: paper.PaperItem, sweeps: Sequence[Sweep], runs: Runs, options: argparse.Namespace
) -> Iterator[Path]:
    results = [Results(sweep, runs) for sweep in sweeps]
    first = results[0]
    if isinstance(item, paper.Figure):
        if runs.failures:
            print(f"{item.name}: not drawn, because runs failed", file=sys.stderr)
            return
        yield from save_figures(lambda: MAKERS[item.name].draw(results), item.name, options.out)
        return
    said = [runs.weights_remark(sweeps[0].methods[0])]
    if options.scale == "small":
        said.insert(0, stand_in(first.sweep))
    mark = f"reproduce {item.name} --scale {options.scale}"
    if isinstance(item, paper.OwnTable):
        yield from write_sweeps(sweeps, runs, options.out, options.typed, options.into, mark, said)
        return
    said = [*first.remarks(), *said]
    sheet = make_sheet(item, first.sweep, numbers(item, first), options.typed, said)
    if options.into is not None:
        put_into(options.into, mark, sheet.markdown())
    yield from sheet.write(options.out)


def stand_in(sweep: Sweep) -> str:
    """What was trained and evaluated instead."""
    made = ", ".join(dict.fromkeys(sweep.config))
    shifts = ", ".join(map(str, sweep.shifts()))
    under = f" under {shifts}" if shifts else ""
    return f"Stand-ins for a CPU ({made}{under}): not comparable with the paper's numbers."
