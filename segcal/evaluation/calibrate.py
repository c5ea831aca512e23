"""What a hold-out decides: post-hoc fits, thresholds of confidence, and class sets.

For the fits, the network runs once, and its logits are read from files.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.evaluation.evaluate import LogitMap, measure, require_pixels, with_progress
from segcal.evaluation.saved import PredictionFolder
from segcal.evaluation.sources import Predictions, PredictionSource
from segcal.metrics import Report
from segcal.metrics.triage import AcceptedPixels, MissRates, SetCounts, Target, choose_threshold
from segcal.posthoc import CALIBRATORS, NONE, Calibrator

log = logging.getLogger(__name__)


def fit_calibrators(
    methods: Sequence[str], holdout: Callable[[], PredictionSource], *, title: str = ""
) -> dict[str, Calibrator | None]:
    """The fitted calibrator of each method by its short name, and before them None for "none".

    Warnings of a fit, such as that it improved nothing, are logged, each in one line.

    Args:
        methods: short names.
        holdout: makes the predictions to fit on; not called if there are no methods.
        title: of the progress bar.
    """
    calibrators: dict[str, Calibrator | None] = {NONE: None}
    if not methods:
        return calibrators
    source = holdout()
    options: dict[str, Any] = {"ignore_index": source.ignore_index}
    if source.multilabel:
        options["multilabel"] = True
    unfitted = {method: CALIBRATORS[method](**options) for method in methods}
    images = any(calibrator.reads_images for calibrator in unfitted.values())
    with _rereadable(source, images=images, title=title) as batches:
        for method in methods:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                calibrators[method] = unfitted[method].fit(batches)
            for warning in caught:
                log.warning("%s", warning.message)
    if source.skipped:
        log.warning("left out %d files of the hold-out that cannot be used", len(source.skipped))
    return calibrators


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

    That takes 4 bytes per pixel and class on the disk, and one batch at a time in memory.

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
    """Raise if the disk is too small for all batches, if they are as large as `batch`."""
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


@dataclass(frozen=True)
class Triage:
    """What was chosen for one calibrator, and the counts of the test images under it.

    Attributes:
        holdout: the report of the hold-out.
        accepted: by target, the counts at its threshold.
        sets: by promised miss rate, the counts of its class sets.
        holdout_miss: by promised miss rate, the mean miss rate of the hold-out.
    """

    holdout: Report
    accepted: Mapping[Target, AcceptedPixels] = field(default_factory=dict)
    sets: Mapping[float, SetCounts] = field(default_factory=dict)
    holdout_miss: Mapping[float, float] = field(default_factory=dict)

    @property
    def observers(self) -> list[AcceptedPixels | SetCounts]:
        """What must see the test images; see `measure`."""
        return [*self.accepted.values(), *self.sets.values()]

    def complete(self, report: Report) -> Report:
        """The report of the test images with the operating points and class sets."""
        images = self.holdout.protocol.images
        return replace(
            report,
            operating_points=tuple(
                counts.point(target, self.holdout.fine, images)
                for target, counts in self.accepted.items()
            ),
            class_sets=tuple(
                counts.sets(alpha, images, self.holdout_miss[alpha])
                for alpha, counts in self.sets.items()
            ),
        )


def choose_on_holdout(
    holdout: Callable[[], PredictionSource],
    calibrators: Mapping[str, LogitMap | None],
    *,
    targets: Sequence[Target] = (),
    misses: Sequence[float] = (),
    title: str = "",
) -> dict[str, Triage]:
    """Choose thresholds and class sets after each calibrator, in one pass over the hold-out.

    Args:
        holdout: makes the predictions to choose on.
        calibrators: by name; None leaves the predictions as they are.
        targets: of operating points.
        misses: promised miss rates of class sets.
        title: of the progress bar.

    Returns:
        By the name of the calibrator.

    Raises:
        ValueError: the hold-out has no labelled pixels, or too few images for a miss rate.
    """
    source = holdout()
    ignore, multilabel = source.ignore_index, source.multilabel
    if misses and multilabel:
        raise ValueError(
            "Expected predictions of one class per pixel for class sets, but got sigmoid outputs"
        )
    rates = {name: MissRates(ignore) for name in calibrators if misses}
    watching = {name: [found] for name, found in rates.items()}
    measured = measure(source, calibrators, observers=watching, per_image=False, title=title)
    triage = {}
    for name, found in measured.items():
        report = require_pixels(found.report(resamples=0), "the hold-out")
        chosen = {alpha: rates[name].choose(alpha) for alpha in misses}
        triage[name] = Triage(
            report,
            {
                t: AcceptedPixels(choose_threshold(report.fine, t), ignore, multilabel=multilabel)
                for t in targets
            },
            {alpha: SetCounts(lam, ignore) for alpha, (lam, _) in chosen.items()},
            {alpha: miss for alpha, (_, miss) in chosen.items()},
        )
    return triage
