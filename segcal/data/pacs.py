"""PACS: seven classes in four domains; networks train on some and are tested on others."""

from __future__ import annotations

from pathlib import Path

from segcal.data.image_files import FilePart, find_images
from segcal.data.options import DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, RawDataset

DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
CLASS_NAMES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
OTHERS = "others"  # as a training domain: every domain but the one that is tested on


def pacs(config: DataConfig) -> RawDataset:
    """PACS as PACS/DOMAIN/CLASS/*; by default photo is trained on, and the others are tested.

    The folders may also be in the root itself. Images are resized to 224x224, for a network
    with ImageNet weights.
    """
    folder = _folder(config)
    tested, trained = _domains(config)
    return RawDataset(
        train=_part(folder, trained),
        test=_part(folder, tested),
        class_names=CLASS_NAMES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        resize=224,
    )


def _domains(config: DataConfig) -> tuple[list[str], list[str]]:
    """The domains to test on, and those to train on."""
    domain = None if config.domain is None else _known(config.domain, "domain", DOMAINS)
    allowed = (*DOMAINS, OTHERS)
    trained = _known(config.train_domain or "photo", "train_domain", allowed)
    if trained == OTHERS:
        if domain is None:
            raise ValueError(f"Expected domain, what to test on, with train_domain={OTHERS}")
        return [domain], [other for other in DOMAINS if other != domain]
    if domain is None:
        return [other for other in DOMAINS if other != trained], [trained]
    if domain == trained:
        raise ValueError(f"Expected another domain than train_domain, but got {domain} for both")
    return [domain], [trained]


def _known(name: str, option: str, allowed: tuple[str, ...]) -> str:
    name = "art_painting" if name == "art" else name
    if name not in allowed:
        raise ValueError(f"Expected {option} to be one of {', '.join(allowed)}, but got {name!r}")
    return name


def _folder(config: DataConfig) -> Path:
    root = Path(config.root)
    for folder in (root / "PACS", root):
        if all((folder / domain).is_dir() for domain in DOMAINS):
            return folder
    raise ValueError(
        f"Expected PACS (folders {', '.join(DOMAINS)}) in {root / 'PACS'}, but there is none; "
        f"data/README.md says how to get it"
    )


def _part(folder: Path, domains: list[str]) -> FilePart:
    images: list[Path] = []
    classes: list[int] = []
    for domain in domains:
        for index, name in enumerate(CLASS_NAMES):
            found = find_images(folder / domain / name)
            images += found
            classes += [index] * len(found)
    return FilePart(images, classes, num_classes=len(CLASS_NAMES), ignore_index=-1)
