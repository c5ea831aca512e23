"""Data read from files: layouts, palettes, hold-outs, and one clear sentence for each fault."""

import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from segcal.data import DATASETS, DataConfig
from segcal.data import build as build_data
from segcal.data.folders import palette
from segcal.data.samples import read_class_mask
from segcal.data.shift import Shift, shifted_part
from segcal.data.splits import missing
from segcal.data.splits import shifted as build_shifted


def save_pair(image_path, mask_path, *, size=(20, 14), values=(0, 3, 255), seed=0):
    """An image and a palette PNG mask that holds all `values`; size is (width, height)."""
    rng = np.random.default_rng(seed)
    for path in (image_path, mask_path):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(image_path)
    mask = rng.choice(values, (size[1], size[0])).astype(np.uint8)
    mask.flat[: len(values)] = values
    picture = Image.fromarray(mask, mode="P")
    picture.putpalette(palette(256).tobytes())
    picture.save(mask_path)
    return mask


@pytest.fixture
def voc_root(tmp_path):
    """The official layout: 6 train and 3 val images, 2 more in the augmented list."""
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    names = {"train": [f"2007_{i}" for i in range(6)], "val": [f"2008_{i}" for i in range(3)]}
    for split, ids in names.items():
        (lists / f"{split}.txt").write_text("\n".join(ids) + "\n")
        for i, name in enumerate(ids):
            save_pair(
                folder / "JPEGImages" / f"{name}.jpg",
                folder / "SegmentationClass" / f"{name}.png",
                size=(20 + i, 14),
                seed=i,
            )
    for name in [*names["train"], "2009_0", "2009_1"]:
        save_pair(
            folder / "JPEGImages" / f"{name}.jpg",
            folder / "SegmentationClassAug" / f"{name}.png",
            values=(0, 20),
        )
    pairs = (f"/JPEGImages/{n}.jpg /SegmentationClassAug/{n}.png" for n in ("2007_0", "2009_1"))
    (lists / "train_aug.txt").write_text("\n".join(pairs))
    return tmp_path


def voc(root, **options):
    options = {"base_size": 16, "crop_size": 12, "holdout": 0.3, **options}
    data = build_data(DataConfig("voc2012", root=str(root), **options), seed=0)
    assert data.train.names and data.holdout.names  # what is absent says why when it is used
    return data


def test_voc_in_its_official_layout(voc_root):
    data = voc(voc_root)
    assert [len(data.train), len(data.holdout), len(data.test)] == [4, 2, 3]
    assert not set(data.train.names) & set(data.holdout.names)
    assert data.test.names == ["2008_0", "2008_1", "2008_2"]
    assert data.num_classes == 21 and data.class_names[15] == "person" and not data.uniform
    image, label = data.train[(3, 0)]
    assert image.shape == (3, 12, 12) and label.shape == (12, 12)
    image, label = data.test[1]
    assert image.shape == (3, 14, 21) and label.dtype == torch.int64
    assert label.unique().tolist() == [0, 3, 255]
    assert data.test.image(1).shape == (14, 21, 3)


def test_voc_mask_is_read_as_indices_not_colours(voc_root):
    path = voc_root / "VOCdevkit/VOC2012/SegmentationClass/2008_0.png"
    expected = save_pair(path.with_suffix(".jpg"), path, values=(0, 5, 20, 255))
    assert (voc(voc_root).test[0][1].numpy() == expected).all()


def test_voc_trainaug_is_its_list_without_val(voc_root):
    data = voc(voc_root, train_split="trainaug")
    assert sorted(data.train.names + data.holdout.names) == ["2007_0", "2009_1"]
    assert data.train[0][1].unique().tolist() != [0, 3, 255]
    listed = voc_root / "VOCdevkit/VOC2012/ImageSets/Segmentation/train_aug.txt"
    listed.write_text("2007_0\n2008_1\n")
    with pytest.raises(ValueError, match=r"no image of the test set .* got 1, 2008_1"):
        voc(voc_root, train_split="trainaug")
    listed.unlink()
    with pytest.raises(
        ValueError, match=r"list train_aug.txt .* got train.txt, val.txt; data/README"
    ):
        voc(voc_root, train_split="trainaug")


