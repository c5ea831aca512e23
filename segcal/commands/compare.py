"""Compare models on the same images, with 95 % intervals of the differences."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import UNITS, add_options

OPTIONS = {
    "--shift": "compare under each shift and in the mean; STATE is a folder of `segcal eval "
    "--shift`",
    "--resamples N=1000": "resamples behind the 95 %% intervals",
    **UNITS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare."""
    about = (
        "a state.npz that `segcal eval` or `CalibrationMeter.save` wrote, or its folder: the state "
        "of a model. The others are compared with the first"
    )
    parser.add_argument("states", nargs="+", type=Path, metavar="STATE", help=about)
    add_options(parser, OPTIONS)


def run(options: argparse.Namespace) -> None:
    """Print a table of differences; several under shift."""
    from segcal.evaluation.states import compare_states
    from segcal.viz.tables import difference_table

    if len(options.states) < 2:
        raise ValueError("two states or more are needed to compare, but there is one")
    tables = compare_states(options.states, shift=options.shift, resamples=options.resamples)
    for title, rows in tables.items():
        corner = "shift" if options.shift else "model"
        print(difference_table(rows, title=title, corner=corner).markdown())
