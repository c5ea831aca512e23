"""Public classification sets: those torchvision reads, and those that are folders of images."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from segcal.data.folders import class_part
from segcal.data.options import DataConfig
from segcal.data.samples import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArrayPart,
    FilePart,
    RawDataset,
    class_files,
    read_lines,
)
from segcal.data.transforms import Augmentation
from segcal.files import one_line

_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_DIGITS = tuple(map(str, range(10)))
_PARTS = ("train", "t10k")  # of MNIST
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
OTHERS = "others"  # as a training domain: every domain but the one that is tested on
_XRAYS = ("NORMAL", "PNEUMONIA")


def cifar10(config: DataConfig) -> RawDataset:
    """CIFAR-10: 50000 + 10000 images of 32x32, augmented by padding of 4, random crop and flip."""
    return _cifar(config, "CIFAR10")


def cifar100(config: DataConfig) -> RawDataset:
    """CIFAR-100: 50000 + 10000 images of 32x32, augmented by padding of 4, random crop and flip."""
    return _cifar(config, "CIFAR100")


def svhn(config: DataConfig) -> RawDataset:
    """SVHN, cropped digits: 73257 + 26032 images of 32x32, not augmented.

    It is normalised with CIFAR's mean and deviation, as in the paper's code.
    """
    train, test = _load(config, "SVHN", [{"split": "train"}, {"split": "test"}])
    return RawDataset(
        train=_part("train", np.transpose(train.data, (0, 2, 3, 1)), train.labels),
        test=_part("test", np.transpose(test.data, (0, 2, 3, 1)), test.labels),
        class_names=_DIGITS,
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
    )


def mnist(config: DataConfig) -> RawDataset:
    """MNIST: 60000 + 10000 images of 28x28, not augmented; grey becomes three equal channels.

    The files may be compressed (.gz), as they are published.
    """
    folder = Path(config.root) / "MNIST" / "raw"
    kinds = ("images-idx3", "labels-idx1")
    files = {part: [_found(folder / f"{part}-{kind}-ubyte") for kind in kinds] for part in _PARTS}
    if not all(path.is_file() for paths in files.values() for path in paths):
        _load(config, "MNIST", [{"train": True}, {"train": False}])  # fetched, or an error
    arrays = {part: [_read_idx(_found(path)) for path in paths] for part, paths in files.items()}
    return RawDataset(
        train=_part("train", *arrays["train"]),
        test=_part("test", *arrays["t10k"]),
        class_names=_DIGITS,
        mean=(0.1307,) * 3,
        std=(0.3081,) * 3,
    )


def _found(path: Path) -> Path:
    """The file, or its compressed form if only that is there."""
    compressed = path.with_name(f"{path.name}.gz")
    return compressed if compressed.is_file() and not path.is_file() else path


def _read_idx(path: Path) -> np.ndarray:
    """The uint8 array of a file in MNIST's format: the sizes in big-endian, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        ndim = content[3]
        shape = np.frombuffer(content, ">u4", ndim, offset=4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, ValueError) as error:
        raise ValueError(f"Expected MNIST's format in {path}, but {one_line(error)}") from error


def _cifar(config: DataConfig, name: str) -> RawDataset:
    train, test = _load(config, name, [{"train": True}, {"train": False}])
    return RawDataset(
        train=_part("train", train.data, train.targets),
        test=_part("test", test.data, test.targets),
        class_names=tuple(train.classes),
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        augmentation=Augmentation(pad=4, crop_size=32, flip=0.5),
    )


def _part(name: str, images: np.ndarray, labels: Any) -> ArrayPart:
    classes = np.asarray(labels, dtype=np.int64)
    return ArrayPart(images, classes, [f"{name}-{i:05d}" for i in range(len(classes))])


def _load(config: DataConfig, name: str, parts: list[dict[str, Any]]) -> list[Any]:
    """The data set `name` of torchvision, once with each of the keywords in `parts`."""
    import torchvision.datasets

    read: Callable[..., Any] = getattr(torchvision.datasets, name)
    try:
        return [read(config.root, download=config.download, **part) for part in parts]
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"Expected {name} in {config.root}, but {one_line(error)}; "
            f"data/README.md says how to get it"
        ) from error


def tiny_imagenet(config: DataConfig) -> RawDataset:
    """Tiny-ImageNet in its official layout; tested on val, because test has no labels.

    The 200 classes are in the order of their WordNet numbers and have their first name in
    words.txt, if that is there. Training images, 64x64, are augmented by padding of 4, random crop
    and flip.
    """
    folder = _tiny_folder(config)
    numbers = sorted(read_lines(folder / "wnids.txt"))
    train = [(folder / "train" / number / "images", c) for c, number in enumerate(numbers)]
    return RawDataset(
        train=class_files(train, len(numbers)),
        test=_tiny_val(folder, numbers),
        class_names=_tiny_names(folder, numbers),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation=Augmentation(pad=4, crop_size=64, flip=0.5),
    )


