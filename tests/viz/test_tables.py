"""Tables: every cell by hand, the best marked, units in the header, one writer for each format."""

import csv
import io
import re
from dataclasses import replace

import pytest
import torch

from segcal.metrics import CalibrationMeter, paired_differences
from segcal.metrics.compare import ONE_SEED
from segcal.metrics.scores import SCORES, in_percent
from segcal.viz.tables import (
    CLEAN,
    Cell,
    Number,
    Table,
    class_table,
    describe_report,
    difference_table,
    distinct_names,
    posthoc_table,
    ranked_cells,
    reading_notes,
    score_tables,
    shift_csv,
    shift_tables,
    shift_text,
    tell_apart,
    threshold_text,
    to_csv,
    to_markdown,
)
from tests.support.synthetic_reports import constant_report, images, measured, synthetic_report

NAN = float("nan")
EVIL = "<img src=x>|*"
# NLL: -(0.7 ln 0.9 + 0.3 ln 0.1) and -(0.7 ln 0.7 + 0.3 ln 0.3); Brier: 2 (0.7 0.1² + 0.3 0.9²)
# and 2 (0.7 0.3² + 0.3 0.7²). Dice: (14/17 + 0) / 2. All pixels are ties: the expected risk is 0.3
# at any coverage, and AUGRC is the mean of 0.3 m/10 over m = 1..10.
SURE, RIGHT = constant_report(0.9, 7), constant_report(0.7, 7)


def rows_of(markdown):
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
        "| AUPR of errors (%) | AUPR of successes (%) | FPR at 95 % TPR (%) | PRR (%) "
        "| AURC (1e-3) | AUGRC (1e-3) "
        "| risk at 80 % coverage (%) | risk at 90 % coverage (%) | risk at 95 % coverage (%) "
        "| coverage at 1 % risk (%) | coverage at 5 % risk (%) | Dice without class 0 (%) |",
        "|---|" + 19 * "---:|",
        "| sure | 30.00 | 20.00 | 20.00 | 20.00 | 0.00 | 90.00 | +20.00 "
        "| 30.00 | 70.00 | 100.00 | 0.00 | 300.00 | 165.00 | 30.00 | 30.00 | 30.00 | 0.00 | 0.00 "
        "| 0.00 |",
        "| a\\|b c | 30.00 | **0.00** | **0.00** | **0.00** | 0.00 | 70.00 | 0.00 "
        "| 30.00 | 70.00 | 100.00 | 0.00 | 300.00 | 165.00 | 30.00 | 30.00 | 30.00 | 0.00 | 0.00 "
        "| 0.00 |",
        "",
        "Pixel-averaged over 10 pixels of 1 image, region all, 2 classes, 15 equal bins (lo, hi], "
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
    reports = {"kept": kept, "not": synthetic_report()}
    rows = list(csv.DictReader(io.StringIO(to_csv(reports))))
    for name, heading, scale in (("ece", "ECE (%)", 100), ("sce", "SCE (1e-3)", 1000)):
        low, high = kept.intervals[name].low, kept.intervals[name].high
        assert float(rows[0][f"{heading} 95% low"]) == pytest.approx(scale * low, rel=1e-12)
        assert float(rows[0][f"{heading} 95% high"]) == pytest.approx(scale * high, rel=1e-12)
        assert rows[1][f"{heading} 95% low"] == ""
    assert rows[1]["image-averaged ECE (%)"] == ""
    text = to_markdown(reports, {"kept": ["temperature 1.50"]})
    shown, not_shown = rows_of(text)
    low, high = (float(end) for end in shown["ECE (%)"].split("[")[1].strip("]").split(", "))
    interval = kept.intervals["ece"]
    assert [low, high] == pytest.approx([100 * interval.low, 100 * interval.high], abs=0.005)
    assert "[" not in not_shown["ECE (%)"] and not_shown["image-averaged ECE (%)"] == "–"
    assert "95 % intervals over 8 images" in text and "bootstrap" not in text
    assert "- kept: temperature 1.50\n" in text


