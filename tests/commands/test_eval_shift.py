"""`segcal eval --shift`: runs on changed test images, and what is kept of them."""

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from segcal.run import open_run

import segcal
from segcal.cli import main
from segcal.data import build as build_data
from segcal.data.corruptions import CORRUPTIONS
from segcal.data.shift import Shift
from segcal.evaluation import results, shifted
from tests.support.datasets import write_pacs

pytestmark = pytest.mark.usefixtures("undrawn")
QUICK = ["--resamples", "0", "--workers", "0", "--device", "cpu", "--overlays", "none"]


def copied(runs, name, tmp_path):
    # Other tests may have evaluated the run where it is.
    return shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns("eval*"))


@pytest.fixture
def digits(runs, tmp_path):
    return copied(runs, "digits", tmp_path)


@pytest.fixture
def seg(runs, tmp_path):
    return copied(runs, "seg", tmp_path)


@pytest.fixture
def passes(monkeypatch):
    """The titles of the passes over shifted images."""
    made = []

    def measure(*arguments, **options):
        made.append(options["title"])
        return measured(*arguments, **options)

    measured = shifted.measure
    monkeypatch.setattr(shifted, "measure", measure)
    return made


def load(folder):
    return segcal.Report.load(folder / "report.json")


def test_rotated_digits(digits):
    assert main(["eval", str(digits), *QUICK, "--shift", "rotation:45", "--posthoc", "ts"]) == 0
    found = load(digits / "eval" / "shift" / "rotation-45")
    run = open_run(digits)
    data = build_data(replace(run.config.data, rotation=45.0), seed=0)
    images, labels = zip(*(data.test[i] for i in range(len(data.test))), strict=True)
    loader = [(torch.stack(images), torch.stack(labels))]
    expected = segcal.evaluate(run.model, loader, num_classes=10, progress=False)
    assert found.nll == pytest.approx(expected.nll)
    calibrator = segcal.load_calibrator(
        digits / "eval" / "posthoc" / "ts" / "calibrator.safetensors"
    )
    scaled = segcal.evaluate(
        run.model, loader, num_classes=10, progress=False, transform=calibrator
    )
    found = load(digits / "eval" / "shift" / "rotation-45" / "posthoc" / "ts")
    assert found.nll == pytest.approx(scaled.nll)
    shutil.move(digits / "eval", digits / "before")
    assert main(["eval", str(digits), *QUICK, "--posthoc", "ts"]) == 0
    for place in ("", "posthoc/ts"):  # the clean images and the hold-out stay as they were
        assert load(digits / "eval" / place).scores == load(digits / "before" / place).scores


@pytest.mark.parametrize("shift", ["gaussian_noise:3", "fog:5", "jpeg:1"])
def test_shifted_files_give_the_same_scores(shift, seg, tmp_path, runs):
    """The changed images as PNG files, by way of `masks`, and --shift, agree to the bit."""
    options = [*QUICK, "--posthoc", "ts"]
    assert main(["eval", str(seg), *options, "--shift", shift]) == 0
    other = tmp_path / "other"
    shutil.copytree(runs / "data", other)
    name, _, severity = shift.partition(":")
    data = open_run(seg).data
    for image in data.test.names:
        path = other / "test" / "images" / f"{image}.png"
        changed = Shift(name, int(severity)).apply(np.asarray(Image.open(path)), key=image)
        Image.fromarray(changed).save(path)
    shutil.rmtree(other / "train")  # a folder of shifted images needs its test part alone
    out = ["--out", str(tmp_path / "out")]
    assert main(["eval", str(seg), *options, *out, "--shift-data", str(other)]) == 0
    for place in ("", "posthoc/ts"):
        mine = load(seg / "eval" / "shift" / shift.replace(":", "-") / place)
        theirs = load(tmp_path / "out" / "shift" / "data-other" / place)
        assert mine.to_dict() == theirs.to_dict()
        assert mine.ece != load(seg / "eval" / place).ece


def test_workers_and_batches_do_not_matter(digits, tmp_path):
    reports = []
    for number, options in enumerate((["--workers", "0"], ["--workers", "2", "--batch-size", "7"])):
        out = tmp_path / str(number)
        words = [*QUICK, "--shift", "impulse_noise:2", "--out", str(out), *options]
        assert main(["eval", str(digits), *words]) == 0
        reports.append(load(out / "shift" / "impulse_noise-2"))
    assert (reports[0].confusion == reports[1].confusion).all()
    assert reports[0].nll == pytest.approx(reports[1].nll, rel=1e-5)


def test_table_of_all_corruptions(digits):
    assert main(["eval", str(digits), *QUICK, "--shift", "all", "--posthoc", "ts"]) == 0
    evaluated = digits / "eval"
    assert {path.name for path in (evaluated / "shift").iterdir()} == {
        f"{n}-3" for n in CORRUPTIONS
    }
    rows = list(csv.DictReader((evaluated / "shift.csv").open()))
    names = [row["shift"] for row in rows if row["model"] == "digits + TS"]
    assert names == ["clean", *CORRUPTIONS, "mean over shifts"]
    reports = {n: load(evaluated / "shift" / f"{n}-3" / "posthoc" / "ts") for n in CORRUPTIONS}
    row = {row["shift"]: row for row in rows if row["model"] == "digits + TS"}
    assert float(row["fog"]["ECE (%)"]) == pytest.approx(100 * reports["fog"].ece)
    for score, heading, scale in (("ece", "ECE (%)", 100), ("sce", "SCE (1e-3)", 1000)):
        mean = np.mean([getattr(report, score) for report in reports.values()])
        assert float(row["mean over shifts"][heading]) == pytest.approx(scale * mean)
    stated = json.loads((evaluated / "shift.json").read_text())["scores"]
    assert len(stated) == len(rows) == 2 * 14
    over, under = (100 * stated[5][f"{side}confidence"] for side in ("over", "under"))
    assert over + under == pytest.approx(100 * stated[5]["ece"])
    markdown = (evaluated / "shift.md").read_text()
    assert markdown.count("| mean over shifts |") == 6 and "**over-confidence (%)**" in markdown


def test_what_is_kept_is_not_made_again(seg, passes, runs):
    common = ["eval", str(seg), *QUICK]
    assert main([*common, "--shift", "fog:2,4"]) == 0
    assert passes == ["seg, fog:2", "seg, fog:4"]
    before = load(seg / "eval" / "shift" / "fog-4").to_dict()
    assert main([*common, "--shift", "snow,fog:4"]) == 0
    assert passes[2:] == ["seg, snow:3"]
    assert load(seg / "eval" / "shift" / "fog-4").to_dict() == before
    rows = list(csv.DictReader((seg / "eval" / "shift.csv").open()))
    assert [row["shift"] for row in rows] == ["clean", "snow", "fog", "mean over shifts"]
    assert main([*common, "--shift", "fog:4", "--posthoc", "ts"]) == 0  # for ts alone
    assert (
        passes[3:] == ["seg, fog:4"] and load(seg / "eval" / "shift" / "fog-4").to_dict() == before
    )
    for options in (["--num-bins", "10"], ["--resamples", "5"], ["--weights", "last"]):
        passes.clear()
        assert main([*common, "--shift", "fog:4", *options]) == 0
        assert passes == ["seg, fog:4"], options
    assert main(common) == 0
    assert not (seg / "eval" / "shift.csv").exists() and (seg / "eval" / "shift").is_dir()


