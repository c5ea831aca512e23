"""Public segmentation data sets in their official layouts, and maps of labels."""

import numpy as np
import pytest
from PIL import Image

from segcal import data
from segcal.cli import main
from segcal.data.benchmarks import CAMVID_CLASSES, CITYSCAPES_CLASSES, mapped, read_label_map
from segcal.data.samples import ArrayPart
from segcal.sources import open_source


def picture(path, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), 90, np.uint8)).save(path)


def mask(path, values, size=(6, 4)):
    """A mask whose first pixels have the values, and all others the last of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = np.full(size[0] * size[1], values[-1], np.uint8)
    flat[: len(values)] = values
    Image.fromarray(flat.reshape(size[1], size[0])).save(path)


def first_labels(samples, count):
    return samples[0][1].flatten()[:count].tolist()


def opened(name, root, **options):
    return data.build(data.DataConfig(name=name, root=str(root), augment=False, **options))


def test_camvid(tmp_path):
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            picture(tmp_path / part / f"{name}.png")
            mask(tmp_path / f"{part}annot" / f"{name}.png", [0, 10, 11])
    splits = opened("camvid", tmp_path)
    assert splits.class_names == CAMVID_CLASSES and splits.uniform
    assert first_labels(splits.test, 3) == [0, 10, 255]
    assert [len(s) for s in (splits.train, splits.holdout, splits.test)] == [2, 2, 2]


def cityscapes(root, size=(6, 4)):
    for part in ("train", "val"):
        for number in range(2):
            image = root / "leftImg8bit" / part / "ulm" / f"ulm_{number:06}_000019_leftImg8bit.png"
            labels = root / "gtFine" / part / "ulm" / f"ulm_{number:06}_000019_gtFine_labelIds.png"
            picture(image, size)
            mask(labels, [7, 26, 33, 4], size)


def test_segcal_train_takes_it_by_name(tmp_path):
    cityscapes(tmp_path / "data", (24, 16))
    words = ["train", "--data.name", "cityscapes", "--data.root", str(tmp_path / "data")]
    words += ["--data.crop_size", "16", "--data.base_size", "16", "--data.holdout", "0.5"]
    words += ["--epochs", "1", "--batch_size", "1", "--workers", "0", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    run = open_source(tmp_path / "run")
    assert run.class_names == CITYSCAPES_CLASSES and len(run.names) == 2


def test_cityscapes_ids_become_train_ids(tmp_path):
    cityscapes(tmp_path)
    splits = opened("cityscapes", tmp_path)
    wanted = [splits.class_names.index(name) for name in ("road", "car", "bicycle")]
    assert first_labels(splits.test, 4) == [*wanted, 255]
    assert splits.test.names == ["ulm_000000_000019_leftImg8bit", "ulm_000001_000019_leftImg8bit"]


def test_acdc_has_the_classes_of_cityscapes(tmp_path):
    for weather in ("fog", "night"):
        for part in ("train", "val"):
            place = f"{weather}/{part}/GP01"
            picture(tmp_path / "rgb_anon" / place / f"{weather}_1_rgb_anon.png")
            mask(tmp_path / "gt" / place / f"{weather}_1_gt_labelTrainIds.png", [0, 18, 255])
    splits = opened("acdc", tmp_path)
    assert splits.class_names == CITYSCAPES_CLASSES
    assert splits.test.names == ["fog_1_rgb_anon", "night_1_rgb_anon"]
    assert first_labels(splits.test, 3) == [0, 18, 255]


def test_ade20k_leaves_zero_out(tmp_path):
    for part in ("training", "validation"):
        for name in ("ADE_1", "ADE_2"):
            picture(tmp_path / "images" / part / f"{name}.jpg")
            mask(tmp_path / "annotations" / part / f"{name}.png", [0, 1, 150])
    lines = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    lines += [f"{c + 1}\t0.1\t1\t1\t0\tname{c}, other" for c in range(150)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(lines))
    splits = opened("ade20k", tmp_path)
    assert splits.num_classes == 150 and splits.class_names[149] == "name149"
    assert first_labels(splits.test, 3) == [255, 0, 149]


def test_coco_stuff_skips_ids_without_pixels(tmp_path):
    for part in ("train2017", "val2017"):
        for name in ("000001", "000002"):
            picture(tmp_path / "images" / part / f"{name}.jpg")
            mask(tmp_path / "annotations" / part / f"{name}.png", [0, 10, 12, 181, 255])
    names = ["0: unlabeled", *(f"{number + 1}: name{number}" for number in range(182))]
    (tmp_path / "labels.txt").write_text("\n".join(names))
    splits = opened("coco_stuff", tmp_path)
    assert splits.num_classes == 171 and splits.class_names[11] == "name12"
    assert first_labels(splits.test, 5) == [0, 10, 11, 170, 255]


def test_oxford_pet_ignores_the_border(tmp_path):
    for part in ("trainval", "test"):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"{part}.txt").write_text(f"{part}_1 1 1 1\n{part}_2 1 1 1\n")
        for number in (1, 2):
            picture(tmp_path / "images" / f"{part}_{number}.jpg")
            mask(tmp_path / "annotations" / "trimaps" / f"{part}_{number}.png", [1, 2, 3])
    splits = opened("oxford_pet", tmp_path)
    assert splits.class_names == ("background", "pet")
    assert first_labels(splits.test, 3) == [1, 0, 255]


def test_a_missing_data_set_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        opened("cityscapes", tmp_path)


def test_a_label_map_joins_classes(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("car: vehicle\n2: vehicle\nsky: null\nroad: 0\n")
    table = read_label_map(path, ("road", "car", "bus", "sky", "tree"), ("road", "vehicle"))
    assert table[:6] == (0, 1, 1, 255, 255, 255)
    part = mapped(
        ArrayPart(np.zeros((1, 2, 3, 3), np.uint8), np.arange(6).reshape(1, 2, 3), ["a"]), table
    )
    assert part.label(0).tolist() == [[0, 1, 1], [255, 255, 255]]


@pytest.mark.parametrize("text", ["plane: vehicle", "car: plane", "9: 0", "- a", ""])
def test_a_label_map_that_does_not_fit(tmp_path, text):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"map\.yaml"):
        read_label_map(path, ("road", "car"), ("road", "vehicle"))
