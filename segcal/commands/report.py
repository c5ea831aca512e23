"""Write pages, tables and figures again from reports, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import PAGE, UNITS, add_options, show

OPTIONS = {
    "--out DIR": "folder to write; default: comparison, beside the first input",
    **PAGE,
    **UNITS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which reports, and where to write."""
    about = "a report.json, or the folder of an evaluated run, which has several"
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help=about)
    add_options(parser, OPTIONS)


def run(options: argparse.Namespace) -> None:
    """Write one page of all."""
    from segcal.evaluation.folder import load_evaluation, require_writable, write_comparison

    folder = options.out or options.reports[0].parent / "comparison"
    require_writable(folder)
    evaluations = [load_evaluation(path) for path in options.reports]
    names = list(dict.fromkeys(evaluation.name for evaluation in evaluations))
    title = names[0] if len(names) == 1 else "Comparison"
    page = write_comparison(evaluations, folder, title=title)
    show(page, browser=options.open)
