"""The place where predictions are judged: one pass, one meter for each way to repair them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from segcal import distributed
from segcal.data.predictions import Predictions
from segcal.evaluation.sources import Source
from segcal.metrics import CalibrationMeter, Report

log = logging.getLogger(__name__)
_MAX_IMAGE_SUMS = 2 * 2**30  # bytes; what is kept of each image for the bootstrap


def judge(
    source: Source,
    scalers: Mapping[str, nn.Module | None],
    *,
    num_bins: int = 15,
    resamples: int = 1000,
    title: str = "",
) -> dict[str, Report]:
    """The report of each scaler's predictions, all from one pass over `source`.

    Every process judges its share, and all get the same reports.

    Args:
        source: what to judge.
        scalers: by name; each takes (N, C, *S) logits to logits. None: leave them as they are.
        num_bins: of the reports.
        resamples: of the bootstrap over images; 0 for no intervals.
        title: of the progress bar.
    """
    meters = measure(source, scalers, num_bins=num_bins, per_image=resamples > 0, title=title)
    return {name: labelled(meter, resamples, title) for name, meter in meters.items()}


def labelled(meter: CalibrationMeter, resamples: int, title: str) -> Report:
    """The report of a meter; a ValueError that names `title` if it met no labelled pixel."""
    report = meter.compute(resamples=resamples)
    if not report.protocol.pixels:
        raise ValueError(f"Expected labelled pixels in {title or 'the data'}, but got none")
    return report


def measure(
    source: Source,
    scalers: Mapping[str, nn.Module | None],
    *,
    num_bins: int = 15,
    per_image: bool = True,
    title: str = "",
) -> dict[str, CalibrationMeter]:
    """The meters behind `judge`: the same on every process, each with the pixels of all.

    Args:
        source: as for `judge`.
        scalers: as for `judge`.
        num_bins: as for `judge`.
        per_image: keep sums of each image, if they fit into memory.
        title: as for `judge`.
    """
    per_image = per_image and _fits(source, num_bins * len(scalers))
    meters = {name: new_meter(source, num_bins, per_image=per_image) for name in scalers}
    for batch in with_progress(source, title):
        for name, scaler in scalers.items():
            count(meters[name], repaired(batch, scaler))
        del batch  # before the next one is made
    _share(source.skipped)
    return {name: meter.sync() for name, meter in meters.items()}


def with_progress(source: Source, title: str) -> Iterator[Predictions]:
    """This process's share of `source`, under a progress bar on the first process's terminal."""
    quiet = distributed.rank() != 0 or not sys.stderr.isatty()
    total = len(range(distributed.rank(), source.num_images, distributed.world_size()))
    with tqdm(total=total, desc=title, unit=" images", leave=False, disable=quiet) as bar:
        for batch in source:
            size = len(batch.names)
            yield batch
            del batch  # before the next one is made
            bar.update(size)


def new_meter(source: Source, num_bins: int = 15, *, per_image: bool = False) -> CalibrationMeter:
    """A meter for the predictions of `source`."""
    return CalibrationMeter(
        source.num_classes,
        num_bins,
        source.ignore_index,
        per_image=per_image,
        class_names=source.class_names,
    )


def count(meter: CalibrationMeter, batch: Predictions) -> None:
    """Count a batch, of whichever kind."""
    update = meter.update if batch.kind == "logits" else meter.update_probs
    update(batch.values, batch.labels, names=batch.names)


@torch.inference_mode()
def repaired(batch: Predictions, scaler: nn.Module | None) -> Predictions:
    """A batch with the logits that `scaler` makes of its own; as it is if that is None."""
    if scaler is None:
        return batch
    return replace(batch, kind="logits", values=scaler(batch.logits, batch.images))


def _fits(source: Source, tables: int) -> bool:
    """Whether sums of each image can be kept; `tables` of K numbers an image."""
    needed = 8 * source.num_classes * tables * source.num_images
    if needed > _MAX_IMAGE_SUMS:
        log.warning(
            "no intervals: the bootstrap over %d images of %d classes would take %.1f GiB",
            *(source.num_images, source.num_classes, needed / 2**30),
        )
    return needed <= _MAX_IMAGE_SUMS


def _share(skipped: dict[str, str]) -> None:
    """Let every process know what any of them left out."""
    if distributed.is_distributed():
        parts: list[dict[str, str]] = [{}] * distributed.world_size()
        dist.all_gather_object(parts, skipped)
        for part in parts:
            skipped.update(part)
