"""`measure`: one pass over a source gives what a meter fed with everything gives."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

import segcal
from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.evaluation import measure as measuring
from segcal.evaluation.holdout import fit
from segcal.evaluation.measure import measure, require_pixels
from segcal.files import BadFile
from segcal.metrics.regions import boundary, interior
from segcal.sources.network import NetworkSource
from segcal.sources.saved import PredictionFolder
from tests.support.evaluated import assert_close, reports
from tests.support.networks import Halve
from tests.support.saved import CLASSES, logits_and_labels, save_folder


def everything(count=6, scale=1.0):
    meter = segcal.CalibrationMeter(
        CLASSES, per_image=True, class_names=["class 0", "class 1", "class 2"]
    )
    for index in range(count):
        logits, labels = map(torch.from_numpy, logits_and_labels(index))
        meter.update(scale * logits[None], labels[None], names=[f"im{index:03d}"])
    return meter.compute()


def test_logits_of_resized_images_have_the_size_of_the_masks(tmp_path):
    rng = np.random.default_rng(0)
    for i, size in enumerate(((20, 30), (40, 24))):
        for kind, shape in (("images", (*size, 3)), ("masks", size)):
            (tmp_path / "test" / kind).mkdir(parents=True, exist_ok=True)
            array = rng.integers(0, CLASSES, shape, dtype=np.uint8)
            Image.fromarray(array).save(tmp_path / "test" / kind / f"{i}.png")
    splits = build_data(DataConfig("masks", root=str(tmp_path), num_classes=CLASSES, resize=32))
    torch.manual_seed(0)
    network = torch.nn.Conv2d(3, CLASSES, 3, 2, 1)
    source = NetworkSource(network, splits, workers=0)
    for (batch,), size in zip(([b] for b in source), ((20, 30), (40, 24)), strict=True):
        assert batch.values.shape == (1, CLASSES, *size) == (*batch.images.shape[:2], *size)
    expected = interpolate(network(splits.test[0][0][None]), (20, 30), mode="bilinear")
    torch.testing.assert_close(source[0].values, expected)


def test_without_a_terminal_there_are_lines_of_progress(tmp_path, monkeypatch, caplog):
    source = PredictionFolder(save_folder(tmp_path))
    monkeypatch.setattr(measuring, "EVERY", 0.0)
    with caplog.at_level("INFO", logger="segcal"):
        measure(source, {"none": None}, progress=False)
        assert not caplog.messages
        measure(source, {"none": None})
        assert caplog.messages[-1] == f"{source.name}: 6 of 6 images"
        fit("ts", source)
    assert caplog.messages[-1].startswith("fitting TS: ")


def test_one_pass_measures_every_calibrator(tmp_path):
    source = PredictionFolder(save_folder(tmp_path))
    found = reports(source, {"none": None, "half": Halve()})
    assert found["none"] == everything()
    assert found["half"] == replace(everything(scale=0.5), changed=0)


def test_pixels_whose_class_a_calibrator_changes_are_counted(tmp_path):
    class Rotate(torch.nn.Module):
        """Every class becomes the next one where the first logit is positive."""

        def forward(self, logits, images=None):
            return torch.where(logits[:, :1] > 0, logits.roll(1, 1), logits)

    source = PredictionFolder(save_folder(tmp_path))
    measured = measure(source, {"none": None, "rotated": Rotate()})
    pairs = [map(torch.from_numpy, logits_and_labels(index)) for index in range(6)]
    expected = sum(int(((z[0] > 0) & (y != 255)).sum()) for z, y in pairs)
    report, meter = measured["rotated"]
    assert report.changed == expected
    assert report.mask_changed == pytest.approx(expected / report.protocol.pixels)
    assert np.isnan(measured["none"].report.mask_changed)
    meter.save(tmp_path / "state")
    assert (meter + segcal.CalibrationMeter.load(tmp_path / "state")).changed == 2 * expected


def test_probabilities_are_counted_as_such_and_scaled_through_their_logarithm(tmp_path):
    for index in range(6):
        logits, labels = map(torch.from_numpy, logits_and_labels(index))
        probs = logits.double().softmax(0)
        np.savez(tmp_path / f"im{index:03d}.npz", probs=probs, labels=labels)
    found = reports(PredictionFolder(tmp_path), {"none": None, "half": Halve()})
    for name, scale in (("none", 1.0), ("half", 0.5)):
        expected = everything(scale=scale)
        for score in ("ece", "sce", "nll", "brier", "accuracy"):
            assert found[name].scores[score] == pytest.approx(expected.scores[score], abs=1e-6)


def test_classification_goes_the_same_way(tmp_path):
    pairs = [logits_and_labels(index) for index in range(6)]
    logits = np.concatenate([x.reshape(CLASSES, -1).T for x, _ in pairs])
    labels = np.concatenate([y.ravel() for _, y in pairs])
    np.savez(tmp_path / "table.npz", logits=logits, labels=labels)
    report = reports(PredictionFolder(tmp_path))["none"]
    expected = everything()
    assert report.ece == pytest.approx(expected.ece, rel=1e-12)
    assert report.protocol.images == report.protocol.pixels == expected.protocol.pixels


def test_a_split_measures_as_evaluate_does():
    data = build_data(DataConfig(name="digits", limit=21), seed=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    source = NetworkSource(model, data, batch_size=4, workers=0)
    report = reports(source)["none"]
    assert {image.name for image in report.worst_images} <= set(data.test.names)
    loader = torch.utils.data.DataLoader(data.test, batch_size=21)
    expected = segcal.evaluate(model, loader, num_classes=10, progress=False)
    for name, score in expected.scores.items():
        assert report.scores[name] == pytest.approx(score, rel=1e-5), name


def test_a_bad_file_ends_it_unless_skipped(tmp_path):
    save_folder(tmp_path)
    (tmp_path / "im002.npz").write_bytes(b"broken")
    with pytest.raises(BadFile, match=r"im002\.npz"):
        reports(PredictionFolder(tmp_path))
    source = PredictionFolder(tmp_path, skip_bad=True)
    assert reports(source)["none"].protocol.images == 5
    assert list(source.skipped) == ["im002"]


def test_no_pixels_are_an_error(tmp_path):
    logits, labels = logits_and_labels(0)
    np.savez(tmp_path / "a.npz", logits=logits, labels=np.full_like(labels, 255))
    report = reports(PredictionFolder(tmp_path))["none"]
    with pytest.raises(ValueError, match="labelled pixels in it"):
        require_pixels(report, "it")


def test_the_file_at_hand_and_the_next_one_are_in_memory(tmp_path, monkeypatch):
    alive = []
    read = PredictionFolder.__getitem__

    def watched(self, index):
        gc.collect()
        assert len([values for values in alive if values() is not None]) <= 1
        batch = read(self, index)
        alive.append(weakref.ref(batch.values))
        return batch

    monkeypatch.setattr(PredictionFolder, "__getitem__", watched)
    source = PredictionFolder(save_folder(tmp_path))
    reports(source, {"none": None, "half": Halve()})
    assert len(alive) == 6


def test_sums_of_images_are_not_kept_where_they_would_not_fit(tmp_path, monkeypatch, caplog):
    source = PredictionFolder(save_folder(tmp_path))
    assert reports(source)["none"].intervals
    assert not reports(source, resamples=0)["none"].intervals
    monkeypatch.setattr(measuring, "_MAX_IMAGE_SUMS", 1000)
    assert not reports(source)["none"].intervals
    assert "no intervals" in caplog.text


def test_a_protocol_whose_sums_do_not_fit_is_refused(tmp_path, monkeypatch):
    source = PredictionFolder(save_folder(tmp_path))
    monkeypatch.setattr(measuring, "_MAX_IMAGE_SUMS", 1000)
    with pytest.raises(ValueError, match="memory"):
        measure(source, {"none": None}, protocols=("image",), resamples=0)


def test_regions_are_counted_in_the_same_pass_after_every_calibrator(tmp_path):
    source = PredictionFolder(save_folder(tmp_path))
    regions = {"border": boundary(1), "inside": interior(1)}
    measured = reports(source, {"none": None, "half": Halve()}, regions=regions)
    for scale, found in ((1.0, measured["none"]), (0.5, measured["half"])):
        for name, region in regions.items():
            meter = segcal.CalibrationMeter(
                CLASSES,
                per_image=True,
                region=name,
                class_names=["class 0", "class 1", "class 2"],
            )
            for index in range(6):
                logits, labels = map(torch.from_numpy, logits_and_labels(index))
                part = labels[None].masked_fill(~region(labels[None]), 255)
                meter.update(scale * logits[None], part, names=[f"im{index:03d}"])
            report = meter.compute()  # regions leave the table of images to the whole
            images = replace(report.images, table=None)
            expected = replace(report, images=images)
            assert_close(found.regions[name].to_dict(), expected.to_dict())


def test_a_calibrator_that_reads_images_works_through_every_door():
    """`segcal.evaluate` and `measure` both hand the images on."""
    data = build_data(DataConfig(name="scenes", limit=4), seed=0)
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, data.num_classes, 3, padding=1)
    source = NetworkSource(model, data, batch_size=2, workers=0)
    calibrator = segcal.LocalTemperatureScaling().fit(
        [(batch.logits.clone(), batch.labels, batch.images.clone()) for batch in source]
    )
    assert calibrator.image_channels_ == 3
    expected = reports(source, {"lts": calibrator}, resamples=0)["lts"]
    loader = torch.utils.data.DataLoader(data.test, batch_size=2)
    report = segcal.evaluate(
        model, loader, num_classes=data.num_classes, transform=calibrator, progress=False
    )
    assert report.scores == pytest.approx(expected.scores, rel=1e-12)


def test_images_of_one_group_are_one_unit_of_the_intervals(tmp_path):
    source = PredictionFolder(save_folder(tmp_path, 12))
    alone = reports(source, resamples=200)["none"]
    source.group = r"im\d\d"  # im000 to im009 are one, im010 and im011 another
    found = reports(source, resamples=200)["none"]
    assert found.scores == alone.scores
    assert found.images.groups == 2 and alone.images.groups is None
    assert found.intervals != alone.intervals
    assert source.groups_of(["im001", "x"]) == ["im00", "x"]
    source.group = "("
    with pytest.raises(ValueError, match="regular expression"):
        reports(source)