def test_each_protocol_is_stated_once():
    reports = {"one": SURE, "two": RIGHT, "three": constant_report(0.7, 7, num_bins=9)}
    lines = to_markdown(reports).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["one", "two", "three"]
    assert len(lines) == 2 * 6 + 2
    assert "15 equal bins" in lines[12] and "9 equal bins" in lines[13]


def test_posthoc_table_by_hand():
    reports = {
        ("a|b", "none"): SURE,
        ("a|b", "ts"): RIGHT,
        ("c", "none"): RIGHT,
        ("d", "none"): RIGHT,
        ("d", "ts"): RIGHT,
    }
    assert posthoc_table(reports).markdown().splitlines() == [
        "| model | SCE (1e-3) none | SCE (1e-3) ts | ECE (%) none | ECE (%) ts |",
        "|---|---:|---:|---:|---:|",
        "| a\\|b | 200.00 | **0.00** | 20.00 | **0.00** |",
        "| c | 0.00 | – | 0.00 | – |",
        "| d | 0.00 | 0.00 | 0.00 | 0.00 |",
    ]


def test_the_best_is_marked_as_it_is_printed():
    for values, score, best in [
        ([3.0, 1.0, 2.0], "nll", {1}),
        ([0.3, 0.1, 0.2], "accuracy", {0}),
        ([1.00004, 1.00001, 2.0], "nll", {0, 1}),  # print alike
        ([1.00004, 1.00001], "nll", set()),  # nothing to choose
        ([NAN, 1.0, 2.0], "nll", {1}),
        ([NAN, 1.0], "nll", set()),
        ([0.1, 0.2], "mean_confidence", set()),  # none is better
        ([], "nll", set()),
    ]:
        cells = ranked_cells(SCORES[score], values)
        assert {index for index, cell in enumerate(cells) if cell.best} == best


def test_html_escapes_and_carries_the_numbers():
    cells = [Cell("-1.50", "[-2, 1]", -1.5, best=True), Cell("within"), Cell("–")]
    page = Table(EVIL, ["m<i>", "ECE (%)", "verdict", "x"], [(EVIL, cells)]).html(sortable=True)
    assert "<i>" not in page and "<img" not in page and "&lt;img src=x&gt;|*" in page
    assert '<td data-value="-1.5" class="best">−1.50' in page and "[−2, 1]" in page
    assert "<td>within</td><td>–</td>" in page
    assert SCORES["ece"].definition.split("·")[0] in page  # the heading explains itself


def test_every_fraction_in_percent():
    before = to_markdown({"a": SURE})
    with in_percent():
        table, text = to_markdown({"a": SURE}), to_csv({"a": SURE})
        assert "1e-3" not in table + text and "| 20.000 |" in table and "SCE (%)" in text
        assert "SCE 20.000 %" in describe_report(SURE)
    assert to_markdown({"a": SURE}) == before


def test_classes_of_sigmoid_outputs_are_rows_of_their_own_decisions():
    """Class a: 3 of 4 decisions right, present in 2; class b: 1 of 2 right, 2 ignored."""
    meter = CalibrationMeter(2, multilabel=True, class_names=("a", "b"))
    logits = torch.tensor([[2.0, 2.0], [1.0, 1.0], [-1.0, 0.0], [2.0, 0.0]])
    meter.update(logits, torch.tensor([[1, 1], [0, 0], [0, 255], [1, 255]]))
    table = class_table(meter.compute())
    a, b = (dict(zip(table.columns[1:], cells, strict=True)) for _, cells in table.rows)
    assert (a["accuracy (%)"].text, b["accuracy (%)"].text) == ("75.00", "50.00")
    assert (a["present (%)"].text, b["IoU (%)"].text) == ("50.00", "50.00")


