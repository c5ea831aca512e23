"""Public classification sets that are folders of images: Tiny-ImageNet, PACS, Mendeley V2."""

from __future__ import annotations

from pathlib import Path

from segcal.data.folders import class_part
from segcal.data.image_files import FilePart, class_files
from segcal.data.options import DataConfig
from segcal.data.samples import IMAGENET_MEAN, IMAGENET_STD, RawDataset
from segcal.data.transforms import Augmentation

DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
OTHERS = "others"  # as a training domain: every domain but the one that is tested on
_XRAYS = ("NORMAL", "PNEUMONIA")


def tiny_imagenet(config: DataConfig) -> RawDataset:
    """Tiny-ImageNet in its official layout; tested on val, because test has no labels.

    The 200 classes are in the order of their WordNet numbers and have their first name in
    words.txt, if that is there. Training images, 64x64, are augmented by padding of 4, random crop
    and flip.
    """
    folder = _tiny_folder(config)
    numbers = sorted(_lines(folder / "wnids.txt"))
    train = [(folder / "train" / number / "images", c) for c, number in enumerate(numbers)]
    return RawDataset(
        train=class_files(train, len(numbers)),
        test=_val(folder, numbers),
        class_names=_names(folder, numbers),
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


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _names(folder: Path, numbers: list[str]) -> tuple[str, ...]:
    """The first name of each class; its number where there is no list of names."""
    listed = folder / "words.txt"
    pairs = [line.partition("\t") for line in _lines(listed)] if listed.is_file() else []
    names = {number: words.partition(",")[0].strip() for number, _, words in pairs}
    return tuple(names.get(number, number) for number in numbers)


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
