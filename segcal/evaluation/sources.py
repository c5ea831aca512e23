"""Predictions to evaluate, and their sources: a network with any loader, or with its data.

`saved.PredictionFolder` is the source of predictions in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from segcal import distributed
from segcal.data.samples import Samples, eval_loader
from segcal.data.splits import Splits
from segcal.pixels import multilabel_labels

if TYPE_CHECKING:
    from segcal.evaluation.saved import PredictionFolder

Kind = Literal["logits", "probs", "sigmoid_logits", "sigmoid_probs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERYTHING = (0, 1)  # the shard that leaves nothing out
_Sharded = TypeVar("_Sharded", "PredictionFolder", Samples)


def is_sigmoid(kind: Kind | None) -> bool:
    """Whether predictions of a kind are of sigmoid outputs."""
    return kind in ("sigmoid_logits", "sigmoid_probs")


@dataclass(frozen=True)
class VolumePart:
    """The place of some slices in their volume.

    Attributes:
        labels: (1, D, H, W) of the whole volume, of any integer dtype; (1, K, D, H, W) of sigmoids.
        start: the first slice.
    """

    labels: Tensor
    start: int


@dataclass(frozen=True)
class Predictions:
    """What a network predicted for N images, at the resolution of their labels.

    Attributes:
        names: N names, or None.
        kind: whether `values` are logits or probabilities, and of what.
        values: (N, C, *S) floating; S = (H, W) for segmentation, (D, H, W) for volumes, () for
            classification.
        labels: (N, *S) int64; (N, C, *S) for sigmoid outputs.
        images: (N, 3, H, W) what the network saw, where it is known.
        part: where these slices lie in a volume that is read in parts; None for all else.
    """

    names: Sequence[str] | None
    kind: Kind
    values: Tensor
    labels: Tensor
    images: Tensor | None = None
    part: VolumePart | None = None

    @property
    def continued(self) -> bool:
        """Whether this is a part of the same volume as the predictions before."""
        return self.part is not None and self.part.start > 0

    @property
    def multilabel(self) -> bool:
        """Whether the values are of sigmoid outputs."""
        return is_sigmoid(self.kind)

    @property
    def are_probs(self) -> bool:
        """Whether the values are probabilities."""
        return self.kind in ("probs", "sigmoid_probs")

    @property
    def logits(self) -> Tensor:
        """(N, C, *S) logits; of probabilities, those whose softmax or sigmoids they are."""
        if not self.are_probs:
            return self.values
        wide = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        if self.multilabel:
            return wide.double().logit(torch.finfo(torch.float64).eps).to(wide)
        return wide.clamp_min(torch.finfo(wide.dtype).tiny).log()

    @property
    def probs(self) -> Tensor:
        """(N, C, *S) probabilities."""
        if self.are_probs:
            return self.values
        return self.values.sigmoid() if self.multilabel else self.values.softmax(1)

    def with_logits(self, logits: Tensor) -> Predictions:
        """The same with other (N, C, *S) logits."""
        kind: Kind = "sigmoid_logits" if self.multilabel else "logits"
        return replace(self, kind=kind, values=logits)


class PredictionSource(Protocol):
    """Predictions of images, in batches.

    Iterating gives this process's share: of all processes together, every image once.
    """

    skipped: dict[str, str]  # why, by name, for images that were left out

    @property
    def num_classes(self) -> int:
        """C."""
        ...

    @property
    def ignore_index(self) -> int:
        """The label that is not counted."""
        ...

    @property
    def multilabel(self) -> bool:
        """Whether the predictions are of sigmoid outputs."""
        ...

    @property
    def num_images(self) -> int | None:
        """How many images there are, over all processes; None if that is not known."""
        ...

    @property
    def class_names(self) -> Sequence[str] | None:
        """C names, or None."""
        ...

    def __iter__(self) -> Iterator[Predictions]: ...


class NamedPredictions(PredictionSource, Protocol):
    """Predictions of named images, which can also be had one by one."""

    names: Sequence[str]  # of all images (or files of images)
    palette: np.ndarray | None  # (C, 3) uint8 colours of the classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """C names."""
        ...

    def __getitem__(self, index: int) -> Predictions:
        """The predictions of one image (or file)."""
        ...

    def parts(self, index: int) -> Iterator[Predictions]:
        """What indexing gives; a large volume in parts."""
        ...

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB at the size of the labels; None if there is no image.

        Of a volume (D, H, W) or (D, H, W, 3) of any numbers.
        """
        ...


