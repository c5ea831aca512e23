"""Fitting post-hoc methods: the network runs once, and the fit is that of all its logits."""

import tempfile
import warnings

import pytest
import torch

import segcal
from segcal.evaluation import calibrate
from segcal.evaluation.calibrate import fit_calibrators, record
from segcal.evaluation.saved import PredictionFolder
from segcal.posthoc import method_names
from tests.support.networks import Network, network_source
from tests.support.saved import save_folder


def test_methods_by_name():
    assert method_names("none,ts, VS") == ("ts", "vs")
    assert method_names("none") == ()
    with pytest.raises(ValueError, match=r"Expected post-hoc methods among none, ts, .*'tz'"):
        method_names("ts,tz")


def test_the_network_runs_once_for_all_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    network = Network()
    calibrators = fit_calibrators(("ts", "vs"), lambda: network_source(network))
    assert network.seen == 23
    assert list(calibrators) == ["none", "ts", "vs"]
    assert list(tmp_path.iterdir()) == []  # nothing stays behind
    source = network_source(network)
    batches = [(batch.logits.clone(), batch.labels) for batch in source]
    expected = segcal.TemperatureScaling().fit(batches)
    torch.testing.assert_close(calibrators["ts"].temperature_, expected.temperature_)
    assert calibrators["ts"].temperature_ > 1  # over-confident, and corrected


def test_a_recording_is_what_was_recorded(tmp_path):
    source = network_source(Network())
    recording = record(source, tmp_path, images=True)
    assert len(recording) == 6
    for _ in range(2):
        for kept, batch in zip(recording, source, strict=True):
            torch.testing.assert_close(kept, (batch.logits, batch.labels, batch.images))
    assert [len(kept) for kept in record(source, tmp_path / "..", images=False)] == [2] * 6


def test_nothing_is_made_without_methods():
    assert fit_calibrators((), lambda: pytest.fail("made a hold-out")) == {"none": None}


def test_saved_predictions_recover_the_temperature_they_were_made_with(tmp_path):
    save_folder(tmp_path, 12, size=32, temperature=2.5)
    fitted = fit_calibrators(("ts",), lambda: PredictionFolder(tmp_path))["ts"]
    assert float(fitted.temperature_) == pytest.approx(2.5, rel=0.05)


def test_what_a_fit_warns_of_is_logged_in_one_line(tmp_path, caplog, monkeypatch):
    class Hesitant(segcal.TemperatureScaling):
        def fit(self, batches):
            warnings.warn("no better than before", stacklevel=2)
            return super().fit(batches)

    monkeypatch.setitem(calibrate.CALIBRATORS, "ts", Hesitant)
    save_folder(tmp_path)
    fit_calibrators(("ts",), lambda: PredictionFolder(tmp_path))
    assert [record.getMessage() for record in caplog.records] == ["no better than before"]


def test_a_full_disk_is_said_before_it_is_full(monkeypatch, tmp_path):
    monkeypatch.setattr(
        calibrate.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})
    )
    with pytest.raises(ValueError, match=r"GiB free in .* for the logits of the hold-out"):
        record(network_source(Network()), tmp_path)
