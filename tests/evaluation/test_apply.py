"""Images without labels: what is written and expected; a second call repeats nothing."""

import csv
import os
import subprocess
import sys
import time

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.cli import main
from segcal.data import DataConfig
from segcal.data import build as build_data
from segcal.evaluation.apply import OUTPUTS
from segcal.sources.named import open_network
from segcal.sources.network import NetworkSource
from segcal.sources.saved import PredictionFolder
from tests.support import ROOT
from tests.support.ranks import run_on_ranks
from tests.support.saved import save_folder

CLASSES, SIZE = 3, (32, 48)
SCORES = ("accuracy", "ece", "sce", "nll", "brier", "miou")
CODE = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.5)
        return x

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, 1, 1)).eval()

def slow():
    return nn.Sequential(network(), Slow())
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Five images with masks, and a network in a file."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / "test" / kind).mkdir(parents=True)
    for i in range(5):
        image = rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, SIZE, dtype=np.uint8)
        labels[:2] = 255
        Image.fromarray(image).save(folder / "test" / "images" / f"i{i}.png")
        Image.fromarray(labels).save(folder / "test" / "masks" / f"i{i}.png")
    (folder / "classes.txt").write_text("road\ncar\nsky\n")
    (folder / "glue.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def calibrator():
    torch.manual_seed(1)
    logits = 2 * torch.randn(1, CLASSES, 40, 40)
    labels = torch.distributions.Categorical(logits=logits.movedim(1, -1) / 3).sample()
    return segcal.TemperatureScaling().fit(logits, labels)


def unlabelled(root, function="network", images=None, **options):
    return segcal.open_source(
        f"{root / 'glue.py'}:{function}",
        unlabelled=images or root / "test" / "images",
        **{"num_classes": CLASSES, "workers": 0, **options},
    )


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("i*.*")}


def test_its_files_have_the_scores_of_the_network(root, calibrator, tmp_path):
    found = segcal.apply(unlabelled(root), calibrator, tmp_path, write=["probs"])
    meter = segcal.CalibrationMeter(CLASSES)
    for batch in open_network(f"{root / 'glue.py'}:network", f"masks:{root}", workers=0):
        meter.update(calibrator(batch.logits), batch.labels)
    expected = meter.compute()
    later = PredictionFolder(tmp_path / "probs", labels=root / "test" / "masks")
    report = segcal.evaluate_source(later, overlays="none", resamples=0).reports["none"]
    assert report.protocol.pixels == expected.protocol.pixels > 0
    for score in ("accuracy", "ece", "sce", "nll", "brier", "miou"):
        assert getattr(report, score) == pytest.approx(getattr(expected, score), abs=1e-6), score
    # Saved predictions without their labels give the same files and expectations.
    again = segcal.apply(
        PredictionFolder(tmp_path / "probs", labelled=False), None, tmp_path / "again", ["probs"]
    )
    assert again.accuracy == pytest.approx(found.accuracy, abs=1e-6)
    assert again.class_iou == pytest.approx(found.class_iou, abs=1e-6)


def test_what_is_expected_follows_its_formulas(root, calibrator, tmp_path):
    found = segcal.apply(unlabelled(root), calibrator, tmp_path, write=["probs"])
    p = np.stack([np.load(tmp_path / "probs" / f"{name}.npz")["probs"] for name in found.names])
    p = p.astype(np.float64).transpose(1, 0, 2, 3)  # (C, M, H, W)
    predicted = p.argmax(0)
    assert found.accuracy == pytest.approx(p.max(0).mean(), abs=1e-7)
    assert found.each.accuracy == pytest.approx(p.max(0).mean((1, 2)), abs=1e-7)
    for c in range(CLASSES):
        here = predicted == c
        inside, outside = p[c][here].sum(), p[c][~here].sum()
        iou = inside / (here.sum() + outside) if here.any() else np.nan
        dice = 2 * inside / (here.sum() + p[c].sum()) if here.any() else np.nan
        assert found.class_iou[c] == pytest.approx(iou, abs=1e-6, nan_ok=True)
        assert found.class_dice[c] == pytest.approx(dice, abs=1e-6, nan_ok=True)
    rows = list(csv.DictReader((tmp_path / "expected.csv").open()))
    assert rows[0]["image"] == "(all images)" and len(rows) == 6
    shares = [float(row["expected_accuracy"]) for row in rows]
    assert shares[0] == pytest.approx(found.accuracy, abs=1e-6)
    assert shares[1:] == sorted(shares[1:])


