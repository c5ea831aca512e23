"""Public classification sets: those torchvision reads, and those that are folders of images."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from segcal.data.folders import class_files, class_part, read_lines
from segcal.data.options import DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, ArrayPart, FilePart, RawDataset
from segcal.data.transforms import Augmentation
from segcal.files import one_line

_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_DIGITS = tuple(map(str, range(10)))
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
OTHERS = "others"  # as a training domain: every domain but the one that is tested on
_XRAYS = ("NORMAL", "PNEUMONIA")


def cifar(config: DataConfig) -> RawDataset:
    """CIFAR-10 and CIFAR-100: 50000 + 10000 images of 32x32.

    They are augmented by padding of 4, random crop and flip.
    """
    train, test = _load(config, config.name.upper(), [{"train": True}, {"train": False}])
    return RawDataset(
        train=_part("train", train.data, train.targets),
        test=_part("test", test.data, test.targets),
        class_names=tuple(train.classes),
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        augmentation=Augmentation(pad=4, crop_size=32, flip=0.5),
    )


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

    def files(part: str) -> list[Path]:
        plain = [folder / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        return [p if p.is_file() else p.with_name(f"{p.name}.gz") for p in plain]

    if not all(path.is_file() for part in ("train", "t10k") for path in files(part)):
        _load(config, "MNIST", [{"train": True}, {"train": False}])  # fetched, or an error
    return RawDataset(
        train=_part("train", *map(_read_idx, files("train"))),
        test=_part("test", *map(_read_idx, files("t10k"))),
        class_names=_DIGITS,
        mean=(0.1307,) * 3,
        std=(0.3081,) * 3,
    )


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
    folder = Path(config.root) / "tiny-imagenet-200"
    official = ("wnids.txt", "train", "val/images", "val/val_annotations.txt")
    _expect(folder, "Tiny-ImageNet", official)
    numbers = sorted(read_lines(folder / "wnids.txt"))
    listed = folder / "words.txt"
    pairs = [line.partition("\t") for line in read_lines(listed)] if listed.is_file() else []
    names = {number: words.partition(",")[0].strip() for number, _, words in pairs}
    images: list[Path] = []
    classes: list[int] = []
    for line in read_lines(folder / "val" / "val_annotations.txt"):
        name, number, *_ = (*line.split("\t"), "")
        if number not in numbers:
            raise ValueError(
                f"Expected a class of wnids.txt for {name} in val_annotations.txt of {folder}, "
                f"but got {number}"
            )
        images.append(folder / "val" / "images" / name)
        classes.append(numbers.index(number))
    train = [(folder / "train" / number / "images", c) for c, number in enumerate(numbers)]
    return RawDataset(
        train=class_files(train, len(numbers)),
        test=FilePart(images, classes, num_classes=len(numbers)),
        class_names=tuple(names.get(number, number) for number in numbers),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation=Augmentation(pad=4, crop_size=64, flip=0.5),
    )


def _expect(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raise unless these files and folders are in the folder of a data set."""
    for name in names:
        if not (folder / name).exists():
            raise ValueError(
                f"Expected {what} in {folder}, but it has no {name}; "
                "data/README.md says how to get it"
            )


def pacs(config: DataConfig) -> RawDataset:
    """PACS as PACS/DOMAIN/CLASS/*; by default photo is trained on, and the others are tested.

    The folders may also be in the root itself. Images are resized to 224x224, for a network
    with ImageNet weights.
    """
    root = Path(config.root)
    folder = root if all((root / domain).is_dir() for domain in DOMAINS) else root / "PACS"
    _expect(folder, f"PACS (folders {', '.join(DOMAINS)})", DOMAINS)
    tested = None if config.domain is None else domain_name(config.domain)
    trained = domain_name(config.train_domain or "photo")
    if tested not in (None, *DOMAINS):
        raise ValueError(f"data.domain: expected one of {', '.join(DOMAINS)}, got {tested!r}")
    if trained not in (*DOMAINS, OTHERS):
        listed = ", ".join((*DOMAINS, OTHERS))
        raise ValueError(f"data.train_domain: expected one of {listed}, got {trained!r}")
    if tested == trained:
        raise ValueError(f"data.domain: expected another domain than train_domain, got {tested}")
    if trained == OTHERS and tested is None:
        raise ValueError(f"data.domain: state what to test on with train_domain={OTHERS}")

    def part(*domains: str) -> FilePart:
        places = [folder / domain / name for domain in domains for name in PACS_CLASSES]
        return class_files([(p, PACS_CLASSES.index(p.name)) for p in places], len(PACS_CLASSES))

    return RawDataset(
        train=part(*[d for d in DOMAINS if d == trained or (trained == OTHERS and d != tested)]),
        test=part(*[d for d in DOMAINS if d == tested or (tested is None and d != trained)]),
        class_names=PACS_CLASSES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )


def domain_name(name: str) -> str:
    """The full name of a domain: art is short for art_painting."""
    return "art_painting" if name == "art" else name


def mendeley(config: DataConfig) -> RawDataset:
    """Chest X-rays, normal or pneumonia (Kermany et al. 2018), in their official folders.

    Images are resized to 224x224, as for ImageNet.
    """
    folder = Path(config.root) / "chest_xray"
    names = [f"{part}/{kind}" for part in ("train", "test") for kind in _XRAYS]
    _expect(folder, "chest X-rays (train and test with NORMAL and PNEUMONIA)", names)
    train, test = (class_part(folder / part, _XRAYS) for part in ("train", "test"))
    return RawDataset(
        train=train,
        test=test,
        class_names=tuple(name.lower() for name in _XRAYS),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )
