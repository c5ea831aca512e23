"""`segcal eval` and `segcal report`, from the command line to the files they leave."""

import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.cli import main
from segcal.metrics.triage import accepted
from segcal.sources.network import RunSource
from segcal.sources.saved import PredictionFolder
from tests.support import ROOT
from tests.support.evaluations import QUICK, draw_nothing
from tests.support.saved import logits_and_labels, save_folder


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def evaluated(runs, tmp_path_factory):
    """A copy of the run seg, evaluated."""
    run = tmp_path_factory.mktemp("evaluated") / "seg"
    shutil.copytree(runs / "seg", run)
    assert main(["eval", str(run), *QUICK, "--num-overlays", "2"]) == 0
    return run


def test_a_run_is_judged_and_everything_is_written(evaluated):
    folder = evaluated / "eval"
    report = segcal.Report.load(folder / "report.json")
    assert report.protocol.images == 5
    assert report.class_names == ("sky", "road", "<b>car</b>")
    assert report.intervals["ece"].low <= report.intervals["ece"].high
    page = (folder / "report.html").read_text()
    assert "&lt;b&gt;car&lt;/b&gt;" in page
    assert "<b>car</b>" not in page
    assert "crop_size" in page  # the settings
    written = files(folder)
    assert {
        "table.md",
        "table.csv",
        "figures/reliability.png",
    } <= written
    worst = [image.name for image in report.worst_images[:2]]
    assert {f"overlays/{name}.{kind}" for name in worst for kind in ("png", "npz")} <= written
    (row,) = csv.DictReader((folder / "table.csv").open())
    assert float(row["ECE (%)"]) == pytest.approx(100 * report.ece)
    assert not [path for path in evaluated.iterdir() if path.name.startswith(".")]


def test_the_numbers_are_those_of_the_best_weights(runs, undrawn):
    assert main(["eval", str(runs / "seg"), *QUICK, "--overlays", "none"]) == 0
    report = segcal.Report.load(runs / "seg" / "eval" / "report.json")
    run = RunSource(runs / "seg")
    meter = segcal.CalibrationMeter(3)
    with torch.no_grad():
        for image, label in run.samples:
            meter.update(run.model(image[None]), label[None])
    assert report.ece == pytest.approx(meter.compute().ece, rel=1e-9)
    assert not (runs / "seg" / "eval" / "overlays").exists()


def test_pages_are_opened(runs, tmp_path, monkeypatch, evaluated):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    out = tmp_path / "none"
    assert main(["report", str(evaluated), "--out", str(out), "--open"]) == 0
    page = evaluated / "eval" / "report.html"
    assert "Bokeh" in page.read_text()
    draw_nothing(monkeypatch.setattr)
    seg = [str(runs / "seg"), *QUICK, "--overlays", "none", "--open"]
    assert main(["eval", *seg, "--out", str(tmp_path / "one")]) == 0
    other = str(evaluated / "eval" / "report.json")
    assert main(["eval", *seg, other, "--out", str(tmp_path / "two")]) == 0
    assert opened == [(tmp_path / n / "report.html").as_uri() for n in ("none", "one", "two")]


def test_holdout_and_other_weights_and_bins(runs, tmp_path, undrawn):
    arguments = [
        "--split",
        "holdout",
        "--weights",
        "last",
        "--num-bins",
        "10",
        "--overlays",
        "none",
    ]
    assert main(["eval", str(runs / "seg"), *QUICK, *arguments, "--out", str(tmp_path / "o")]) == 0
    report = segcal.Report.load(tmp_path / "o" / "report.json")
    assert (report.protocol.images, report.protocol.num_bins) == (3, 10)


def test_a_run_is_opened_with_groups(runs):
    run = segcal.open_source(runs / "seg", group="^.", workers=0)
    report = segcal.evaluate_source(run, overlays="none", resamples=20).reports["none"]
    assert report.images.groups == len({name[0] for name in run.names})
    assert run.holdout().group == "^."


