"""Post-hoc fits on a hold-out: the network runs once, and its logits are read from files."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.evaluation.evaluate import with_progress
from segcal.evaluation.saved import PredictionFolder
from segcal.evaluation.sources import Predictions, PredictionSource
from segcal.posthoc import SCALERS, Scaler
from segcal.posthoc.registry import NONE, require_multilabel

log = logging.getLogger(__name__)


def fit_scalers(
    methods: Sequence[str], holdout: Callable[[], PredictionSource], *, title: str = ""
) -> dict[str, Scaler | None]:
    """The fitted scaler of each method by its short name, and before them None for "none".

    What a fit warns of, such as that it made nothing better, is logged in one line.

    Args:
        methods: short names.
        holdout: makes the predictions to fit on; not called if there are no methods.
        title: of the progress bar.
    """
    scalers: dict[str, Scaler | None] = {NONE: None}
    if not methods:
        return scalers
    source = holdout()
    options: dict[str, Any] = {"ignore_index": source.ignore_index}
    if source.multilabel:
        for method in methods:
            require_multilabel(method)
        options["multilabel"] = True
    images = any(SCALERS[method].reads_images for method in methods)
    with _rereadable(source, images=images, title=title) as batches:
        for method in methods:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scalers[method] = SCALERS[method](**options).fit(batches)
            for warning in caught:
                log.warning("%s", warning.message)
    if source.skipped:
        log.warning("left out %d files of the hold-out that cannot be used", len(source.skipped))
    return scalers


@contextmanager
def _rereadable(
    source: PredictionSource, *, images: bool, title: str
) -> Iterator[Iterable[tuple[Tensor, ...]]]:
    if isinstance(source, PredictionFolder):  # is in files already
        yield _Files(source)
        return
    with tempfile.TemporaryDirectory(prefix="segcal-") as folder:
        yield record(source, Path(folder), images=images, title=title)


class _Files:
    """Saved predictions as batches of (logits, labels)."""

    def __init__(self, source: PredictionFolder) -> None:
        self._source = source

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in self._source:
            yield batch.logits, batch.labels
            del batch  # before the next is read


class Recording:
    """Batches of (logits, labels) or (logits, labels, images) that were written to files.

    Args:
        folder: of the files.
        count: of the batches.
        device: to put them on.
    """

    def __init__(self, folder: Path, count: int, device: torch.device) -> None:
        self._folder, self._count, self._device = folder, count, device

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for number in range(self._count):
            parts = sorted(self._folder.glob(f"{number}.*.npy"))  # logits, labels, images
            arrays = [np.load(path, allow_pickle=False) for path in parts]
            yield tuple(torch.from_numpy(array).to(self._device) for array in arrays)


def record(
    source: PredictionSource, folder: Path, *, images: bool = False, title: str = ""
) -> Recording:
    """Run once over this process's share of `source`, keeping its predictions in `folder`.

    That takes 4 bytes a pixel and class on the disk, and one batch at a time in memory.

    Args:
        source: the predictions.
        folder: an empty one.
        images: keep the images too.
        title: of the progress bar.
    """
    count, device = 0, torch.device("cpu")
    for batch in with_progress(source, title):
        if count == 0:
            _check_space(source, batch, folder)
        parts = [batch.logits.float(), batch.labels]
        if images and batch.images is not None:
            parts.append(batch.images)
        for number, part in enumerate(parts):
            _save(folder / f"{count}.{number}.npy", part.cpu().numpy())
        count, device = count + 1, batch.values.device
        del batch, parts, part  # before the next is made
    return Recording(folder, count, device)


def _save(path: Path, array: np.ndarray) -> None:
    try:
        np.save(path, array, allow_pickle=False)
    except OSError as error:
        # numpy says of a full disk only how much of the array was written.
        raise OSError(
            error.errno or errno.ENOSPC,
            f"cannot write the logits of the hold-out ({error.strerror or error}), which take 4 "
            "bytes per pixel and class; set TMPDIR to use another folder",
            str(path.parent),
        ) from None


def _check_space(source: PredictionSource, batch: Predictions, folder: Path) -> None:
    """Refuse to begin what cannot be finished; all batches are taken to be like `batch`."""
    if source.num_images is None:
        return
    batches = source.num_images / distributed.world_size() / len(batch.labels)
    needed = 4 * batch.values.numel() * batches / 2**30
    free = shutil.disk_usage(folder).free / 2**30
    if needed > free:
        raise ValueError(
            f"Expected {needed:.1f} GiB free in {folder.parent} for the logits of the hold-out, "
            f"but got {free:.1f} GiB; set TMPDIR to use another folder"
        )
