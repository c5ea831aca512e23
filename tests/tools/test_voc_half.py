"""The subset at half resolution: its lists, and its pixels where the real ones are at hand."""

import numpy as np
import pytest
import voc_half
from PIL import Image

IDS = {name: (voc_half.IDS / f"{name}.txt").read_text().split() for name in ("train", "val")}


def test_the_lists_nest_and_keep_apart():
    lists = voc_half.training_lists(IDS["train"])
    assert {name: len(ids) for name, ids in lists.items()} == {
        "holdout60": 60,
        "train60": 60,
        "train160": 160,
        "train300": 300,
    }
    assert lists["train300"][:160] == lists["train160"]
    assert lists["train160"][:60] == lists["train60"]
    assert not set(lists["train300"]) & set(lists["holdout60"])
    assert set(lists["train300"]) <= set(IDS["train"])
    assert not set(IDS["train"]) & set(IDS["val"])
    # The lists that the trainings of docs/results.md began with.
    assert lists["holdout60"][:2] == ["2007_009464", "2010_001195"]
    assert lists["train160"][:2] == ["2008_008323", "2008_006434"]


def test_images_are_averaged_and_masks_keep_their_labels(tmp_path):
    source, target = tmp_path / "VOC2012", tmp_path / "half"
    for folder in ("JPEGImages", "SegmentationClass"):
        (source / folder).mkdir(parents=True)
    grey = np.kron(np.array([[40, 80], [120, 200]], np.uint8), np.ones((16, 16), np.uint8))
    Image.fromarray(np.stack([grey] * 3, -1)).save(source / "JPEGImages/a.jpg", quality=100)
    labels = np.kron(np.array([[0, 15], [255, 3]], np.uint8), np.ones((16, 16), np.uint8))
    mask = Image.fromarray(labels, "P")
    mask.putpalette(list(range(256)) * 3)
    mask.save(source / "SegmentationClass/a.png")
    voc_half.make_half(source, target, {"val": ["a"]})
    half = np.asarray(Image.open(target / "JPEGImages/a.jpg")).astype(int)
    assert half.shape == (16, 16, 3)
    assert np.abs(half[4, 4] - 40).max() <= 2 and np.abs(half[12, 12] - 200).max() <= 2
    assert np.array_equal(
        np.asarray(Image.open(target / "SegmentationClass/a.png")), labels[::2, ::2]
    )
    assert (target / "ImageSets/Segmentation/val.txt").read_text() == "a\n"


def test_a_missing_image_is_named_before_anything_is_written(tmp_path):
    (tmp_path / "VOC2012").mkdir()
    with pytest.raises(FileNotFoundError, match=r"a\.jpg"):
        voc_half.make_half(tmp_path / "VOC2012", tmp_path / "half", {"val": ["a"]})
    assert not (tmp_path / "half").exists()


def test_equals_the_subset_that_was_trained_on(tmp_path, shared_data):
    data = shared_data / "voc2012_full_subset/VOCdevkit/VOC2012"
    known = shared_data / "voc2012_half/VOCdevkit/VOC2012"
    ids = sorted(path.stem for path in (data / "JPEGImages").iterdir())[:5]
    voc_half.make_half(data, tmp_path, {"some": ids})
    for name in ids:
        for file in (f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png"):
            mine, theirs = (np.asarray(Image.open(folder / file)) for folder in (tmp_path, known))
            assert np.array_equal(mine, theirs), file