def test_voc_lists_of_any_name(voc_root):
    """The hold-out may be a list too: then all images of the training list are trained on."""
    lists = voc_root / "VOCdevkit/VOC2012/ImageSets/Segmentation"
    (lists / "some.txt").write_text("2007_4\n2007_1\n\n2007_0\n")
    (lists / "held.txt").write_text("2007_3\n")
    data = voc(voc_root, train_split="some", holdout_split="held")
    assert data.train.names == ["2007_4", "2007_1", "2007_0"]
    assert data.holdout.names == ["2007_3"] and len(data.test) == 3
    folder = voc_root / "VOCdevkit" / "VOC2012"
    assert data.holdout.part.images == [folder / "JPEGImages" / "2007_3.jpg"]
    assert data.holdout.part.labels == [folder / "SegmentationClass" / "2007_3.png"]
    split = voc(voc_root, train_split="some")
    assert sorted(split.train.names + split.holdout.names) == ["2007_0", "2007_1", "2007_4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_split": "none"},
            r"the list none\.txt .*, but got bytes\.txt, empty\.txt",
        ),
        ({"train_split": "../../x"}, r"the list \.\./\.\./x\.txt"),
        ({"train_split": "empty"}, r"names of images in .*empty\.txt"),
        ({"holdout_split": "held"}, "no image of the training set in .*held.txt.*1, 2007_3 first"),
        ({"holdout_split": "val"}, "no image of the test set in .*val.txt, but got 3"),
        ({"train_split": "bytes"}, r"bytes\.txt: 'utf-8' codec can't decode"),
        ({"train_split": "odd"}, "Expected a file at .*2007_77.jpg, as odd.txt says"),
    ],
)
def test_voc_lists_that_do_not_fit(voc_root, options, message):
    lists = voc_root / "VOCdevkit/VOC2012/ImageSets/Segmentation"
    for name, text in (("held", "2007_3"), ("empty", "\n"), ("odd", "2007_77")):
        (lists / f"{name}.txt").write_text(text)
    (lists / "bytes.txt").write_bytes(b"\xff\xfe\x80")
    (voc_root / "VOCdevkit/VOC2012/x.txt").write_text("2007_3")
    with pytest.raises(ValueError, match=message):
        voc(voc_root, **options)


def test_voc_faults_are_named(voc_root, tmp_path):
    with pytest.raises(ValueError, match=r"VOC 2012 .*nowhere.* data/README.md"):
        voc(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"no image of the test set in .*val.txt, but got 3, 2008_"
    ):
        voc(voc_root, train_split="val")
    folder = voc_root / "VOCdevkit" / "VOC2012"
    (folder / "SegmentationClass" / "2008_2.png").unlink()
    with pytest.raises(ValueError, match=r"Expected a file at .*2008_2.png"):
        voc(voc_root)
    (folder / "ImageSets" / "Segmentation" / "val.txt").unlink()
    with pytest.raises(ValueError, match=r"the list val.txt of VOC 2012"):
        voc(voc_root)


def test_palette_is_the_one_voc_draws_with():
    colours = palette(256)
    assert colours[[0, 1, 2, 3, 15, 20, 255]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [192, 128, 128], [0, 64, 128],
        [224, 224, 192],
    ]  # fmt: skip


@pytest.fixture
def mask_root(tmp_path):
    for part, count in (("train", 5), ("test", 2)):
        for i in range(count):
            save_pair(
                tmp_path / part / "images" / f"{i}.png", tmp_path / part / "masks" / f"{i}.png"
            )
    return tmp_path


def masks(root, **options):
    options = {"num_classes": 4, **options}
    return build_data(DataConfig("masks", root=str(root), **options), seed=0)


