"""Data sets of files: your own masks or class folders, and PASCAL VOC 2012."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from segcal.data.options import DataConfig
from segcal.data.samples import (
    AbsentPart,
    FilePart,
    Part,
    RawDataset,
    class_files,
    find_images,
    one_size,
    or_absent,
    read_lines,
)
from segcal.data.transforms import Augmentation
from segcal.files import check_num_classes, one_line, visible

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip
_HOLDOUTS = ("holdout", "val")  # folders of a user's own hold-out
_AUG_LISTS = ("train_aug.txt", "trainaug.txt")  # both names are in use


def masks(config: DataConfig) -> RawDataset:
    """Segmentation from root/{train,test}/{images,masks}, a mask named like its image.

    The hold-out is root/holdout or root/val, if there is one, else a share of the training images.

    Masks are PNG files of one channel that hold class indices. root/classes.txt names the
    classes, one per line; without it num_classes says how many there are.

    With multilabel, masks are in root/{train,test}/masks/CLASS, one folder per class, and hold 0
    or 1. Without classes.txt, the classes are the names of these folders.
    """
    root = _root(config, "train/images, train/masks, test/images and test/masks")
    class_names = _class_names(config, root)
    ignore_index = config.ignored(2 if config.multilabel else len(class_names))
    if config.ignore_index is not None and not 0 <= ignore_index < 2**16:
        raise ValueError(f"data.ignore_index: {ignore_index} is no value that a mask can hold")

    def part(name: str) -> FilePart:
        images, folder = find_images(root / name / "images"), root / name / "masks"
        labels: list[Path] | list[tuple[Path, ...]]
        if config.multilabel:
            of_class = [folder / class_name for class_name in class_names]
            labels = [tuple(_mask_of(image, each) for each in of_class) for image in images]
        else:
            labels = [_mask_of(image, folder) for image in images]
        return FilePart(images, labels, num_classes=len(class_names), ignore_index=ignore_index)

    train, test = or_absent(lambda: part("train")), part("test")
    holdout = [part(name) for name in _HOLDOUTS if (root / name).is_dir()]
    return RawDataset(
        train=train,
        holdout=holdout[0] if holdout else None,
        test=test,
        class_names=class_names,
        palette=palette(len(class_names)),
        uniform=_uniform(config, train, test, *holdout),
    )


def folders(config: DataConfig) -> RawDataset:
    """Classification from root/{train,test}/CLASS/*.png; the folders' names are the classes.

    The hold-out is root/holdout or root/val, if there is one, else a share of the training images.
    """
    root = _root(config, "train/CLASS and test/CLASS folders of images")
    # Without anything to train on, the test images have all the classes.
    class_names = _subfolders(root / ("train" if (root / "train").is_dir() else "test"))
    held = [root / name for name in _HOLDOUTS if (root / name).is_dir()][:1]
    for folder in (*held, root / "test"):
        unknown = sorted(set(_subfolders(folder)) - set(class_names))
        if unknown:
            raise ValueError(
                f"Expected the classes of {root / 'train'} in {folder}, but got {unknown[0]!r}"
            )
    train = or_absent(lambda: class_part(root / "train", _subfolders(root / "train")))
    holdout = [class_part(folder, class_names) for folder in held]
    test = class_part(root / "test", class_names)
    return RawDataset(
        train=train,
        holdout=holdout[0] if holdout else None,
        test=test,
        class_names=class_names,
        uniform=_uniform(config, train, test, *holdout),
    )


def _root(config: DataConfig, expected: str) -> Path:
    root = Path(config.root)
    if not root.is_dir():
        raise ValueError(
            f"Expected {expected} in {root}, but there is no such folder; "
            f"data/README.md shows the layout"
        )
    return root


def _class_names(config: DataConfig, root: Path) -> tuple[str, ...]:
    listed = root / "classes.txt"
    if not listed.is_file():
        if config.multilabel:
            first = "train" if (root / "train").is_dir() else "test"
            return _subfolders(root / first / "masks")
        if config.num_classes is None:
            raise ValueError(
                f"Expected num_classes, or one name per line in {listed}, but got none"
            )
        check_num_classes(config.num_classes)
        return tuple(f"class {i}" for i in range(config.num_classes))
    names = tuple(line.strip() for line in read_lines(listed))
    if config.num_classes not in (None, len(names)):
        raise ValueError(
            f"Expected num_classes={config.num_classes} names in {listed}, but got {len(names)}"
        )
    least = 1 if config.multilabel else 2
    if len(names) < least:
        raise ValueError(f"Expected at least {least} class names in {listed}, but got {len(names)}")
    return names


def _mask_of(image: Path, folder: Path) -> Path:
    mask = folder / f"{image.stem}.png"
    if not mask.is_file():
        raise ValueError(f"Expected a mask for {image} at {mask}, but there is none")
    return mask


def _subfolders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise ValueError(f"Expected class folders in {folder}, but there is no such folder")
    names = tuple(path.name for path in visible(folder) if path.is_dir())
    if not names:
        raise ValueError(f"Expected class folders in {folder}, but got none")
    return names


def class_part(folder: Path, class_names: tuple[str, ...]) -> FilePart:
    """The images of folder/CLASS for each of the classes, in their order."""
    # A class may be absent from the test images, but a folder that is there holds some.
    places = [(folder / name, index) for index, name in enumerate(class_names)]
    return class_files([place for place in places if place[0].is_dir()], len(class_names))


def _uniform(config: DataConfig, *parts: FilePart | AbsentPart) -> bool:
    """Whether all images have one size; if not, an option that gives batches one must be set."""
    images = [path for part in parts if isinstance(part, FilePart) for path in part.images]
    uniform = one_size(images, skip_bad=config.skip_bad)
    if not uniform and config.resize is None and (config.crop_size is None or not config.augment):
        raise ValueError(
            f"Expected images of one size in {config.root}, or resize or crop_size to be set, "
            f"but the images differ in size"
        )
    return uniform


def palette(num_classes: int) -> np.ndarray:
    """(num_classes, 3) uint8: the colours that VOC draws its masks in, for any number of classes.

    Bits 0, 1, 2 of the class index are the highest bits of red, green and blue, bits 3, 4, 5 the
    next ones, and so on.
    """
    colours = np.zeros((num_classes, 3), dtype=np.uint8)
    index = np.arange(num_classes)
    for bit in range(8):
        for channel in range(3):
            value = (index >> (3 * bit + channel)) & 1
            colours[:, channel] |= (value << (7 - bit)).astype(np.uint8)
    return colours


def voc2012(config: DataConfig) -> RawDataset:
    """PASCAL VOC 2012 in its official layout, 21 classes and borders of 255, tested on val.

    `train_split` and `holdout_split` name the lists of the other images; without `holdout_split`
    the hold-out is a share of the training images.
    """
    if config.ignore_index not in (None, 255):
        raise ValueError(f"data.ignore_index: expected 255 for VOC, but got {config.ignore_index}")
    folder = Path(config.root) / "VOCdevkit" / "VOC2012"
    test = _official(config, folder, "val")
    others: dict[str, Part] = {"test set": test}

    def trained() -> FilePart:
        if config.train_split == "train":
            return _official(config, folder, "train")
        return _listed(folder, config.train_split, others)

    others["training set"] = train = or_absent(trained)
    holdout: Part | None = None
    if (name := config.holdout_split) is not None:
        holdout = or_absent(lambda: _listed(folder, name, others))
    return RawDataset(
        train=train,
        holdout=holdout,
        test=test,
        class_names=VOC_CLASSES,
        # SegmenTron's recipe; its Xception was pretrained with this normalisation.
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        augmentation=Augmentation(base_size=520, scale=(0.5, 2.0), crop_size=480, flip=0.5),
        palette=palette(len(VOC_CLASSES)),
        uniform=False,
    )


def _official(config: DataConfig, folder: Path, split: str) -> FilePart:
    from torchvision.datasets import VOCSegmentation

    try:
        # torchvision would unpack the 2 GB archive again over a complete folder.
        download = config.download and not folder.is_dir()
        found = VOCSegmentation(config.root, year="2012", image_set=split, download=download)
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"Expected VOC 2012 (JPEGImages, SegmentationClass, ImageSets/Segmentation/{split}.txt)"
            f" in {folder}, but {one_line(error)}; data/README.md says how to get it"
        ) from error
    return _voc_part([Path(p) for p in found.images], [Path(p) for p in found.masks])


def _listed(folder: Path, name: str, others: Mapping[str, Part]) -> FilePart:
    """The images of a list in ImageSets/Segmentation, none of which is in the `others`."""
    path = _find_list(folder / "ImageSets" / "Segmentation", name)
    # A line is an id, or "/JPEGImages/ID.jpg /SegmentationClassAug/ID.png".
    ids = [Path(line.split()[0]).stem for line in read_lines(path)]
    if not ids:
        raise ValueError(f"Expected names of images in {path}, one per line, but got none")
    for what, part in others.items():
        seen = sorted(set(ids) & set(part.names))
        if seen:
            raise ValueError(
                f"Expected no image of the {what} in {path}, but got {len(seen)}, {seen[0]} first"
            )
    masks = "SegmentationClassAug" if name == "trainaug" else "SegmentationClass"
    return _voc_part(
        [folder / "JPEGImages" / f"{name}.jpg" for name in ids],
        [folder / masks / f"{name}.png" for name in ids],
    )


def _find_list(folder: Path, name: str) -> Path:
    files = _AUG_LISTS if name == "trainaug" else (f"{name}.txt",)
    found = {path.name: path for path in folder.glob("*.txt")}
    for file in files:
        if file in found:
            return found[file]
    raise ValueError(
        f"Expected the list {files[0]} in {folder}, but got {', '.join(sorted(found)) or 'none'}; "
        f"data/README.md says what goes there"
    )


def _voc_part(images: list[Path], masks: list[Path]) -> FilePart:
    for path in (*images, *masks):
        if not path.is_file():
            raise ValueError(f"Expected a file at {path}, as the list of images says, but got none")
    return FilePart(images, masks, num_classes=len(VOC_CLASSES), ignore_index=255)
