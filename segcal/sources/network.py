"""Sources that run a network: a module with any loader, a network on a data set, a trained run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from segcal import data, distributed, models, settings
from segcal.files import read_checkpoint, read_yaml
from segcal.pixels import multilabel_labels, resolve_ignore_index
from segcal.sources.members import learned, pooled
from segcal.sources.source import (
    Batch,
    Kind,
    Source,
    digest,
    file_digest,
    logits_of,
    resize,
)
from segcal.sources.views import views

if TYPE_CHECKING:  # a module and a loader need none of these
    from segcal.data.options import DataConfig
    from segcal.data.samples import Samples
    from segcal.data.shift import Shift
    from segcal.data.splits import Splits
    from segcal.models.options import ModelConfig
    from segcal.posthoc import Calibrator

CONFIG, LOG = "config.yaml", "log.jsonl"  # in the folder of a run


class LoaderSource(Source):
    """A network on the batches of any loader, at the resolution of the labels.

    Args:
        model: as for `segcal.evaluate`, as are the options that are not explained here; it must
            be in eval mode.
        loader: gives (inputs, labels) or (inputs, labels, names), this process's share alone.
        names: of all images of the loader, in order, instead of names in the batches.
        name: what tables call it.

    Attributes:
        labelled: whether the labels are known; if not, they only say how large a prediction is.
    """

    labelled: bool = True
    _views: tuple[nn.Module, ...] = ()
    _viewed: tuple[Any, ...] = ()  # the settings of the views, and their calibrators

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        ignore_index: int | None = None,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        pad_to: int = 1,
        padded: bool | None = None,
        multilabel: bool = False,
        name: str = "model",
    ) -> None:
        self.name, self.num_classes = name, num_classes
        self.class_names = tuple(class_names or ())
        self.multilabel = multilabel
        self.ignore_index = resolve_ignore_index(ignore_index, 2 if multilabel else num_classes)
        self.skipped = {}
        if not distributed.is_distributed():
            with suppress(AttributeError, TypeError):  # not a DataLoader, or one over a stream
                self.num_images = len(loader.dataset)  # type: ignore[attr-defined]
        self.model, self._loader, self._batch_names = model, loader, names
        first = next(chain(model.parameters(), model.buffers()), torch.zeros(0))
        self.device = first.device if device is None else torch.device(device)
        self._pad_to, self._padded = pad_to, padded

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.inputs():
            yield self.pooled(*batch)

    def inputs(self) -> Iterator[tuple[Tensor, Tensor, Sequence[str] | None]]:
        """What the network is given, batch by batch: inputs, labels, and names if there are any."""
        seen = 0
        for batch in self._loader:
            if not isinstance(batch, Sequence) or len(batch) not in (2, 3):
                raise ValueError(
                    "the loader must give (inputs, labels) or (inputs, labels, names), "
                    f"but gave {type(batch).__name__}"
                )
            inputs, labels, names = (*batch, None)[:3]
            if self._batch_names is not None:
                names = self._batch_names[seen : seen + len(labels)]
            seen += len(labels)
            yield inputs, labels, names

    def input_key(self) -> str:
        """A digest of the inputs; sources of one digest give their networks the same."""
        return ""

    def with_views(self, tta: str = "", mc_dropout: int = 0) -> LoaderSource:
        """The same source, whose predictions are the mean over views of the network.

        These are `tta`, flip, scale:0.75,1.25 or flip,scale:0.75,1.25, and so many passes with the
        dropout layers at work.
        """
        part = copy.copy(self)
        part._views, part._viewed = views(self.model, tta, mc_dropout), (tta, mc_dropout)
        stated = f"tta: {tta}\n" * bool(tta) + f"mc_dropout: {mc_dropout}\n" * bool(mc_dropout)
        part.config, part.pools = self.config + stated, len(part._views) > 1
        return part

    @property
    def members(self) -> Sequence[LoaderSource]:  # type: ignore[override]
        """The same source with one of its views each."""
        parts = [copy.copy(self) for _ in self._views]
        for number, (part, view) in enumerate(zip(parts, self._views, strict=True), 1):
            part.name, part.pools = f"view {number}", False
            part._views, part._viewed, part.calibrators = (view,), (*self._viewed, number), ()
        return parts

    def with_calibrators(self, calibrators: Sequence[Calibrator | None]) -> LoaderSource:
        """The same views, each after a calibrator."""
        if not self._views:
            super().with_calibrators(calibrators)  # raises
        part = copy.copy(self)
        part.calibrators = tuple(calibrators)
        part._viewed = (*self._viewed, *map(learned, calibrators))
        return part

    def pooled(self, inputs: Tensor, labels: Tensor, names: Sequence[str] | None) -> Batch:
        """What the network makes of a batch: the mean over its views, if there are several."""
        if not self._views:
            return self.predict(inputs, labels, names)

        def seen(view: nn.Module, calibrator: Calibrator | None) -> Batch:
            part = copy.copy(self)
            part.model = view
            return part.predict(inputs, labels, names).calibrated(calibrator)

        return pooled(map(seen, self._views, self.calibrators or [None] * len(self._views)))

    @torch.inference_mode()
    def predict(self, inputs: Tensor, labels: Tensor, names: Sequence[str] | None) -> Batch:
        """What the network makes of a batch, in one forward pass."""
        inputs = inputs.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        padded = inputs
        if self._pad_to > 1 and inputs.ndim >= 4:
            height, width = inputs.shape[-2:]
            padded = pad(inputs, (0, -width % self._pad_to, 0, -height % self._pad_to))
        logits = logits_of(self.model(padded))
        if self.multilabel and self.labelled and labels.ndim == 3 and self.num_classes == 1:
            labels = labels.unsqueeze(1)
        stacked = self.multilabel and self.labelled and labels.ndim > 1
        one = labels[:, 0] if stacked else labels  # (N, *S)
        logits = _at_labels(logits, inputs, one, self._pad_to, self._padded)
        images = inputs if inputs.ndim == 4 else None  # a text is not an image
        if images is not None and self._padded and one.ndim == 3:
            images = images[..., : one.shape[1], : one.shape[2]]
        if images is not None and logits.ndim == 4 and images.shape[2:] != logits.shape[2:]:
            images = nn.functional.interpolate(images, logits.shape[2:], mode="bilinear")
        if self.multilabel and self.labelled:
            labels = multilabel_labels(logits, labels)
        kind: Kind = "sigmoid_logits" if self.multilabel else "logits"
        return Batch(names, kind, logits, labels if self.labelled else None, images)


class NetworkSource(LoaderSource):
    """A network on a split (test or holdout) of a data set, with its hold-out and its shifts.

    Args:
        model: (N, 3, H, W) images to (N, C, *S) logits; moved to the device, in eval mode.
        config: how `splits` were made, for shifts; None if that is not known.
        batch_size: images at a time; one where images differ in size.
        key: a digest of the network: its weights and settings.
    """

    def __init__(
        self,
        model: nn.Module,
        splits: Splits,
        *,
        config: DataConfig | None = None,
        split: str = "test",
        device: torch.device | str = "cpu",
        batch_size: int = 8,
        workers: int = 2,
        name: str = "model",
        key: str = "",
    ) -> None:
        super().__init__(
            model.to(device).eval(),
            (),
            num_classes=splits.num_classes,
            class_names=splits.class_names,
            ignore_index=splits.ignore_index,
            device=device,
            multilabel=splits.multilabel,
            name=name,
            padded=False,
        )
        self.splits, self.data_config, self.split, self.key = splits, config, split, key
        self.batch_size, self.workers = batch_size, workers
        self.palette = splits.palette
        self._read(getattr(splits, split))

    def _read(self, samples: Samples) -> None:
        from segcal.data.samples import eval_loader

        self.samples, self.names, self.num_images = samples, samples.names, len(samples)
        self.skipped = dict(samples.skipped)
        self._batch_names = samples.names[distributed.rank() :: distributed.world_size()]
        self._loader = eval_loader(
            samples,
            batch_size=self.batch_size if self.splits.uniform else 1,
            workers=self.workers,
            pin=self.device.type == "cuda",
        )

    def __getitem__(self, index: int) -> Batch:
        image, label = self.samples[index]
        return self.pooled(image[None], label[None], [self.names[index]])

    def image(self, index: int) -> np.ndarray | None:
        """(H, W, 3) uint8 RGB."""
        return self.samples.image(index)

    def only(self, indices: Sequence[int]) -> NetworkSource:
        """The same network on some of the images, by number."""
        part = copy.copy(self)
        part._read(self.samples.only(indices))
        return part

    def shifted(self, shift: Shift) -> NetworkSource:
        """The same network on images that a shift changes, or brings."""
        from segcal.data.splits import shifted

        if self.data_config is None or (shift.brings_images and self.split != "test"):
            raise ValueError(f"{shift} needs the test images of a data set, and there is none")
        other = copy.copy(self)
        other.splits = shifted(replace(self.splits, test=self.samples), self.data_config, shift)
        other.name, other.split = f"{self.name}, {shift}", "test"
        other._read(other.splits.test)
        for choose in self.taken if shift.brings_images else ():
            other = other.only(choose(len(other.names)))
        return other

    def on_images(self, folder: str | Path, *, skip_bad: bool = False) -> NetworkSource:
        """The same network on the images of a folder, which have no labels."""
        from segcal.data.splits import without_labels

        other = copy.copy(self)
        other.splits = without_labels(self.splits, folder, skip_bad=skip_bad)
        other.split, other.labelled, other.taken = "test", False, ()
        other._read(other.splits.test)
        return other

    def holdout(self) -> NetworkSource | None:
        """The same network on the hold-out of the data set, whole."""
        if self.split == "holdout":
            return None
        other = copy.copy(self)
        other.split, other.taken = "holdout", ()
        other._read(self.splits.holdout)
        return other

    def input_key(self) -> str:
        """A digest of the images and of how they become inputs."""
        return digest(self.samples.fingerprint(), repr(self.samples.prepare))

    def logit_module(self) -> nn.Module:
        """The network from its inputs to logits, for export."""
        return self.model

    def fingerprint(self) -> str:
        """A digest of the network, the settings of the data, and the images."""
        if not self.key:
            return ""
        config = None if self.data_config is None else asdict(self.data_config)
        return digest(self.key, config, self.samples.fingerprint(), *self._viewed)


class RunSource(NetworkSource):
    """A trained run: its network on a split of its data.

    The folder has config.yaml and the weights, best or last. `batch_size` and `workers` are by
    default those of the training. `skip_bad` leaves out images that cannot be used; a run may say
    so itself. `record` is the log line of the epoch that the weights are from, if it has one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: str = "test",
        weights: str = "best",
        device: torch.device | str = "cpu",
        batch_size: int | None = None,
        workers: int | None = None,
        skip_bad: bool = False,
        group: str = "",
    ) -> None:
        folder = Path(folder)
        path, checkpoint = folder / CONFIG, folder / f"{weights}.pt"
        if not path.exists():
            raise FileNotFoundError(f"{folder} is not a run: there is no {CONFIG} in it")
        config, network, other = _settings(path)
        state = read_checkpoint(checkpoint)
        # A run may come from someone else: opening it downloads nothing.
        config = replace(config, download=False, skip_bad=skip_bad or config.skip_bad)
        splits = data.build(config)
        # The checkpoint has all weights: pretrained ones of the encoder are not needed.
        bare = replace(network, encoder_weights=None)
        model = models.build(bare, splits.num_classes, words=splits.words)
        try:
            model.load_state_dict(state["model"])
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{checkpoint} does not fit the network in {path}: {reason:.200}"
            ) from None
        super().__init__(
            model,
            splits,
            config=config,
            split=split,
            device=device,
            batch_size=batch_size or int(other.get("batch_size", 8)),
            workers=int(other.get("workers", 2)) if workers is None else workers,
            name=folder.resolve().name,
            key=digest(file_digest(checkpoint), asdict(network)),
        )
        self.folder, self.record, self.group = folder, state.get("record"), group
        self.config = path.read_text(encoding="utf-8")
        self.history = _read_log(folder / LOG)


