"""Public classification sets that torchvision reads: CIFAR-10 and -100, SVHN, MNIST."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from segcal.data.options import DataConfig
from segcal.data.samples import ArrayPart, RawDataset
from segcal.data.transforms import Augmentation
from segcal.files import one_line

_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_DIGITS = tuple(map(str, range(10)))
_PARTS = ("train", "t10k")  # of MNIST


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
