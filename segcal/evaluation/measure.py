"""The evaluation loop: one pass over the batches of a source, with a meter for every calibrator.

What else counts the batches is a `Watch`: thresholds, class sets, raters, uncertainty and objects.
The loop and the reports know nothing more of it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from segcal import distributed
from segcal.metrics import CalibrationMeter, Report, update_together
from segcal.metrics.protocols import (
    FOREGROUND,
    check_protocols,
    need_image_sums,
    scores_by_protocol,
)
from segcal.metrics.regions import Region, named_regions
from segcal.sources.source import Batch, LogitMap, Source

log = logging.getLogger(__name__)
WHOLE_IMAGE = "all"  # the whole image, among the names of regions
EVERY = 60.0  # seconds between lines of progress, where there is no terminal
_MAX_IMAGE_SUMS = 2 * 2**30  # bytes of per-image sums, all meters together

Groups = Sequence[str] | None  # of the images of a batch
Mask = Callable[[Tensor], Tensor | None]  # of the labels of a batch; None: all of it


@dataclass(frozen=True)
class Watch:
    """A counter beside the meters: it sees every calibrated batch, and adds to the report.

    The labels of R raters come as those of images R times as large.
    """

    update: Callable[[Batch, Groups], object]
    sync: Callable[[], object]  # gathers the counts of all ranks
    complete: Callable[[Report], Report] = lambda report: report  # adds what was counted


def watch_logits(
    counter: Any, complete: Callable[[Report], Report] = lambda report: report
) -> Watch:
    """The watch of a counter with `update(logits, labels, groups)` and `sync()`.

    Where only the top class is known, it gets probabilities in place of logits.
    """

    def update(batch: Batch, groups: Groups) -> None:
        values = batch.values if batch.kind == "top1" else batch.logits
        counter.update(values, batch.labels, groups)

    return Watch(update, counter.sync, complete)


class Measured(NamedTuple):
    """What one calibrator gives: the report, and the sums of whole images behind it."""

    report: Report
    meter: CalibrationMeter


def measure(
    source: Source,
    calibrators: Mapping[str, LogitMap | None],
    *,
    watches: Mapping[str, Sequence[Watch]] | None = None,
    regions: Mapping[str, Region] | None = None,
    protocols: Sequence[str] = (),
    num_bins: int = 15,
    edge_rule: str = "right",
    resamples: int = 1000,
    per_image: bool = False,
    progress: bool | None = None,
) -> dict[str, Measured]:
    """Count the predictions of `source`, after each calibrator, in one pass.

    Every process counts its share, and returns the numbers of all processes. Other arguments are
    as for `evaluate_source`.

    Args:
        source: the predictions.
        calibrators: by name; None leaves the predictions as they are.
        watches: by calibrator, what else counts its batches.
        regions: parts of the images to count as well, by name, for `Report.regions`.
        per_image: keep sums of each image even without resamples.
    """
    watches, regions = watches or {}, dict(regions or {})
    if FOREGROUND in check_protocols(protocols):
        regions |= named_regions([FOREGROUND], 1, multilabel=source.multilabel)
    if WHOLE_IMAGE in regions:
        raise ValueError(f"a region cannot be called {WHOLE_IMAGE!r}: that is the whole image")
    masks: dict[str, tuple[Mask, int]] = {WHOLE_IMAGE: (lambda labels: None, source.raters)}
    masks |= _masks(source, regions)
    tables = num_bins * len(calibrators) * len(masks)
    settings: dict[str, Any] = {
        "num_bins": num_bins,
        "edge_rule": edge_rule,
        "per_image": _keeps_image_sums(source, tables, protocols, asked=per_image or resamples > 0),
    }
    meters = {
        name: {region: new_meter(source, region, n, **settings) for region, (_, n) in masks.items()}
        for name in calibrators
    }
    for name, calibrator in calibrators.items():
        meters[name][WHOLE_IMAGE].changed = None if calibrator is None else 0
    for batch in with_progress(source, progress):
        assert batch.labels is not None  # `with_progress` has looked
        inside = [mask(batch.labels) for mask, _ in masks.values()]
        classes = batch.mask if any(calibrators.values()) else None
        groups = source.groups_of(batch.names)
        for name, calibrator in calibrators.items():
            found = batch.calibrated(calibrator)
            count_batch([*meters[name].values()], found, inside, groups=groups)
            whole = meters[name][WHOLE_IMAGE]
            if whole.changed is not None:
                valid = batch.labels != source.ignore_index
                whole.changed += int(((found.mask != classes) & valid).sum())
            found = found.with_each_rater() if source.raters > 1 else found
            for watch in watches.get(name, ()):
                watch.update(found, groups)
        del batch, inside, found, classes  # before the next batch is made
    # Every process shall know what any of them left out.
    for skipped, sums in distributed.gathered((source.skipped, source.score_sums)):
        source.skipped.update(skipped)
        source.score_sums = {**source.score_sums, **sums}
    measured = {}
    for name, by_region in meters.items():
        reports = {}
        for region, meter in by_region.items():
            meter.sync()
            part = meter.compute(resamples=resamples)
            if region != WHOLE_IMAGE and part.images is not None:
                part = replace(part, images=replace(part.images, table=None))  # it is needed once
            reports[region] = part
        meter = by_region[WHOLE_IMAGE]
        report = replace(reports.pop(WHOLE_IMAGE), regions=reports)
        if protocols:
            report = replace(report, protocols=scores_by_protocol(protocols, report, meter))
        for watch in watches.get(name, ()):
            watch.sync()
            report = watch.complete(report)
        measured[name] = Measured(report, meter)
    return measured


def _masks(source: Source, regions: Mapping[str, Region]) -> dict[str, tuple[Mask, int]]:
    """By name, the mask of each region and the number of its raters.

    The labels of several raters, (R, N, *S), are one region for each of them too.
    """
    if source.raters == 1:
        return {name: (region, 1) for name, region in regions.items()}

    def of_each(region: Region, labels: Tensor) -> Tensor:
        return torch.stack([*map(region, labels)])

    def of_rater(rater: int, labels: Tensor) -> Tensor:
        mask = torch.zeros_like(labels, dtype=torch.bool)
        mask[rater] = True
        return mask

    found: dict[str, tuple[Mask, int]] = {}
    for name, region in regions.items():
        found[name] = partial(of_each, region), source.raters
    for rater in range(source.raters):
        found[f"rater {rater + 1}"] = partial(of_rater, rater), 1
    return found


class Minutes:
    """Logs what is said once a minute, on the first process."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Log the line, if a minute has passed since the last one."""
        if distributed.rank() == 0 and time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            log.info("%s", line)


