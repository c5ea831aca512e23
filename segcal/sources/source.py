"""What every source of predictions is: batches of named predictions, with or without labels."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from segcal.pixels import each_rater

if TYPE_CHECKING:
    from segcal.data.shift import Shift
    from segcal.posthoc import Calibrator

Kind = Literal["logits", "probs", "sigmoid_logits", "sigmoid_probs", "top1"]
KINDS: tuple[Kind, ...] = get_args(Kind)[:4]  # of all classes

Choose = Callable[[int], Sequence[int]]  # the number of images to the indices of some of them
# Takes (N, C, *S) logits, and the (N, 3, H, W) images if there are any, to (N, C, *S) logits.
LogitMap = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Batch:
    """The predictions of N images, at the resolution of their labels.

    Attributes:
        names: N names, or None.
        kind: whether `values` are logits or probabilities, of a softmax or of C sigmoids; "top1"
            for the probability of the predicted class, and 0 in place of all others.
        values: (N, C, *S) floating; S = (H, W) for masks, (D, H, W) for volumes, () for
            classification.
        labels: (N, *S) int64; (N, C, *S) for sigmoids; None for images without labels. Those of
            several raters have a first axis R.
        images: (N, channels, *) what the network saw, where it is known.
        spread: of pooled members, how much they differ: maps of "mutual_information" and
            "variance", (N, *S); (N, C, *S) of sigmoids.
    """

    names: Sequence[str] | None
    kind: Kind
    values: Tensor
    labels: Tensor | None
    images: Tensor | None = None
    spread: Mapping[str, Tensor] | None = None

    @property
    def multilabel(self) -> bool:
        """Whether the values are of sigmoid outputs."""
        return self.kind.startswith("sigmoid_")

    @property
    def are_probs(self) -> bool:
        """Whether the values are probabilities."""
        return not self.kind.endswith("logits")

    @property
    def logits(self) -> Tensor:
        """(N, C, *S) logits; of probabilities, those whose softmax or sigmoids they are."""
        if not self.are_probs:
            return self.values
        if self.kind == "top1":
            raise ValueError("this needs the probabilities of all classes, not the top one alone")
        wide = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        if self.multilabel:  # 1 may be rounded: it is half way from there to what is below 1
            rest = max(torch.finfo(self.values.dtype).eps / 8, 2**-53)
            return wide.double().clamp(2**-52, 1 - rest).logit().to(wide)
        return wide.clamp_min(torch.finfo(wide.dtype).tiny).log()

    @property
    def probs(self) -> Tensor:
        """(N, C, *S) probabilities."""
        if self.are_probs:
            return self.values
        return self.values.sigmoid() if self.multilabel else self.values.softmax(1)

    def with_each_rater(self) -> Batch:
        """Images with R raters as images that are R times as large; see `pixels.each_rater`."""
        assert self.labels is not None and self.images is None  # of saved predictions
        values, labels = each_rater(self.values, self.labels)
        maps = {
            name: known.unsqueeze(known.ndim - self.values.ndim + 2).expand_as(labels)
            for name, known in (self.spread or {}).items()
        }
        return replace(self, values=values, labels=labels, spread=maps or None)

    @property
    def mask(self) -> Tensor:
        """(N, *S) predicted classes; of sigmoids (N, C, *S) whether each class is present."""
        if self.multilabel:
            return self.values > (0.5 if self.are_probs else 0)
        return self.values.argmax(1)

    def with_logits(self, logits: Tensor) -> Batch:
        """The same batch with other (N, C, *S) logits."""
        kind: Kind = "sigmoid_logits" if self.multilabel else "logits"
        return replace(self, kind=kind, values=logits)

    @torch.inference_mode()
    def calibrated(self, calibrator: LogitMap | None) -> Batch:
        """The same batch with the logits that `calibrator` makes of its own; as it is if None."""
        if calibrator is None:
            return self
        return self.with_logits(calibrator(self.logits, self.images))


class Source(ABC):
    """Predictions of images, in batches.

    Iterating gives this process's share, `indices[rank::world_size]`: all processes together give
    every image once. A subclass sets the attributes below, and may override the methods that need
    images by number, a network or a data set.

    Attributes:
        name: what tables call it.
        num_classes: C.
        class_names: C names.
        ignore_index: the label that is not counted.
        multilabel: whether the outputs are C sigmoids.
        top_only: whether only the predicted class and its probability are known.
        raters: R, how many raters labelled each image.
        palette: (C, 3) uint8 colours of the classes, or None.
        names: the names of all images; empty if they are not known.
        group: a regular expression; images in whose names it finds the same text, such as the
            patient of a slice, belong together, and intervals are over these groups. Empty: every
            image stands alone.
        num_images: how many images there are, over all processes; None if that is not known.
        skipped: the reason, by name, for each image that was left out.
        score_sums: where a network gives scores that are divided by their sum over the classes,
            the mean of that sum over the pixels of each image, by name.
        config: the settings behind the predictions as YAML, for the page.
        history: the log of the training, one record per epoch, for the page.
        pools: whether a prediction is a mean over members, whose spread is known.
        members: what a prediction is the mean of, where each of them is a source.
        calibrators: one for each member, applied before the mean; None for a member as it is.
        taken: how images were chosen: a shift that brings other images repeats it.
        stored: whether batches are read from files, so that reading them again costs little.
    """

    name: str
    num_classes: int
    class_names: tuple[str, ...]
    ignore_index: int
    multilabel: bool = False
    top_only: bool = False
    raters: int = 1
    palette: np.ndarray | None = None
    names: Sequence[str] = ()
    group: str = ""
    num_images: int | None = None
    skipped: dict[str, str]
    score_sums: Mapping[str, float] = {}
    config: str = ""
    history: Sequence[Mapping[str, Any]] = ()
    pools: bool = False
    members: Sequence[Source] = ()
    calibrators: Sequence[Calibrator | None] = ()
    stored: bool = False
    taken: tuple[Choose, ...] = ()

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]: ...

    def __getitem__(self, index: int) -> Batch:
        """The predictions of one image (or file)."""
        raise ValueError(f"{self.name} gives no single images")

    def groups_of(self, names: Sequence[str] | None) -> list[str] | None:
        """The group of each image, by name; a name without a match is a group of its own."""
        if not self.group or names is None:
            return None
        try:
            found = [re.search(self.group, name) for name in names]
        except re.error as error:
            raise ValueError(
                f"the group {self.group!r} is no regular expression: {error}"
            ) from None
        return [match[0] if match else n for match, n in zip(found, names, strict=True)]

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB at the size of the labels, or None if there is no image.

        Of a volume it is (D, H, W) or (D, H, W, 3) of any numbers.
        """
        return None

    def affine(self, index: int) -> np.ndarray | None:
        """(4, 4) from voxel (x, y, z) of a volume to millimetres, or None if that is not known."""
        return None

    def only(self, indices: Sequence[int]) -> Source:
        """The same source on some of its images, by number."""
        raise ValueError(f"{self.name} does not know its images by number, so none can be chosen")

    def limited(self, number: int) -> Source:
        """The same source on at most `number` images, evenly spaced."""

        def evenly(size: int) -> Sequence[int]:
            chosen = np.linspace(0, size - 1, min(number, size)).round()
            return [int(index) for index in chosen]

        return self.take(evenly) if self.names else self

    def shard(self, k: int, n: int) -> Source:
        """The same source on every n-th image from image k on, counted from 0."""
        if len(self.names) < n:
            raise ValueError(
                f"{self.name} has {len(self.names)} images: too few to divide into {n} shards"
            )
        return self.take(lambda size: range(k, size, n))

    def take(self, choose: Choose) -> Source:
        """The same source on the images that a function of their number chooses."""
        part = self.only(choose(len(self.names)))
        part.taken = (*self.taken, choose)
        return part

    def shifted(self, shift: Shift) -> Source:
        """The same network on images that a shift changes."""
        raise ValueError("--shift needs the network: pass a run or --model, not saved predictions.")

    def on_images(self, folder: str | Path, *, skip_bad: bool = False) -> Source:
        """The same network on the images of a folder, which have no labels."""
        raise ValueError(f"{folder} needs a network to run on it: pass a run or --model.")

    def with_calibrators(self, calibrators: Sequence[Calibrator | None]) -> Source:
        """The same source with a calibrator for each of its members."""
        raise ValueError(f"{self.name} has no members: see --ensemble, --tta and --mc-dropout")

    def holdout(self) -> Source | None:
        """The predictions to fit calibrators on, where the source has a hold-out of its own."""
        return None

    def fingerprint(self) -> str:
        """A digest of all that the predictions depend on; empty if that is not known.

        It covers weights, settings, and the data: files with their sizes and times.
        """
        return ""