def test_a_large_class_is_named_with_the_scores_to_read():
    meter = CalibrationMeter(3, class_names=("background", "a", "b"))
    labels = (torch.arange(100) >= 90).long().view(1, 10, 10)
    meter.update(torch.randn(1, 3, 10, 10), labels)
    (note,) = reading_notes(meter.compute())
    assert (
        note.startswith("background is 90.0 % of the pixels") and "Dice without class 0 and" in note
    )
    assert "Dice without class 0 (%)" in score_tables({"a": meter.compute()})[0].columns
    assert "Dice without class 0 (%)" in score_tables({"a": SURE})[1].columns
    assert reading_notes(SURE) == []  # 70 %


def test_thresholds_have_four_digits_or_tell_from_one():
    texts = {0.5: "0.5000", 0.93: "0.9300", 0.99957275: "0.99957", 1 - 2e-7: "0.99999980"}
    assert {value: threshold_text(value) for value in texts} == texts


def test_models_are_named_by_what_differs():
    for paths, names in [
        (["T/dicece/test", "T/ace/test"], ["dicece", "ace"]),
        (["runs/nll/seed1", "runs/nll/seed2"], ["seed1", "seed2"]),
        (["runs/voc/nll/eval", "runs/cam/fl/eval"], ["voc/nll", "cam/fl"]),
        (["a/x", "a/x"], ["a/x", "a/x-2"]),
        (["only"], ["only"]),
    ]:
        assert distinct_names(paths) == names


def test_repeated_names_get_numbers():
    assert tell_apart(["nll", "nll", "nll-2", "nll"]) == ["nll", "nll-2", "nll-2-2", "nll-3"]


def test_differences_have_intervals_and_say_what_they_leave_out():
    generator = torch.Generator().manual_seed(0)
    logits, labels = images(30, generator)
    first, second = measured(logits, labels), measured(3 * logits, labels)
    found = paired_differences([first], [second])
    text = difference_table({"b": found}, title="Differences from a").markdown()
    (row,) = rows_of(text.split("\n\n", 1)[1])
    value = found["ece"].value
    assert row["ECE (%)"].startswith(f"+{100 * value:.2f} [")
    assert "*" not in row["ECE (%)"] and ONE_SEED in text  # one seed is never sure
    fixed = difference_table({"b": paired_differences([first], [second], fixed=True)}).markdown()
    (row,) = rows_of(fixed)
    assert row["ECE (%)"].startswith(f"+{100 * value:.2f}* [") and "A star marks" in fixed
    seeds = paired_differences([first, first], [second, second])
    both = difference_table({"a": {}, "b": found, "c": seeds}).markdown()
    assert f"{ONE_SEED} (b)" in both and ONE_SEED in text and f"{ONE_SEED} (" not in text


# Under shift ------------------------------------------------------------------------------------

CLEAR = synthetic_report(sharpness=1.5, images=1, side=16)
REPORTS = [synthetic_report(sharpness=s, images=1, side=16) for s in (2.0, 3.0, 0.5)]


def test_the_mean_over_shifts_is_plain_and_without_the_clean_images():
    names = (CLEAN, "fog:5", "fog:1", "rotation:45")
    models = {"a": dict(zip(names, [CLEAR, *REPORTS], strict=True))}
    rows = list(csv.DictReader(io.StringIO(shift_csv(models))))
    assert [(row["shift"], row["severity"]) for row in rows] == [
        *((CLEAN, "0"), ("fog", "1"), ("fog", "5"), ("rotation:45", "")),
        ("mean over shifts", ""),
    ]
    for name in ("ece", "sce", "accuracy", "overconfidence", "underconfidence", "mean_confidence"):
        score = SCORES[name]
        values = [getattr(r, name) * score.scale for r in (REPORTS[1], REPORTS[0], REPORTS[2])]
        found = [float(row[score.heading]) for row in rows]
        assert found[1:4] == pytest.approx(values)
        assert found[4] == pytest.approx(sum(values) / 3)
        assert found[0] == pytest.approx(getattr(CLEAR, name) * score.scale)