def test_own_masks(mask_root):
    data = masks(mask_root)
    assert [len(data.train), len(data.holdout), len(data.test)] == [4, 1, 2]
    assert data.uniform and data.num_classes == 4 and data.palette.shape == (4, 3)
    assert data.train[0][0].shape == (3, 14, 20)
    (mask_root / "classes.txt").write_text("sky\nroad\ncar\nperson\n")
    assert masks(mask_root, num_classes=None).class_names == ("sky", "road", "car", "person")
    with pytest.raises(ValueError, match=r"num_classes=7 names in .*classes.txt, but got 4"):
        masks(mask_root, num_classes=7)
    (mask_root / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"at most 23170"):
        masks(mask_root, num_classes=10**9)


def test_own_masks_of_different_sizes_need_a_crop(mask_root):
    for kind in ("images", "masks"):
        path = mask_root / "train" / kind / "0.png"
        Image.open(path).resize((40, 40), Image.Resampling.NEAREST).save(path)
    data = masks(mask_root)  # they can be evaluated, one by one
    assert not data.uniform and data.test[0][0].shape == (3, 14, 20)
    with pytest.raises(ValueError, match=r"crop_size to be set"):
        len(data.train)
    assert "crop_size" in missing(DataConfig("masks", root=str(mask_root), num_classes=4))
    data = masks(mask_root, crop_size=16)
    assert not data.uniform
    assert all(data.train[i][0].shape == (3, 16, 16) for i in range(len(data.train)))


def test_resize_takes_training_masks_along_and_leaves_those_of_the_test(mask_root):
    for kind in ("images", "masks"):
        path = mask_root / "train" / kind / "0.png"
        Image.open(path).resize((40, 40), Image.Resampling.NEAREST).save(path)
    data = masks(mask_root, resize=28, flip=0.0, holdout=0.2)
    for index, name in enumerate(data.train.names):
        image, mask = data.train[0, index]
        assert image.shape == (3, 28, 28) and mask.shape == (28, 28)
        stored = np.asarray(Image.open(mask_root / "train" / "masks" / f"{name}.png"))
        rows, columns = (((np.arange(28) + 0.5) * side / 28).astype(int) for side in stored.shape)
        np.testing.assert_array_equal(mask, stored[rows[:, None], columns])  # the nearest pixels
    image, mask = data.test[0]
    assert image.shape == (3, 28, 28) and mask.shape == (14, 20)
    assert data.test.image(0).shape == (14, 20, 3) and not data.uniform


def test_mask_faults_are_named(mask_root):
    image, mask = (mask_root / "test" / kind / "1.png" for kind in ("images", "masks"))
    save_pair(image, mask, values=(0, 9, 12))
    with pytest.raises(ValueError, match=rf"{mask}: .* 0\.\.3 or ignore_index=255, but got 9, 12$"):
        masks(mask_root).test[1]
    found = masks(mask_root, ignore_index=12, num_classes=10).test[1][1]
    assert found.unique().tolist() == [0, 9, 12]
    with pytest.raises(ValueError, match=r"one of the 13 classes"):
        masks(mask_root, ignore_index=9, num_classes=13)
    Image.new("L", (5, 7)).save(mask)
    with pytest.raises(
        ValueError, match=rf"{mask}: .*20x14 pixels, the size of {image}, but got 5x7"
    ):
        masks(mask_root).test[1]
    Image.new("RGB", (20, 14)).save(mask)
    with pytest.raises(ValueError, match=rf"{mask}: .*one channel .* mode RGB"):
        masks(mask_root).test[1]
    mask.write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=rf"{mask}: it cannot be read as an image"):
        masks(mask_root).test[1]
    mask.unlink()
    with pytest.raises(ValueError, match=r"Expected a mask for .* but there is none"):
        masks(mask_root)


