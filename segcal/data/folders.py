"""Data sets of files: your own masks or class folders, and PASCAL VOC 2012."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from segcal.data.options import DataConfig
from segcal.data.samples import FilePart, Part, RawDataset, or_absent
from segcal.data.transforms import Augmentation
from segcal.files import BadFile, check_num_classes, image_size, one_line, reading, visible
from segcal.pixels import resolve_ignore_index

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
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
    classes = 2 if config.multilabel else len(class_names)
    ignore_index = resolve_ignore_index(config.ignore_index, classes)
    if config.ignore_index is not None and not 0 <= ignore_index < 2**16:
        raise ValueError(f"data.ignore_index: {ignore_index} is no value that a mask can hold")

    def part(name: str) -> FilePart:
        images, folder = find_images(root / name / "images"), root / name / "masks"
        labels: list[Path] | list[tuple[Path, ...]]
        if config.multilabel:
            of_class = [folder / class_name for class_name in class_names]
            labels = [tuple(each / f"{image.stem}.png" for each in of_class) for image in images]
        else:
            labels = [folder / f"{image.stem}.png" for image in images]
        for image, found in zip(images, labels, strict=True):
            for mask in found if isinstance(found, tuple) else (found,):
                if not mask.is_file():
                    raise ValueError(f"Expected a mask for {image} at {mask}, but there is none")
        return FilePart(images, labels, num_classes=len(class_names), ignore_index=ignore_index)

    train, test = or_absent(lambda: part("train")), part("test")
    holdout = next((part(name) for name in _HOLDOUTS if (root / name).is_dir()), None)
    return RawDataset(
        train=train,
        holdout=holdout,
        test=test,
        class_names=class_names,
        palette=palette(len(class_names)),
        uniform=_uniform(config, train, test, holdout),
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
    holdout = class_part(held[0], class_names) if held else None
    test = class_part(root / "test", class_names)
    uniform = _uniform(config, train, test, holdout)
    return RawDataset(train, test, class_names, holdout=holdout, uniform=uniform)


def voc2012(config: DataConfig) -> RawDataset:
    """PASCAL VOC 2012 in its official layout, 21 classes and borders of 255, tested on val.

    `train_split` and `holdout_split` name the lists of the other images; without `holdout_split`
    the hold-out is a share of the training images.
    """
    if config.ignore_index not in (None, 255):
        raise ValueError(f"data.ignore_index: expected 255 for VOC, but got {config.ignore_index}")
    folder = Path(config.root) / "VOCdevkit" / "VOC2012"
    if config.download and not folder.is_dir():
        from torchvision.datasets import VOCSegmentation

        try:
            VOCSegmentation(config.root, year="2012", image_set="val", download=True)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"VOC 2012 cannot be fetched into {config.root}: {one_line(error)}; "
                "data/README.md says how to get it"
            ) from error
    held = config.holdout_split
    test = _voc_part(folder, "val")
    train = or_absent(lambda: _voc_part(folder, config.train_split, test=test))
    holdout = None
    if held is not None:
        holdout = or_absent(lambda: _voc_part(folder, held, test=test, training=train))
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


def _voc_part(folder: Path, name: str, **others: Part) -> FilePart:
    """The images in the list `name`, none of which may be in one of the other parts."""
    lists = folder / "ImageSets" / "Segmentation"
    wanted = _AUG_LISTS if name == "trainaug" else (f"{name}.txt",)
    known = {file.name: file for file in lists.glob("*.txt")}
    path = next((known[file] for file in wanted if file in known), None)
    if path is None:
        raise ValueError(
            f"Expected the list {wanted[0]} of VOC 2012 in {lists}, but got "
            f"{', '.join(sorted(known)) or 'none'}; data/README.md says what goes there"
        )
    # A line is an id, or "/JPEGImages/ID.jpg /SegmentationClassAug/ID.png".
    ids = [Path(line.split()[0]).stem for line in read_lines(path)]
    if not ids:
        raise ValueError(f"Expected names of images in {path}, one per line, but got none")
    for what, other in others.items():
        if seen := sorted(set(ids) & set(other.names)):
            raise ValueError(
                f"Expected no image of the {what} set in {path}, but got {len(seen)}, "
                f"{seen[0]} first"
            )
    masks = folder / ("SegmentationClassAug" if name == "trainaug" else "SegmentationClass")
    images = [folder / "JPEGImages" / f"{i}.jpg" for i in ids]
    labels = [masks / f"{i}.png" for i in ids]
    for file in (*images, *labels):
        if not file.is_file():
            raise ValueError(f"Expected a file at {file}, as {path.name} says, but got none")
    return FilePart(images, labels, num_classes=len(VOC_CLASSES), ignore_index=255)


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


def class_part(folder: Path, class_names: tuple[str, ...]) -> FilePart:
    """The images of folder/CLASS for each of the classes, in their order."""
    # A class may be absent from the test images, but a folder that is there holds some.
    places = [(folder / name, index) for index, name in enumerate(class_names)]
    return class_files([place for place in places if place[0].is_dir()], len(class_names))


def class_files(places: Iterable[tuple[Path, int]], num_classes: int) -> FilePart:
    """The images of each folder, all of the class that is named with it, in order."""
    found = [(path, index) for folder, index in places for path in find_images(folder)]
    images, classes = [path for path, _ in found], [index for _, index in found]
    return FilePart(images, classes, num_classes=num_classes)


def find_images(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name; at least one."""
    if not folder.is_dir():
        raise ValueError(f"Expected a folder of images at {folder}, but there is none")
    found = [path for path in visible(folder) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise ValueError(f"Expected images ({' '.join(IMAGE_SUFFIXES)}) in {folder}, but got none")
    return found


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty; errors name the file."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]


def _root(config: DataConfig, expected: str) -> Path:
    root = Path(config.root)
    if not root.is_dir():
        raise ValueError(
            f"Expected {expected} in {root}, but there is no such folder; "
            "data/README.md shows the layout"
        )
    return root


def _class_names(config: DataConfig, root: Path) -> tuple[str, ...]:
    listed = root / "classes.txt"
    if listed.is_file():
        names = tuple(line.strip() for line in read_lines(listed))
        least = 1 if config.multilabel else 2
        if len(names) < least:
            raise ValueError(f"{listed}: expected {least} class names or more, got {len(names)}")
        if config.num_classes not in (None, len(names)):
            raise ValueError(
                f"Expected num_classes={config.num_classes} names in {listed}, but got {len(names)}"
            )
        return names
    if config.multilabel:
        return _subfolders(root / ("train" if (root / "train").is_dir() else "test") / "masks")
    if config.num_classes is None:
        raise ValueError(f"Expected num_classes, or one name per line in {listed}, but got none")
    check_num_classes(config.num_classes)
    return tuple(f"class {i}" for i in range(config.num_classes))


def _subfolders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise ValueError(f"Expected class folders in {folder}, but there is no such folder")
    names = tuple(path.name for path in visible(folder) if path.is_dir())
    if not names:
        raise ValueError(f"Expected class folders in {folder}, but got none")
    return names


def _uniform(config: DataConfig, *parts: Part | None) -> bool:
    """Whether all images have one size."""
    sizes = set()
    for path in (path for part in parts if isinstance(part, FilePart) for path in part.images):
        try:
            sizes.add(image_size(path))  # of the header
        except BadFile:
            if not config.skip_bad:
                raise
        if len(sizes) > 1:
            break
    return len(sizes) < 2