def _tiny_folder(config: DataConfig) -> Path:
    folder = Path(config.root) / "tiny-imagenet-200"
    for name in ("wnids.txt", "train", "val/images", "val/val_annotations.txt"):
        if not (folder / name).exists():
            raise ValueError(
                f"Expected Tiny-ImageNet (wnids.txt, train, val) in {folder}, but it has no "
                f"{name}; data/README.md says how to get it"
            )
    return folder


def _tiny_names(folder: Path, numbers: list[str]) -> tuple[str, ...]:
    """The first name of each class; its number where there is no list of names."""
    listed = folder / "words.txt"
    pairs = [line.partition("\t") for line in read_lines(listed)] if listed.is_file() else []
    names = {number: words.partition(",")[0].strip() for number, _, words in pairs}
    return tuple(names.get(number, number) for number in numbers)


def _tiny_val(folder: Path, numbers: list[str]) -> FilePart:
    label_of = {number: label for label, number in enumerate(numbers)}
    listed = folder / "val" / "val_annotations.txt"
    images: list[Path] = []
    classes: list[int] = []
    for line in read_lines(listed):
        name, _, rest = line.partition("\t")
        number = rest.partition("\t")[0]
        if number not in label_of:
            raise ValueError(
                f"Expected a class of wnids.txt for {name} in {listed}, but got {number}"
            )
        images.append(folder / "val" / "images" / name)
        classes.append(label_of[number])
    return FilePart(images, classes, num_classes=len(numbers), ignore_index=-1)


def pacs(config: DataConfig) -> RawDataset:
    """PACS as PACS/DOMAIN/CLASS/*; by default photo is trained on, and the others are tested.

    The folders may also be in the root itself. Images are resized to 224x224, for a network
    with ImageNet weights.
    """
    folder = _pacs_folder(config)
    tested, trained = _domains(config)
    return RawDataset(
        train=_domain_part(folder, trained),
        test=_domain_part(folder, tested),
        class_names=PACS_CLASSES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )


def _domains(config: DataConfig) -> tuple[list[str], list[str]]:
    """The domains to test on, and those to train on."""
    domain = None if config.domain is None else _known_domain(config.domain, "domain", DOMAINS)
    allowed = (*DOMAINS, OTHERS)
    trained = _known_domain(config.train_domain or "photo", "train_domain", allowed)
    if trained == OTHERS:
        if domain is None:
            raise ValueError(f"Expected domain, what to test on, with train_domain={OTHERS}")
        return [domain], [other for other in DOMAINS if other != domain]
    if domain is None:
        return [other for other in DOMAINS if other != trained], [trained]
    if domain == trained:
        raise ValueError(f"Expected another domain than train_domain, but got {domain} for both")
    return [domain], [trained]


def domain_name(name: str) -> str:
    """The full name of a domain: art is short for art_painting."""
    return "art_painting" if name == "art" else name


def _known_domain(name: str, option: str, allowed: tuple[str, ...]) -> str:
    name = domain_name(name)
    if name not in allowed:
        raise ValueError(f"Expected {option} to be one of {', '.join(allowed)}, but got {name!r}")
    return name


def _pacs_folder(config: DataConfig) -> Path:
    root = Path(config.root)
    for folder in (root / "PACS", root):
        if all((folder / domain).is_dir() for domain in DOMAINS):
            return folder
    raise ValueError(
        f"Expected PACS (folders {', '.join(DOMAINS)}) in {root / 'PACS'}, but there is none; "
        f"data/README.md says how to get it"
    )


def _domain_part(folder: Path, domains: list[str]) -> FilePart:
    places = [folder / domain / name for domain in domains for name in PACS_CLASSES]
    return class_files([(p, PACS_CLASSES.index(p.name)) for p in places], len(PACS_CLASSES))


def mendeley(config: DataConfig) -> RawDataset:
    """Chest X-rays, normal or pneumonia (Kermany et al. 2018), in their official folders.

    Images are resized to 224x224, as for ImageNet.
    """
    folder = Path(config.root) / "chest_xray"
    for name in (f"{part}/{kind}" for part in ("train", "test") for kind in _XRAYS):
        if not (folder / name).is_dir():
            raise ValueError(
                f"Expected chest X-rays (train and test with NORMAL and PNEUMONIA) in {folder}, "
                f"but it has no {name}; data/README.md says how to get them"
            )
    train, test = (class_part(folder / part, _XRAYS) for part in ("train", "test"))
    return RawDataset(
        train=train,
        test=test,
        class_names=tuple(name.lower() for name in _XRAYS),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )
