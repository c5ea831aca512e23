"""The place where predictions to be judged come from: a network, or the files that one left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn

from segcal import distributed
from segcal.data.arrays import BadFile
from segcal.data.build import Splits
from segcal.data.predictions import PredictionFolder, Predictions
from segcal.data.samples import Samples
from segcal.training.loader import eval_loader


class Source(Protocol):
    """Predictions of named images, in batches and one by one.

    Iterating gives this process's share: of all processes together, every image once.

    Attributes:
        names: of all images (or files of images).
        num_images: how many images there are.
        num_classes: C.
        class_names: C names.
        ignore_index: label that is not counted.
        palette: (C, 3) uint8 colours of the classes, or None.
        skipped: why, by name, for files that were left out.
    """

    names: Sequence[str]
    num_images: int
    num_classes: int
    class_names: tuple[str, ...]
    ignore_index: int
    palette: np.ndarray | None
    skipped: dict[str, str]

    def __iter__(self) -> Iterator[Predictions]: ...

    def __getitem__(self, index: int) -> Predictions:
        """The predictions of one image (or file)."""
        ...

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB at the size of the labels; None if there is no image."""
        ...


class NetworkSource:
    """A network at work on a part of a data set.

    Args:
        model: (N, 3, H, W) images to (N, C, *S) logits.
        data: the data set.
        part: the part of it to look at: `data.test`, say.
        device: where the network works.
        batch_size: images at a time; ignored where images differ in size.
        workers: processes that read images.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Splits,
        part: Samples,
        *,
        device: torch.device,
        batch_size: int,
        workers: int,
    ) -> None:
        self.names: Sequence[str] = part.names
        self.num_images = len(part)
        self.num_classes, self.class_names = data.num_classes, data.class_names
        self.ignore_index, self.palette = data.ignore_index, data.palette
        self.skipped = dict(part.skipped)
        self._model, self._part, self._device = model.to(device).eval(), part, device
        self._batch_size, self._workers = batch_size if data.uniform else 1, workers

    def __iter__(self) -> Iterator[Predictions]:
        names = iter(self.names[distributed.rank() :: distributed.world_size()])
        for images, labels in eval_loader(
            self._part,
            batch_size=self._batch_size,
            workers=self._workers,
            pin=self._device.type == "cuda",
        ):
            yield self._predict([next(names) for _ in images], images, labels)

    def __getitem__(self, index: int) -> Predictions:
        image, label = self._part[index]
        return self._predict([self.names[index]], image[None], label[None])

    def _predict(
        self, names: Sequence[str], images: torch.Tensor, labels: torch.Tensor
    ) -> Predictions:
        images = images.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        with torch.inference_mode():
            logits = self._model(images)
        shown = images if images.ndim == 4 else None  # word numbers are nothing to look at
        return Predictions(names, "logits", logits, labels, shown)

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB."""
        return self._part.image(index)


class FileSource:
    """Saved predictions, read one file at a time.

    Args:
        folder: where they are.
        skip_bad: leave out files that cannot be used, and list them in `skipped`.
    """

    palette: np.ndarray | None = None

    def __init__(self, folder: PredictionFolder, *, skip_bad: bool = False) -> None:
        self.names: Sequence[str] = folder.names
        self.num_images = folder.num_images
        self.num_classes, self.class_names = folder.num_classes, folder.class_names
        self.ignore_index = folder.ignore_index
        self.skipped: dict[str, str] = {}
        self._folder, self._skip_bad = folder, skip_bad

    def __iter__(self) -> Iterator[Predictions]:
        self.skipped = {}
        for index in range(distributed.rank(), len(self.names), distributed.world_size()):
            try:
                batch = self._folder[index]
            except BadFile as error:
                if not self._skip_bad:
                    raise
                self.skipped[self.names[index]] = str(error)
            else:
                yield batch
                del batch  # before the next is read: one file in memory at a time

    def __getitem__(self, index: int) -> Predictions:
        return self._folder[index]

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB at the size of the labels; None if there is no image."""
        image = self._folder.image(index)
        if image is None:
            return None
        height, width = self._folder[index].labels.shape[1:]
        return np.asarray(Image.fromarray(image).resize((width, height)))
