"""Data sets ready to use: read, and split into training, hold-out and test samples."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from segcal.data import classification, options
from segcal.data.folders import find_images
from segcal.data.options import DATASETS, DataConfig
from segcal.data.samples import (
    AbsentPart,
    ArrayPart,
    FilePart,
    ImagePart,
    Part,
    RawDataset,
    Samples,
    split,
    spread,
)
from segcal.data.shift import DOMAIN, ROTATION, Shift, imbalanced, shifted_part
from segcal.data.transforms import Augmentation, Augmenter
from segcal.files import check_size, image_size, one_line
from segcal.pixels import resolve_ignore_index

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """A data set ready for training.

    Where there is nothing to train on, to ask for anything of `train`, or of a hold-out that would
    be cut from it, raises why. Where images differ in size, evaluate one at a time: padding a batch
    to a common size would change what the network sees.
    """

    train: Samples  # augmented; index it with `(epoch, index)`
    holdout: Samples
    test: Samples
    num_classes: int
    class_names: tuple[str, ...]
    ignore_index: int
    palette: np.ndarray | None  # (C, 3) uint8
    uniform: bool  # all hold-out and test images have one size
    words: tuple[str, ...] = ()  # the vocabulary of a text, in the order of its numbers
    multilabel: bool = False  # labels are (C, H, W), the presence of each class


def build(config: DataConfig, *, seed: int = 0) -> Splits:
    """Read a data set and split it; `seed` is of the training augmentation alone.

    Raises:
        ValueError: an unknown name, an option out of range, or files that are missing.
    """
    if min(seed, config.split_seed) < 0:
        raise ValueError(f"Expected seeds of at least 0, but got {min(seed, config.split_seed)}")
    for name in ("limit", "resize"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"Expected data.{name} to be at least 1, but got {value}")
    for name in ("resize", "crop_size", "base_size"):
        side = getattr(config, name) or 0
        check_size(12 * side**2, f"an image of float32 at data.{name}={side}")
    if config.std is not None and min(config.std) <= 0:
        raise ValueError(f"Expected data.std to be positive, but got {config.std}")
    source = _read(config)
    classes = 2 if config.multilabel else len(source.class_names)
    ignore_index = resolve_ignore_index(config.ignore_index, classes)
    changes = {option.name: getattr(config, option.name) for option in fields(Augmentation)}
    recipe = replace(source.augmentation, **{k: v for k, v in changes.items() if v is not None})
    augmenter = None
    if config.augment and recipe != Augmentation(scale=recipe.scale):  # that does nothing
        augmenter = Augmenter(recipe, ignore_index=ignore_index)
    train: Any = source.train
    holdout: Any = source.train  # there may be nothing to train on
    if source.holdout is not None:
        holdout = _samples(config, source, source.holdout)
    if not isinstance(train, AbsentPart):
        chosen = np.arange(len(train.names))
        if config.imbalance is not None:
            assert isinstance(train, ArrayPart | FilePart)  # one label per sample
            chosen = imbalanced(
                np.asarray(train.labels),
                num_classes=len(source.class_names),
                factor=config.imbalance,
                seed=config.split_seed,
            )
        if source.holdout is None:
            kept, held = split(len(chosen), holdout=config.holdout, seed=config.split_seed)
            chosen, holdout = chosen[kept], _samples(config, source, train, chosen[held])
        train = _samples(config, source, train, chosen, augmenter=augmenter, seed=seed)
        if reason := _differ_in_size(config, source):
            train = AbsentPart(reason)
    return Splits(
        train=train,
        holdout=holdout,
        num_classes=len(source.class_names),
        class_names=source.class_names,
        ignore_index=ignore_index,
        palette=source.palette,
        words=source.words,
        multilabel=config.multilabel,
        **_tested(config, source),
    )


def without_labels(data: Splits, folder: str | Path, *, skip_bad: bool = False) -> Splits:
    """The images of a folder, which have no labels, as the test part of a data set.

    Images become inputs as those of the test part do. Their labels are zeros of their size.
    `skip_bad` leaves out images that cannot be read.
    """
    part = ImagePart(find_images(Path(folder)))
    name, count = Counter(part.names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two images in {folder} are called {name}: rename one of them")
    bad = _faults(part, range(len(part.names))) if skip_bad else {}
    good = [i for i in range(len(part.names)) if i not in bad]
    skipped = {part.names[i]: reason for i, reason in bad.items()}
    return replace(
        data,
        test=replace(data.test, part=part, indices=good, skipped=skipped),
        uniform=len({image_size(part.images[i]) for i in good}) == 1,
    )


def missing(config: DataConfig) -> str | None:
    """In one line, why nothing can be trained on a data set as it is on the disk, or None."""
    try:
        source = _read(replace(config, download=False))
        _ = source.train.names
    except (ValueError, OSError) as error:
        return one_line(error)
    return _differ_in_size(config, source)


def _differ_in_size(config: DataConfig, source: RawDataset) -> str | None:
    """Why training images cannot be put into batches, or None."""
    crop = (config.crop_size or source.augmentation.crop_size) if config.augment else None
    if source.uniform or config.resize or source.resize or crop:
        return None
    return (
        f"Expected images of one size in {config.root}, or resize or crop_size to be set, "
        "but the images differ in size"
    )


def shifted(data: Splits, config: DataConfig, shift: Shift) -> Splits:
    """A data set, as `build` made it from `config`, with its test part under a shift.

    A corruption or a rotation leaves the labels as they are; a domain or a folder brings other
    images with labels of their own.
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
        brought = str(shift.value)
        domain = shift.name == DOMAIN
        config = replace(config, domain=brought) if domain else replace(config, root=brought)
        other = _read(config)
        if other.class_names != data.class_names:
            raise ValueError(
                f"Expected the classes {', '.join(data.class_names)} in {shift.value}, "
                f"but got {', '.join(other.class_names)}"
            )
        return replace(data, **_tested(config, other))
    if task == "segmentation" and shift.name == ROTATION:
        raise ValueError(f"Expected a shift that leaves masks where they are, but got {shift}")
    return replace(data, test=replace(data.test, part=shifted_part(data.test.part, shift)))