class LoaderPredictions:
    """The predictions of a network on the batches of any loader, at the resolution of the labels.

    Args:
        model: as for `segcal.evaluate`; must be in eval mode.
        loader: gives (inputs, labels) or (inputs, labels, names), this process's share alone.
        num_classes: C.
        class_names: C names, or None.
        ignore_index: label that is not counted.
        device: where to run; by default where the model's parameters are.
        names: of all images of the loader, in order; instead of names in the batches.
        pad_to: as for `segcal.evaluate`.
        padded: as for `segcal.evaluate`.
        multilabel: as for `segcal.evaluate`.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        ignore_index: int = 255,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        pad_to: int = 1,
        padded: bool | None = None,
        multilabel: bool = False,
    ) -> None:
        self.num_classes, self.class_names = num_classes, class_names
        self.ignore_index, self.multilabel = ignore_index, multilabel
        self.num_images = None if distributed.is_distributed() else _num_images(loader)
        self.skipped: dict[str, str] = {}
        self._model, self._loader, self._batch_names = model, loader, names
        self._device = _device_of(model) if device is None else torch.device(device)
        self._pad_to, self._padded = pad_to, padded

    def __iter__(self) -> Iterator[Predictions]:
        seen = 0
        for batch in self._loader:
            inputs, labels, names = _unpack(batch)
            if self._batch_names is not None:
                names = self._batch_names[seen : seen + len(labels)]
            seen += len(labels)
            yield self._predict(inputs, labels, names)

    def _predict(self, inputs: Tensor, labels: Tensor, names: Sequence[str] | None) -> Predictions:
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        with torch.inference_mode():
            logits = logits_of(self._model(_pad(inputs, self._pad_to)))
            if self.multilabel and labels.ndim == 3 and self.num_classes == 1:
                labels = labels.unsqueeze(1)
            one = labels[:, 0] if self.multilabel and labels.ndim > 1 else labels  # (N, *S)
            logits = _at_labels(logits, inputs, one, self._pad_to, self._padded)
        images = inputs if inputs.ndim == 4 else None  # a text is not an image
        if images is not None and self._padded and one.ndim == 3:
            images = images[..., : one.shape[1], : one.shape[2]]
        if self.multilabel:
            labels = multilabel_labels(logits, labels)
        kind: Kind = "sigmoid_logits" if self.multilabel else "logits"
        return Predictions(names, kind, logits, labels, images)


class SplitPredictions(LoaderPredictions):
    """The predictions of a network on one split of a data set.

    Args:
        model: (N, 3, H, W) images to (N, C, *S) logits; moved to `device` and put in eval mode.
        data: the data set.
        samples: the split of it: `data.test`, say.
        device: where the network works.
        batch_size: images at a time; ignored where images differ in size.
        workers: processes that read images.
    """

    class_names: tuple[str, ...]
    num_images: int

    def __init__(
        self,
        model: nn.Module,
        data: Splits,
        samples: Samples,
        *,
        device: torch.device,
        batch_size: int,
        workers: int,
    ) -> None:
        self.names: Sequence[str] = samples.names
        super().__init__(
            model.to(device).eval(),
            eval_loader(
                samples,
                batch_size=batch_size if data.uniform else 1,
                workers=workers,
                pin=device.type == "cuda",
            ),
            num_classes=data.num_classes,
            class_names=data.class_names,
            ignore_index=data.ignore_index,
            device=device,
            names=samples.names[distributed.rank() :: distributed.world_size()],
            multilabel=data.multilabel,
        )
        self.num_images, self.palette = len(samples), data.palette
        self.skipped = dict(samples.skipped)
        self.samples = samples

    def __getitem__(self, index: int) -> Predictions:
        image, label = self.samples[index]
        return self._predict(image[None], label[None], [self.names[index]])

    def parts(self, index: int) -> Iterator[Predictions]:
        """What indexing gives."""
        yield self[index]

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB."""
        return self.samples.image(index)


def shard_of(whole: _Sharded, shard: tuple[int, int], what: str) -> _Sharded:
    """Part k of n of the images or files, for `shard` = (k, n) counted from 0."""
    if len(whole.names) < shard[1]:
        raise ValueError(
            f"Expected at least {shard[1]} {what} to divide into shards, but got {len(whole.names)}"
        )
    return whole if shard == EVERYTHING else whole.shard(*shard)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """The bare network in eval mode; afterwards every submodule has its own mode back."""
    # A DDP wrapper sends buffers at each forward, so ranks with uneven shares would wait forever.
    network = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield network
    finally:
        for module in training:
            module.training = True


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
            "Expected a model that returns logits, alone, first in a tuple, or under 'out' or "
            f"'logits', but got {type(output).__name__}"
        )
    return output


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
            f"Expected logits (N, C, *S) that can be resized to {tuple(size)}, "
            f"but got {tuple(logits.shape)}"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return interpolate(logits.to(wide), size=tuple(size), mode=mode, align_corners=align_corners)


def _device_of(model: nn.Module) -> torch.device:
    tensor = next((t for group in (model.parameters(), model.buffers()) for t in group), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _num_images(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # not a DataLoader, or one over a stream
        return None


def _unpack(batch: Any) -> tuple[Tensor, Tensor, Sequence[str] | None]:
    if not isinstance(batch, Sequence) or len(batch) not in (2, 3):
        raise ValueError(
            f"Expected batches of (inputs, labels) or (inputs, labels, names), "
            f"but got {type(batch).__name__}"
        )
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def _pad(inputs: Tensor, pad_to: int) -> Tensor:
    if pad_to == 1 or inputs.ndim < 4:
        return inputs
    height, width = inputs.shape[-2:]
    return pad(inputs, (0, -width % pad_to, 0, -height % pad_to))


def _at_labels(
    logits: Tensor, inputs: Tensor, labels: Tensor, pad_to: int, padded: bool | None
) -> Tensor:
    """(N, C, *S) logits at the size of the (N, *S) labels: padding cut off, then resized."""
    if labels.ndim == 4 and logits.ndim == 5:
        return resize(logits, labels.shape[1:])
    if labels.ndim != 3 or logits.ndim != 4 or inputs.ndim != 4:
        return logits  # classification, or something whose sizes the meter checks
    size = labels.shape[-2:]
    image = inputs.shape[-2:]
    if padded is None and (image[0] > size[0] or image[1] > size[1]):
        raise ValueError(
            f"Expected images no larger than their labels {tuple(size)}, but got {tuple(image)}; "
            "say padded=True if they were padded right and below, padded=False if resized"
        )
    full = (image[0] + -image[0] % pad_to, image[1] + -image[1] % pad_to)
    if full != tuple(image):  # the network saw padding: undo it at the size it was added
        logits = resize(logits, full)[..., : image[0], : image[1]]
    if padded:
        logits = resize(logits, image)[..., : size[0], : size[1]]
    return resize(logits, size)
