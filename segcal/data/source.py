"""The place that says what a data set is: the options it is built from and the parts it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from segcal.data.transforms import Augmentation

Label = np.ndarray | int  # (H, W) class of each pixel, or the class of the image
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DataConfig:
    """Which images to train and test on, and how they are prepared.

    Options left at None take the value of the data set's own recipe.

    Attributes:
        name: scenes, digits, voc2012, cifar10, cifar100, svhn, mnist, tiny_imagenet, pacs,
            mendeley, newsgroups (text); or your own images: masks (images with masks) and folders
            (one folder a class).
        root: Folder that holds the data set; data/README.md says what goes where.
        download: Fetch the data set into root first, where its publisher allows that.
        holdout: Share of the training images kept apart for model selection and post-hoc fits.
        split_seed: Chooses the held-out images, whatever the seed of the training.
        skip_bad: Look at all image and mask files first, and leave out, list and count those that
            cannot be used; false stops at the first one met.
        limit: Use only this many images of each part, spread evenly over it, for a quick look.
        train_split: For voc2012: train, or trainaug (with SegmentationClassAug).
        augment: Augment the training images; false shows them as they are.
        base_size: Training images are first resized so that their short side is this many pixels,
            times a random factor from scale.
        scale: Range of that random factor.
        crop_size: Side of the square random crop; smaller images are padded first, masks with
            ignore_index.
        pad: Pixels of padding put on every side before the crop.
        flip: Probability of a left-right flip.
        resize: Resize every image, of all parts, to this square side (classification).
        mean: Mean of each channel on a 0-1 scale, subtracted from the image.
        std: Standard deviation of each channel on a 0-1 scale, which the image is divided by.
        rotation: Turn the test images by this many degrees counter-clockwise, the corners black
            (classification); training images stay upright.
        imbalance: Thin out the training images so that the first class is this many times as
            common as the last, with an exponential profile between them (classification).
        domain: For pacs: test on photo, art_painting (or art), cartoon or sketch; null is every
            domain that is not trained on.
        train_domain: For pacs: train on this domain, or on others, all but domain; null is photo.
        max_words: For newsgroups: size of the vocabulary, the padding included.
        max_length: For newsgroups: words of a message that are kept, its last.
        num_classes: Number of classes in your own masks; needed unless root has a classes.txt.
        ignore_index: Mask value that marks pixels not to count.
    """

    name: str = "scenes"
    root: str = "data"
    download: bool = False
    holdout: float = 0.1
    split_seed: int = 0
    skip_bad: bool = False
    limit: int | None = None
    train_split: str = "train"
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
    ignore_index: int = 255


class Part(Protocol):
    """One part of a data set (train, say), before any transform."""

    @property
    def names(self) -> Sequence[str]:
        """What each sample is called in reports."""
        ...

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        ...

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """(H, W, 3) uint8 RGB, or (L,) words of a text, and the label: (H, W) uint8 or an int."""
        ...


@dataclass(frozen=True)
class ArrayPart:
    """A part held in memory.

    Attributes:
        images: (n, H, W, 3) or, for grey images, (n, H, W) uint8.
        labels: (n, H, W) uint8 or (n,) of an integer dtype.
        names: n names.
    """

    images: np.ndarray
    labels: np.ndarray
    names: Sequence[str]

    def image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB."""
        image = self.images[index]
        return image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)

    def read(self, index: int) -> tuple[np.ndarray, Label]:
        """The image and its label."""
        label = self.labels[index]
        return self.image(index), label if label.ndim else int(label)


@dataclass(frozen=True)
class Source:
    """A data set as its entry in `DATASETS` gives it: raw parts and the recipe's defaults.

    Attributes:
        train: what is trained on, before the hold-out is taken from it.
        test: what is tested on.
        class_names: one name a class.
        mean: of each channel, on a 0-1 scale.
        std: of each channel, on a 0-1 scale.
        holdout: the hold-out, for data sets that make their own (`train` then excludes it).
        augmentation: the recipe for training images.
        resize: square side that images of all parts are resized to.
        palette: (num_classes, 3) uint8 colours to draw the classes in.
        uniform: whether all images of a part have one size.
        words: the vocabulary of a text, in the order of its numbers; none for images.
    """

    train: Part
    test: Part
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    holdout: Part | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    resize: int | None = None
    palette: np.ndarray | None = None
    uniform: bool = True
    words: tuple[str, ...] = ()


def split(n: int, *, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Part 0..n-1 at random into (kept, held out), each sorted; never leaves either empty."""
    if not 0 < holdout < 1:
        raise ValueError(f"Expected holdout to be a share between 0 and 1, but got {holdout}")
    if n < 2:
        raise ValueError(f"Expected at least 2 training images to hold some out, but got {n}")
    size = min(max(round(n * holdout), 1), n - 1)
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[size:]), np.sort(order[:size])