def _settings(path: Path) -> tuple[DataConfig, ModelConfig, dict[str, Any]]:
    """The data and the network that a config.yaml states, and its other settings."""
    stated = read_yaml(path)
    if not isinstance(stated, dict) or not all(
        isinstance(stated.get(section), dict) for section in ("data", "model")
    ):
        raise ValueError(f"{path} is no config.yaml of a run: it needs the sections data and model")
    config = settings.build(data.DataConfig, stated["data"], f"{path}: data.")
    return config, settings.build(models.ModelConfig, stated["model"], f"{path}: model."), stated


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return check_history([json.loads(line) for line in lines])
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: a line must be a JSON object of numbers: {error}") from None


def check_history(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of a log, one per epoch; an error unless they hold numbers."""
    for record in records:
        for value in record.values():
            if value is not None and not isinstance(value, int | float):
                raise TypeError(f"{value!r:.60} in the log")
            float(value or 0)
    return [dict(record) for record in records]


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
            f"the images {tuple(image)} are larger than their labels {tuple(size)}: say "
            "padded=True if they were padded right and below, padded=False if resized"
        )
    full = (image[0] + -image[0] % pad_to, image[1] + -image[1] % pad_to)
    if full != tuple(image):  # the network saw padding: undo it at the size it was added
        logits = resize(logits, full)[..., : image[0], : image[1]]
    if padded:
        logits = resize(logits, image)[..., : size[0], : size[1]]
    return resize(logits, size)
