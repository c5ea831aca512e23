"""The data sets by name, with the options that each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from segcal import registry
from segcal.data import classification, folders, mendeley, pacs, scenes, text, tiny_imagenet, voc
from segcal.data.options import DataConfig
from segcal.data.raw import RawDataset

Task = Literal["segmentation", "classification", "text"]

_COMMON = (
    *("name", "root", "download", "holdout", "split_seed", "skip_bad", "limit", "augment"),
    *("num_classes", "ignore_index"),
)
_IMAGES = ("base_size", "scale", "crop_size", "pad", "flip", "mean", "std")
# Segmentation is evaluated on images and masks as they are: their sizes change in training alone.
_OF_TASK: dict[Task, tuple[str, ...]] = {
    "segmentation": _IMAGES,
    "classification": (*_IMAGES, "resize", "rotation", "imbalance"),
    "text": ("imbalance",),
}


@dataclass(frozen=True)
class DatasetEntry:
    """A data set that can be asked for by name.

    Attributes:
        read: finds and reads it.
        about: what it is, for the help.
        task: segmentation has a mask an image as label, classification and text one class.
        options: what it takes beside the options of every data set and of its task.
        embedded: whether it comes with the installed packages, and needs no files.
    """

    read: Callable[[DataConfig], RawDataset]
    about: str
    task: Task
    options: tuple[str, ...] = ()
    embedded: bool = False

    @property
    def taken(self) -> tuple[str, ...]:
        """All options of `DataConfig` that it takes."""
        return (*_COMMON, *_OF_TASK[self.task], *self.options)


# A new data set is one function and one entry here.
DATASETS: dict[str, DatasetEntry] = {
    "scenes": DatasetEntry(
        scenes.scenes, "cluttered scenes of digits, embedded", "segmentation", embedded=True
    ),
    "digits": DatasetEntry(
        scenes.digits, "handwritten digits, embedded", "classification", embedded=True
    ),
    "voc2012": DatasetEntry(
        voc.voc2012, "PASCAL VOC", "segmentation", options=("train_split", "holdout_split")
    ),
    "cifar10": DatasetEntry(classification.cifar10, "CIFAR", "classification"),
    "cifar100": DatasetEntry(classification.cifar100, "CIFAR", "classification"),
    "svhn": DatasetEntry(classification.svhn, "house numbers", "classification"),
    "mnist": DatasetEntry(classification.mnist, "handwritten digits", "classification"),
    "tiny_imagenet": DatasetEntry(tiny_imagenet.tiny_imagenet, "200 classes", "classification"),
    "pacs": DatasetEntry(
        pacs.pacs, "four domains", "classification", options=("domain", "train_domain")
    ),
    "mendeley": DatasetEntry(mendeley.mendeley, "chest X-rays", "classification"),
    "newsgroups": DatasetEntry(
        text.newsgroups, "20 Newsgroups, text", "text", options=("max_words", "max_length")
    ),
    "masks": DatasetEntry(
        folders.masks, "your own images with masks", "segmentation", options=("multilabel",)
    ),
    "folders": DatasetEntry(
        folders.folders, "your own images, one folder a class", "classification"
    ),
}


def describe() -> str:
    """The data sets and what they are, for the help of `--data.name`."""
    return registry.describe({name: entry.about for name, entry in DATASETS.items()})


def takers(option: str) -> str:
    """Which data sets take an option, in words; "" if all do."""
    if option in _COMMON:
        return ""
    if option in _IMAGES:
        return "images"
    tasks = [task for task, options in _OF_TASK.items() if option in options]
    names = [name for name, entry in DATASETS.items() if option in entry.options]
    return ", ".join([*tasks, *names])


def find_dataset(config: DataConfig) -> DatasetEntry:
    """The entry that `config` names.

    Raises:
        ValueError: there is none, or it does not take an option that is set.
    """
    if config.name not in DATASETS:
        raise ValueError(
            f"Expected data name to be one of {', '.join(DATASETS)}, but got {config.name!r}"
        )
    entry = DATASETS[config.name]
    unfit = registry.unfit_option(config, entry.taken)
    if unfit is not None:
        raise ValueError(
            f"Expected {unfit} to be unset for {config.name}, which is {entry.task}, "
            f"but got {getattr(config, unfit)!r}; it is for {takers(unfit)}"
        )
    return entry