def test_an_interrupted_evaluation_resumes(seg, monkeypatch, passes):
    assert main(["eval", str(seg), *QUICK, "--shift", "all", "--out", str(seg / "whole")]) == 0
    whole = shifted.measure

    def stopped(*arguments, **options):
        if options["title"].endswith("snow:3"):
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    passes.clear()
    monkeypatch.setattr(shifted, "measure", stopped)
    assert main(["eval", str(seg), *QUICK, "--shift", "all"]) != 0
    made = list(passes)
    assert 0 < len(made) < len(CORRUPTIONS) and not (seg / "eval" / "shift.csv").exists()
    # One was killed while it was written: its state is there, its report is not.
    (seg / "eval" / "shift" / "shot_noise-3" / "report.json").unlink()
    (seg / "eval" / "shift" / "fog-3" / "report.json").write_text("{")
    monkeypatch.setattr(shifted, "measure", whole)
    assert main(["eval", str(seg), *QUICK, "--shift", "all"]) == 0
    again = set(passes[len(made) :])
    assert again == {f"seg, {n}:3" for n in CORRUPTIONS} - set(made) | {
        "seg, shot_noise:3",
        "seg, fog:3",
    }
    for name in ("shift.csv", "shift.json", "shift.md"):
        assert (seg / "eval" / name).read_text() == (seg / "whole" / name).read_text()


def test_changed_files_are_evaluated_again(seg, passes, tmp_path, runs):
    other = shutil.copytree(runs / "data", tmp_path / "other")
    common = ["eval", str(seg), *QUICK, "--shift-data", str(other)]
    assert main(common) == 0 and main(common) == 0
    assert len(passes) == 1
    path = other / "test" / "images" / "test0.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    assert main(common) == 0 and len(passes) == 2


def test_results_are_read_again(digits):
    options = [*QUICK, "--shift", "fog:1,5,rotation:15", "--posthoc", "ts"]
    assert main(["eval", str(digits), *options]) == 0
    evaluated = digits / "eval"
    for place in (evaluated, evaluated / "posthoc" / "ts"):
        entry = results.read_result(place / "report.json").entry
        assert [str(shift) for shift in entry.shifts] == ["fog:1", "fog:5", "rotation:15"]
        states = results.shift_states(place)
        for shift, report in entry.shifts.items():
            meter = segcal.CalibrationMeter.load(states[shift])
            assert meter.compute().ece == report.ece
    assert main(["report", str(digits), "--out", str(digits / "again")]) == 0
    again, first = (folder / "shift.csv" for folder in (digits / "again", evaluated))
    assert again.read_text() == first.read_text()


@pytest.mark.parametrize(
    "shifts", [[["fog", 99]], [["fog"]], [[1, 2, 3]], 7, [["domain", ["a"]]], [["rain", 3]]]
)
def test_reports_that_name_no_shift(shifts, digits):
    assert main(["eval", str(digits), *QUICK]) == 0
    path = digits / "eval" / "report.json"
    data = json.loads(path.read_text())
    data["about"]["shifts"] = shifts
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        results.read_result(path)


def test_the_panel_of_one_image(seg):
    options = [*QUICK, "--shift", "fog:1,3,5,snow", "--posthoc", "ts", "--overlays", "test1"]
    assert main(["eval", str(seg), *options]) == 0
    entry = results.read_result(seg / "eval" / "report.json").entry
    assert entry.shift_overlay is not None and entry.shift_overlay.name == "test1"
    panel = Image.open(seg / "eval" / "shift.png")
    assert panel.width > panel.height  # four columns, three rows