def test_classification_and_post_hoc_methods(runs, capsys, undrawn):
    assert main(["eval", str(runs / "digits"), *QUICK, "--posthoc", "none,ts,vs"]) == 0
    out = capsys.readouterr().out
    assert "mIoU" not in out
    folder = runs / "digits" / "eval"
    assert not (folder / "overlays").exists()
    before = segcal.Report.load(folder / "report.json")
    after = segcal.Report.load(folder / "ts" / "report.json")
    assert after.accuracy == before.accuracy  # a temperature changes no prediction
    assert after.nll != before.nll
    calibrator = segcal.load_calibrator(folder / "ts" / "calibrator.safetensors")
    assert calibrator.temperature_ > 0
    assert segcal.Report.load(folder / "vs" / "report.json").protocol.images == 40
    assert str(folder / "report.html") in out.splitlines()[-1]
    assert "temperature" in out
    table = (folder / "table.md").read_text()
    assert "| digits + TS |" in table
    assert "| model | SCE (1e-3) none | SCE (1e-3) ts | SCE (1e-3) vs |" in table


def test_several_are_compared_and_reports_may_stand_for_runs(runs, tmp_path, capsys, undrawn):
    copy = tmp_path / "other"
    shutil.copytree(runs / "seg", copy)
    arguments = [str(copy), *QUICK, "--overlays", "none"]
    assert main(["eval", *arguments]) == 0
    report = copy / "eval" / "report.json"
    out = tmp_path / "all"
    assert main(["eval", *arguments, str(report), "--names", "one,two", "--out", str(out)]) == 0
    assert str(out / "report.html") in capsys.readouterr().out.splitlines()[-1]
    assert files(out) == {"report.html", "table.md", "table.csv"}
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert rows[0]["model"] == "one" and rows[0]["ECE (%)"] == rows[1]["ECE (%)"]