def test_shift_tables_have_every_model_and_shift():
    models = {
        "a": {CLEAN: CLEAR, "snow:5": REPORTS[0], "snow:1": REPORTS[1], "fog:3": REPORTS[2]},
        EVIL: {CLEAN: CLEAR, "fog:3": REPORTS[1], "fog:4": REPORTS[2]},
    }
    rows = list(csv.DictReader(io.StringIO(shift_csv(models))))
    assert [row["shift"] + row["severity"] for row in rows] == [
        *("clean0", "snow1", "snow5", "fog3", "mean over shifts"),
        *("clean0", "fog3", "fog4", "mean over shifts"),
    ]
    assert float(rows[1]["ECE (%)"]) == 100 * REPORTS[1].ece
    means, ece, *_, confidence = (table.markdown() for table in shift_tables(models))
    assert "clean ECE (%)" in means and "| shift | a | <img src=x>\\|* |" in ece
    assert re.findall(r"\| snow:1 \| (\S+) \| – \|", ece) == [f"{100 * REPORTS[1].ece:.2f}"]
    fog = {100 * REPORTS[2].ece, 100 * REPORTS[1].ece}
    assert f"**{min(fog):.2f}**" in ece
    assert "**" not in confidence.split("\n", 1)[1]  # none is better


def test_tables_under_shift_say_what_changes_the_mask():
    changed = [replace(report, changed=5 * i) for i, report in enumerate((CLEAR, REPORTS[0]))]
    models = {
        "a": {CLEAN: CLEAR, "fog:3": REPORTS[0]},
        "a + VS": dict(zip((CLEAN, "fog:3"), changed, strict=True)),
    }
    heading = SCORES["mask_changed"].heading
    rows = list(csv.DictReader(io.StringIO(shift_csv(models))))
    assert [row[heading] for row in rows[:3]] == [""] * 3 and float(rows[3][heading]) == 0
    share = 100 * 5 / REPORTS[0].protocol.pixels
    assert float(rows[4][heading]) == float(rows[5][heading]) == pytest.approx(share)
    means, *_, table = (table.markdown() for table in shift_tables(models))
    assert heading in means and f"| fog:3 | – | {share:.2f} |" in table


def test_text_for_a_terminal_is_aligned():
    models = {
        "a": {CLEAN: CLEAR, "fog:3": REPORTS[0], "fog:5": REPORTS[1]},
        "a longer name": {CLEAN: CLEAR, "fog:5": REPORTS[2]},
    }
    first, second, *rows = shift_text(models).splitlines()
    percent = [f"{100 * report.ece:.2f}" for report in (CLEAR, *REPORTS)]
    mean = f"{50 * (REPORTS[0].ece + REPORTS[1].ece):.2f}"
    assert first.split("  ")[-1] == "ECE (%)" and "accuracy (%)" in first
    assert second.split(maxsplit=5)[1:] == ["clean", "clean", "fog:3", "fog:5", "mean over shifts"]
    accuracy = f"{100 * CLEAR.accuracy:.2f}"
    assert rows[0].split() == ["a", accuracy, *percent[:3], mean]
    assert rows[1].split("name")[1].split() == [accuracy, percent[0], "–", percent[3], percent[3]]
    assert len({len(row) for row in (second, *rows)}) == 1


def test_seeds_stand_beside_their_mean():
    three = Number("accuracy", "%", "nll", "clean", (75.9, 70.7, 63.2), (60.0, 80.0))
    assert three.cell.text == "69.93 ± 6.38"
    assert three.cell.note == "[60.00, 80.00]; seeds 75.90, 70.70, 63.20"
    one = Number("accuracy", "%", "nll", "clean", (75.9,)).cell
    assert (one.text, one.note) == ("75.90", "")
    assert Number("accuracy", "%", "nll", "clean", ()).text == "–"