def with_progress(
    source: Source, progress: bool | None = None, *, labelled: bool = True
) -> Iterator[Batch]:
    """This process's share of `source`, under a progress bar on the first process.

    Without a terminal, the first process logs a line every minute instead; never if `progress` is
    False. A batch that must be `labelled` and is not is a ValueError.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    total = source.num_images
    if total is not None:
        total = len(range(distributed.rank(), total, distributed.world_size()))
    minutes, done = Minutes(), 0
    hidden = distributed.rank() != 0 or not shown
    with tqdm(total=total, desc=source.name, unit=" images", leave=False, disable=hidden) as bar:
        for batch in source:
            if labelled and batch.labels is None:
                raise ValueError(f"{source.name} has no labels to evaluate against")
            size = len(batch.values)
            yield batch
            del batch  # before the next one is made
            bar.update(size)
            done += size
            if progress is None and not shown:
                minutes.say(f"{source.name}: {done}{f' of {total}' if total else ''} images")


def new_meter(
    source: Source, region: str = WHOLE_IMAGE, raters: int = 1, **settings: Any
) -> CalibrationMeter:
    """A meter for the predictions of `source`, with other settings of `CalibrationMeter`."""
    return CalibrationMeter(
        source.num_classes,
        ignore_index=source.ignore_index,
        class_names=source.class_names or None,
        region=region,
        multilabel=source.multilabel,
        top_only=source.top_only,
        raters=raters,
        **settings,
    )


def count_batch(
    meters: Sequence[CalibrationMeter],
    batch: Batch,
    inside: Sequence[Tensor | None] | None = None,
    *,
    groups: Groups = None,
) -> None:
    """Count a batch of logits or of probabilities, in each meter the pixels inside its mask."""
    assert batch.labels is not None
    more: dict[str, Any] = {"inside": inside, "names": batch.names, "groups": groups}
    update_together(meters, batch.values, batch.labels, probs=batch.are_probs, **more)


def require_pixels(report: Report, what: str) -> None:
    """Raise if a report has counted no labelled pixel."""
    if not report.protocol.pixels:
        raise ValueError(f"there are no labelled pixels in {what}")


def _keeps_image_sums(
    source: Source, tables: int, protocols: Sequence[str], *, asked: bool
) -> bool:
    """Whether meters keep sums of each image: if wanted, and if they fit into memory."""
    needed = need_image_sums(protocols)
    size = 8 * source.num_classes * tables * (source.num_images or 0)
    if not (asked or needed) or size <= _MAX_IMAGE_SUMS:
        return asked or needed
    sums = f"sums of {source.num_images} images of {source.num_classes} classes"
    if needed:
        raise ValueError(
            f"the protocols {', '.join(protocols)} need {sums}, which do not fit into memory"
        )
    log.warning("no intervals: the %s would take %.1f GiB", sums, size / 2**30)
    return False
