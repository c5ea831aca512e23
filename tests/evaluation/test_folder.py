"""The folder of an evaluation: whole or not at all, and read back as it was written."""

import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from segcal.evaluation.results import (
    Result,
    compare_results,
    file_name,
    new_contents,
    read_result,
    settle,
    state_path,
    write_result,
)
from segcal.evaluation.saved import PredictionFolder

from segcal.evaluation.overlays import draw
from segcal.metrics import CalibrationMeter, paired_differences
from segcal.metrics.scores import SCORES
from segcal.viz import PageRow
from segcal.viz.page import render_page
from tests.support.evaluated import reports as reports_of
from tests.support.networks import Halve
from tests.support.saved import save_folder
from tests.support.synthetic_reports import images, measured


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    source = PredictionFolder(save_folder(tmp_path_factory.mktemp("saved")))
    calibrators = {"none": None, "ts": Halve()}
    return reports_of(source, calibrators), draw(source, [0, 1], calibrators)


def test_a_result_is_read_as_it_was_written(tmp_path, evaluated):
    reports, drawn = evaluated
    history = [{"epoch": 1, "holdout/ece": 0.1, "holdout/miou": float("nan")}]
    entry = PageRow("net + TS", reports["ts"], history, "loss: nll\n", skipped=["a.npz: bad"])
    written = write_result(Result("net", "ts", entry), drawn["ts"], tmp_path / "out")
    found = read_result(tmp_path / "out" / "report.json")
    assert (found.run, found.method, found.entry.name) == ("net", "ts", "net + TS")
    assert found.entry.report == reports["ts"]
    assert found.entry.overlays == written.entry.overlays
    assert [overlay.name for overlay in found.entry.overlays] == ["im000", "im001"]
    assert found.entry.history == [{"epoch": 1, "holdout/ece": 0.1, "holdout/miou": None}]
    assert (found.entry.config, found.entry.skipped) == ("loss: nll\n", ["a.npz: bad"])
    with np.load(tmp_path / "out" / "overlays" / "im000.npz") as arrays:
        np.testing.assert_array_equal(arrays["gap"], drawn["ts"][0].arrays["gap"])


def test_any_saved_report_will_do(tmp_path, evaluated):
    reports, _ = evaluated
    reports["none"].save(tmp_path / "mine.json")
    found = read_result(tmp_path / "mine.json")
    assert (found.run, found.method, found.entry.report) == ("mine", "none", reports["none"])
    (tmp_path / "fl" / "eval").mkdir(parents=True)
    reports["none"].save(tmp_path / "fl" / "eval" / "report.json")
    assert read_result(tmp_path / "fl" / "eval" / "report.json").run == "fl"


@pytest.mark.parametrize(
    "about",
    [[], {"history": 3}, {"overlays": [{}]}, {"overlays": [1]}, {"history": ["x"]}, "text"],
)
def test_a_strange_report_is_one_line_that_names_it(tmp_path, evaluated, about):
    reports, _ = evaluated
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**reports["none"].to_dict(), "about": about}))
    with pytest.raises(ValueError, match=r"odd\.json: Expected a report of segcal") as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


def test_a_report_cannot_name_files_elsewhere(tmp_path, evaluated):
    reports, _ = evaluated
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "out").mkdir()
    overlays = [{"name": "x", "file": "../../secret.png", "ece": None}]
    path = tmp_path / "out" / "report.json"
    path.write_text(json.dumps({**reports["none"].to_dict(), "about": {"overlays": overlays}}))
    assert read_result(path).entry.overlays == []


def test_a_folder_gets_all_of_its_new_contents_or_none(tmp_path):
    folder = tmp_path / "eval"
    with new_contents(folder) as staging:
        (staging / "overlays").mkdir()
        (staging / "overlays" / "old.png").write_text("old")
        (staging / "report.json").write_text("old")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(KeyError), new_contents(folder) as staging:
        (staging / "report.json").write_text("half")
        raise KeyError
    assert (folder / "report.json").read_text() == "old"
    with new_contents(folder) as staging:
        (staging / "report.json").write_text("new")
    assert (folder / "report.json").read_text() == "new"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "overlays").exists()  # of the earlier evaluation
    assert [path.name for path in tmp_path.iterdir()] == ["eval"]


def write_all(folder, text, names):
    """New results that hold `text`, all of `names`."""
    with new_contents(folder) as staging:
        for name in names:
            place = staging / name
            if "." not in name:
                place.mkdir()
                place = place / "inside"
            place.write_text(text)


def texts(folder):
    """What every file holds that is not hidden."""
    shown = (path for path in folder.rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): path.read_text() for path in shown}
    return {name: text for name, text in found.items() if not name.startswith(".")}