def _read(config: DataConfig) -> RawDataset:
    entry = options.find(config)
    try:
        source = entry.read(config)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(
            f"reading {config.name} needs {package}, which is not installed: "
            "pip install 'segcal[train]'"
        ) from None
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
    indices: np.ndarray | None = None,
    *,
    augmenter: Augmenter | None = None,
    seed: int = 0,
) -> Samples:
    # Bad files are left out after the split, so that they do not move good ones.
    wanted = spread(np.arange(len(part.names)) if indices is None else indices, config.limit)
    bad: dict[int, str] = {}
    if config.skip_bad and not isinstance(part, ArrayPart):
        bad = _faults(part, wanted.tolist())
        for text in bad.values():
            log.warning("left out: %s", text)
        if bad and len(bad) == len(wanted):
            raise ValueError(
                f"none of the {len(bad)} files can be used; the first: {next(iter(bad.values()))}"
            )
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


def _faults(part: Part, indices: Sequence[int]) -> dict[int, str]:
    """Why some of these samples cannot be read, by number."""

    def fault(index: int) -> str:
        try:
            part.read(index)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders let other threads run
        found = zip(indices, pool.map(fault, indices), strict=True)
        return {index: text for index, text in found if text}


def _tested(config: DataConfig, source: RawDataset) -> dict[str, Any]:
    """The fields `test` and `uniform` of `Splits`."""
    part = source.test
    if config.rotation:
        part = shifted_part(part, Shift(ROTATION, config.rotation))
    resized = (config.resize or source.resize) is not None  # the images, but not their masks
    uniform = source.uniform or (resized and DATASETS[config.name].task != "segmentation")
    return {"test": _samples(config, source, part), "uniform": uniform}
