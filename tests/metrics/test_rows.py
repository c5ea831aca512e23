"""Tables of reports: every cell by hand, the best marked, units in the header."""

import csv
import io

import pytest

from segcal.metrics.rows import best_of, posthoc_markdown, to_csv, to_markdown
from tests.support.synthetic_reports import constant_report, synthetic_report

NAN = float("nan")
# NLL: -(0.7 ln 0.9 + 0.3 ln 0.1) and -(0.7 ln 0.7 + 0.3 ln 0.3); Brier: 2 (0.7 0.1² + 0.3 0.9²)
# and 2 (0.7 0.3² + 0.3 0.7²). Dice: (14/17 + 0) / 2. All pixels are ties: the expected risk is 0.3
# at any coverage, and AUGRC is the mean of 0.3 m/10 over m = 1..10.
SURE, RIGHT = constant_report(0.9, 7), constant_report(0.7, 7)


def table(markdown):
    """The cells of the first Markdown table by heading, one dict per row."""
    lines = markdown.split("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_markdown_by_hand():
    assert to_markdown({"sure": SURE, "a|b\nc": RIGHT}).splitlines() == [
        "| model | accuracy (%) | mIoU (%) | Dice (%) | ECE (%) | SCE (1e-3) | MCE (%) "
        "| adaptive ECE (%) | smECE (%) | NLL (nats) | Brier (0-2) | error AUROC (%) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| sure | 70.00 | 35.00 | 41.18 | 20.00 | 200.00 | 20.00 | 20.00 | 20.00 "
        "| 0.7645 | 0.5000 | 50.00 |",
        "| a\\|b c | 70.00 | 35.00 | 41.18 | **0.00** | **0.00** | **0.00** | **0.00** | **0.00** "
        "| **0.6109** | **0.4200** | 50.00 |",
        "",
        "| model | test error (%) | RMS-CE (%) | KS error (%) | over-confidence (%) "
        "| under-confidence (%) | mean confidence (%) | confidence − accuracy (points) "
        "| AURC (1e-3) | AUGRC (1e-3) "
        "| risk at 80 % coverage (%) | risk at 90 % coverage (%) | risk at 95 % coverage (%) "
        "| coverage at 1 % risk (%) | coverage at 5 % risk (%) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| sure | 30.00 | 20.00 | 20.00 | 20.00 | 0.00 | 90.00 | +20.00 | 300.00 | 165.00 "
        "| 30.00 | 30.00 | 30.00 | 0.00 | 0.00 |",
        "| a\\|b c | 30.00 | **0.00** | **0.00** | **0.00** | 0.00 | 70.00 | 0.00 | 300.00 "
        "| 165.00 | 30.00 | 30.00 | 30.00 | 0.00 | 0.00 |",
        "",
        "Pixel-averaged over 10 pixels of 1 images, region all, 2 classes, 15 equal bins (lo, hi], "
        f"label 255 ignored; segcal {SURE.protocol.version}.",
    ]


def test_csv_by_hand():
    header, row = csv.reader(io.StringIO(to_csv({"m, n": SURE})))
    cells = dict(zip(header, row, strict=True))
    assert header[:3] == ["model", "accuracy (%)", "mIoU (%)"]
    expected = {"accuracy (%)": 70, "ECE (%)": 20, "SCE (1e-3)": 200, "Brier (0-2)": 0.5}
    assert {name: float(cells[name]) for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (cells["model"], cells["num_bins"], cells["pixels"]) == ("m, n", "15", "10")


def test_intervals_have_a_column_where_there_are_any():
    kept = synthetic_report(per_image=True)
    rows = list(csv.DictReader(io.StringIO(to_csv({"kept": kept, "not": synthetic_report()}))))
    for name, heading, scale in (("ece", "ECE (%)", 100), ("sce", "SCE (1e-3)", 1000)):
        low, high = kept.intervals[name].low, kept.intervals[name].high
        assert float(rows[0][f"{heading} 95% low"]) == pytest.approx(scale * low, rel=1e-12)
        assert float(rows[0][f"{heading} 95% high"]) == pytest.approx(scale * high, rel=1e-12)
        assert rows[1][f"{heading} 95% low"] == ""
    assert rows[1]["image-averaged ECE (%)"] == ""
    shown, not_shown = table(to_markdown({"kept": kept, "not": synthetic_report()}))
    low, high = (float(end) for end in shown["ECE (%)"].split("[")[1].strip("]").split(", "))
    interval = kept.intervals["ece"]
    assert [low, high] == pytest.approx([100 * interval.low, 100 * interval.high], abs=0.005)
    assert "[" not in not_shown["ECE (%)"] and not_shown["image-averaged ECE (%)"] == "–"


def test_each_protocol_is_stated_once():
    reports = {"one": SURE, "two": RIGHT, "three": constant_report(0.7, 7, num_bins=9)}
    lines = to_markdown(reports).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["one", "two", "three"]
    assert len(lines) == 2 * 6 + 2
    assert "15 equal bins" in lines[12] and "9 equal bins" in lines[13]


def test_higher_is_better_where_it_is():
    rows = table(to_markdown({"weak": constant_report(0.9, 4), "strong": constant_report(0.9, 7)}))
    assert [row["accuracy (%)"] for row in rows] == ["40.00", "**70.00**"]
    assert [row["ECE (%)"] for row in rows] == ["50.00", "**20.00**"]


def test_posthoc_table_by_hand():
    reports = {
        ("a|b", "none"): SURE,
        ("a|b", "ts"): RIGHT,
        ("c", "none"): RIGHT,
        ("d", "none"): RIGHT,
        ("d", "ts"): RIGHT,
    }
    assert posthoc_markdown(reports).splitlines() == [
        "| model | SCE (1e-3) none | SCE (1e-3) ts | ECE (%) none | ECE (%) ts |",
        "|---|---:|---:|---:|---:|",
        "| a\\|b | 200.00 | **0.00** | 20.00 | **0.00** |",
        "| c | 0.00 | – | 0.00 | – |",
        "| d | 0.00 | 0.00 | 0.00 | 0.00 |",
    ]


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
