"""`segcal merge`: parts of a data set, evaluated in separate processes, add up to the whole."""

import json
import re
import shlex
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import segcal
from segcal.cli import main
from segcal.evaluation.states import merge_states
from tests.support import ROOT
from tests.support.evaluations import QUICK, draw_nothing
from tests.support.saved import logits_and_labels, save_folder

COUNTS = ("top.count", "top.hits", "classes.count", "classes.hits", "fine.correct", "fine.wrong")


def evaluated(folder, *arguments):
    predictions = ["--predictions", str(folder), "--overlays", "none", *QUICK]
    assert main(["eval", *predictions, *map(str, arguments)]) == 0


def evaluated_elsewhere(folder, shard):
    """`evaluated`, for another process, which no fixture reaches: pages take seconds to draw."""
    torch.set_num_threads(1)
    draw_nothing()
    predictions = ["--predictions", str(folder), "--overlays", "none", *QUICK]
    return main(["eval", *predictions, "--shard", shard])


def merged(*arguments):
    return main(["merge", *map(str, arguments), "--resamples", "20"])


def expect_equal(merged, whole):
    """Counts, and all that is of one image, to the bit; sums of sums to the last digits."""
    assert merged.protocol == whole.protocol
    assert merged.class_names == whole.class_names
    for name in COUNTS:
        table, column = name.split(".")
        one, other = (getattr(getattr(r, table), column) for r in (merged, whole))
        np.testing.assert_array_equal(one, other, err_msg=name)
    np.testing.assert_array_equal(merged.confusion, whole.confusion)
    assert merged.images == whole.images  # intervals and the worst images
    assert merged.scores == pytest.approx(whole.scores, rel=1e-12)
    assert merged.accuracy == whole.accuracy
    assert merged.miou == whole.miou


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_shards_counted_by_separate_processes_merge_into_one_run(tmp_path, capsys):
    folder = save_folder(tmp_path / "net", 10)
    evaluated(folder)
    whole = segcal.Report.load(folder / "eval" / "report.json")
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        assert list(pool.map(evaluated_elsewhere, [folder] * 3, ["1/3", "2/3", "3/3"])) == [0, 0, 0]
    parts = [folder / f"eval-{k}-of-3" for k in (1, 2, 3)]
    images = [segcal.Report.load(part / "report.json").protocol.images for part in parts]
    assert images == [4, 3, 3]
    capsys.readouterr()
    assert merged(*parts, "--out", tmp_path / "c.npz", "--report", tmp_path / "page") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("net: accuracy")
    assert out[1] == f"10 images, {whole.protocol.pixels} pixels from 3 states"
    expect_equal(segcal.Report.load(tmp_path / "page" / "report.json"), whole)
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "report.html", "report.json", "state.npz", "table.md", "table.csv",
    }  # fmt: skip
    # The state of the whole is a state like any other, and merging is adding: order is nothing.
    assert merged(tmp_path / "c.npz", "--report", tmp_path / "again") == 0
    expect_equal(segcal.Report.load(tmp_path / "again" / "report.json"), whole)
    assert merged(*reversed(parts), "--report", tmp_path / "reversed") == 0
    expect_equal(segcal.Report.load(tmp_path / "reversed" / "report.json"), whole)


def test_a_meter_saved_in_python_merges(tmp_path, capsys):
    whole = segcal.CalibrationMeter(3)
    for part in (0, 1):
        meter = segcal.CalibrationMeter(3)
        for index in (2 * part, 2 * part + 1):
            logits, labels = logits_and_labels(index)
            meter.update(*(np_to_batch(logits), np_to_batch(labels)))
            whole.update(*(np_to_batch(logits), np_to_batch(labels)))
        meter.save(tmp_path / f"{part}.npz")
    assert merged(tmp_path / "0.npz", tmp_path / "1.npz", "--out", tmp_path / "c.npz") == 0
    assert capsys.readouterr().out.startswith("c: accuracy")
    expect_equal(segcal.CalibrationMeter.load(tmp_path / "c.npz").compute(), whole.compute())


def np_to_batch(array):
    return torch.from_numpy(array)[None]


@pytest.mark.usefixtures("undrawn")
def test_the_shards_of_a_run_and_what_they_left_out(runs, tmp_path, capsys):
    """Post-hoc methods are fitted alike by every shard; what was skipped is still listed."""
    run = str(runs / "seg")
    posthoc = [*QUICK, "--posthoc", "none,ts", "--overlays", "none"]
    assert main(["eval", run, *posthoc, "--out", str(tmp_path / "whole")]) == 0
    for k in ("1", "2"):
        shard = ["--shard", f"{k}/2", "--out", str(tmp_path / k)]
        assert main(["eval", run, *posthoc, *shard]) == 0
    states = [tmp_path / k / "ts" for k in "12"]
    capsys.readouterr()
    assert merged(*states, "--report", tmp_path / "page") == 0
    assert capsys.readouterr().out.startswith("seg + TS: accuracy")
    expect_equal(
        segcal.Report.load(tmp_path / "page" / "report.json"),
        segcal.Report.load(tmp_path / "whole" / "ts" / "report.json"),
    )
    folder = save_folder(tmp_path / "net", 4)
    (folder / "im001.npz").write_bytes(b"")
    for k in ("1", "2"):
        evaluated(folder, "--skip-bad", "--shard", f"{k}/2")
    parts = [folder / "eval-1-of-2", folder / "eval-2-of-2"]
    assert merged(*parts, "--report", tmp_path / "skipped") == 0
    about = json.loads((tmp_path / "skipped" / "report.json").read_text())["about"]
    assert len(about["skipped"]) == 1 and "im001.npz" in str(about["skipped"])