def dies_at(number, folder, names):
    """In another process, write results, and die at the n-th renaming; whether it got so far."""
    pid = os.fork()
    if pid == 0:
        calls = itertools.count(1)
        usual = os.replace

        def replace(*paths):
            if next(calls) == number:
                os._exit(9)
            usual(*paths)

        os.replace = replace
        try:
            write_all(folder, "new", names)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_killed_at_any_renaming_results_are_old_or_new(tmp_path):
    """Never a mixture, and what was begun is finished by whoever looks next."""
    before = ("report.json", "report.html", "state.npz", "figures", "overlays")
    after = ("report.json", "report.html", "figures", "posthoc")
    whole = tmp_path / "whole"
    write_all(whole, "new", after)
    outcomes = []
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        write_all(folder, "old", before)
        (folder / "notes.txt").write_text("mine")
        old = texts(folder)
        if not dies_at(number, folder, after):
            break
        settle(folder)
        outcomes.append(texts(folder))
        assert outcomes[-1] in (old, texts(whole) | {"notes.txt": "mine"}), number
        write_all(folder, "newer", after)
        assert {path.name for path in folder.iterdir()} == {*after, "notes.txt"}, number
    # The first renaming makes them complete; then come five old names, one mark, four new names.
    assert [found == old for found in outcomes] == [True] + 10 * [False]


def test_whoever_asks_for_a_method_settles_the_whole(tmp_path):
    folder = tmp_path / "eval"
    write_all(folder, "old", ("report.json", "posthoc"))
    assert dies_at(3, folder, ("report.json", "posthoc"))
    state_path(folder / "posthoc" / "ts")
    assert {path.name for path in folder.iterdir()} == {"report.json", "posthoc"}
    assert (folder / "posthoc" / "inside").read_text() == "new"


def test_new_results_are_written_inside_their_folder(tmp_path):
    """Which may be a disk of its own: nothing can be renamed to there from elsewhere."""
    with new_contents(tmp_path / "eval") as staging:
        assert staging.parent == tmp_path / "eval"
        (staging / "report.json").write_text("new")
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["report.json"]


def test_what_only_looks_like_new_results_moves_nothing(tmp_path):
    """A folder of results may come from someone else, with a link to the home of its reader."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("private")
    for name in (".complete", ".moving"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / "home")
        with pytest.raises(ValueError, match="Expected a folder of new results"):
            settle(folder)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter"]


def test_file_names_stay_in_their_folder():
    assert file_name("2007_000033") == "2007_000033"
    assert file_name("../../etc/passwd") == "etc-passwd"
    assert file_name("a/b c?.png") == "a-b-c-.png"
    assert file_name("//") == "image"


def test_seeds_are_compared_together_on_the_page(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits, labels = images(40, generator)
    results = []
    for run, sharpness in {"nll-seed0": 4.0, "nll-seed1": 4.5, "calm-seed0": 1.0}.items():
        meter = measured(sharpness * logits, labels, [f"{i}" for i in range(40)])
        result = Result(run, "none", PageRow(run, meter.compute(resamples=100)))
        write_result(result, (), tmp_path / run)
        meter.save(tmp_path / run / "state.npz")
        results.append(read_result(tmp_path / run / "report.json"))
    found = compare_results(results)
    assert found.seeds == {"nll": 2, "calm": 1}
    meters = [
        CalibrationMeter.load(tmp_path / run / "state.npz")
        for run in ("nll-seed0", "nll-seed1", "calm-seed0")
    ]
    assert found.differences["calm"] == paired_differences(meters[:2], meters[2:])
    page = render_page([r.entry for r in results], comparison=found, static=True)
    heading = '<th scope="col">seeds</th>'
    single = render_page([r.entry for r in results[1:]], comparison=compare_results(results[1:]))
    assert heading in page and 'id="differences"' in single and heading not in single
    texts = found.differences["calm"]["ece"].texts(SCORES["ece"])
    value, interval = (text.replace("-", "−") for text in texts)
    assert f'{value}<span class="aside"> (best)</span><span class="interval">[{interval}]' in page
    summary = page.split('id="diagrams"')[0]
    assert summary.count('class="best"') == len(found.best)
    write_result(results[0], (), tmp_path / "alone")
    alone = read_result(tmp_path / "alone" / "report.json")  # without a state
    assert compare_results([alone, results[2]]) is None
    assert compare_results([results[2], replace(results[0], run="calm")]).seeds == {
        "calm": 1,
        "nll-seed0": 1,
    }
    other = replace(results[2], meter=measured(logits[1:], labels[1:], list("a" * 39)))
    assert compare_results([results[0], other]) is None  # of other images
