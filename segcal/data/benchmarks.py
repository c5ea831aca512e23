"""Public data sets for segmentation, each in its official layout, and maps of labels.

All give labels 0 .. C-1, and 255 for pixels that are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segcal.data.folders import find_images, palette, read_lines
from segcal.data.options import DataConfig
from segcal.data.samples import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ChangedPart,
    FilePart,
    Label,
    Part,
    RawDataset,
    or_absent,
)
from segcal.data.transforms import Augmentation
from segcal.files import BadFile, read_yaml

IGNORED = 255
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian",
    "bicyclist",
)  # fmt: skip
CITYSCAPES_CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign",
    "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus", "train",
    "motorcycle", "bicycle",
)  # fmt: skip
# The ids in *_labelIds.png of the 19 classes above; all other ids are not counted.
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_CITYSCAPES_COLOURS = (
    (128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153),
    (153, 153, 153), (250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152),
    (70, 130, 180), (220, 20, 60), (255, 0, 0), (0, 0, 142), (0, 0, 70), (0, 60, 100),
    (0, 80, 100), (0, 0, 230), (119, 11, 32),
)  # fmt: skip
# Ids of COCO that no pixel of COCO-Stuff has; the other 171 of 0 .. 181 are its classes.
_NOT_IN_COCO_STUFF = {11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90}
_STREET = Augmentation(base_size=512, scale=(0.5, 2.0), crop_size=512, flip=0.5)


def mapped(part: Part, table: Sequence[int]) -> Part:
    """A part whose masks get other labels: `table` has the new label of each old one."""
    array = np.asarray(table, dtype=np.uint8)
    return ChangedPart(part, array.tobytes(), label=partial(_look_up, array))


def _look_up(table: np.ndarray, label: Label, name: str) -> np.ndarray:
    mask = np.asarray(label)
    if mask.max(initial=0) >= len(table):
        raise BadFile(f"the mask of {name} has the unknown label {mask.max()}")
    return table[mask]


def _table(classes: Mapping[int, int]) -> tuple[int, ...]:
    """The class of each value of an 8-bit mask; those that are not in `classes` do not count."""
    return tuple(classes.get(value, IGNORED) for value in range(256))


def _part(images: Sequence[Path], mask_of: Callable[[Path], Path], values: Iterable[int]) -> Part:
    """Images with 8-bit masks, in which the classes have these values."""
    masks = [mask_of(image) for image in images]
    for mask in masks:
        if not mask.is_file():
            raise ValueError(f"there is no mask at {mask}; data/README.md shows the layout")
    files = FilePart(images, masks, num_classes=256, ignore_index=IGNORED)
    return mapped(files, _table({value: c for c, value in enumerate(values)}))


def _dataset(
    class_names: Sequence[str],
    part: Callable[[str], Part],
    *,
    train: str = "train",
    test: str,
    holdout: str | None = None,
    colours: Sequence[tuple[int, int, int]] | None = None,
    uniform: bool = False,
    augmentation: Augmentation = _STREET,
) -> RawDataset:
    """A data set whose parts, which have these names there, `part` reads."""
    return RawDataset(
        train=or_absent(lambda: part(train)),
        test=part(test),
        holdout=None if holdout is None else or_absent(lambda: part(holdout)),
        class_names=tuple(class_names),
        mean=IMAGENET_MEAN,  # as most networks for these data take them
        std=IMAGENET_STD,
        augmentation=augmentation,
        palette=palette(len(class_names)) if colours is None else np.array(colours, np.uint8),
        uniform=uniform,
    )


def camvid(config: DataConfig) -> RawDataset:
    """CamVid with 11 classes: root/{train,val,test} and root/{train,val,test}annot.

    This is the layout of SegNet's authors; label 11 is void. The hold-out is val.
    """

    def part(name: str) -> Part:
        masks = Path(config.root) / f"{name}annot"
        images = find_images(_folder(config, name))
        return _part(images, lambda image: masks / image.name, range(11))

    return _dataset(
        CAMVID_CLASSES,
        part,
        test="test",
        holdout="val",
        uniform=True,
        augmentation=Augmentation(base_size=360, scale=(0.5, 2.0), crop_size=352, flip=0.5),
    )


def cityscapes(config: DataConfig) -> RawDataset:
    """Cityscapes with 19 classes: root/leftImg8bit and root/gtFine (labelIds), tested on val."""

    def part(name: str) -> Part:
        masks = Path(config.root) / "gtFine" / name

        def mask_of(image: Path) -> Path:
            file = image.name.replace("_leftImg8bit", "_gtFine_labelIds")
            return masks / image.parent.name / file

        images = _images_below(_folder(config, "leftImg8bit", name), "*/*_leftImg8bit.png")
        return _part(images, mask_of, _CITYSCAPES_IDS)

    return _dataset(CITYSCAPES_CLASSES, part, test="val", colours=_CITYSCAPES_COLOURS, uniform=True)


def acdc(config: DataConfig) -> RawDataset:
    """ACDC, adverse conditions with the classes of Cityscapes: root/rgb_anon and root/gt.

    Fog, night, rain and snow together, tested on val.
    """

    def part(name: str) -> Part:
        root = _folder(config, "rgb_anon")

        def mask_of(image: Path) -> Path:
            file = image.name.replace("_rgb_anon.png", "_gt_labelTrainIds.png")
            return Path(config.root) / "gt" / image.parent.relative_to(root) / file

        images = _images_below(root, f"*/{name}/*/*_rgb_anon.png")
        return _part(images, mask_of, range(19))

    return _dataset(CITYSCAPES_CLASSES, part, test="val", colours=_CITYSCAPES_COLOURS, uniform=True)


def ade20k(config: DataConfig) -> RawDataset:
    """ADE20K, 150 classes: root/images and root/annotations, {training,validation}.

    Label 0 is "other" and is not counted; labels 1 .. 150 become 0 .. 149. The names of the
    classes are in root/objectInfo150.txt.
    """
    part = partial(_annotated, config, range(1, 151))
    listed = Path(config.root) / "objectInfo150.txt"
    names = [f"class {c}" for c in range(150)]
    if listed.is_file():  # a head line, then lines of columns whose last is the name
        names = [line.split("\t")[-1].split(",")[0].strip() for line in read_lines(listed)[1:]]
    return _dataset(names, part, train="training", test="validation")


def coco_stuff(config: DataConfig) -> RawDataset:
    """COCO-Stuff, 171 classes: root/{images,annotations}/{train2017,val2017}.

    The masks are the official "stuffthingmaps"; names of classes are in root/labels.txt.
    """
    kept = [number for number in range(182) if number not in _NOT_IN_COCO_STUFF]
    part = partial(_annotated, config, kept)
    listed = Path(config.root) / "labels.txt"
    names = [f"class {c}" for c in range(len(kept))]
    if listed.is_file():  # lines such as "1: person"; 0 is unlabeled
        known = dict(line.split(":", 1) for line in read_lines(listed))
        names = [known[str(number + 1)].strip() for number in kept]
    return _dataset(names, part, train="train2017", test="val2017")


def oxford_pet(config: DataConfig) -> RawDataset:
    """Oxford-IIIT Pet, background and pet: root/images and root/annotations/trimaps.

    The border, label 3 of a trimap, is not counted.
    """
    root = Path(config.root)
    root = root / "oxford-iiit-pet" if (root / "oxford-iiit-pet").is_dir() else root

    def part(name: str) -> Part:
        names = [line.split()[0] for line in read_lines(root / "annotations" / f"{name}.txt")]
        images = [root / "images" / f"{name}.jpg" for name in names]
        trimaps = root / "annotations" / "trimaps"
        return _part(images, lambda image: trimaps / f"{image.stem}.png", (2, 1))

    return _dataset(
        ("background", "pet"),
        part,
        train="trainval",
        test="test",
        augmentation=Augmentation(base_size=256, scale=(0.75, 1.5), crop_size=224, flip=0.5),
    )


def _annotated(config: DataConfig, values: Iterable[int], name: str) -> Part:
    """root/images/name, with masks of the same names in root/annotations/name."""
    masks = Path(config.root) / "annotations" / name
    images = find_images(_folder(config, "images", name))
    return _part(images, lambda image: masks / f"{image.stem}.png", values)


def _folder(config: DataConfig, *parts: str) -> Path:
    folder = Path(config.root, *parts)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; data/README.md shows the layout of {config.name}"
        )
    return folder


def _images_below(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(f"there are no images {folder / pattern}")
    return found


def read_label_map(path: Path, given: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """The table of `mapped` in a YAML file of `label of the data: class of the network`.

    Both sides are numbers or names of classes; several labels may become one class. A label that
    becomes null, or that the file leaves out, is not counted. `given` are the class names of the
    data set, `wanted` those of the network.
    """
    stated = read_yaml(path)
    if not isinstance(stated, dict) or not stated:
        raise ValueError(f"{path} must hold lines such as `car: vehicle` or `13: 2`")

    def number(value: object, names: Sequence[str], what: str) -> int:
        if isinstance(value, int) and 0 <= value < len(names):
            return value
        if isinstance(value, str) and value in names:
            return list(names).index(value)
        raise ValueError(
            f"{path}: {value!r} is no {what}: they are 0 to {len(names) - 1}, or "
            f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        )

    pairs = {
        number(label, given, "class of the data"): IGNORED
        if target is None
        else number(target, wanted, "class of the network")
        for label, target in stated.items()
    }
    return _table(pairs)
