"""The folder of an evaluation: whole or not at all, and read back as it was written."""

import csv
import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import segcal
from segcal.evaluation.evaluate import Evaluation, evaluate_source
from segcal.evaluation.folder import (
    compare,
    file_name,
    load_evaluation,
    store,
    stored,
    write_comparison,
)
from segcal.metrics import CalibrationMeter, paired_differences
from segcal.sources.saved import PredictionFolder
from tests.support import children
from tests.support.evaluations import draw_nothing
from tests.support.saved import save_folder
from tests.support.synthetic_reports import images, measured


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = save_folder(tmp_path_factory.mktemp("saved") / "net", temperature=2.0)
    (folder / "im009.npz").write_bytes(b"")
    found = evaluate_source(
        PredictionFolder(folder, skip_bad=True),
        holdout=PredictionFolder(folder, skip_bad=True),
        posthoc=["ts"],
        regions=["classes:1"],
        resamples=50,
        num_overlays=2,
    )
    found.history = [{"epoch": 1, "holdout/ece": 0.1, "holdout/miou": float("nan")}]
    found.config = "loss: nll\n"
    return found


def assert_same(one, other):
    assert one.name == other.name and one.notes == other.notes
    assert one.reports == other.reports and list(one.reports) == list(other.reports)
    assert one.skipped == other.skipped and one.config == other.config
    assert one.calibrators.keys() == other.calibrators.keys()
    for name, calibrator in one.calibrators.items():
        torch.testing.assert_close(calibrator.state_dict(), other.calibrators[name].state_dict())
    assert one.meters.keys() == other.meters.keys()
    for key in one.meters:
        torch.testing.assert_close(one.meters[key].state_dict(), other.meters[key].state_dict())
    for method, drawn in one.overlays.items():
        for a, b in zip(drawn, other.overlays[method], strict=True):
            assert (a.name, a.of, a.ece) == (b.name, b.of, b.ece)
            for name, array in a.arrays.items():
                np.testing.assert_array_equal(array, b.arrays[name])


