"""The place for PASCAL VOC 2012 segmentation: 21 classes, border pixels 255."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from segcal.data.image_files import FilePart
from segcal.data.options import DataConfig
from segcal.data.raw import RawDataset
from segcal.data.transforms import Augmentation
from segcal.files import one_line

CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip
TRAIN_SPLITS = ("train", "trainaug")
_AUG_LISTS = ("train_aug.txt", "trainaug.txt")  # both names are in use


def palette(num_classes: int) -> np.ndarray:
    """(num_classes, 3) uint8: the colours VOC draws its masks in, which go on for any number.

    The bits of the class index are dealt in turn to red, green and blue, highest bit first.
    """
    colours = np.zeros((num_classes, 3), dtype=np.uint8)
    index = np.arange(num_classes)
    for bit in range(8):
        for channel in range(3):
            value = (index >> (3 * bit + channel)) & 1
            colours[:, channel] |= (value << (7 - bit)).astype(np.uint8)
    return colours


def voc2012(config: DataConfig) -> RawDataset:
    """VOC 2012 in its official layout; trained on train or trainaug, tested on val."""
    if config.train_split not in TRAIN_SPLITS:
        raise ValueError(
            f"Expected train_split to be one of {', '.join(TRAIN_SPLITS)}, "
            f"but got {config.train_split!r}"
        )
    if config.ignore_index != 255:
        raise ValueError(f"Expected ignore_index=255 for VOC, but got {config.ignore_index}")
    train, test = (_official(config, split) for split in ("train", "val"))
    if config.train_split == "trainaug":
        train = _trainaug(_folder(config), test)
    return RawDataset(
        train=train,
        test=test,
        class_names=CLASS_NAMES,
        # SegmenTron's recipe; its Xception was pretrained with this normalisation.
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        augmentation=Augmentation(base_size=520, scale=(0.5, 2.0), crop_size=480, flip=0.5),
        palette=palette(len(CLASS_NAMES)),
        uniform=False,
    )


def _official(config: DataConfig, split: str) -> FilePart:
    from torchvision.datasets import VOCSegmentation

    folder = _folder(config)
    try:
        # torchvision would unpack the 2 GB archive again over a complete folder.
        download = config.download and not folder.is_dir()
        found = VOCSegmentation(config.root, year="2012", image_set=split, download=download)
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"Expected VOC 2012 (JPEGImages, SegmentationClass, ImageSets/Segmentation/{split}.txt)"
            f" in {folder}, but {one_line(error)}; data/README.md says how to get it"
        ) from error
    return _part([Path(p) for p in found.images], [Path(p) for p in found.masks])


def _trainaug(folder: Path, test: FilePart) -> FilePart:
    lists = [folder / "ImageSets" / "Segmentation" / name for name in _AUG_LISTS]
    listed = next((path for path in lists if path.is_file()), None)
    if listed is None:
        raise ValueError(
            f"Expected the list of the augmented training set at {lists[0]}, "
            f"but there is none; data/README.md says how to get it"
        )
    # Lines are ids, or "/JPEGImages/ID.jpg /SegmentationClassAug/ID.png".
    ids = [Path(line.split()[0]).stem for line in listed.read_text().splitlines() if line.strip()]
    seen = sorted(set(ids) & set(test.names))
    if seen:
        raise ValueError(
            f"Expected no image of the test set (val) in {listed}, "
            f"but got {len(seen)}, {seen[0]} first"
        )
    images = [folder / "JPEGImages" / f"{name}.jpg" for name in ids]
    masks = [folder / "SegmentationClassAug" / f"{name}.png" for name in ids]
    return _part(images, masks)


def _folder(config: DataConfig) -> Path:
    return Path(config.root) / "VOCdevkit" / "VOC2012"


def _part(images: list[Path], masks: list[Path]) -> FilePart:
    for path in (*images, *masks):
        if not path.is_file():
            raise ValueError(f"Expected a file at {path}, as the list of images says, but got none")
    return FilePart(images, masks, num_classes=len(CLASS_NAMES), ignore_index=255)
