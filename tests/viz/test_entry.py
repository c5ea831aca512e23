"""Entries get names of their own, and their tables are those of their reports."""

import pytest

from segcal.metrics import rows
from segcal.viz import PageRow, comparison_csv, comparison_markdown
from segcal.viz.entry import distinct, tell_apart
from tests.support.synthetic_reports import constant_report

SURE, RIGHT = constant_report(0.9, 7), constant_report(0.7, 7)


def test_comparison_is_the_table_of_the_reports():
    entries = [PageRow("a|b\nc", SURE), PageRow("nll", SURE), PageRow("nll", RIGHT)]
    reports = {"a|b\nc": SURE, "nll": SURE, "nll-2": RIGHT}
    assert comparison_markdown(entries) == rows.to_markdown(reports)
    assert comparison_csv(entries) == rows.to_csv(reports)


def test_names_are_told_apart():
    assert tell_apart(["nll", "nll", "nll-2", "nll"]) == ["nll", "nll-2", "nll-2-2", "nll-3"]
    entries = distinct([PageRow("nll", SURE), PageRow("nll", RIGHT)])
    assert [(entry.name, entry.report) for entry in entries] == [("nll", SURE), ("nll-2", RIGHT)]


@pytest.mark.parametrize("table", [comparison_markdown, comparison_csv])
def test_no_entries_is_said(table):
    with pytest.raises(ValueError, match="at least one entry"):
        table([])
