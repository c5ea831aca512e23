"""Hold-outs: the network runs once, the fit is that of all its logits, and what is said of it."""

import tempfile
import warnings

import numpy as np
import pytest
import torch

import segcal
from segcal.evaluation import holdout as choosing
from segcal.evaluation.evaluate import evaluate_source
from segcal.evaluation.holdout import fit, fit_on, recorded
from segcal.sources.saved import PredictionFolder
from tests.support.networks import Network, network_source
from tests.support.saved import CLASSES, SIDE, logits_and_labels, save_folder


def test_the_network_runs_once_for_all_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    network = Network()
    methods = ("ts", "vs")
    with recorded(network_source(network), methods) as recording:
        calibrators = fit_on(methods, [recording])
    assert network.seen == 23
    assert list(calibrators) == ["ts", "vs"]
    assert list(tmp_path.iterdir()) == []  # nothing stays behind
    source = network_source(network)
    batches = [(batch.logits.clone(), batch.labels) for batch in source]
    expected = segcal.TemperatureScaling().fit(batches)
    torch.testing.assert_close(calibrators["ts"].temperature_, expected.temperature_)
    assert calibrators["ts"].temperature_ > 1  # over-confident, and corrected


def test_several_names_may_be_one_text():
    """A text was read letter by letter."""
    source, choices = network_source(Network()), {"resamples": 0, "overlays": "none"}
    lists = {"posthoc": ["ts", "vs"], "protocols": ["image"], "operate": ["accuracy=0.9"]}
    texts = {"posthoc": "ts,vs", "protocols": "image", "operate": "accuracy=0.9"}
    expected = evaluate_source(source, holdout=source, **lists, **choices).reports
    found = evaluate_source(source, holdout=source, **texts, **choices).reports
    assert list(found) == list(expected) == ["none", "ts", "vs"]
    assert found["vs"].scores == pytest.approx(expected["vs"].scores, nan_ok=True)
    assert list(found["ts"].protocols) == ["image"]
    assert len(found["ts"].operating_points) == 1


@pytest.mark.parametrize(("method", "images"), [("ts", False), ("lts", True)])
def test_a_recording_is_what_was_recorded(method, images):
    source = network_source(Network())
    with recorded(source, [method]) as recording:
        assert recording.stored
        for _ in range(2):
            for kept, batch in zip(recording, source, strict=True):
                torch.testing.assert_close(kept.values, batch.logits)
                torch.testing.assert_close(kept.labels, batch.labels)
                assert (kept.names, kept.kind) == (batch.names, "logits")
                assert (kept.images is not None) == images
                if images:
                    torch.testing.assert_close(kept.images, batch.images)
        with recorded(recording) as again:
            assert again is recording


def test_groups_of_the_test_images_hold_for_the_hold_out_too(tmp_path, monkeypatch):
    for place in ("test", "fit"):
        (tmp_path / place).mkdir()
        for i in range(8):
            logits, labels = logits_and_labels(i)
            name = f"patient{i // 4}_slice{i % 4}"
            np.savez(tmp_path / place / f"{name}.npz", logits=logits, labels=labels)
    seen = []
    fitting = segcal.TemperatureScaling.fit

    def spy(self, batches):
        seen.extend(batch[-1] for batch in batches)
        return fitting(self, batches)

    monkeypatch.setattr(segcal.TemperatureScaling, "fit", spy)
    source, held = (PredictionFolder(tmp_path / place) for place in ("test", "fit"))
    hint = evaluate_source(source, overlays="none").notes
    assert len(hint) == 1 and "--group" in hint[0] and "patient0_slice0" in hint[0]
    source.group = "^[^_]+"
    found = evaluate_source(source, holdout=held, posthoc=["ts"], overlays="none")
    assert seen == [[f"patient{i // 4}"] for i in range(8)] and held.group == ""
    assert found.reports["none"].images.groups == 2
    assert not any("--group" in note for note in found.notes)


def test_saved_predictions_recover_the_temperature_they_were_made_with(tmp_path):
    save_folder(tmp_path, 12, size=32, temperature=2.5)
    fitted = fit("ts", PredictionFolder(tmp_path))
    assert float(fitted.temperature_) == pytest.approx(2.5, rel=0.05)


