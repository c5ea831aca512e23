"""Add up the states of evaluations of parts of a data set."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import PAGE, RESAMPLES, UNITS, add_options, show

OPTIONS = {
    "--out FILE": "file of the merged state, .npz",
    "--report DIR": "folder of the page and tables",
    **PAGE,
    **UNITS,
    **RESAMPLES,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to add up, and where to write it."""
    about = (
        "a state.npz that `segcal eval` or `CalibrationMeter.save` wrote, or its folder: the state "
        "of a part of the images"
    )
    parser.add_argument("states", nargs="+", type=Path, metavar="STATE", help=about)
    add_options(parser, OPTIONS)


def run(options: argparse.Namespace) -> None:
    """Merge, print the scores, and write what is asked for."""
    from segcal.evaluation.folder import require_writable, state_file
    from segcal.evaluation.states import merge_states
    from segcal.viz.tables import counted, describe_report

    for folder in filter(None, (options.report, options.out and options.out.parent)):
        require_writable(folder)
    if options.out is not None and options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file")
    for state in map(state_file, options.states):
        if options.report is not None and options.report.resolve() in state.resolve().parents:
            raise ValueError(f"--report {options.report} holds {state}: name another folder")
    name = "" if options.out is None else options.out.stem
    merged = merge_states(options.states, name=name, resamples=options.resamples)
    report, protocol = merged.reports["none"], merged.reports["none"].protocol
    print(f"{merged.name}: {describe_report(report)}")
    pixels = f"{protocol.pixels} {counted(report)}"
    print(f"{protocol.images} images, {pixels} from {len(options.states)} states")
    page = options.report and merged.save(options.report)
    if options.out is not None:  # after the report, whose folder may be the same
        merged.meters["none"].save(options.out)
        print(f"state: {options.out}")
    if page is not None:
        show(page, browser=options.open)
