"""Tiny-ImageNet and Mendeley V2, from small copies in their official layouts."""

import numpy as np
import pytest
import torch
from PIL import Image

from segcal.cli import main
from segcal.data import DataConfig
from segcal.data import build as build_data
from tests.support import ROOT

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
NUMBERS = ["n03", "n01", "n02"]  # wnids.txt is not sorted


def build(name, root, **options):
    return build_data(DataConfig(name, root=str(root), **options), seed=0)


def save(path, colour, size=(64, 64), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, quality=100)


@pytest.fixture
def tiny(tmp_path):
    """Four training and two val images per class, each of one grey that says which it is."""
    folder = tmp_path / "tiny-imagenet-200"
    for index, number in enumerate(NUMBERS):
        for i in range(4):
            level = 60 * index + 10 * i
            save(folder / "train" / number / "images" / f"{number}_{i}.JPEG", (level,) * 3)
        (folder / "train" / number / f"{number}_boxes.txt").write_text("")
    lines = []
    for i, number in enumerate(["n02", "n03", "n01", "n01", "n02", "n03"]):
        save(folder / "val" / "images" / f"val_{i}.JPEG", 40 * i, mode="L")
        lines.append(f"val_{i}.JPEG\t{number}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(NUMBERS) + "\n")
    (folder / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius\nn03\tbullfrog\n")
    return tmp_path


def test_tiny_imagenet(tiny):
    data = build("tiny_imagenet", tiny, augment=False)
    assert data.class_names == ("goldfish", "n02", "bullfrog")  # n02 has no name in words.txt
    assert len(data.train) + len(data.holdout) == 12 and len(data.test) == 6
    assert [int(data.test[i][1]) for i in range(6)] == [1, 2, 0, 0, 1, 2]
    image, _ = data.test[3]  # a grey file becomes three equal channels
    assert image.shape == (3, 64, 64)
    expected = (120 / 255 - MEAN) / STD
    np.testing.assert_allclose(image[:, 9, 9].numpy(), expected, rtol=1e-5)
    for i, name in enumerate(data.train.names):
        number = name.removeprefix("images/")[:3]
        assert int(data.train[i][1]) == sorted(NUMBERS).index(number)
        assert data.train.image(i)[0, 0, 0] // 60 == NUMBERS.index(number)


def test_tiny_imagenet_is_padded_cropped_and_flipped(tiny):
    data = build("tiny_imagenet", tiny)
    crops = torch.stack([data.train[(epoch, 0)][0] for epoch in range(8)])
    assert crops.shape == (8, 3, 64, 64) and len(crops.flatten(1).unique(dim=0)) > 1


@pytest.mark.parametrize("lost", ["wnids.txt", "val/val_annotations.txt"])
def test_incomplete_tiny_imagenet(tiny, lost):
    (tiny / "tiny-imagenet-200" / lost).rename(tiny / "elsewhere")
    with pytest.raises(ValueError, match=rf"it has no {lost}; data/README.md says how to get it"):
        build("tiny_imagenet", tiny)


def test_unknown_class_in_the_annotations(tiny):
    path = tiny / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    path.write_text("val_0.JPEG\tn09\t0\t0\t62\t62\n")
    with pytest.raises(ValueError, match=r"class of wnids.txt for val_0.JPEG in .* got n09"):
        build("tiny_imagenet", tiny)


def test_a_list_that_is_not_text_is_named(tiny):
    (tiny / "tiny-imagenet-200" / "wnids.txt").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match=r"wnids\.txt: 'utf-8' codec can't decode"):
        build("tiny_imagenet", tiny)


def test_real_tiny_imagenet(shared_data):
    data = build("tiny_imagenet", shared_data)
    assert data.num_classes == 10 and len(data.test) == 100
    assert len(data.train) + len(data.holdout) == 200
    counts = np.bincount([int(data.test[i][1]) for i in range(100)])
    assert counts.tolist() == [10] * 10


@pytest.fixture
def xrays(tmp_path):
    for part, count in (("train", 4), ("test", 3)):
        for kind, level in (("NORMAL", 50), ("PNEUMONIA", 150)):
            for i in range(count):
                path = tmp_path / "chest_xray" / part / kind / f"{kind}-{i}.jpeg"
                save(path, level + 10 * i, size=(30 + 7 * i, 24), mode="L")
    return tmp_path


def test_mendeley(xrays):
    data = build("mendeley", xrays)
    assert data.class_names == ("normal", "pneumonia") and data.uniform
    assert len(data.train) + len(data.holdout) == 8
    assert [int(data.test[i][1]) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    image, _ = data.test[4]
    assert image.shape == (3, 224, 224)
    np.testing.assert_allclose(image[:, 99, 9].numpy(), (160 / 255 - MEAN) / STD, rtol=1e-4)
    assert build("mendeley", xrays, resize=32).test[0][0].shape == (3, 32, 32)


def test_incomplete_xrays(xrays):
    (xrays / "chest_xray" / "test" / "NORMAL").rename(xrays / "elsewhere")
    with pytest.raises(ValueError, match=r"it has no test/NORMAL; data/README.md says how to get"):
        build("mendeley", xrays)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ("tiny_imagenet_resnet34", "tiny-imagenet-200"),
        ("mendeley_resnet50", "chest_xray"),
        ("pacs_resnet18", "PACS"),
        ("newsgroups_gpcnn", "20news-bydate-train"),
    ],
)
def test_missing_data_says_where_to_put_what(config, place, tmp_path, capfd):
    path = ROOT / "configs" / f"{config}.yaml"
    options = ["--data.root", str(tmp_path), "--data.download", "false"]
    out = tmp_path / "run"
    assert main(["train", "--config", str(path), *options, "--out", str(out)]) == 2
    error = capfd.readouterr().err
    assert error.startswith("segcal: error: Expected ") and error.count("\n") == 1
    assert str(tmp_path) in error and place in error and "data/README.md" in error
    assert not out.exists()