def test_an_evaluation_is_read_as_it_was_written(tmp_path, evaluated):
    page = evaluated.save(tmp_path / "out")
    found = load_evaluation(tmp_path / "out")
    assert_same(found, evaluated)
    assert found.history == [{"epoch": 1, "holdout/ece": 0.1, "holdout/miou": None}]
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert {
        *("report.json", "report.html", "table.md", "table.csv", "state.npz"),
        *("ts/report.json", "ts/state.npz", "ts/calibrator.safetensors"),
        *("figures/reliability.png", "overlays/im000.png", "ts/overlays/im000.npz"),
    } - {name for name in written if "overlays" in name} <= written | {
        "overlays/im000.png",
        "ts/overlays/im000.npz",
    }
    assert segcal.Report.load(tmp_path / "out" / "report.json") == evaluated.reports["none"]
    assert "temperature" in (tmp_path / "out" / "table.md").read_text()
    text = page.read_text()
    assert "im009" in text and "crop_size" not in text and "loss: nll" in text
    assert "hold-out images" in text
    (row, _) = csv.DictReader((tmp_path / "out" / "table.csv").open())
    assert float(row["ECE (%)"]) == pytest.approx(100 * evaluated.reports["none"].ece)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    again = write_comparison([found], tmp_path / "again", title=found.name)
    for name in ("report.html", "table.md", "table.csv"):
        assert (again.parent / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_notebook_shows_a_table(evaluated):
    html = evaluated._repr_html_()
    assert "net + TS" in html and html.count("<tr>") == 3


def test_any_saved_report_will_do(tmp_path, evaluated, undrawn):
    report = evaluated.reports["none"]
    report.save(tmp_path / "mine.json")
    found = load_evaluation(tmp_path / "mine.json")
    assert (found.name, found.reports) == ("mine", {"none": report})
    evaluated.save(tmp_path / "run" / "eval")
    assert load_evaluation(tmp_path / "run").name == "net"  # the results of a run
    alone = load_evaluation(tmp_path / "run" / "eval" / "ts" / "report.json")
    assert (alone.name, alone.reports) == ("net + TS", {"none": evaluated.reports["ts"]})
    assert list(alone.meters) == ["none"]
    with pytest.raises(ValueError, match="segcal eval"):
        load_evaluation(tmp_path)


ODD = [
    *([], "text", 7, {"methods": 7}, {"shifts": 7}, {"history": 3}, {"history": ["x"]}),
    *({"history": [{"epoch": "x"}]}, {"overlays": {"none": [{}]}}, {"overlays": {"none": [1]}}),
    *({"overlays": 7}, {"skipped": 3}, {"notes": 7}),
]


def test_a_strange_report_is_one_line_that_names_it(tmp_path, evaluated, undrawn):
    for about in ODD:
        evaluated.save(tmp_path)
        data = json.loads((tmp_path / "report.json").read_text())
        data["about"] = {**data["about"], **about} if isinstance(about, dict) else about
        (tmp_path / "report.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"report\.json") as caught:
            load_evaluation(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_report_cannot_name_files_elsewhere(tmp_path, evaluated, undrawn):
    evaluated.save(tmp_path / "out")
    (tmp_path / "out" / "overlays" / "im000.npz").unlink(missing_ok=True)
    path = tmp_path / "out" / "report.json"
    data = json.loads(path.read_text())
    data["about"]["methods"].append("../../elsewhere")
    for item in data["about"]["overlays"]["none"]:
        item["file"] = "../../secret.npz"
    np.savez(tmp_path / "secret.npz", labels=np.zeros(3))
    path.write_text(json.dumps(data))
    found = load_evaluation(tmp_path / "out")
    assert found.overlays["none"] == [] and found.methods == ["none", "ts"]


def test_new_results_replace_all_old_ones_and_nothing_else(tmp_path, evaluated, undrawn):
    evaluated.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ts" / "notes.txt").write_text("mine")
    bare = Evaluation("other", {"none": evaluated.reports["none"]})
    bare.save(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"report.json", "table.md", "table.csv", "report.html"} - {"report.html"} | {
        "report.html",
        "notes.txt",
        "ts/notes.txt",
    }
    assert load_evaluation(tmp_path).name == "other"


def test_an_error_changes_nothing(tmp_path, evaluated, undrawn, monkeypatch):
    evaluated.save(tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(segcal.CalibrationMeter, "save", lambda *_: 1 / 0)
    for folder in ("out", "new"):
        with pytest.raises(ZeroDivisionError):
            replace(evaluated, name="other").save(tmp_path / folder)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert not (tmp_path / "new").exists()


def test_what_is_stored_is_known_by_its_key(tmp_path, evaluated):
    report, meter = evaluated.reports["ts"], evaluated.meters["ts"]
    store(tmp_path, report, meter, {"key": "a"})
    kept = stored(tmp_path, "a")
    assert kept is not None and kept[0] == report
    assert stored(tmp_path, "b") is None and stored(tmp_path / "nowhere", "a") is None
    (tmp_path / "state.npz").write_bytes(b"")
    assert stored(tmp_path, "a") is None
    store(tmp_path, report, meter, {"key": "a"})
    (tmp_path / "report.json").write_text("{")
    assert stored(tmp_path, "a") is None


def test_file_names_stay_in_their_folder():
    assert file_name("2007_000033") == "2007_000033"
    assert file_name("../../etc/passwd") == "etc-passwd"
    assert file_name("a/b c?.png") == "a-b-c-.png"
    assert file_name("//") == "image"


def test_seeds_are_compared_together(tmp_path, undrawn):
    generator = torch.Generator().manual_seed(0)
    logits, labels = images(40, generator)
    found = []
    for run, sharpness in {"nll-seed0": 4.0, "nll-seed1": 4.5, "calm-seed0": 1.0}.items():
        meter = measured(sharpness * logits, labels, [f"{i}" for i in range(40)])
        Evaluation(run, {"none": meter.compute(resamples=100)}, meters={"none": meter}).save(
            tmp_path / run
        )
        found.append(load_evaluation(tmp_path / run))
    comparison = compare(found)
    assert comparison.seeds == {"nll": 2, "calm": 1}
    meters = [CalibrationMeter.load(tmp_path / e.name / "state.npz") for e in found]
    assert comparison.differences["calm"] == paired_differences(meters[:2], meters[2:])
    alone = Evaluation("x", found[0].reports)  # without a state
    assert compare([alone, found[2]]) is None
    other = measured(logits[1:], labels[1:], list("a" * 39))
    assert compare([found[0], replace(found[2], meters={"none": other})]) is None  # other images


# Kills -------------------------------------------------------------------------------------------


def save_and_die(folder, source, number):
    """Write new results, and die at the n-th rename of a file."""
    draw_nothing()
    evaluation = load_evaluation(source)
    evaluation.name = "new"
    calls, usual = itertools.count(1), os.replace

    def replace_file(old, new):
        if ".new" in str(old) and ".new" not in str(new) and next(calls) == number:
            os.kill(os.getpid(), 9)
        usual(old, new)

    os.replace = replace_file
    evaluation.save(folder)


@pytest.mark.slow
def test_killed_at_any_rename_the_old_or_the_new_results_are_read(tmp_path, evaluated, undrawn):
    source = tmp_path / "source"
    evaluated.save(source)
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        evaluated.save(folder)
        process = children.start(save_and_die, folder, source, number)
        process.join(60)
        found = load_evaluation(folder)
        assert found.name == ("new" if process.exitcode == 0 else "net")
        # Of a method only what was written with report.json is read.
        assert "none" in found.methods and set(found.methods) <= {"none", "ts"}
        if process.exitcode == 0:
            break
        replace(evaluated, name="newer").save(folder)  # and nothing stays of the killed one
        assert_same(load_evaluation(folder), replace(evaluated, name="newer"))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert number > 8 and found.methods == ["none", "ts"]