@pytest.fixture
def states(tmp_path):
    """States that do not go together."""
    for name, options in {
        "a": {"per_image": True},
        "bins": {"per_image": True, "num_bins": 10},
        "other": {"per_image": True},
        "empty": {"per_image": True},
    }.items():
        meter = segcal.CalibrationMeter(3, **options)
        if name != "empty":
            logits, labels = logits_and_labels(0)
            names = ["x" if name == "other" else "im"]
            meter.update(np_to_batch(logits), np_to_batch(labels), names=names)
        meter.save(tmp_path / f"{name}.npz")
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:500])
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "the following arguments are required: STATE"),
        ("nowhere.npz", "nowhere.npz"),
        ("a.npz a.npz", "different images, but im is in"),
        ("a.npz bins.npz", "num_bins 15 and 10"),
        ("a.npz damaged.npz", "damaged.npz: expected a saved CalibrationMeter"),
        ("pickled.npz", "pickled.npz: expected a saved CalibrationMeter"),
        ("empty.npz", "no labelled pixels in the states"),
        ("a.npz other.npz --out a.npz/c.npz", "cannot be written"),
    ],
)
def test_what_cannot_be_merged_is_one_line(states, capsys, monkeypatch, given, reason):
    monkeypatch.chdir(states)
    before = sorted(states.iterdir())
    assert main(["merge", *shlex.split(given)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("segcal: error: ") and captured.err.count("\n") == 1
    assert reason in captured.err
    assert sorted(states.iterdir()) == before


def test_states_without_reports_take_the_name_that_is_given(states):
    assert merge_states([states / "a.npz", states / "other.npz"], name="both").name == "both"


@pytest.mark.usefixtures("undrawn")
def test_states_of_two_methods_are_refused(runs, tmp_path, capsys):
    shard = ["--shard", "1/5", "--posthoc", "none,ts", "--overlays", "none", *QUICK]
    assert main(["eval", str(runs / "seg"), *shard, "--out", str(tmp_path / "o")]) == 0
    other = ["--shard", "2/5", *shard[2:], "--out", str(tmp_path / "p")]
    assert main(["eval", str(runs / "seg"), *other]) == 0
    assert merged(tmp_path / "o", tmp_path / "p" / "ts") == 2
    assert "of one post-hoc method, but are of none in" in capsys.readouterr().err


def test_shards_that_are_none(tmp_path, capsys):
    folder = save_folder(tmp_path / "net", 2)
    for text in ("0/2", "3/2", "1", "a/b", "1/2/3", "²/3"):
        assert main(["eval", "--predictions", str(folder), f"--shard={text}"]) == 2
        assert "no shard K/N such as 1/4" in capsys.readouterr().err


def test_more_shards_than_images(tmp_path, capsys):
    folder = save_folder(tmp_path / "net", 2)
    assert main(["eval", "--predictions", str(folder), "--shard", "1/3"]) == 2
    assert "too few" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_the_example_in_the_docs(tmp_path, monkeypatch, capsys):
    """Each line of the block in docs/evaluation.md that merges, as typed."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    (block,) = re.findall(r"## In parts\n.*?```\n(.*?)```", text, flags=re.S)
    save_folder(tmp_path / "predictions", 6)
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "segcal"
        assert main([*arguments, "--resamples", "20"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("report: ")
    evaluated("predictions")
    whole = segcal.Report.load(tmp_path / "predictions" / "eval" / "report.json")
    report = Path(out[-1].removeprefix("report: ")).with_name("report.json")
    expect_equal(segcal.Report.load(report), whole)


@pytest.mark.usefixtures("undrawn")
def test_a_report_does_not_replace_what_it_is_made_of(tmp_path, capsys):
    for name in "ab":
        first = 2 * "ab".index(name)
        evaluated(save_folder(tmp_path / name, 2, first=first))
    states = [tmp_path / name / "eval" for name in "ab"]
    assert merged(*states, "--report", tmp_path / "a" / "eval") == 2
    assert " holds " in capsys.readouterr().err
    assert (tmp_path / "a" / "eval" / "state.npz").is_file()
    assert merged(*states, "--out", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err
    whole = tmp_path / "whole"
    for _ in range(2):  # the second time over the first
        assert merged(*states, "--report", whole, "--out", whole / "state.npz") == 0
    assert segcal.CalibrationMeter.load(whole / "state.npz").compute(resamples=0).protocol == (
        segcal.Report.load(whole / "report.json").protocol
    )