def test_a_perfectly_certain_and_a_known_image(tmp_path):
    """By hand: 2 x 2 pixels of two classes."""
    probs = np.array([[[1, 0.8], [0.4, 0.5]]], np.float32)
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", probs=np.concatenate([probs, 1 - probs]))
    source = PredictionFolder(tmp_path / "p", labelled=False)
    found = segcal.apply(source, None, tmp_path / "out")
    text = segcal.apply(source, None, tmp_path / "text", "mask,confidence")
    assert text.accuracy == found.accuracy == pytest.approx((1 + 0.8 + 0.6 + 0.5) / 4)
    assert found.class_iou == pytest.approx([2.3 / (3 + 0.4), 0.6 / (1 + 0.7)])
    assert "accuracy 72.50 %" in repr(found) and "array" not in repr(found)
    mask = np.asarray(Image.open(tmp_path / "out" / "predictions" / "a_pred.png"))
    assert mask.tolist() == [[0, 0], [1, 0]] and mask.dtype == np.uint8
    confidence = np.asarray(Image.open(tmp_path / "out" / "predictions" / "a_conf.png"))
    assert confidence / 65535 == pytest.approx(np.array([[1, 0.8], [0.6, 0.5]]), abs=1e-5)


def test_a_second_call_repeats_nothing_and_adds_what_is_new(root, calibrator, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for path in (root / "test" / "images").iterdir():
        (images / path.name).write_bytes(path.read_bytes())
    first = segcal.apply(unlabelled(root, images=images), calibrator, tmp_path / "out")
    before = times(tmp_path / "out")
    again = segcal.apply(unlabelled(root, images=images), calibrator, tmp_path / "out")
    assert times(tmp_path / "out") == before and again.reused == 5 and first.reused == 0
    assert again.accuracy == first.accuracy
    # One more image, of another size.
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(images / "i9.png")
    more = segcal.apply(unlabelled(root, images=images), calibrator, tmp_path / "out")
    assert more.reused == 5 and len(more.names) == 6
    assert Image.open(tmp_path / "out" / "predictions" / "i9_pred.png").size == (30, 20)
    assert {path: now for path, now in times(tmp_path / "out").items() if path in before} == before
    # Half a file of a killed process goes; a file of the user stays.
    half = tmp_path / "out" / "predictions" / ".i1_pred.png.0123456789ab"
    for path in (half, half.with_name(".notes.txt")):
        path.write_bytes(b"half")
    # A file that is gone, another kind of file, and another calibrator.
    (tmp_path / "out" / "predictions" / "i1_pred.png").unlink()
    assert segcal.apply(unlabelled(root, images=images), calibrator, tmp_path / "out").reused == 5
    assert not half.exists() and half.with_name(".notes.txt").exists()
    both = ["mask", "overlay", "uncertainty"]
    drawn = segcal.apply(unlabelled(root, images=images), calibrator, tmp_path / "out", both)
    assert drawn.reused == 0
    assert Image.open(tmp_path / "out" / "overlay" / "i0.png").size == SIZE[::-1]
    assert segcal.apply(unlabelled(root, images=images), None, tmp_path / "out", both).reused == 0
    # Confidence is still of the calibrator, so it is written again.
    assert segcal.apply(unlabelled(root, images=images), None, tmp_path / "out").reused == 0


@pytest.mark.slow
def test_a_kill_leaves_whole_files_and_a_rerun_goes_on(root, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "segcal", "apply", "--model", f"{root / 'glue.py'}:slow"]
    command += ["--images", str(root / "test" / "images"), "--num-classes", "3"]
    command += ["--batch-size", "1", "--workers", "0", "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while process.poll() is None and len(list(out.glob("done/*.json"))) < 2:
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = times(out)
    finished = len(list(out.glob("done/i*.json")))
    assert 2 <= finished < 5
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{finished} of 5 images as before" in done.stdout
    kept = {path for path in before if (out / "done" / f"{path.stem[:2]}.json") in before}
    after = times(out)
    assert all(after[path] == before[path] for path in kept)
    segcal.apply(unlabelled(root, "network"), None, tmp_path / "whole")
    for path in (tmp_path / "whole").glob("predictions/*.png"):
        pair = (Image.open(path), Image.open(out / path.relative_to(tmp_path / "whole")))
        whole, resumed = (np.asarray(image).astype(int) for image in pair)
        assert abs(whole - resumed).max() <= path.stem.endswith("conf")  # of 65535


def share(rank, folder, out):
    source = PredictionFolder(folder, labelled=False)
    found = segcal.apply(source, None, out, write=["probs", "mask"])
    return {"accuracy": float(found.accuracy), "names": list(found.names), "reused": found.reused}


@pytest.mark.slow
def test_ranks_share_the_images(tmp_path):
    folder = save_folder(tmp_path / "saved", 5)
    alone = share(0, folder, tmp_path / "one")
    for found in run_on_ranks(share, folder, tmp_path / "two"):
        assert found["names"] == alone["names"]
        assert found["accuracy"] == pytest.approx(alone["accuracy"], rel=1e-9)
    for found in run_on_ranks(share, folder, tmp_path / "two"):
        assert found["reused"] == 5


@pytest.fixture(scope="module")
def evaluated(root, tmp_path_factory):
    """What `segcal eval` leaves of the network, whose hold-out is the test images."""
    out = tmp_path_factory.mktemp("evaluated")
    words = ["eval", "--model", f"{root / 'glue.py'}:network", "--data", f"masks:{root}"]
    words += ["--holdout", f"masks:{root}", "--posthoc", "ts", "--operate", "coverage=0.5"]
    words += ["--conformal", "miss=0.5", "--overlays", "none", "--workers", "0"]
    assert main([*words, "--out", str(out)]) == 0
    return out


def test_the_command(root, evaluated, tmp_path, capsys):
    calibrator = evaluated / "ts" / "calibrator.safetensors"
    words = ["apply", "--model", f"{root / 'glue.py'}:network", "--workers", "0"]
    words += ["--calibrator", str(calibrator), "--out", str(tmp_path / "out")]
    images = ["--images", str(root / "test" / "images"), "--fail-on-drift"]
    assert main([*words, *images, "--write", ",".join(OUTPUTS), "--limit", "3"]) == 0
    said = capsys.readouterr().out
    assert "accuracy" in said and "review first: i" in said and "like the hold-out" in said
    assert " car " in said and "class 1" not in said  # as the hold-out calls them
    for kind in ("probs", "predictions", "accept", "sets", "uncertainty", "overlay"):
        assert len(list((tmp_path / "out" / kind).glob("i*"))) == 3 + 3 * (kind == "predictions")
    assert "hold-out" in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "black").mkdir()
    for i in range(5):
        Image.fromarray(np.zeros((*SIZE, 3), np.uint8)).save(tmp_path / "black" / f"{i}.png")
    assert main([*words, "--images", str(tmp_path / "black"), "--fail-on-drift"]) == 3
    assert "unlike the hold-out" in capsys.readouterr().out
    for wrong in (
        [*words],
        [*words, *images, "--write", "video"],
        [*words, *images, "runs/a"],
        [*words, *images, "--operate", "accuracy=0.9"],
        [*words[:5], "--out", str(tmp_path / "o"), "--num-classes", "3", *images],
        ["apply", "no", "--out", "o", *images],
    ):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_the_holdout_decides(root, evaluated, tmp_path):
    """On the hold-out itself: thresholds do what they promise, and nothing is unlike it."""
    calibrator = segcal.load_calibrator(evaluated / "ts" / "calibrator.safetensors")
    profile = evaluated / "ts" / "holdout.json"
    write = ["probs", "accept", "sets"]
    found = segcal.apply(unlabelled(root), calibrator, tmp_path, write, profile=profile)
    assert found.operate == "coverage=0.5" and found.each.coverage.mean() >= 0.45
    assert not found.drift.alarm and not found.drift.unlike.any()
    low, high = found.intervals["accuracy"].low, found.intervals["accuracy"].high
    assert low < found.accuracy < high
    assert found.intervals["miou"].low < found.miou < found.intervals["miou"].high
    threshold, lam = found.profile.point()[1], found.profile.lam()
    for i, name in enumerate(found.names):
        p = np.load(tmp_path / "probs" / f"{name}.npz")["probs"]
        accept = np.asarray(Image.open(tmp_path / "accept" / f"{name}.png"))
        assert (accept == 255).sum() == found.sums["accepted"][i] == (p.max(0) > threshold).sum()
        assert np.array_equal(np.load(tmp_path / "sets" / f"{name}.npz")["sets"], p >= 1 - lam)
    with pytest.raises(ValueError, match="--operate"):
        segcal.apply(unlabelled(root), calibrator, tmp_path, ["accept"])


def test_masks_and_confidence_have_the_scores_of_the_network(root, calibrator, tmp_path):
    """To the depth of 16 bits, for scores that need the predicted class alone."""
    segcal.apply(unlabelled(root), calibrator, tmp_path, ["probs", "mask", "confidence"])
    labels = root / "test" / "masks"
    whole, top = (
        segcal.evaluate_source(
            PredictionFolder(tmp_path / kind, labels=labels), overlays="none", resamples=0
        ).reports["none"]
        for kind in ("probs", "predictions")
    )
    assert top.accuracy == whole.accuracy and top.miou == whole.miou
    assert top.mean_confidence == pytest.approx(whole.mean_confidence, abs=1 / 65535)
    assert top.ece == pytest.approx(whole.ece, abs=1e-3)


def test_volumes_keep_their_place(tmp_path):
    """NIfTI files lie where the images do, and axes of equal length stay in order."""
    affine = np.array([[0, -2, 0, 5], [1, 0, 0, -3], [0, 0, 3, 7], [0, 0, 0, 1.0]])
    rng = np.random.default_rng(0)
    for name in ("saved", "images", "labels"):
        (tmp_path / name).mkdir()
    probs = rng.dirichlet(np.ones(3), (4, 4, 4)).astype(np.float32)  # (z, y, x, C)
    np.savez(tmp_path / "saved" / "case.npz", probs=np.moveaxis(probs, -1, 0))
    labels = rng.integers(0, 3, (4, 4, 4)).astype(np.uint8)
    for name, array in (("images", probs[..., 0]), ("labels", labels)):
        nibabel.Nifti1Image(array.T, affine).to_filename(tmp_path / name / "case.nii.gz")
    images = tmp_path / "images"
    source = PredictionFolder(tmp_path / "saved", labelled=False, axes="zyx", images=images)
    out = tmp_path / "out"
    segcal.apply(source, None, out, ["probs", "mask", "confidence", "uncertainty"])
    for kind, expected in (("mask", probs.argmax(-1)), ("confidence", probs.max(-1))):
        image = nibabel.load(out / kind / "case.nii.gz")
        assert np.array_equal(image.affine, affine)
        assert np.array_equal(np.asarray(image.dataobj).T, expected)
    later = PredictionFolder(out / "probs", labels=tmp_path / "labels")
    report = segcal.evaluate_source(later, overlays="none", resamples=0).reports["none"]
    assert report.accuracy == (probs.argmax(-1) == labels).mean()


def test_a_data_set_and_a_folder_of_its_images_give_the_same(tmp_path):
    """A network on a data set, as a run is, prepares the images of a folder likewise."""
    data = build_data(DataConfig(name="scenes", limit=3))
    torch.manual_seed(0)
    network = torch.nn.Conv2d(3, data.num_classes, 3, padding=1)
    source = NetworkSource(network, data, batch_size=2, workers=0)
    (tmp_path / "images").mkdir()
    for index in range(len(source.names)):
        Image.fromarray(source.image(index)).save(tmp_path / "images" / f"{index}.png")
    folder = source.on_images(tmp_path / "images")
    assert [batch.labels for batch in folder] == [None] * 2
    for index in range(len(source.names)):
        assert torch.allclose(folder[index].values, source[index].values, atol=1e-5)
    found = segcal.apply(folder, None, tmp_path / "out", ["mask", "overlay"])
    assert found.names == ("0", "1", "2")
    (tmp_path / "images" / "bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad\.png"):
        source.on_images(tmp_path / "images")
    kept = source.on_images(tmp_path / "images", skip_bad=True)
    again = segcal.apply(kept, None, tmp_path / "out", ["mask", "overlay"])
    assert again.skipped == ("bad",) and len(again.names) == 3


def test_a_calibrator_of_another_network_is_refused(root, tmp_path):
    torch.manual_seed(0)
    other = segcal.TemperatureScaling().fit(torch.randn(99, 4), torch.randint(4, (99,)))
    with pytest.raises(ValueError, match="4 classes"):
        segcal.apply(unlabelled(root), other, tmp_path)
    with pytest.raises(ValueError, match="num_classes"):
        unlabelled(root, num_classes=None)


def test_sigmoid_outputs(tmp_path):
    probs = np.array([[[0.9, 0.2]], [[0.6, 0.5]]], np.float32)  # (2, 1, 2)
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", sigmoid_probs=probs)
    source = PredictionFolder(tmp_path / "p", labelled=False)
    found = segcal.apply(source, None, tmp_path / "out", write=["probs"])
    assert found.accuracy == pytest.approx((0.9 + 0.8 + 0.6 + 0.5) / 4)
    assert found.class_iou == pytest.approx([0.9 / 1.2, 1.1 / 2])
    np.savez(tmp_path / "p" / "b.npz", sigmoid_probs=probs / 2)  # no class is predicted
    source = PredictionFolder(tmp_path / "p", labelled=False)
    both = segcal.apply(source, None, tmp_path / "out", write=["probs"])
    assert both.reused == 1 and np.isnan(both.each.class_iou[1]).all()
    with pytest.raises(ValueError, match="sigmoid"):
        segcal.apply(source, None, tmp_path / "out", write=["overlay"])


def test_files_of_sigmoid_outputs_are_of_each_class(tmp_path):
    """By hand: two classes that overlap; a second call writes what is missing, and no more."""
    probs = np.array([[[0.9, 0.2]], [[0.6, 0.5]]], np.float32)  # (2, 1, 2)
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", sigmoid_probs=probs)
    source = PredictionFolder(tmp_path / "p", labelled=False, class_names=["cell", "a/b"])
    out, kinds = tmp_path / "out", ["mask", "confidence", "uncertainty"]
    assert segcal.apply(source, None, out, kinds).reused == 0

    def read(kind, of):
        return np.asarray(Image.open(out / kind / of / "a.png"))

    for of, p in (("cell", probs[0]), ("a-b", probs[1])):
        assert read("mask", of).tolist() == (p >= 0.5).tolist()
        found = read("confidence", of)
        assert found / 65535 == pytest.approx(np.maximum(p, 1 - p), abs=1e-5)
        entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
        assert read("uncertainty", of) / 65535 == pytest.approx(entropy, abs=1e-5)
    assert segcal.apply(source, None, out, kinds).reused == 1
    (out / "mask" / "a-b" / "a.png").unlink()
    assert segcal.apply(source, None, out, kinds).reused == 0
    assert (out / "mask" / "a-b" / "a.png").is_file()
