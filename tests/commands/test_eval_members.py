"""`segcal eval --ensemble`, `--tta` and `--mc-dropout`, from the command line to the tables."""

import shutil

import numpy as np
import pytest

import segcal
from segcal.cli import main
from segcal.evaluation.states import merge_states
from segcal.metrics.scores import SCORES
from segcal.metrics.uncertainty import DETECTION, UNCERTAINTIES
from segcal.viz.tables import to_markdown
from tests.support.datasets import write_masks
from tests.support.evaluations import QUICK
from tests.support.saved import save_folder

BARE = [*QUICK, "--overlays", "none"]


@pytest.fixture
def folds(tmp_path):
    return [save_folder(tmp_path / str(t), temperature=t) for t in (0.5, 3.0)]


def test_folds_of_saved_predictions(folds, tmp_path, undrawn):
    out = tmp_path / "out"
    words = [*map(str, folds), "--ensemble", "--posthoc", "ts", "--out", str(out)]
    words += ["--fit-predictions", *map(str, folds)]
    assert main(["eval", "--predictions", *words, *BARE]) == 0
    reports = segcal.load_evaluation(out).reports
    expected = segcal.evaluate_source(
        segcal.Members([segcal.open_source(folder) for folder in folds]), overlays="none"
    ).reports["none"]
    assert reports["none"].ece == pytest.approx(expected.ece, abs=1e-9)
    assert [one.name for one in reports["ts"].detection] == list(UNCERTAINTIES)
    assert reports["ts"].nll < reports["none"].nll
    # A temperature reorders entropies, and leaves how much the members differ.
    for one, other in zip(reports["none"].detection[3:], reports["ts"].detection[3:], strict=True):
        assert np.array_equal(one.correct, other.correct)
    table = to_markdown({"ensemble": reports["none"]}).split("uncertainty |")[1]
    for kind in UNCERTAINTIES.values():
        assert kind.label in table
    for name in DETECTION:
        assert SCORES[name].heading in table


