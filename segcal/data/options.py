"""The options of all data sets; the entries of `DATASETS` declare which of them each one takes."""

from __future__ import annotations

from dataclasses import dataclass


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
        resize: Resize every image, of all parts, to this square side.
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
        ignore_index: Mask value of the pixels that are not counted.
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
    ignore_index: int = 255
    multilabel: bool = False
