"""Tables of the paper with our numbers beside: markdown, csv, html, and into a file."""

import csv
import io

import pytest
from reproduction import paper
from reproduction.render import make_sheet

from segcal.sweep.definition import read_sweep
from segcal.training.config import RECIPES
from segcal.viz.tables import Number, put_into


def sheet(command="python tools/reproduce.py segmentation"):
    table = paper.tables()["segmentation"]
    ours = {"nll / none": (6.0, 7.0, 8.0), "fl / none": (9.0,), "fl+mdca / none": (5.0, 5.5)}
    numbers = [
        Number(
            *(metric, unit, row, column, ours.get(row, ())),
            printed=table.printed(metric, row, column),
        )
        for metric, unit in table.units.items()
        for row in table.rows
        for column in table.columns
    ]
    sweep = read_sweep(RECIPES / "sweeps/paper/segmentation.yaml")
    return make_sheet(table, sweep, numbers, command, ["A <b>remark</b>."])


def test_markdown_has_ours_beside_the_papers():
    text = sheet().markdown()
    assert "| nll / none | 7.00 ± 1.00 (6.4) |" in text
    assert "| nll / ts | – (6.26) |" in text
    assert "| fl / none | 9.00 (11.8) |" in text
    assert "SCE (1e-3), lower is better" in text and "mIoU (%), higher is better" in text
    said = "Against its base loss, MDCA"
    assert f"{said} lowers SCE in 1 of 1 cases here and in 1 of 1 in the paper." in text
    assert f"{said} raises mIoU in 0 of 1 cases here and in 1 of 1 in the paper." in text


def test_csv_has_every_number():
    rows = list(csv.DictReader(io.StringIO(sheet().csv())))
    assert len(rows) == 16
    (row,) = [r for r in rows if (r["metric"], r["row"]) == ("ece", "nll / none")]
    assert (row["paper"], row["mean"], row["deviation"]) == ("7.77", "7", "1")
    assert row["seeds"] == "6 7 8"


def test_html_is_escaped_and_whole():
    page = sheet(command="<script>alert(1)</script>").html()
    assert "<script>" not in page and "A &lt;b&gt;remark" in page
    assert '7.00 ± 1.00<span class="interval">(7.77)</span>' in page
    assert page.count('class="interval"') == 16


def test_put_into_replaces_only_its_own_part(tmp_path):
    path = tmp_path / "results.md"
    path.write_text("# Results\n\n<!-- a -->\nold\n<!-- end of a -->\n\nafter\n")
    put_into(path, "a", sheet().markdown())
    put_into(path, "b", sheet().markdown())
    text = path.read_text()
    assert "old" not in text and text.startswith("# Results\n\n<!-- a -->\n### Semantic")
    assert text.index("after") < text.index("<!-- b -->") < text.index("<!-- end of b -->")
    once = text
    put_into(path, "a", sheet().markdown())
    assert path.read_text() == once
    path.write_text("<!-- a -->\nno end")
    with pytest.raises(ValueError, match="end of a"):
        put_into(path, "a", sheet().markdown())
