"""The options of all data sets; the entries of `DATASETS` declare which of them each one takes."""

from __future__ import annotations

from dataclasses import dataclass


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
