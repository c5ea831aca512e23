"""Sigmoid outputs from the command line: saved predictions, post-hoc methods, regions, page."""

import json

import numpy as np
import pytest
import torch

import segcal
from segcal.cli import main
from segcal.evaluation.folder import load_evaluation
from segcal.metrics.regions import named_regions

NAMES = ("lesion", "rim")


def save(folder, images=12, seed=0):
    """Logits of two overlapping classes, twice too sure, with labels."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for n in range(images):
        z = np.cumsum(rng.normal(size=(2, 12, 14)), 2) / 2  # smooth along rows, so that edges exist
        labels = (rng.random(z.shape) < 1 / (1 + np.exp(-z))).astype(np.uint8)
        labels[0, :2] = 255
        arrays = {"sigmoid_logits": (2 * z).astype(np.float32), "labels": labels}
        np.savez(folder / f"im{n:02}.npz", image=np.full((12, 14, 3), 99, np.uint8), **arrays)
    (folder / "manifest.yaml").write_text(f"class_names: [{', '.join(NAMES)}]\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sigmoids")
    return save(root / "test"), save(root / "fit", seed=1)


@pytest.fixture(scope="module")
def evaluated(folders, tmp_path_factory):
    test, fit = folders
    out = tmp_path_factory.mktemp("out") / "eval"
    arguments = ["--posthoc", "ts,cts,isotonic", "--regions", "boundary:1,classes:1,foreground"]
    arguments += ["--protocol", "image,foreground", "--operate", "accuracy=0.9"]
    arguments += ["--num-overlays", "1", "--resamples", "50", "--out", str(out)]
    command = ["eval", "--predictions", str(test), "--fit-predictions", str(fit), *arguments]
    assert main(command) == 0
    return out


def batch(folder):
    files = [np.load(path) for path in sorted(folder.glob("*.npz"))]
    return tuple(
        torch.from_numpy(np.stack([file[key] for file in files])).to(dtype)
        for key, dtype in (("sigmoid_logits", torch.float32), ("labels", torch.int64))
    )


def measured(logits, labels):
    meter = segcal.CalibrationMeter(2, multilabel=True)
    meter.update(logits, labels)
    return meter.compute()


def test_the_report_is_that_of_the_meter(folders, evaluated):
    logits, labels = batch(folders[0])
    report, expected = segcal.Report.load(evaluated / "report.json"), measured(logits, labels)
    assert report.protocol.multilabel and report.class_names == NAMES
    assert report.protocol.pixels == int((labels != 255).sum())
    assert report.scores == pytest.approx(expected.scores)
    assert report.class_ece.tolist() == pytest.approx(expected.class_ece.tolist())
    assert report.intervals.keys() >= {"accuracy", "miou", "ece", "sce", "dice", "image_ace"}
    regions = named_regions(report.regions, 2, multilabel=True)
    for name, region in regions.items():
        part = measured(logits, labels.masked_fill(~region(labels), 255))
        assert report.regions[name].scores == pytest.approx(part.scores, nan_ok=True), name
    assert set(report.protocols) == {"image", "foreground"}
    assert report.operating_points[0].accuracy > report.accuracy


def test_calibrators_make_it_better(folders, evaluated):
    none = segcal.Report.load(evaluated / "report.json")
    logits, labels = batch(folders[0])
    for method in ("ts", "cts", "isotonic"):
        folder = evaluated / method
        found = segcal.Report.load(folder / "report.json")
        assert found.nll < none.nll and found.sce < none.sce, method
        (saved,) = folder.glob("calibrator*")
        calibrator = segcal.load_calibrator(saved)
        assert calibrator.multilabel
        assert found.nll == pytest.approx(measured(calibrator(logits), labels).nll)
    assert float(segcal.load_calibrator(evaluated / "ts/calibrator.safetensors").temperature_) > 1.5


def test_page_tables_and_state_say_decisions(folders, evaluated):
    page = (evaluated / "report.html").read_text()
    assert "decisions of 12 images" in page and "rim" in page
    assert "decisions of 12 images" in (evaluated / "table.md").read_text()
    state = segcal.CalibrationMeter.load(evaluated / "state.npz")
    assert state.compute(resamples=50).ece == segcal.Report.load(evaluated / "report.json").ece
    drawn = json.loads((evaluated / "report.json").read_text())
    assert drawn["protocol"]["multilabel"] is True
    assert [path.name for path in (evaluated / "overlays").glob("*.png")]
    overlay = load_evaluation(evaluated).overlays["none"][0]  # of one class of the image
    assert overlay.of in drawn["images"]["table"]["names"] and overlay.name != overlay.of


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--posthoc", "ts,vs"], "sigmoid"),
        (["--conformal", "miss=0.5"], "sigmoid outputs"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(folders, tmp_path, capsys, option, message):
    test, fit = map(str, folders)
    command = [
        "eval",
        "--predictions",
        test,
        "--fit-predictions",
        fit,
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*command, *option]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


class Thirds(torch.nn.Module):
    """Two outputs at a third of the resolution."""

    def forward(self, images):
        return {"out": images[:, :2, ::3, ::3] * 4 - 2}


def test_evaluate_takes_any_loader_of_sigmoid_outputs():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, 12, 15, generator=generator)
    labels = (torch.rand(6, 2, 12, 15, generator=generator) < images[:, :2]).long()
    report = segcal.evaluate(
        Thirds(), [(images, labels)], num_classes=2, multilabel=True, protocols=["foreground"]
    )
    coarse = Thirds()(images)["out"]
    logits = torch.nn.functional.interpolate(coarse, (12, 15), mode="bilinear")
    assert report.scores == pytest.approx(measured(logits, labels).scores)
    assert report.regions["foreground"].protocol.pixels == 2 * int((labels == 1).any(1).sum())


def test_evaluate_takes_one_output_with_plain_labels():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 4, 4, generator=generator)
    labels = (images[:, 0] > 0).long()
    reports = [
        segcal.evaluate(torch.nn.Identity(), [(images, y)], num_classes=1, multilabel=True)
        for y in (labels, labels.unsqueeze(1))
    ]
    assert reports[0] == reports[1] and reports[0].accuracy == 1
