"""What is said of the labels before a training begins."""

import json

import numpy as np
import pytest
from PIL import Image

from segcal.cli import main
from segcal.data import build as build_data
from segcal.data.options import DataConfig
from segcal.training.log import write_jsonl
from segcal.training.run import count_labels
from tests.support.datasets import write_masks


def own(root, out, *more):
    arguments = ["--data.name", "masks", "--data.root", str(root), "--data.num_classes", "2"]
    arguments += ["--batch_size", "4", "--epochs", "1", "--device", "cpu", "--workers", "0"]
    return ["train", *arguments, "--model.width", "4", "--out", str(out), *more]


def rewrite(root, change, parts=("train", "test")):
    """Change every mask by a function of the mask and its number."""
    for part in parts:
        for path in (root / part / "masks").iterdir():
            mask = np.asarray(Image.open(path))
            Image.fromarray(change(mask, int(path.stem))).save(path)


@pytest.fixture
def masks(tmp_path):
    write_masks(tmp_path / "own")
    return tmp_path / "own"


def test_binary_masks_of_0_and_255_are_told(masks, tmp_path, capfd):
    rewrite(masks, lambda mask, _: 255 * mask)
    assert main(own(masks, tmp_path / "run")) == 0
    out, err = capfd.readouterr()
    assert "labels in 11 of 11 training images: 5" in out and "% are ignored" in out
    assert "is of 1 of the 2 classes: class 1; if 255 is the foreground" in err


def test_usual_labels_need_no_word(masks, tmp_path, capfd):
    assert main(own(masks, tmp_path / "run")) == 0
    out, err = capfd.readouterr()
    assert "labels in" not in out and "no label" not in err


def test_labels_that_are_all_ignored_are_refused(masks, tmp_path, capfd):
    """They would train with a loss of 0, and log NaN."""
    rewrite(masks, lambda mask, _: np.full_like(mask, 255))
    assert main(own(masks, tmp_path / "run")) == 2
    err = capfd.readouterr().err
    assert "Expected labels in the training images" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_holdout_without_labels_is_refused(masks, tmp_path, capfd):
    config = DataConfig(name="masks", root=str(masks), num_classes=2)
    held = {int(name) for name in build_data(config, seed=0).holdout.names}
    rewrite(masks, lambda mask, n: np.full_like(mask, 255) if n in held else mask, ("train",))
    assert main(own(masks, tmp_path / "run")) == 2
    assert "Expected labels in the hold-out images" in capfd.readouterr().err


def test_counts_are_those_of_the_labels(masks):
    rewrite(masks, lambda mask, n: np.where(mask == 1, 255, 0).astype(np.uint8) if n % 2 else mask)
    config = DataConfig(name="masks", root=str(masks), num_classes=2)
    train = build_data(config, seed=0).train
    classes, ignored, items = count_labels(train, 2, 255)
    labels = np.stack([train.part.read(index)[1] for index in train.indices])
    np.testing.assert_array_equal(classes, [(labels == 0).sum(), (labels == 1).sum()])
    assert ignored == pytest.approx((labels == 255).mean()) and items == len(train)
    assert count_labels(train, 2, 255, most=3)[2] == 3
    digits = build_data(DataConfig(name="digits"), seed=0).train
    assert count_labels(digits, 10, 255, most=10**6)[0].sum() == len(digits)


def test_masks_of_each_class_are_counted_by_class(tmp_path, capfd):
    root = tmp_path / "own"
    write_masks(root)
    for part in ("train", "test"):
        masks = root / part / "masks"
        for name, factor in (("left", 1), ("right", 255)):
            (masks / name).mkdir()
            for path in masks.glob("*.png"):
                Image.fromarray(factor * np.asarray(Image.open(path))).save(
                    masks / name / path.name
                )
    config = DataConfig(name="masks", root=str(root), multilabel=True)
    train = build_data(config, seed=0).train
    classes, ignored, _ = count_labels(train, 2, 255, multilabel=True)
    labels = np.stack([train.part.read(index)[1] for index in train.indices])  # (n, 2, H, W)
    np.testing.assert_array_equal(classes, (labels == 1).sum((0, 2, 3)))
    assert ignored == pytest.approx((labels == 255).mean())
    assert classes[0] and not classes[1]
    arguments = own(root, tmp_path / "run")
    arguments[arguments.index("--data.num_classes") : arguments.index("--batch_size")] = []
    assert main([*arguments, "--data.multilabel", "true"]) == 0
    assert "1 of the 2 classes: right; if 255 is the foreground" in capfd.readouterr().err


def test_the_log_is_json(tmp_path):
    """JSON has no NaN."""
    write_jsonl(tmp_path / "log.jsonl", [{"epoch": 1, "holdout/miou": float("nan"), "lr": 0.1}])
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text) == {"epoch": 1, "holdout/miou": None, "lr": 0.1}