def test_report_makes_the_page_again_without_a_network(evaluated, tmp_path, monkeypatch):
    run = tmp_path / "seg"
    shutil.copytree(evaluated / "eval", run / "eval")  # and nothing else of the run
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_: pytest.fail("used a network"))
    assert main(["report", str(run), "--out", str(tmp_path / "again")]) == 0
    for name in ("report.html", "table.md", "table.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (run / "eval" / name).read_bytes()
    assert files(tmp_path / "again" / "figures") == files(run / "eval" / "figures")


def test_report_takes_all_reports_of_a_run(runs, tmp_path, undrawn, capsys):
    arguments = ["--posthoc", "vs,ts,dc", "--overlays", "none", "--out", str(tmp_path / "eval")]
    assert main(["eval", str(runs / "digits"), *QUICK, *arguments]) == 0
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path.parent / "comparison" / "report.html"
    assert str(page) in capsys.readouterr().out.splitlines()[-1]
    assert (page.parent / "table.md").read_text() == (tmp_path / "eval" / "table.md").read_text()


def test_saved_predictions(tmp_path, capsys, undrawn):
    folder = save_folder(tmp_path / "net", 8, temperature=3.0)
    fit = save_folder(tmp_path / "fit", 8, first=100, temperature=3.0)
    arguments = ["--posthoc", "ts", "--fit-predictions", str(fit), "--num-overlays", "1"]
    assert main(["eval", "--predictions", str(folder), *arguments, *QUICK]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("net: accuracy")
    before = segcal.Report.load(folder / "eval" / "report.json")
    after = segcal.Report.load(folder / "eval" / "ts" / "report.json")
    assert after.ece < before.ece
    assert len(PredictionFolder(folder)) == 8  # results lie beside, not among them


def test_regions_and_protocols_are_blocks_of_report_and_table(tmp_path, undrawn):
    folder = save_folder(tmp_path / "net", 5)
    arguments = ["--regions", "boundary:1,classes:1+2", "--protocol", "pooled,image,batch:2"]
    arguments += ["--overlays", "none", "--resamples", "0"]
    assert main(["eval", "--predictions", str(folder), *arguments]) == 0
    report = segcal.Report.load(folder / "eval" / "report.json")
    assert list(report.regions) == ["boundary:1", "classes:1+2"]
    assert report.regions["classes:1+2"].protocol.pixels == report.confusion.sum(1)[1:].sum()
    assert list(report.protocols) == ["pooled", "image", "batch:2"]
    assert report.protocols["pooled"]["ece"] == report.ece < report.protocols["image"]["ece"]
    table = (folder / "eval" / "table.md").read_text()
    for name in (*report.regions, *report.protocols):
        assert f"\n| {name} |" in table


def test_triage_is_chosen_on_the_holdout_and_checked_on_the_test_images(tmp_path, undrawn):
    folder = save_folder(tmp_path / "net", 8, temperature=2.0)
    fit = save_folder(tmp_path / "fit", 12, first=100, temperature=2.0)
    arguments = ["--fit-predictions", str(fit), "--posthoc", "ts", "--overlays", "none", *QUICK]
    triage = ["--operate", "accuracy=0.9,coverage=0.5", "--conformal", "miss=0.1"]
    assert main(["eval", "--predictions", str(folder), *arguments, *triage]) == 0
    for path in ("report.json", "ts/report.json"):
        report = segcal.Report.load(folder / "eval" / path)
        sure, half = report.operating_points
        (sets,) = report.class_sets
        assert sure.holdout_accuracy >= 0.9 and half.holdout_coverage >= 0.5
        assert sure.holdout_images == sets.holdout_images == 12
        assert (sure.coverage, sure.accuracy) == accepted(report.fine, sure.threshold)
        assert sets.holdout_miss <= 0.1 and 1 <= sets.set_size <= 3
    table = (folder / "eval" / "table.md").read_text()
    assert "| net + TS, accuracy=0.9 |" in table and "| net, miss=0.1 |" in table


def test_triage_of_a_classification_run(runs, tmp_path, undrawn):
    triage = ["--operate", "coverage=0.5", "--conformal", "miss=0.2", "--out", str(tmp_path / "o")]
    assert main(["eval", str(runs / "digits"), *QUICK, *triage]) == 0
    report = segcal.Report.load(tmp_path / "o" / "report.json")
    (point,), (sets,) = report.operating_points, report.class_sets
    assert (point.coverage, point.accuracy) == accepted(report.fine, point.threshold)
    assert point.holdout_coverage >= 0.5 and sets.holdout_miss <= 0.2


def test_conditions_and_a_model_card(tmp_path, undrawn, capsys):
    words = ["eval", "--predictions", str(save_folder(tmp_path / "p")), *QUICK]
    words += ["--model-card", str(tmp_path / "card.md"), "--fail-if", "accuracy<0.01"]
    assert main(words) == 0
    assert main([*words, "--fail-if", "ece>0.001", "--fail-if", "miou<1"]) == 3
    assert capsys.readouterr().out.count("failed: p: ") == 2
    assert main([*words, "--fail-if", "ece"]) == 2
    card = (tmp_path / "card.md").read_text()
    assert "card.png" in card and "ECE (%)" in card and "6 images" in card
    assert (tmp_path / "card.png").read_bytes()[:4] == b"\x89PNG"


def test_every_flag_of_the_format(tmp_path, undrawn):
    (tmp_path / "p").mkdir()
    (tmp_path / "l").mkdir()
    (tmp_path / "i").mkdir()
    for index in range(3):
        logits, labels = logits_and_labels(index)
        labels[labels == 255] = 9
        np.save(tmp_path / "p" / f"{index}.npy", logits.transpose(1, 2, 0)[::2, ::2])
        Image.fromarray(labels).save(tmp_path / "l" / f"{index}.png")
        Image.new("RGB", labels.shape).save(tmp_path / "i" / f"{index}.png")
    arguments = ["--kind", "logits", "--layout", "hwc", "--labels", str(tmp_path / "l")]
    arguments += ["--images", str(tmp_path / "i"), "--ignore-index", "9", "--num-classes", "3"]
    arguments += ["--class-names", "a,b,c", "--align-corners", "--overlays", "1"]
    out = tmp_path / "out"
    predictions = ["--predictions", str(tmp_path / "p"), "--out", str(out)]
    assert main(["eval", *predictions, *arguments, *QUICK]) == 0
    report = segcal.Report.load(out / "report.json")
    assert report.class_names == ("a", "b", "c")
    assert report.protocol.pixels == 3 * (64 - 2)
    with np.load(out / "overlays" / "1.npz") as arrays:
        assert arrays["image"].shape == (8, 8, 3)


def bad_logits():
    nan = logits_and_labels(1)[0]
    nan[0, 3, 3] = np.nan
    return nan


BAD = {
    "missing label": {"logits": logits_and_labels(1)[0]},
    "wrong shape": {"logits": logits_and_labels(1)[0][:, 1:], "labels": np.zeros((4, 8), int)},
    "class out of range": {"logits": logits_and_labels(1)[0], "labels": np.full((8, 8), 40)},
    "nan": {"logits": bad_logits(), "labels": np.zeros((8, 8), int)},
    "object array": {"logits": np.array([None, 1]), "labels": np.zeros((8, 8), int)},
    "truncated": None,
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line_and_nothing_is_written(tmp_path, capsys, case):
    folder = save_folder(tmp_path / "net")
    bad = folder / "im002.npz"
    if BAD[case] is None:
        bad.write_bytes(bad.read_bytes()[:200])
    else:
        np.savez(bad, **BAD[case])
    before = files(tmp_path)
    assert main(["eval", "--predictions", str(folder), *QUICK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"segcal: error: {bad}: ")
    assert files(tmp_path) == before


def test_bad_files_are_skipped_counted_and_listed_on_request(tmp_path, capsys, undrawn):
    folder = save_folder(tmp_path / "net", 10)
    for number, contents in enumerate(BAD.values()):
        path = folder / f"im00{number}.npz"
        if contents is None:
            path.write_bytes(b"PK")
        else:
            np.savez(path, **contents)
    assert (
        main(["eval", "--predictions", str(folder), "--skip-bad", *QUICK, "--overlays", "none"])
        == 0
    )
    assert "left out 6 files" in capsys.readouterr().out
    report = segcal.Report.load(folder / "eval" / "report.json")
    assert report.protocol.images == 4
    skipped = json.loads((folder / "eval" / "report.json").read_text())["about"]["skipped"]
    page = (folder / "eval" / "report.html").read_text()
    for number in range(6):
        assert f"im00{number}.npz" in skipped[f"im00{number}"]
        assert f"im00{number}" in page


def test_wrong_arguments_are_one_line(runs, tmp_path, capsys):
    for arguments, reason in [
        ([], "--predictions"),
        (["nowhere"], "nowhere"),
        (["nowhere.json", "nowhere.json"], "nowhere.json"),
        (["{seg}/eval/report.json"], "segcal report"),
        (["--predictions", "nowhere"], "nowhere"),
        (["--posthoc", "tz", "x"], "choose from none, ts"),
        (["--split", "train", "x"], "--split"),
        (["--num-bins", "0", "x"], "at least 1"),
        (["--num-bins", "many", "x"], "--num-bins"),
        (["--device", "toaster", "x"], "toaster"),
        (["--unknown", "x"], "--unknown"),
        (["--predictions", "{saved}", "--posthoc", "ts"], "--fit-predictions"),
        (["--predictions", "{saved}", "--fit-predictions", "a", "b"], "--fit-predictions"),
        (["--predictions", "{saved}", "--overlays", "im9"], "im9"),
        (["--predictions", "{saved}", "--labels", "nowhere"], "labels"),
        (["--predictions", "{saved}", "--shift", "fog"], "--model"),
        (["{seg}", "--split", "holdout", "--posthoc", "ts"], "hold-out"),
        (["{seg}", "--out", "{file}/x"], "cannot be written"),
        (["{seg}", "--protocol", "batch"], "pooled"),
        (["{seg}", "--regions", "boundary:3,classes:3"], "classes:3"),
        (["{seg}", "--operate", "accuracy=2"], "accuracy"),
        (["{seg}", "--conformal", "0.1"], "miss"),
        (["{seg}", "--split", "holdout", "--conformal", "miss=0.1"], "hold-out"),
        (["{seg}", "--conformal", "miss=0.1"], "9 images"),
    ]:
        (tmp_path / "file").write_text("")
        places = {
            "saved": save_folder(tmp_path / "saved", 2),
            "seg": runs / "seg",
            "file": tmp_path / "file",
        }
        assert main(["eval", *(a.format(**places) for a in arguments), "--workers", "0"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.startswith("segcal: error: ")
        assert reason in err


def test_report_names_what_is_no_report(tmp_path, capsys):
    for contents, reason in [
        ("{", "odd.json"),
        ("{}", "odd.json"),
        ("[1]", "odd.json"),
        (None, "odd.json"),
    ]:
        if contents is not None:
            (tmp_path / "odd.json").write_text(contents)
        assert main(["report", str(tmp_path / "odd.json"), "--out", str(tmp_path / "out")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert reason in err
        assert not (tmp_path / "out").exists()


def test_report_of_a_run_that_was_not_evaluated(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "run segcal eval first" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tool_is_the_command(tmp_path):
    tool = [sys.executable, ROOT / "tools" / "eval_calib.py", "--predictions", "nowhere"]
    done = subprocess.run(tool, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("segcal: error: ") and done.stderr.count("\n") == 1


@pytest.mark.usefixtures("undrawn")
def test_two_inputs_do_not_share_a_folder(tmp_path, capsys):
    folder = save_folder(tmp_path / "d", 2)
    one, two = (str(folder / f"im00{n}.npz") for n in range(2))
    for arguments in (
        ["--predictions", one, two],
        ["--predictions", one, str(folder)],
        ["--predictions", one, str(save_folder(tmp_path / "e", 1)), "--out", str(folder / "eval")],
    ):
        assert main(["eval", *arguments, *QUICK]) == 2
        assert "--" in capsys.readouterr().err
    assert not (folder / "eval").exists() and not (tmp_path / "e" / "eval").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_is_not_written_need_not_be_writable(tmp_path, capsys):
    """The folder for comparisons, when there is nothing to compare; but it is looked at first."""
    (tmp_path / "comparison").write_text("a file")
    one, two = (str(save_folder(tmp_path / name, 1)) for name in "ab")
    arguments = ["--overlays", "none", *QUICK]
    assert main(["eval", "--predictions", one, *arguments]) == 0
    shutil.rmtree(tmp_path / "a" / "eval")
    assert main(["eval", "--predictions", one, two, *arguments]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "a" / "eval").exists()
    assert main(["report", str(tmp_path / "none.json"), "--out", str(tmp_path / "comparison")]) == 2
    assert "cannot be written" in capsys.readouterr().err  # before it is looked for


@pytest.mark.usefixtures("undrawn")
def test_pages_made_again_leave_the_results(tmp_path):
    folder = save_folder(tmp_path / "net", 2)
    arguments = ["--predictions", str(folder), "--num-overlays", "1", *QUICK]
    arguments += ["--posthoc", "none,ts", "--fit-predictions", str(folder)]
    assert main(["eval", *arguments]) == 0
    before = files(folder / "eval")
    (folder / "eval" / "report.html").write_text("old")
    assert main(["report", str(folder), "--out", str(folder / "eval")]) == 0
    assert files(folder / "eval") == before
    assert (folder / "eval" / "report.html").read_text() != "old"
