"""Training with one mask per class: from the files to an evaluated run."""

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.cli import main
from segcal.data import build as build_data
from segcal.data.options import DataConfig
from segcal.data.transforms import Augmentation, Augmenter
from segcal.sources.network import RunSource
from segcal.training.config import parse_train

SIDE = 16


def write(root, count=20):
    """Images whose red and green squares overlap; the classes are where each colour is."""
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        (root / part / "images").mkdir(parents=True)
        for n in range(count):
            image = generator.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
            for channel, name in enumerate(("red", "green")):
                mask = np.zeros((SIDE, SIDE), np.uint8)
                top, left = generator.integers(0, SIDE // 2, 2)
                mask[top : top + SIDE // 2, left : left + SIDE // 2] = 1
                image[..., channel] += 150 * mask
                mask[0] = 255
                (root / part / "masks" / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask).save(root / part / "masks" / name / f"{n:02}.png")
            Image.fromarray(image).save(root / part / "images" / f"{n:02}.png")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("overlapping"))


def options(data):
    return ["--data.name", "masks", "--data.root", str(data), "--multilabel", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    command = ["train", *options(data), "--out", str(folder), "--epochs", "6", "--workers", "0"]
    command += [
        "--batch_size",
        "4",
        "--loss",
        "dicece+mdca",
        "--mixup",
        "0.1",
        "--data.flip",
        "0.5",
    ]
    command += ["--data.crop_size", "12", "--optim.lr", "0.02"]
    assert main(command) == 0
    return folder


def test_labels_are_one_map_a_class(data):
    config = DataConfig(name="masks", root=str(data), multilabel=True)
    splits = build_data(config, seed=0)
    assert splits.multilabel and splits.class_names == ("green", "red")
    _image, label = splits.test[3]
    assert label.shape == (2, SIDE, SIDE) and label.dtype == torch.int64
    for c, name in enumerate(splits.class_names):
        mask = np.array(Image.open(data / "test" / "masks" / name / "03.png"))
        np.testing.assert_array_equal(label[c], mask)


def test_all_masks_are_augmented_as_their_image():
    image = np.arange(100, dtype=np.uint8).reshape(10, 10)
    masks = np.stack([image, image + 100, image % 7, image % 3, image % 5])  # more than 4 channels
    augmenter = Augmenter(Augmentation(crop_size=12, flip=0.5), ignore_index=255)
    for seed in range(6):
        picture, mask = augmenter(np.stack([image] * 3, 2), masks, seed=(seed,))
        known = mask[0] != 255
        assert mask.shape == (5, 12, 12) and known.sum() == 100
        np.testing.assert_array_equal(mask[0][known], picture[..., 0][known])
        np.testing.assert_array_equal(mask[1][known], mask[0][known] + 100)
        np.testing.assert_array_equal(mask[4][known], mask[0][known] % 5)
        assert (mask[:, ~known] == 255).all()


def test_a_run_learns_and_is_evaluated(run, tmp_path):
    command = ["eval", str(run), "--posthoc", "ts", "--resamples", "20", "--workers", "0"]
    assert main([*command, "--num-overlays", "1", "--out", str(tmp_path / "eval")]) == 0
    report = segcal.Report.load(tmp_path / "eval" / "report.json")
    assert report.protocol.multilabel and report.class_names == ("green", "red")
    assert report.miou > 0.6  # squares are a quarter of the image; overlap counts in both classes
    opened = RunSource(run)
    meter = segcal.CalibrationMeter(2, multilabel=True)
    with torch.no_grad():
        for image, label in opened.splits.test:
            meter.update(opened.model(image[None]), label[None])
    assert report.nll == pytest.approx(meter.compute().nll, rel=1e-5)


def test_settings_are_kept(run):
    assert RunSource(run).multilabel
    arguments = ["--data.name", "masks", "--data.multilabel", "true"]
    assert parse_train(arguments)[0].data == parse_train([*arguments[:2], "--multilabel"])[0].data


def test_data_that_is_not_multilabel_is_refused_in_one_line(data, tmp_path, capsys):
    assert main(["train", "--data.name", "scenes", "--multilabel", "--out", str(tmp_path)]) == 2
    assert "data.multilabel" in capsys.readouterr().err
    (data / "test" / "masks" / "red" / "07.png").rename(tmp_path / "07.png")
    try:
        assert main(["train", *options(data), "--out", str(tmp_path / "x")]) == 2
        assert "masks/red/07.png, but there is none" in capsys.readouterr().err
    finally:
        (tmp_path / "07.png").rename(data / "test" / "masks" / "red" / "07.png")


def test_one_class_is_a_binary_problem(data, tmp_path):
    """classes.txt chooses among the folders."""
    listed = data / "classes.txt"
    listed.write_text("red\n")
    try:
        command = ["train", *options(data), "--out", str(tmp_path / "run"), "--epochs", "4"]
        command += ["--workers", "0", "--batch_size", "4", "--loss", "fl+mdca"]
        assert main([*command, "--optim.lr", "0.02", "--schedule.warmup", "2.5"]) == 0
        command = ["eval", str(tmp_path / "run"), "--posthoc", "ts,isotonic", "--workers", "0"]
        assert main([*command, "--resamples", "20", "--num-overlays", "1"]) == 0
    finally:
        listed.unlink()
    report = segcal.Report.load(tmp_path / "run" / "eval" / "report.json")
    assert report.class_names == ("red",) and report.confusion.shape == (1, 2, 2)
    assert report.sce == report.class_ece[0] and report.miou == report.class_iou[0] > 0.5
