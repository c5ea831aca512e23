"""The comparison table says which value is best, with units, intervals and protocol."""

import csv
import io

import pytest

from segcal.metrics.rows import best_of
from segcal.viz import Entry, comparison_csv, comparison_markdown, write_figures
from tests.support.synthetic_reports import synthetic_report

GOOD = Entry("good", synthetic_report(per_image=True))
SHARP = Entry("sharp", synthetic_report(sharpness=3.0, per_image=True))
NAN = float("nan")


def table(markdown):
    """The cells of a Markdown table by heading, one dict a row."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_best_is_bold_and_intervals_are_shown():
    good, sharp = table(comparison_markdown([GOOD, SHARP]))
    report = GOOD.report
    ece = report.intervals["ece"]
    assert good["ECE (%)"] == (
        f"**{100 * report.ece:.2f}** [{100 * ece.low:.2f}, {100 * ece.high:.2f}]"
    )
    assert good["SCE (1e-3)"].startswith(f"**{1000 * report.sce:.2f}**")
    assert good["NLL (nats)"] == f"**{report.nll:.4f}**"
    assert "**" not in sharp["ECE (%)"] and "**" not in sharp["NLL (nats)"]
    # The same predictions: equal accuracy is nobody's merit.
    assert "**" not in good["accuracy (%)"] and "**" not in sharp["accuracy (%)"]


def test_higher_is_better_where_it_is():
    weak = Entry("weak", synthetic_report(sharpness=0.01, num_classes=4, seed=1))
    more = Entry("more", synthetic_report(num_classes=4, seed=2))
    rows = table(comparison_markdown([weak, more]))
    values = [entry.report.accuracy for entry in (weak, more)]
    best = values.index(max(values))
    assert "**" in rows[best]["accuracy (%)"] and "**" not in rows[1 - best]["accuracy (%)"]


def test_protocol_is_stated_once():
    text = comparison_markdown([GOOD, SHARP])
    assert text.count("15 equal bins") == 1


def test_csv_is_numbers_with_units_in_the_header():
    rows = list(csv.DictReader(io.StringIO(comparison_csv([GOOD, SHARP]))))
    assert [row["model"] for row in rows] == ["good", "sharp"]
    assert float(rows[0]["ECE (%)"]) == pytest.approx(100 * GOOD.report.ece, rel=1e-12)
    assert float(rows[0]["ECE (%) 95% low"]) <= float(rows[0]["ECE (%)"])


def test_names_are_told_apart_and_cannot_break_the_table():
    entries = [Entry(name, GOOD.report) for name in ("a|b\nc", "nll", "nll", "nll-2")]
    text = comparison_markdown(entries)
    assert r"| a\|b c |" in text
    names = [line.split(" | ")[0][2:] for line in text.splitlines()[3:6]]
    assert names == ["nll", "nll-2", "nll-2-2"]


@pytest.mark.parametrize(
    ("values", "higher", "best"),
    [
        ([3.0, 1.0, 2.0], False, {1}),
        ([3.0, 1.0, 2.0], True, {0}),
        ([1.004, 1.001, 2.0], False, {0, 1}),  # print alike
        ([1.004, 1.001], False, set()),  # nothing to choose
        ([NAN, 1.0, 2.0], False, {1}),
        ([NAN, 1.0], False, set()),
        ([5.0], False, set()),
        ([], False, set()),
    ],
)
def test_best_of(values, higher, best):
    assert best_of(values, 2, higher=higher) == best


def test_no_entries_is_said():
    with pytest.raises(ValueError, match="at least one entry"):
        comparison_markdown([])


def test_figures_of_one_entry(tmp_path):
    log = [{"epoch": 1, "holdout/ece": 0.1, "holdout/sce": 0.01, "best": True}]
    written = write_figures([Entry("one", GOOD.report, log)], tmp_path)
    stems = {
        *("reliability", "confidence_histogram", "wrong_confidence", "classwise_reliability"),
        *("gap_heatmap", "convergence_ece", "convergence_sce"),
    }
    assert {path.name for path in written} == {f"{s}.{e}" for s in stems for e in ("png", "svg")}
    assert sorted(written) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    starts = {".png": b"\x89PNG", ".svg": b"<?xml"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in written)


def test_figures_of_several_entries_go_to_folders_of_their_own(tmp_path):
    written = write_figures([Entry("a/b", GOOD.report), Entry("..", SHARP.report)], tmp_path / "f")
    folders = {path.parent.relative_to(tmp_path / "f").as_posix() for path in written}
    assert folders == {".", "a-b", "entry"}
    assert all(path.is_file() for path in written)