def test_shards_of_an_ensemble_are_added_up(folds, tmp_path, undrawn):
    words = ["eval", "--ensemble", "--predictions", *map(str, folds), *BARE]
    parts = [str(tmp_path / str(k)) for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        assert main([*words, "--shard", f"{k}/2", "--out", part]) == 0
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    merged = merge_states(parts).reports["none"]
    whole = segcal.load_evaluation(tmp_path / "whole").reports["none"]
    for one, other in zip(merged.detection, whole.detection, strict=True):
        assert one.name == other.name and not one.intervals
        assert np.array_equal(one.correct, other.correct)
        assert np.array_equal(one.wrong, other.wrong)


def test_members_are_calibrated_one_by_one(folds, tmp_path, undrawn):
    words = ["eval", "--ensemble", "--predictions", *map(str, folds), *BARE]
    fits = ["--fit-predictions", *map(str, folds), "--posthoc", "ts", "--calibrate", "members"]
    assert main([*words, *fits, "--out", str(tmp_path / "members")]) == 0
    assert main([*words, "--pool", "logits", "--out", str(tmp_path / "logits")]) == 0
    found, other = (segcal.load_evaluation(tmp_path / name) for name in ("members", "logits"))
    assert found.methods == ["none"] and found.name == "ensemble, members + TS"
    assert [note.partition(": temperature ")[0] for note in found.notes] == [
        f"TS of {fold.name} was fitted on its hold-out" for fold in folds
    ]
    # Both folders hold the same logits times a factor, which their temperatures undo.
    alone = segcal.evaluate_source(
        segcal.open_source(folds[0]), holdout=segcal.open_source(folds[0]), posthoc=["ts"]
    ).reports["ts"]
    assert found.reports["none"].nll == pytest.approx(alone.nll, abs=1e-3)
    assert other.reports["none"].nll != found.reports["none"].nll


def test_the_holdouts_of_folds_may_be_of_different_images(folds, tmp_path, undrawn):
    """As the validation cases of nnU-Net's folds are."""
    parts = [shutil.copytree(fold, tmp_path / f"holdout {fold.name}") for fold in folds]
    for part, out in zip(parts, ("im000", "im003"), strict=True):
        (part / f"{out}.npz").unlink()
    words = ["eval", "--ensemble", "--predictions", *map(str, folds), *BARE]
    words += ["--posthoc", "ts", "--fit-predictions", *map(str, parts)]
    assert main([*words, "--calibrate", "members", "--out", str(tmp_path / "members")]) == 0
    assert main([*words, "--out", str(tmp_path / "pooled")]) == 2  # nothing to take a mean of


def test_an_ensemble_of_runs_under_shift(runs, tmp_path, undrawn):
    twin = shutil.copytree(runs / "seg", tmp_path / "twin")
    words = ["eval", "--ensemble", str(runs / "seg"), str(twin), "--out", str(tmp_path / "both")]
    assert main([*words, "--shift", "fog:3", "--posthoc", "ts", *BARE]) == 0
    assert main(["eval", str(twin), "--shift", "fog:3", *BARE]) == 0
    both, one = segcal.load_evaluation(tmp_path / "both"), segcal.load_evaluation(twin / "eval")
    for key in ("none", ("none", "fog:3")):
        assert both.reports[key].ece == pytest.approx(one.reports[key].ece, abs=1e-6)
        spread = both.reports[key].detection[3]
        assert SCORES["auroc"].of(spread) == 0.5  # equal members do not differ
    shift = (tmp_path / "both/shift.md").read_text()
    assert "of each uncertainty, ensemble + TS**" in shift
    # A second evaluation, which reads what is stored, has them too.
    assert main([*words, "--shift", "fog:3", "--posthoc", "ts", *BARE]) == 0
    assert segcal.load_evaluation(tmp_path / "both").reports == both.reports


def test_views_of_a_run(runs, tmp_path, undrawn):
    run = shutil.copytree(runs / "seg", tmp_path / "seg")
    assert main(["eval", str(run), "--tta", "flip,scale:0.75,1.25", *BARE]) == 0
    folder = run / "eval-flip-scale-0.75-1.25"  # beside the results of the run as it is
    assert len(segcal.load_evaluation(folder).reports["none"].detection) == len(UNCERTAINTIES)


def test_views_are_calibrated_one_by_one_under_shift(runs, tmp_path, undrawn):
    words = ["eval", str(runs / "seg"), "--tta", "flip", "--calibrate", "members", *BARE]
    words += ["--posthoc", "ts", "--shift", "fog:3", "--out", str(tmp_path)]
    assert main(words) == 0
    found = segcal.load_evaluation(tmp_path)
    assert found.name == "seg, members + TS" and set(found.reports) == {"none", ("none", "fog:3")}
    assert [note.partition(" was fitted")[0] for note in found.notes[:2]] == [
        "TS of view 1",
        "TS of view 2",
    ]


def test_views_of_any_network(tmp_path, monkeypatch, undrawn):
    write_masks(tmp_path / "data", count=3)
    code = "import torch\n\ndef net():\n    return torch.nn.Conv2d(3, 2, 1)\n"
    (tmp_path / "glue.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = ["eval", "--model", "glue.py:net", "--data", "masks:data", "--num-classes", "2", *BARE]
    assert main([*words, "--tta", "flip", "--limit", "2"]) == 0
    folder = tmp_path / "evals" / "net-limit-2-flip"  # beside the results of the network as it is
    assert segcal.load_evaluation(folder).reports["none"].protocol.images == 2


def test_one_network_has_fewer_kinds(folds, tmp_path, undrawn):
    assert main(["eval", "--predictions", str(folds[0]), "--uncertainty", *BARE]) == 0
    (report,) = segcal.load_evaluation(folds[0] / "eval").reports.values()
    assert [one.name for one in report.detection] == ["confidence", "entropy", "margin"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tta", "flip"], "need the network"),
        (["--ensemble", "--calibrate", "members"], "one method"),
        (["--ensemble", "--names", "a,b"], "1 different names"),
    ],
)
def test_refusals(folds, capsys, words, message):
    assert main(["eval", "--predictions", *map(str, folds), *words, *BARE]) == 2
    assert message in capsys.readouterr().err
