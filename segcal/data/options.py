"""The data sets by name, and their options. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from segcal import settings

if TYPE_CHECKING:
    from segcal.data.samples import RawDataset

Task = Literal["segmentation", "classification", "text"]


@dataclass(frozen=True)
class DataConfig:
    """Which data to train and test on, and how they are prepared.

    Options left at None take the value of the data set's own recipe. Those that a data set does
    not take must stay unset.

    Attributes:
        name: Which data set, an entry of `DATASETS`.
        root: Folder that holds the data set; data/README.md says what goes where.
        download: Download the data set into root first, if its publisher allows that.
        holdout: Share of the training images kept apart for model selection and post-hoc fits.
        split_seed: Seed of the choice of the hold-out images, apart from the seed of the training.
        skip_bad: Check all image and mask files first, and leave out, list and count those that
            cannot be used; false stops at the first such file.
        limit: Use only this many images of each part, spread evenly over it, for a quick look.
        train_split: List of the training images: train, trainaug (whose masks are in
            SegmentationClassAug) or another NAME.txt in ImageSets/Segmentation.
        holdout_split: List of the hold-out images, NAME.txt in ImageSets/Segmentation; null
            splits off the share holdout of the training images.
        augment: Augment the training images.
        base_size: Training images are first resized so that their short side is this many pixels,
            times a random factor from scale.
        scale: Range of that random factor.
        crop_size: Side of the square random crop; smaller images are padded first, masks with
            ignore_index.
        pad: Pixels of padding put on every side before the crop.
        flip: Probability of a left-right flip.
        resize: Resize every image, of all parts, to this square side. Training masks follow
            (nearest); in evaluation masks stay as they are, and logits are resized to them.
        mean: Mean of each channel on a 0-1 scale, subtracted from the image.
        std: Standard deviation of each channel on a 0-1 scale, which the image is divided by.
        rotation: Rotate the test images by this many degrees counter-clockwise, with black
            corners; training images are not rotated.
        imbalance: Remove training images so that the first class is this many times as
            common as the last, and the others are exponential between them.
        domain: Test on photo, art_painting (or art), cartoon or sketch; null is every domain that
            is not used for training.
        train_domain: Train on this domain, or on others, which is all but domain; null is photo.
        max_words: Size of the vocabulary, including the padding.
        max_length: How many of the last words of a message are kept.
        num_classes: Number of classes in your own masks; needed unless root has a classes.txt.
        ignore_index: Mask value of the pixels that are not counted; null is 255, or -100 beyond
            255 classes.
        multilabel: Classes may overlap: each class has a mask of 0 and 1, and the network has a
            sigmoid for each class.
    """

    name: str = "scenes"
    root: str = "data"
    download: bool = False
    holdout: float = 0.1
    split_seed: int = 0
    skip_bad: bool = False
    limit: int | None = None
    train_split: str = "train"
    holdout_split: str | None = None
    augment: bool = True
    base_size: int | None = None
    scale: tuple[float, float] | None = None
    crop_size: int | None = None
    pad: int | None = None
    flip: float | None = None
    resize: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    rotation: float = 0.0
    imbalance: float | None = None
    domain: str | None = None
    train_domain: str | None = None
    max_words: int = 20000
    max_length: int = 1000
    num_classes: int | None = None
    ignore_index: int | None = None
    multilabel: bool = False


_COMMON = (
    *("name", "root", "download", "holdout", "split_seed", "skip_bad", "limit", "augment"),
    *("num_classes", "ignore_index"),
)
_IMAGES = ("base_size", "scale", "crop_size", "pad", "flip", "resize", "mean", "std")
_OF_TASK: dict[Task, tuple[str, ...]] = {
    "segmentation": _IMAGES,
    "classification": (*_IMAGES, "rotation", "imbalance"),
    "text": ("imbalance",),
}


@dataclass(frozen=True)
class DataSet:
    """A data set that can be asked for by name."""

    place: str  # MODULE.FUNCTION in `segcal.data`, which reads it
    about: str  # for the help
    task: Task  # segmentation has a mask per image as label, the others one class
    options: tuple[str, ...] = ()  # that it takes beside those of every data set and of its task
    embedded: bool = False  # it comes with the installed packages, and needs no files
    val: Literal["holdout", "test"] = "test"  # the part here that its publisher calls val

    @property
    def taken(self) -> tuple[str, ...]:
        """All options of `DataConfig` that it takes."""
        return (*_COMMON, *_OF_TASK[self.task], *self.options)

    def read(self, config: DataConfig) -> RawDataset:
        """Find and read it."""
        module, _, function = self.place.partition(".")
        found: RawDataset = getattr(import_module(f"segcal.data.{module}"), function)(config)
        return found


# A new data set is one function and one entry here.
DATASETS: dict[str, DataSet] = {
    "scenes": DataSet(
        "scenes.scenes", "cluttered scenes of digits, embedded", "segmentation", embedded=True
    ),
    "digits": DataSet(
        "scenes.digits", "handwritten digits, embedded", "classification", embedded=True
    ),
    "voc2012": DataSet(
        "folders.voc2012", "PASCAL VOC", "segmentation", ("train_split", "holdout_split")
    ),
    "camvid": DataSet(
        "benchmarks.camvid", "streets from a car, 11 classes", "segmentation", val="holdout"
    ),
    "cityscapes": DataSet("benchmarks.cityscapes", "German streets, 19 classes", "segmentation"),
    "acdc": DataSet(
        "benchmarks.acdc", "streets in fog, rain, snow and at night, 19 classes", "segmentation"
    ),
    "ade20k": DataSet("benchmarks.ade20k", "scenes, 150 classes", "segmentation"),
    "coco_stuff": DataSet("benchmarks.coco_stuff", "things and stuff, 171 classes", "segmentation"),
    "oxford_pet": DataSet("benchmarks.oxford_pet", "cats and dogs, 2 classes", "segmentation"),
    "cifar10": DataSet("classification.cifar", "CIFAR", "classification"),
    "cifar100": DataSet("classification.cifar", "CIFAR", "classification"),
    "svhn": DataSet("classification.svhn", "house numbers", "classification"),
    "mnist": DataSet("classification.mnist", "handwritten digits", "classification"),
    "tiny_imagenet": DataSet("classification.tiny_imagenet", "200 classes", "classification"),
    "pacs": DataSet(
        "classification.pacs", "four domains", "classification", ("domain", "train_domain")
    ),
    "mendeley": DataSet("classification.mendeley", "chest X-rays", "classification"),
    "newsgroups": DataSet(
        "text.newsgroups", "20 Newsgroups, text", "text", ("max_words", "max_length")
    ),
    "masks": DataSet(
        "folders.masks",
        "your own images with masks",
        "segmentation",
        ("multilabel",),
        val="holdout",
    ),
    "folders": DataSet(
        "folders.folders", "your own images, one folder per class", "classification", val="holdout"
    ),
}


def takers(option: str) -> str:
    """Which data sets take an option, in words; "" if all do."""
    if option in _COMMON:
        return ""
    if option in _IMAGES:
        return "images"
    tasks = [task for task, options in _OF_TASK.items() if option in options]
    return ", ".join(
        [*tasks, *(name for name, entry in DATASETS.items() if option in entry.options)]
    )


def find(config: DataConfig) -> DataSet:
    """The data set that `config` names; a ValueError if it does not take an option that is set."""
    if config.name not in DATASETS:
        raise ValueError(
            f"data.name: expected one of {', '.join(DATASETS)}, but got {config.name!r}"
        )
    entry = DATASETS[config.name]
    for name in settings.changed(config):
        if name not in entry.taken:
            raise ValueError(
                f"data.{name}: expected it to be unset for {config.name}, which is {entry.task}; "
                f"it is for {takers(name)}"
            )
    return entry
