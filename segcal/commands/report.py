"""`segcal report`: makes pages, tables and figures again from reports alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.evaluation.results import (
    COMPARISON,
    EVAL,
    PAGE,
    PAGES,
    REPORT,
    method_folder,
    new_contents,
    open_page,
    read_result,
    require_writable,
    settle,
    write_pages,
)
from segcal.posthoc import CALIBRATORS


def rewrite_pages(options: argparse.Namespace) -> None:
    """Write the page, tables and figures of reports, without any network."""
    folder = options.out or options.reports[0].parent / COMPARISON
    require_writable(folder)
    results = [read_result(path) for given in options.reports for path in _files(given)]
    runs = list(dict.fromkeys(result.run for result in results))
    with new_contents(folder, PAGES) as staging:
        title = runs[0] if len(runs) == 1 else "Comparison"
        write_pages(results, staging, title, static=options.static)
    print(f"report: {folder / PAGE}")
    if options.open:
        open_page(folder / PAGE)


def _files(path: Path) -> list[Path]:
    """The report files that `path` stands for."""
    if not path.is_dir():
        return [path]
    folder = path / EVAL if (path / EVAL).is_dir() else path
    settle(folder)
    if not (folder / REPORT).is_file():
        raise ValueError(f"Expected {REPORT} in {folder}, but there is none: run segcal eval first")
    methods = [method_folder(folder, method) / REPORT for method in CALIBRATORS]
    return [folder / REPORT, *(path for path in methods if path.is_file())]
