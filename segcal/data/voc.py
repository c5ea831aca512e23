"""PASCAL VOC 2012 segmentation: 21 classes, border pixels 255."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from segcal.data.image_files import FilePart, read_lines
from segcal.data.options import DataConfig
from segcal.data.samples import Part, RawDataset, or_absent
from segcal.data.transforms import Augmentation
from segcal.files import one_line

CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip
_AUG_LISTS = ("train_aug.txt", "trainaug.txt")  # both names are in use


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
    """VOC 2012 in its official layout, tested on val.

    `train_split` and `holdout_split` name the lists of the other images; without `holdout_split`
    the hold-out is a share of the training images.
    """
    if config.ignore_index != 255:
        raise ValueError(f"Expected ignore_index=255 for VOC, but got {config.ignore_index}")
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
        class_names=CLASS_NAMES,
        # SegmenTron's recipe; its Xception was pretrained with this normalisation.
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        augmentation=Augmentation(base_size=520, scale=(0.5, 2.0), crop_size=480, flip=0.5),
        palette=palette(len(CLASS_NAMES)),
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
    return _part([Path(p) for p in found.images], [Path(p) for p in found.masks])


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
    return _part(
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


def _part(images: list[Path], masks: list[Path]) -> FilePart:
    for path in (*images, *masks):
        if not path.is_file():
            raise ValueError(f"Expected a file at {path}, as the list of images says, but got none")
    return FilePart(images, masks, num_classes=len(CLASS_NAMES), ignore_index=255)
