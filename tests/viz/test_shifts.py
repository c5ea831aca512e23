"""Models under shift: means by hand, tables, diagrams, and their section of the page."""

import csv
import io
import re

import numpy as np
import pytest
from PIL import Image

from segcal.data.shift import parse_shifts
from segcal.viz import (
    Overlay,
    PageRow,
    ShiftView,
    believed_accuracy,
    severity_curve,
    severity_curves,
    shift_csv,
    shift_markdown,
    shift_panel,
    shift_records,
    shift_text,
)
from segcal.viz.drawings import shift_drawings
from segcal.viz.html import headline, render_page
from segcal.viz.shifts import kinds_and_severities
from tests.support.synthetic_reports import predictor, synthetic_report

EVIL = "<img src=x>|*"
CLEAN = synthetic_report(sharpness=1.5, images=1, side=16)
REPORTS = [synthetic_report(sharpness=s, images=1, side=16) for s in (2.0, 3.0, 0.5, 4.0, 5.0)]


def entry(name, shifts, first=0, **more):
    reports = REPORTS[first:] + REPORTS[:first]
    under = {s: reports[i % 5] for i, s in enumerate(parse_shifts(shifts))}
    return PageRow(name, CLEAN, shifts=under, **more)


def test_the_mean_is_plain_and_without_the_clean_images():
    records = shift_records([entry("a", "fog:1,5,rotation:45"), PageRow("never shifted", CLEAN)])
    assert [(r["shift"], r["severity"]) for r in records] == [
        ("clean", 0),
        ("fog", 1),
        ("fog", 5),
        ("rotation:45", None),
        ("mean over shifts", None),
    ]
    for score in ("ece", "sce", "accuracy", "overconfidence", "underconfidence", "mean_confidence"):
        values = [getattr(report, score) for report in REPORTS[:3]]
        assert [record[score] for record in records[1:4]] == values
        assert records[4][score] == pytest.approx(sum(values) / 3)
        assert records[0][score] == getattr(CLEAN, score)


def test_tables_have_every_model_and_shift():
    entries = [entry("a", "snow:5,1,fog"), entry(EVIL, "fog:3,fog:4", first=1)]
    rows = list(csv.DictReader(io.StringIO(shift_csv(entries))))
    assert [row["shift"] + row["severity"] for row in rows] == [
        *("clean0", "snow1", "snow5", "fog3", "mean over shifts"),
        *("clean0", "fog3", "fog4", "mean over shifts"),
    ]
    assert float(rows[1]["ECE (%)"]) == 100 * REPORTS[1].ece  # snow:1 came second
    markdown = shift_markdown(entries)
    ece = markdown.split("**ECE (%)**")[1].split("**SCE")[0]
    assert "| shift | a | <img src=x>\\|* |" in ece
    found = re.findall(r"\| snow:1 \| (\S+) \| – \|", ece)
    assert found == [f"{100 * REPORTS[1].ece:.2f}"]
    fog = {100 * REPORTS[2].ece, 100 * REPORTS[1].ece}
    assert f"**{min(fog):.2f}**" in ece and f"**{max(fog):.2f}**" not in ece.split("fog:4")[0]
    confidence = markdown.split("**mean confidence (%)**")[1]
    assert "**" not in confidence  # none is better


def test_text_for_a_terminal_is_aligned():
    entries = [entry("a", "fog:3,5"), entry("a longer name", "fog:5", first=1)]
    first, second, *rows = shift_text([*entries, PageRow("never shifted", CLEAN)]).splitlines()
    percent = [f"{100 * report.ece:.2f}" for report in (CLEAN, *REPORTS)]
    mean = f"{50 * (REPORTS[0].ece + REPORTS[1].ece):.2f}"
    assert first.split("  ")[-1] == "ECE (%)" and "accuracy (%)" in first
    assert second.split(maxsplit=5)[1:] == ["clean", "clean", "fog:3", "fog:5", "mean over shifts"]
    accuracy = f"{100 * CLEAN.accuracy:.2f}"
    assert rows[0].split() == ["a", accuracy, *percent[:3], mean]
    assert rows[1].split("name")[1].split() == [accuracy, percent[0], "–", percent[2], percent[2]]
    assert len(rows) == 2 and len({len(row) for row in (second, *rows)}) == 1
    assert shift_text([PageRow("never shifted", CLEAN)]) == ""


