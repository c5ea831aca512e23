"""A user's own data: images with masks, or images in one folder per class."""

from __future__ import annotations

from pathlib import Path

from segcal.data.image_files import FilePart, class_files, find_images, one_size, read_lines
from segcal.data.options import DataConfig
from segcal.data.samples import AbsentPart, RawDataset, or_absent
from segcal.data.voc import palette
from segcal.files import check_num_classes, visible


def masks(config: DataConfig) -> RawDataset:
    """Segmentation from root/{train,test}/{images,masks}, a mask named like its image.

    Masks are PNG files of one channel that hold class indices. root/classes.txt names the
    classes, one per line; without it num_classes says how many there are.

    With multilabel, masks are in root/{train,test}/masks/CLASS, one folder per class, and hold 0
    or 1. Without classes.txt, the classes are the names of these folders.
    """
    root = _root(config, "train/images, train/masks, test/images and test/masks")
    class_names = _class_names(config, root)
    if not 0 <= config.ignore_index <= 255:
        raise ValueError(
            f"Expected ignore_index in 0..255, what a mask can hold, but got {config.ignore_index}"
        )

    def part(name: str) -> FilePart:
        images, folder = find_images(root / name / "images"), root / name / "masks"
        labels: list[Path] | list[tuple[Path, ...]]
        if config.multilabel:
            of_class = [folder / class_name for class_name in class_names]
            labels = [tuple(_mask_of(image, each) for each in of_class) for image in images]
        else:
            labels = [_mask_of(image, folder) for image in images]
        return FilePart(
            images, labels, num_classes=len(class_names), ignore_index=config.ignore_index
        )

    train, test = or_absent(lambda: part("train")), part("test")
    return RawDataset(
        train=train,
        test=test,
        class_names=class_names,
        palette=palette(len(class_names)),
        uniform=_uniform(config, train, test),
    )


def folders(config: DataConfig) -> RawDataset:
    """Classification from root/{train,test}/CLASS/*.png; the folders' names are the classes."""
    root = _root(config, "train/CLASS and test/CLASS folders of images")
    # Without anything to train on, the test images have all the classes.
    class_names = _subfolders(root / ("train" if (root / "train").is_dir() else "test"))
    unknown = sorted(set(_subfolders(root / "test")) - set(class_names))
    if unknown:
        raise ValueError(
            f"Expected the classes of {root / 'train'} in {root / 'test'}, but got {unknown[0]!r}"
        )
    train = or_absent(lambda: class_part(root / "train", _subfolders(root / "train")))
    test = class_part(root / "test", class_names)
    return RawDataset(
        train=train, test=test, class_names=class_names, uniform=_uniform(config, train, test)
    )


def _root(config: DataConfig, expected: str) -> Path:
    root = Path(config.root)
    if not root.is_dir():
        raise ValueError(
            f"Expected {expected} in {root}, but there is no such folder; "
            f"data/README.md shows the layout"
        )
    return root


def _class_names(config: DataConfig, root: Path) -> tuple[str, ...]:
    listed = root / "classes.txt"
    if not listed.is_file():
        if config.multilabel:
            first = "train" if (root / "train").is_dir() else "test"
            return _subfolders(root / first / "masks")
        if config.num_classes is None:
            raise ValueError(
                f"Expected num_classes, or one name per line in {listed}, but got none"
            )
        check_num_classes(config.num_classes)
        return tuple(f"class {i}" for i in range(config.num_classes))
    names = tuple(line.strip() for line in read_lines(listed))
    if config.num_classes not in (None, len(names)):
        raise ValueError(
            f"Expected num_classes={config.num_classes} names in {listed}, but got {len(names)}"
        )
    least = 1 if config.multilabel else 2
    if len(names) < least:
        raise ValueError(f"Expected at least {least} class names in {listed}, but got {len(names)}")
    return names


def _mask_of(image: Path, folder: Path) -> Path:
    mask = folder / f"{image.stem}.png"
    if not mask.is_file():
        raise ValueError(f"Expected a mask for {image} at {mask}, but there is none")
    return mask


def _subfolders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise ValueError(f"Expected class folders in {folder}, but there is no such folder")
    names = tuple(path.name for path in visible(folder) if path.is_dir())
    if not names:
        raise ValueError(f"Expected class folders in {folder}, but got none")
    return names


def class_part(folder: Path, class_names: tuple[str, ...]) -> FilePart:
    """The images of folder/CLASS for each of the classes, in their order."""
    # A class may be absent from the test images, but a folder that is there holds some.
    places = [(folder / name, index) for index, name in enumerate(class_names)]
    return class_files([place for place in places if place[0].is_dir()], len(class_names))


def _uniform(config: DataConfig, train: FilePart | AbsentPart, test: FilePart) -> bool:
    """Whether all images have one size; if not, an option that gives batches one must be set."""
    trained = train.images if isinstance(train, FilePart) else ()
    uniform = one_size([*trained, *test.images], skip_bad=config.skip_bad)
    if not uniform and config.resize is None and (config.crop_size is None or not config.augment):
        raise ValueError(
            f"Expected images of one size in {config.root}, or resize or crop_size to be set, "
            f"but the images differ in size"
        )
    return uniform