def test_binary_and_sixteen_bit_masks(tmp_path):
    Image.fromarray(np.eye(4, dtype=bool)).save(tmp_path / "b.png")
    mask = read_class_mask(tmp_path / "b.png", num_classes=2, ignore_index=255)
    assert mask.dtype == np.uint8 and (mask == np.eye(4)).all()
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(tmp_path / "w.png")
    assert (read_class_mask(tmp_path / "w.png", num_classes=301, ignore_index=255) == 300).all()


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty"])
def test_corrupt_jpeg_is_named(voc_root, damage):
    path = voc_root / "VOCdevkit/VOC2012/JPEGImages/2008_1.jpg"
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[: len(whole) // 2], "noise": b"\xff\xd8" * 9, "empty": b""}[damage]
    )
    with pytest.raises(ValueError, match=rf"{path}: it cannot be read as an image") as caught:
        voc(voc_root).test[1]
    assert "\n" not in str(caught.value)


@pytest.fixture
def class_root(tmp_path):
    for part, count in (("train", 5), ("test", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                colour = (40 * number + i, 0, 0)
                Image.new("RGB", (6, 6), colour).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def folders(root, **options):
    return build_data(DataConfig("folders", root=str(root), **options), seed=0)


def test_class_folders(class_root):
    data = folders(class_root)
    assert data.class_names == ("cat", "dog") and data.uniform
    assert data.test.names == ["cat/0", "cat/1", "dog/0", "dog/1"]
    assert [int(data.test[i][1]) for i in range(4)] == [0, 0, 1, 1]
    assert len(data.train) == 9 and len(data.holdout) == 1
    assert data.test.image(3)[0, 0].tolist() == [41, 0, 0]


def test_hidden_files_and_folders_are_no_data(class_root):
    (class_root / "train" / ".checkpoints").mkdir()
    for part in ("train", "test"):
        (class_root / part / "cat" / "._0.png").write_bytes(b"what macOS puts into archives")
    data = folders(class_root)
    assert data.class_names == ("cat", "dog")
    assert data.test.names == ["cat/0", "cat/1", "dog/0", "dog/1"] and len(data.train) == 9


def test_class_folders_of_different_sizes_need_a_resize(class_root):
    Image.new("RGB", (9, 5)).save(class_root / "test" / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"resize or crop_size to be set"):
        len(folders(class_root).train)
    data = folders(class_root, resize=8)
    assert data.uniform and data.test[4][0].shape == (3, 8, 8)
    assert data.test.image(4).shape == (5, 9, 3)


def test_class_folder_faults_are_named(class_root, tmp_path):
    with pytest.raises(ValueError, match=r"no such folder; data/README.md"):
        folders(tmp_path / "nowhere")
    (class_root / "test" / "cow").mkdir()
    with pytest.raises(ValueError, match=r"but got 'cow'"):
        folders(class_root)
    (class_root / "train" / "cow").mkdir()
    with pytest.raises(ValueError, match=r"Expected images .* in .*cow, but got none"):
        folders(class_root)


@pytest.mark.parametrize("kind", ["voc", "class"])
def test_a_folder_of_other_test_images_needs_no_training_images(kind, request, tmp_path):
    root = request.getfixturevalue(f"{kind}_root")
    names = {"voc": "voc2012", "class": "folders"}
    config = DataConfig(names[kind], root=str(root), limit=3)
    data = build_data(config, seed=0)
    other = tmp_path / "other"
    shutil.copytree(root, other, ignore=shutil.ignore_patterns("other"))
    if kind == "voc":
        lists = other / "VOCdevkit" / "VOC2012" / "ImageSets" / "Segmentation"
        (lists / "train.txt").unlink()
        reason = "the list train.txt"
    else:
        shutil.rmtree(other / "train")
        reason = "Expected class folders in .*train, but there is no such folder"
    found = build_shifted(data, config, Shift("data", str(other))).test
    assert found.names == data.test.names and found.part.images != data.test.part.images
    assert all(torch.equal(a, b) for a, b in zip(found[1], data.test[1], strict=True))
    absent = replace(config, root=str(other))
    with pytest.raises(ValueError, match=reason):
        len(build_data(absent).train)
    assert re.search(reason, missing(absent)) and missing(config) is None


def test_limit_is_spread_over_the_classes(class_root):
    data = folders(class_root, limit=2)
    assert [len(data.train), len(data.holdout), len(data.test)] == [2, 1, 2]
    assert data.test.names == ["cat/0", "dog/1"]


def test_hold_out_is_disjoint_and_depends_on_the_split_seed_alone(class_root):
    one, two = (folders(class_root, holdout=0.4), folders(class_root, holdout=0.4, crop_size=4))
    assert one.holdout.names == two.holdout.names and len(one.holdout) == 4
    assert sorted(one.train.names + one.holdout.names) == [
        f"{c}/{i}" for c in ("cat", "dog") for i in range(5)
    ]
    others = {tuple(folders(class_root, holdout=0.4, split_seed=s).holdout.names) for s in range(5)}
    assert len(others) > 1


def test_bad_options_are_refused():
    for options, word in (
        ({"name": "vocc"}, ", ".join(DATASETS)),
        ({"holdout": 0.0}, "holdout"),
        ({"holdout": 1.0}, "holdout"),
        ({"limit": 0}, "limit"),
        ({"split_seed": -1}, "seeds"),
        ({"std": (0.5, 0.0, 0.5)}, "std"),
        ({"num_classes": 5}, "num_classes=11"),
        ({"train_split": "trainaug"}, "voc2012"),
        ({"rotation": 5.0}, "classification"),
        ({"max_words": 5}, "newsgroups"),
    ):
        with pytest.raises(ValueError, match=word):
            build_data(DataConfig(**options))


@pytest.mark.parametrize(("kind", "name"), [("mask", "holdout"), ("class", "val")])
def test_a_folder_of_its_own_is_the_hold_out(kind, name, request):
    root, read = request.getfixturevalue(f"{kind}_root"), {"mask": masks, "class": folders}[kind]
    before = read(root)
    shutil.copytree(root / "test", root / name)
    data = read(root)
    assert data.holdout.names == data.test.names
    assert len(data.train) == len(before.train) + len(before.holdout)


def test_a_fingerprint_is_of_names_sizes_and_times(mask_root):
    first = masks(mask_root).test
    assert first.fingerprint() == masks(mask_root).test.fingerprint()
    assert first.fingerprint() != masks(mask_root, limit=1).test.fingerprint()
    assert first.fingerprint() != masks(mask_root, mean=(0.4, 0.5, 0.5)).test.fingerprint()
    assert first.fingerprint() != masks(mask_root).holdout.fingerprint()
    mask, before = mask_root / "test" / "masks" / "1.png", first.fingerprint()
    os.utime(mask, ns=(0, mask.stat().st_mtime_ns + 1000))
    assert first.fingerprint() != before
    for name in ("scenes", "digits"):
        some, same, other = (build_data(DataConfig(name, limit=n)).test for n in (3, 3, 4))
        assert some.fingerprint() == same.fingerprint() != other.fingerprint()
        fog = replace(some, part=shifted_part(some.part, Shift("fog", 1)))
        assert fog.fingerprint() != some.fingerprint()


def test_real_voc(shared_data):
    data = build_data(DataConfig("voc2012", root=str(shared_data / "voc2012_full_subset")), seed=0)
    assert [len(data.train), len(data.holdout), len(data.test)] == [54, 6, 60]
    image, label = data.train[(0, 0)]
    assert image.shape == (3, 480, 480) and label.shape == (480, 480)
    image, label = data.test[0]
    assert image.shape[1:] == label.shape and 255 in label


def test_real_class_folders(shared_data):
    data = build_data(DataConfig("folders", root=str(shared_data / "cifar10_small")), seed=0)
    assert [len(data.train), len(data.holdout), len(data.test)] == [4500, 500, 2000]
    assert data.num_classes == 10 and data.test[0][0].shape == (3, 32, 32) and data.uniform
