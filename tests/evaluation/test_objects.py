"""Objects through `evaluate_source`: calibrated on the hold-out, saved, shown, and refused."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

import segcal
from segcal.cli import main
from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.folder import load_evaluation
from segcal.evaluation.objects import fit_objects, object_note, object_probability
from segcal.metrics.objects import ObjectCounter, ObjectRule
from segcal.sources.saved import PredictionFolder


def save_blobs(folder, count, first=0):
    """Over-confident logits of blobs, some of which are not there, with images."""
    folder.mkdir()
    for index in range(first, first + count):
        rng = np.random.default_rng(index)
        seen = gaussian_filter(rng.standard_normal((48, 48)), 2) * 7
        truth = seen + 4 * gaussian_filter(rng.standard_normal((48, 48)), 3) > 0.6
        logits = np.stack([np.zeros_like(seen), 8 * (seen - 0.6)]).astype(np.float32)
        image = np.repeat((40 * np.clip(seen, 0, 5)).astype(np.uint8)[..., None], 3, 2)
        arrays = {"logits": logits, "labels": truth.astype(np.uint8), "image": image}
        np.savez(folder / f"im{index:03d}.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("objects")
    return save_blobs(place / "test", 12), save_blobs(place / "holdout", 30, first=100)


@pytest.fixture(scope="module")
def evaluation(folders):
    test, holdout = map(PredictionFolder, folders)
    rule = ObjectRule((1,), calibrate="beta")
    options = {"objects": rule, "operate": ["object-precision=0.7"], "num_overlays": 1}
    return evaluate_source(test, holdout=holdout, posthoc=("ts",), resamples=50, **options)


def test_the_calibrated_confidence_of_objects_is_nearer_to_the_truth(evaluation):
    for method in ("none", "ts"):
        plain, beta = evaluation.reports[method].objects
        assert [plain.calibration, beta.calibration] == ["none", "beta"]
        assert plain.whole.top.hits.sum() == beta.whole.top.hits.sum() > 50
        assert beta.whole.brier < plain.whole.brier
        assert abs(beta.whole.confidence - beta.whole.precision) < 0.08
        assert beta.whole.auroc == pytest.approx(plain.whole.auroc, abs=0.01)  # monotone
        for report in (plain, beta):
            (point,) = report.points
            assert point.holdout_accuracy >= 0.7 and point.target == "object-precision=0.7"
            assert (point.accuracy, point.coverage) == report.above(point.threshold)


def test_objects_are_saved_with_the_page(evaluation, tmp_path):
    assert "of them are real" in evaluation.notes[-1] and "after beta" in evaluation.notes[-1]
    page = evaluation.save(tmp_path / "out").read_text(encoding="utf-8")
    assert 'id="objects"' in page and "object-threshold" in page
    again = load_evaluation(tmp_path / "out")
    assert again.reports == evaluation.reports
    assert again.object_overlay == evaluation.object_overlay is not None
    image = torch.linspace(0.5, 0.99, 9).double().numpy()
    for method, calibrator in evaluation.object_calibrators.items():
        loaded = object_probability(again.object_calibrators[method])(image)
        np.testing.assert_array_equal(loaded, object_probability(calibrator)(image))
        assert (np.diff(loaded) >= 0).all()
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "**Objects**" in text and "**FROC**" in text and "**Thresholds of objects**" in text
    assert not load_evaluation(evaluate_plain(tmp_path)).reports["none"].objects


def evaluate_plain(folder):
    test = PredictionFolder(save_blobs(folder / "few", 2))
    evaluate_source(test, resamples=0, num_overlays=0).save(folder / "other")
    return folder / "other"


def test_a_network_that_shows_no_object_is_said_to():
    counter = ObjectCounter(ObjectRule((1,)), 2)
    counter.update(torch.tensor([[[[0.9, 0.9]], [[0.1, 0.1]]]]), torch.tensor([[[1, 0]]]))
    assert object_note([counter.compute(resamples=0)]) == "No object is shown in place of 1."


def test_mask_scores_are_calibrated_too():
    rng = np.random.default_rng(0)
    scores = [rng.uniform(0.5, 1, 20) for _ in range(40)]
    images = [(score, rng.random(20) < score**4) for score in scores]
    probability = object_probability(fit_objects("isotonic", images))
    assert probability(np.array([0.9]))[0] == pytest.approx(0.9**4, abs=0.12)
    with pytest.raises(ValueError, match="all 20"):
        fit_objects("beta", [(scores[0], np.ones(20, bool))])


def test_the_command_says_what_is_wrong(folders, tmp_path, capsys):
    test, holdout = map(str, folders)
    command = ["eval", "--predictions", test, "--out", str(tmp_path / "out"), "--overlays", "none"]
    fit = ["--fit-predictions", holdout]
    for words, said in (
        (["--object-iou", "0.3"], "--objects"),
        (["--objects", "classes:2"], "below 2"),
        (["--objects", "classes:1", "--object-calibrate", "beta"], "hold-out"),
        ([*fit, "--operate", "object-precision=0.9"], "--objects"),
        (["--objects", "classes:1", "--object-labels", str(tmp_path)], "no instance map"),
    ):
        assert main([*command, *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--objects", "classes:1", "--object-match", "overlap"]) == 0
    found = segcal.Report.load(tmp_path / "out" / "report.json").objects[0]
    assert "overlap" in found.rule and found.images == 12
