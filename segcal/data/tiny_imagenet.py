"""Tiny-ImageNet: 200 classes of 64x64 images."""

from __future__ import annotations

from pathlib import Path

from segcal.data.image_files import FilePart, find_images
from segcal.data.options import DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, RawDataset
from segcal.data.transforms import Augmentation


def tiny_imagenet(config: DataConfig) -> RawDataset:
    """Tiny-ImageNet in its official layout; tested on val, because test has no labels.

    Classes are in the order of their WordNet numbers and have their first name in words.txt, if
    that is there. Training images are augmented by padding of 4, random crop and flip.
    """
    folder = _folder(config)
    numbers = sorted(_lines(folder / "wnids.txt"))
    return RawDataset(
        train=_train(folder, numbers),
        test=_val(folder, numbers),
        class_names=_names(folder, numbers),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation=Augmentation(pad=4, crop_size=64, flip=0.5),
    )


def _folder(config: DataConfig) -> Path:
    folder = Path(config.root) / "tiny-imagenet-200"
    for name in ("wnids.txt", "train", "val/images", "val/val_annotations.txt"):
        if not (folder / name).exists():
            raise ValueError(
                f"Expected Tiny-ImageNet (wnids.txt, train, val) in {folder}, but it has no "
                f"{name}; data/README.md says how to get it"
            )
    return folder


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _names(folder: Path, numbers: list[str]) -> tuple[str, ...]:
    """The first name of each class; its number where there is no list of names."""
    listed = folder / "words.txt"
    pairs = [line.partition("\t") for line in _lines(listed)] if listed.is_file() else []
    names = {number: words.partition(",")[0].strip() for number, _, words in pairs}
    return tuple(names.get(number, number) for number in numbers)


def _train(folder: Path, numbers: list[str]) -> FilePart:
    found = [find_images(folder / "train" / number / "images") for number in numbers]
    images = [path for paths in found for path in paths]
    classes = [label for label, paths in enumerate(found) for _ in paths]
    return FilePart(images, classes, num_classes=len(numbers), ignore_index=-1)


def _val(folder: Path, numbers: list[str]) -> FilePart:
    label_of = {number: label for label, number in enumerate(numbers)}
    listed = folder / "val" / "val_annotations.txt"
    images: list[Path] = []
    classes: list[int] = []
    for line in _lines(listed):
        name, _, rest = line.partition("\t")
        number = rest.partition("\t")[0]
        if number not in label_of:
            raise ValueError(f"Expected a class of wnids.txt for {name} in {listed}, got {number}")
        images.append(folder / "val" / "images" / name)
        classes.append(label_of[number])
    return FilePart(images, classes, num_classes=len(numbers), ignore_index=-1)