def lines(ax):
    return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def test_curves_start_at_the_clean_images():
    entries = [entry("a", "fog:1,5,snow:1,5"), entry("b", "fog:1,5,snow:1,5", first=1)]
    drawn = lines(severity_curve(entries, score="accuracy"))
    assert set(drawn) == {"a", "b"}
    # fog:1, fog:5, snow:1, snow:5 have the first four reports.
    means = [CLEAN.accuracy, *((REPORTS[i].accuracy + REPORTS[i + 2].accuracy) / 2 for i in (0, 1))]
    np.testing.assert_allclose(drawn["a"], np.stack([[0, 1, 5], 100 * np.array(means)], 1))
    figure = severity_curves(entries)
    assert [ax.get_title() for ax in figure.axes] == ["fog", "snow"]
    np.testing.assert_allclose(
        lines(figure.axes[1])["a"][:, 1], [100 * r.ece for r in (CLEAN, REPORTS[2], REPORTS[3])]
    )


def test_only_corruptions_that_all_met_are_averaged():
    kinds = kinds_and_severities([entry("a", "fog:1,5,snow:1,rotation:3"), PageRow("b", CLEAN)])
    assert kinds == (["fog"], [1, 5])
    assert kinds_and_severities([entry("a", "rotation:3")]) == ([], [])
    both = [entry("a", "fog:1,snow:1"), entry("b", "fog:1")]
    assert kinds_and_severities(both) == (["fog"], [1])
    with pytest.raises(ValueError, match="Expected corruptions of the same severities"):
        severity_curve([entry("a", "rotation:3")])
    with pytest.raises(ValueError, match="Expected corruptions of the same severities"):
        severity_curves([entry("a", "rotation:3")])


def test_believed_against_true_accuracy():
    drawn = lines(believed_accuracy([entry("a", "fog:1,5")]))["a"]
    expected = [(r.accuracy, r.mean_confidence) for r in (CLEAN, *REPORTS[:2])]
    np.testing.assert_allclose(drawn, 100 * np.array(expected))


@pytest.mark.parametrize(
    ("shifts", "stems"),
    [
        ("fog:1,3,snow:1,3", {"shift_ece", "shift_accuracy", "shift_ece_by_corruption"}),
        ("fog:1,3", {"shift_ece", "shift_accuracy"}),
        ("rotation:45", set()),
    ],
)
def test_diagrams_that_shifts_get(shifts, stems):
    drawings = shift_drawings([entry("a", shifts), PageRow("never shifted", CLEAN)])
    assert {drawing.stem for drawing in drawings} == stems | {"shift_belief"}
    assert all(drawing.figure.axes for drawing in drawings)
    assert shift_drawings([PageRow("never shifted", CLEAN)]) == []


def test_section_of_the_page():
    probs, labels = predictor(0.7)
    views = [ShiftView(name, None, {"none": probs, "ts": probs}) for name in ("clean", EVIL)]
    panel = shift_panel(views, labels, name=EVIL)
    first = entry(EVIL, "fog:1,5,snow:1,5", shift_overlay=Overlay(EVIL, panel))
    page = render_page([first, entry("b", "fog:1,5", first=2)])
    assert '<section id="shift">' in page and 'href="#shift"' in page
    section = page.split('<section id="shift">')[1].split("</section>")[0]
    assert "means over 4 shifts" in section and section.count("<details") == 6
    assert "<img src=x>" not in page and "&lt;img src=x&gt;" in section
    assert f">{100 * REPORTS[1].ece:.2f}</td>" in section
    assert section.count("data:image/webp") == 1 and section.count("data:image/svg") == 3
    assert 'id="shift"' not in render_page([PageRow("a", CLEAN)])


def test_panel_has_one_row_per_shift_and_one_column_per_method():
    probs, labels = predictor(0.7)
    image = np.full((*labels.shape, 3), 90, np.uint8)

    def size(rows, methods):
        views = [ShiftView(str(i), image, dict.fromkeys(methods, probs)) for i in range(rows)]
        return Image.open(io.BytesIO(shift_panel(views, labels))).size

    width, height = size(2, ["none"])
    assert size(2, ["none", "ts"])[0] > width and size(2, ["none", "ts"])[1] == height
    assert size(5, ["none"])[1] > 2 * height and size(5, ["none"])[0] == width


def test_headline_names_the_mean():
    """Of one model its own mean, of several that of the best."""
    one = "".join(phrase.text for phrase in headline([entry("a", "fog:1,5")]))
    mean = 50 * (REPORTS[0].ece + REPORTS[1].ece)
    assert f" Under 2 shifts the mean ECE is {mean:.2f}\u00a0%: confidence" in one
    both = [entry("a", "fog:1,5"), entry("b", "fog:1,5", first=2)]
    means = {e.name: sum(report.ece for report in e.shifts.values()) for e in both}
    words = "".join(phrase.text for phrase in headline(both))
    assert f" Under 2 shifts {min(means, key=means.get)} has the lowest mean ECE" in words
    single = "".join(phrase.text for phrase in headline([entry("a", "snow")]))
    assert " Under snow:3 the ECE is" in single