class Changed(Source):
    """A source with other batches, which a function makes anew each time they are read."""

    def __init__(self, source: Source, make: Callable[[Source], Iterator[Batch]]) -> None:
        for name in (
            *("name", "num_classes", "class_names", "ignore_index", "multilabel"),
            *("raters", "group", "num_images", "skipped"),
        ):
            setattr(self, name, getattr(source, name))
        self._source, self._make = source, make

    def __iter__(self) -> Iterator[Batch]:
        return self._make(self._source)


def digest(*parts: Any) -> str:
    """A digest of plain values."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """A digest of the contents of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:  # hashlib.file_digest came with Python 3.11
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def resize(logits: Tensor, size: Sequence[int], *, align_corners: bool = False) -> Tensor:
    """(N, C, *size) logits, by linear interpolation along each axis, in float32 at least.

    Raises:
        ValueError: the logits have other axes, or there is nothing to interpolate.
    """
    if logits.shape[2:] == tuple(size):
        return logits
    modes = {1: "linear", 2: "bilinear", 3: "trilinear"}
    mode = modes.get(len(size)) if len(size) == logits.ndim - 2 else None
    if mode is None or 0 in (*size, *logits.shape[1:]):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} cannot be resized to {tuple(size)}: "
            "they must be (N, C, *S) with the same axes"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return interpolate(logits.to(wide), size=tuple(size), mode=mode, align_corners=align_corners)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned, as torchvision, smp and others wrap them."""
    if isinstance(output, Mapping):
        output = output.get("out", output.get("logits"))
    elif isinstance(output, Sequence):
        output = output[0]
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    if not isinstance(output, Tensor):
        raise ValueError(
            "the model must return logits, alone, first in a tuple, or under 'out' or 'logits', "
            f"but returned {type(output).__name__}"
        )
    return output
