"""The data sets by name, each built as a training, a hold-out and a test part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from segcal import registry
from segcal.data import classification, folders, scenes, text, voc
from segcal.data.image_files import FilePart, unusable
from segcal.data.options import DataConfig
from segcal.data.samples import ArrayPart, Part, RawDataset, Samples, split, spread
from segcal.data.shift import DOMAIN, ROTATION, Shift, ShiftedPart, imbalanced
from segcal.data.text import TextPart
from segcal.data.transforms import Augmentation, Augmenter
from segcal.files import check_size, one_line

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
        task: segmentation has a mask per image as label, classification and text one class.
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
    "tiny_imagenet": DatasetEntry(classification.tiny_imagenet, "200 classes", "classification"),
    "pacs": DatasetEntry(
        classification.pacs, "four domains", "classification", options=("domain", "train_domain")
    ),
    "mendeley": DatasetEntry(classification.mendeley, "chest X-rays", "classification"),
    "newsgroups": DatasetEntry(
        text.newsgroups, "20 Newsgroups, text", "text", options=("max_words", "max_length")
    ),
    "masks": DatasetEntry(
        folders.masks, "your own images with masks", "segmentation", options=("multilabel",)
    ),
    "folders": DatasetEntry(
        folders.folders, "your own images, one folder per class", "classification"
    ),
}


def dataset_takers(option: str) -> str:
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
            f"but got {getattr(config, unfit)!r}; it is for {dataset_takers(unfit)}"
        )
    return entry


@dataclass(frozen=True)
class Splits:
    """A data set ready for training.

    Attributes:
        train: augmented; index it with `(epoch, index)`.
        holdout: as the images are; for model selection and post-hoc fits.
        test: as the images are.
        num_classes: C.
        class_names: C names.
        ignore_index: label of pixels that do not count.
        palette: (C, 3) uint8 colours of the classes, or None.
        uniform: whether all hold-out and test images have one size. If not, evaluate one image at
            a time: padding a batch to a common size would change what the network sees.
        words: the vocabulary of a text, in the order of its numbers; none for images.
        multilabel: whether labels are (C, H, W), the presence of each class.
    """

    train: Samples
    holdout: Samples
    test: Samples
    num_classes: int
    class_names: tuple[str, ...]
    ignore_index: int
    palette: np.ndarray | None
    uniform: bool
    words: tuple[str, ...] = ()
    multilabel: bool = False


def build_data(config: DataConfig, *, seed: int) -> Splits:
    """Read a data set and split it into train, hold-out and test.

    Args:
        config: which data set, where, and how it is prepared.
        seed: of the training augmentation; it changes nothing else.

    Raises:
        ValueError: an unknown name, an option out of range, or files that are missing.
    """
    _check(config, seed)
    source = _read(config)

    def samples(part: Part, indices: np.ndarray, augmenter: Augmenter | None = None) -> Samples:
        return _samples(config, source, part, indices, augmenter=augmenter, seed=seed)

    chosen = _chosen(config, source)
    if source.holdout is None:
        kept, held = split(len(chosen), holdout=config.holdout, seed=config.split_seed)
        kept, holdout = chosen[kept], samples(source.train, chosen[held])
    else:
        kept, holdout = chosen, samples(source.holdout, np.arange(len(source.holdout.names)))
    return Splits(
        train=samples(source.train, kept, _augmenter(config, source.augmentation)),
        holdout=holdout,
        test=_test(config, source),
        num_classes=len(source.class_names),
        class_names=source.class_names,
        ignore_index=config.ignore_index,
        palette=source.palette,
        uniform=_uniform(config, source),
        words=source.words,
        multilabel=config.multilabel,
    )


def missing_data(config: DataConfig) -> str | None:
    """In one line, why a data set cannot be read as it is on the disk; None if it can."""
    try:
        _read(replace(config, download=False))
    except (ValueError, OSError) as error:
        return one_line(error)
    return None


def build_shifted(data: Splits, config: DataConfig, shift: Shift) -> Splits:
    """The data set with its test part under a shift.

    Args:
        data: the data set, as `build_data` made it from `config`.
        config: its options.
        shift: the change. A corruption or a rotation leaves the labels as they are; a domain or
            a folder brings other images with labels of their own.
    """
    task = DATASETS[config.name].task
    if task == "text":
        raise ValueError(f"Expected images to apply {shift} to, but {config.name} is text")
    if shift.name == DOMAIN and config.train_domain == classification.OTHERS:
        tested, asked = map(classification.domain_name, (str(config.domain), str(shift.value)))
        if asked != tested:
            raise ValueError(
                f"Expected domain {tested}, which was left out of the training, but got {asked}: "
                "it was trained on that"
            )
    if shift.brings_images:
        config = shift.configure(config)
        other = _read(config)
        if other.class_names != data.class_names:
            raise ValueError(
                f"Expected the classes {', '.join(data.class_names)} in {shift.value}, "
                f"but got {', '.join(other.class_names)}"
            )
        return replace(data, test=_test(config, other), uniform=_uniform(config, other))
    if task == "segmentation" and shift.name == ROTATION:
        raise ValueError(f"Expected a shift that leaves masks where they are, but got {shift}")
    return replace(data, test=data.test.with_part(ShiftedPart(data.test.part, shift)))


def _check(config: DataConfig, seed: int) -> None:
    """Raise for values that are wrong for any data set."""
    if min(seed, config.split_seed) < 0:
        raise ValueError(f"Expected seeds of at least 0, but got {min(seed, config.split_seed)}")
    for name in ("limit", "resize"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"Expected {name} to be at least 1, but got {value}")
    for name in ("resize", "crop_size", "base_size"):
        side = getattr(config, name) or 0
        check_size(12 * side**2, f"an image of float32 at {name}={side}")
    if config.std is not None and min(config.std) <= 0:
        raise ValueError(f"Expected std to be positive, but got {config.std}")


def _read(config: DataConfig) -> RawDataset:
    source = find_dataset(config).read(config)
    if config.num_classes not in (None, len(source.class_names)):
        raise ValueError(
            f"Expected num_classes={len(source.class_names)} for {config.name}, "
            f"but got {config.num_classes}"
        )
    return source


def _samples(
    config: DataConfig,
    source: RawDataset,
    part: Part,
    indices: np.ndarray,
    *,
    augmenter: Augmenter | None = None,
    seed: int = 0,
) -> Samples:
    # Bad files are left out after the split, so that they do not move good ones.
    wanted = spread(indices, config.limit)
    bad = unusable(part, wanted.tolist()) if config.skip_bad else {}
    return Samples(
        part,
        [index for index in wanted if index not in bad],
        mean=config.mean or source.mean,
        std=config.std or source.std,
        resize=config.resize or source.resize,
        augmenter=augmenter,
        seed=seed,
        skipped={part.names[index]: reason for index, reason in bad.items()},
    )


def _test(config: DataConfig, source: RawDataset) -> Samples:
    part = source.test
    if config.rotation:
        part = ShiftedPart(part, Shift(ROTATION, config.rotation))
    return _samples(config, source, part, np.arange(len(part.names)))


def _uniform(config: DataConfig, source: RawDataset) -> bool:
    return source.uniform or (config.resize or source.resize) is not None


def _chosen(config: DataConfig, source: RawDataset) -> np.ndarray:
    """Indices of the training images that are used, including the hold-out."""
    if config.imbalance is None:
        return np.arange(len(source.train.names))
    assert isinstance(source.train, ArrayPart | FilePart | TextPart)  # one label per sample
    return imbalanced(
        np.asarray(source.train.labels),
        num_classes=len(source.class_names),
        factor=config.imbalance,
        seed=config.split_seed,
    )


def _augmenter(config: DataConfig, default: Augmentation) -> Augmenter | None:
    """The recipe with the user's changes, or None where it would do nothing."""
    names = ("base_size", "scale", "pad", "crop_size", "flip")
    chosen = {name: getattr(config, name) for name in names}
    recipe = replace(default, **{k: v for k, v in chosen.items() if v is not None})
    if not config.augment or recipe == Augmentation(scale=recipe.scale):
        return None
    return Augmenter(recipe, ignore_index=config.ignore_index)