def test_methods_that_are_none_and_methods_for_one_class_per_pixel(tmp_path):
    with pytest.raises(ValueError, match="post-hoc"):
        fit("tz", network_source(Network()))
    labels = np.ones((2, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", sigmoid_logits=np.zeros((2, 4, 4)), labels=labels)
    with pytest.raises(ValueError, match="sigmoid"):
        fit("dc", PredictionFolder(tmp_path))


def test_what_a_fit_warns_of_is_logged_in_one_line(tmp_path, caplog, monkeypatch):
    class Hesitant(segcal.TemperatureScaling):
        def fit(self, batches):
            warnings.warn("no better than before", stacklevel=2)
            return super().fit(batches)

    monkeypatch.setitem(choosing.posthoc.CALIBRATORS, "ts", Hesitant)
    save_folder(tmp_path)
    fit("ts", PredictionFolder(tmp_path))
    assert [record.getMessage() for record in caplog.records] == ["no better than before"]


def test_a_full_disk_is_said_before_it_is_full(monkeypatch):
    monkeypatch.setattr(choosing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(ValueError, match="GiB free"), recorded(network_source(Network())):
        pass


def notes(tmp_path, holdout, test, posthoc=("ts",)):
    sources = [
        PredictionFolder(save_folder(tmp_path / name, 12, **options))
        for name, options in (("fit", holdout), ("test", test))
    ]
    found = evaluate_source(
        sources[1], holdout=sources[0], posthoc=posthoc, resamples=20, overlays="none"
    )
    return found, "\n".join(found.notes)


def test_a_hold_out_that_is_the_test_is_noted(tmp_path):
    save_folder(tmp_path, 6)
    source, same, part = (PredictionFolder(tmp_path) for _ in range(3))
    said = "The hold-out is the test data itself"
    for holdout, expected in ((same, True), (part.only(range(3)), False)):
        found = evaluate_source(source, holdout=holdout, posthoc=["ts"], overlays="none")
        assert any(said in note for note in found.notes) == expected


def test_the_fitted_temperature_is_noted_and_a_good_holdout_raises_no_doubt(tmp_path):
    found, text = notes(
        tmp_path, {"temperature": 2.0, "size": 16}, {"first": 50, "size": 16, "temperature": 2.0}
    )
    assert f"temperature {float(found.calibrators['ts'].temperature_):.4g}" in text
    assert "12 hold-out images" in text
    assert "differ" not in text and "worse" not in text


def test_a_holdout_the_network_knows_is_noticed_and_so_is_a_fit_that_hurts(tmp_path):
    """The hold-out is predicted without an error: a network knows what it was trained on."""
    folder = tmp_path / "fit"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(12):
        labels = rng.integers(0, CLASSES, (SIDE, SIDE))
        right = np.arange(CLASSES)[:, None, None] == labels
        logits = (2 * right + rng.normal(size=right.shape) / 3).astype(np.float32)
        np.savez(folder / f"{index}.npz", logits=logits, labels=labels)
    test = PredictionFolder(save_folder(tmp_path / "test", 12, temperature=2.0))
    found = evaluate_source(
        test, holdout=PredictionFolder(folder), posthoc=["ts"], resamples=20, overlays="none"
    )
    text = "\n".join(found.notes)
    assert "TS makes the NLL of the test images worse" in text
    assert "more than chance" in text and "trained on the hold-out" in text
    assert found.reports["ts"].nll > found.reports["none"].nll


def test_operating_points_and_class_sets_keep_their_promise_on_the_holdout(tmp_path):
    fit_on = PredictionFolder(save_folder(tmp_path / "fit", 12, first=100, temperature=2.0))
    test = PredictionFolder(save_folder(tmp_path / "test", 8, temperature=2.0))
    found = evaluate_source(
        test,
        holdout=fit_on,
        posthoc=["ts"],
        operate=["accuracy=0.9", "coverage=0.5"],
        conformal=["miss=0.1"],
        resamples=0,
        overlays="none",
    )
    for method in ("none", "ts"):
        report = found.reports[method]
        sure, half = report.operating_points
        (sets,) = report.class_sets
        assert sure.holdout_accuracy >= 0.9 and half.holdout_coverage >= 0.5
        assert sure.holdout_images == sets.holdout_images == 12
        assert sets.holdout_miss <= 0.1 and 1 <= sets.set_size <= 3
    assert not found.reports["none"].regions
