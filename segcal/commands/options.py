"""The options of every command but `train`, whose options are the fields of `TrainConfig`.

A command is imported after its options are read. This module imports nothing heavy, so that help
and typing mistakes are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from segcal.commands.parser import Parser, at_least


def parse_report(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Write the page, tables and figures again from reports, without any network."""
    parser = Parser(prog, parse_report.__doc__ or "")
    parser.add_argument(
        "reports",
        nargs="+",
        type=Path,
        metavar="REPORT",
        help="a report.json, or the folder of an evaluated run for all its reports",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write; default: comparison, beside the first input"
    )
    return parser.parse(arguments)


def parse_merge(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Add up the states of evaluations of parts of a data set."""
    parser = Parser(prog, parse_merge.__doc__ or "")
    _add_states(parser, "of a part of the images")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the merged state, as .npz")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write page, tables, figures")
    _add_resamples(parser, low=0)
    return parser.parse(arguments)


def parse_compare(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Compare models with the first on the same images, with 95 % intervals of the differences."""
    parser = Parser(prog, parse_compare.__doc__ or "")
    _add_states(parser, "of a model; the others are compared with the first")
    _add_resamples(parser, low=1)
    options = parser.parse(arguments)
    if len(options.states) < 2:
        parser.error(f"Expected two states or more to compare, but got {len(options.states)}")
    return options


def _add_states(parser: Parser, what: str) -> None:
    parser.add_argument(
        "states",
        nargs="+",
        type=Path,
        metavar="STATE",
        help="a state.npz that `segcal eval --save-state` or `CalibrationMeter.save` wrote, "
        f"or its folder: the state {what}",
    )


def _add_resamples(parser: Parser, *, low: int) -> None:
    none = "; 0 for no intervals" if low == 0 else ""
    parser.add_argument(
        "--resamples",
        type=at_least(low),
        default=1000,
        help=f"resamples of the bootstrap over images; default: 1000{none}",
    )
