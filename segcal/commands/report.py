"""`segcal report`: makes pages, tables and figures again from reports alone."""

from __future__ import annotations

import argparse
import webbrowser

from segcal.evaluation.folder import load_evaluation, require_writable, write_comparison


def rewrite_pages(options: argparse.Namespace) -> None:
    """Write the page, tables and figures of reports, without any network."""
    folder = options.out or options.reports[0].parent / "comparison"
    require_writable(folder)
    evaluations = [load_evaluation(path) for path in options.reports]
    title = evaluations[0].name if len(evaluations) == 1 else "Comparison"
    page = write_comparison(evaluations, folder, title=title, static=options.static)
    print(f"report: {page}")
    if options.open:
        webbrowser.open(page.resolve().as_uri())
