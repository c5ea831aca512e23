"""The place for the table that compares entries, as text."""

from __future__ import annotations

from collections.abc import Sequence

from segcal.metrics import rows
from segcal.viz.entry import Entry, distinct


def comparison_markdown(entries: Sequence[Entry]) -> str:
    """A Markdown table: one row an entry, units in the header, intervals, the best in bold."""
    return rows.to_markdown({entry.name: entry.report for entry in distinct(entries)})


def comparison_csv(entries: Sequence[Entry]) -> str:
    """CSV: one row an entry, units in the header, intervals and protocol in their own columns."""
    return rows.to_csv({entry.name: entry.report for entry in distinct(entries)})