def test_comparison_over_shifts(seg, capfd, tmp_path):
    options = [*QUICK, "--resamples", "20", "--posthoc", "ts"]
    assert main(["eval", str(seg), *options, "--shift", "fog:3,contrast"]) == 0
    capfd.readouterr()
    folders = [str(seg / "eval"), str(seg / "eval" / "posthoc" / "ts")]
    assert main(["compare", *folders, "--shift", "--resamples", "50"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "fog:3",
        "contrast:3",
        "mean over 2 shifts",
    ]
    ece = lines[0].split("|").index(" ECE (%) ")
    values = [float(line.split("|")[ece].split()[0].rstrip("*")) for line in lines[2:]]
    assert values[2] == pytest.approx((values[0] + values[1]) / 2, abs=0.011)
    other = tmp_path / "other"
    assert main(["eval", str(seg), *options, "--shift", "fog:3", "--out", str(other)]) == 0
    assert main(["compare", folders[0], str(other), "--shift"]) == 2
    assert "but contrast:3 is in one alone" in capfd.readouterr().err
    assert main(["eval", str(seg), *options, "--out", str(other)]) == 0
    assert main(["compare", folders[0], str(other), "--shift"]) == 2
    assert "Expected results under shift in" in capfd.readouterr().err


def test_domains(tmp_path, capfd):
    write_pacs(tmp_path)
    common = f"--data.name pacs --data.root {tmp_path} --data.resize 8 --model.name resnet8".split()
    common += ["--epochs", "1", "--workers", "0", "--device", "cpu"]
    run = tmp_path / "photos"
    assert main(["train", *common, "--out", str(run)]) == 0
    shifts = ["--shift", "domain:sketch,domain:art", "--shift", "fog:1"]
    assert main(["eval", str(run), *QUICK, *shifts]) == 0
    assert load(run / "eval").protocol.images == 63  # the three that were not trained on
    for name, images in (("domain-sketch", 21), ("domain-art", 21), ("fog-1", 63)):
        assert load(run / "eval" / "shift" / name).protocol.images == images
    left_out = ["--data.train_domain", "others", "--data.domain", "sketch"]
    run = tmp_path / "others"
    assert main(["train", *common, *left_out, "--out", str(run)]) == 0
    capfd.readouterr()
    assert main(["eval", str(run), *QUICK, "--shift", "domain:photo"]) == 2
    error = capfd.readouterr().err
    assert "left out of the training, but got photo: it was trained on that" in error


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", ["--shift", "domain:art"], "Expected domain to be unset for digits"),
        ("digits", ["--shift", "fog:7"], "Expected a severity of 1 to 5 for fog, but got 7"),
        ("digits", ["--shift", "fog", "--split", "holdout"], "Expected --split test with --shift"),
        ("seg", ["--shift", "rotation:15"], "Expected a shift that leaves masks where they are"),
        ("seg", ["--shift-data", "/nowhere"], "but there is no such folder"),
        (
            "seg",
            ["--shift-data", "a/x", "--shift-data", "b/x"],
            "Expected shifts whose results have different names, but got two data-x",
        ),
    ],
)
def test_shifts_that_cannot_be(name, options, message, runs, tmp_path, capfd):
    run = copied(runs, name, tmp_path)
    assert main(["eval", str(run), *QUICK, *options]) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(run.glob("eval*"))


def test_a_limit_takes_the_same_images_of_every_shift(seg, passes):
    options = [*QUICK, "--shift", "fog:1", "--resamples", "5", "--posthoc", "ts"]
    assert main(["eval", str(seg), *options, "--limit", "3"]) == 0
    folder = seg / "eval-limit-3"
    names = [
        segcal.CalibrationMeter.load(place / "state.npz").names
        for place in (folder / "shift" / "fog-1", folder / "shift" / "fog-1" / "posthoc" / "ts")
    ]
    assert names == [["test0", "test2", "test4"]] * 2 and load(folder).protocol.images == 3
    assert main(["eval", str(seg), *options]) == 0
    assert load(seg / "eval").protocol.images == 5 and len(passes) == 2
    fits = [place / "posthoc" / "ts" / "calibrator.safetensors" for place in (folder, seg / "eval")]
    temperatures = [segcal.load_calibrator(path).temperature_ for path in fits]
    assert temperatures[0] == temperatures[1]  # the hold-out is whole


def test_saved_predictions_cannot_be_shifted(tmp_path, capfd):
    assert main(["eval", "--predictions", str(tmp_path), "--shift", "fog"]) == 2
    assert "Expected runs with --shift" in capfd.readouterr().err
    assert main(["eval", "--predictions", str(tmp_path), "--limit", "3"]) == 2
    assert "Expected runs with --limit" in capfd.readouterr().err
