"""The evaluation loop: one pass over predictions, a meter for every calibrator and region.

`segcal.evaluate` wraps any module and loader for it; the trainer, the commands and sweeps call
the same loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from segcal import distributed
from segcal.evaluation.sources import LoaderPredictions, Predictions, PredictionSource, eval_mode
from segcal.metrics import CalibrationMeter, Report, update_together
from segcal.metrics.protocols import (
    FOREGROUND,
    check_protocols,
    need_image_sums,
    scores_by_protocol,
)
from segcal.metrics.regions import Region, any_present, foreground
from segcal.posthoc import NONE, Calibrator

log = logging.getLogger(__name__)
WHOLE_IMAGE = "all"  # the whole image, among the names of regions
_MAX_IMAGE_SUMS = 2 * 2**30  # bytes of per-image sums, all meters together

# Takes (N, C, *S) logits, and the (N, 3, H, W) images if there are any, to (N, C, *S) logits.
LogitMap = Callable[[Tensor, Tensor | None], Tensor]


class Observer(Protocol):
    """Something that counts logits and labels as `Predictions` has them, batch by batch."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch."""
        ...

    def sync(self) -> Any:
        """Sum over all ranks; every rank must call it, those without batches too."""
        ...


@dataclass(frozen=True)
class Measured:
    """The meters of one calibrator.

    Attributes:
        whole: of whole images.
        regions: of parts of the same images, by name.
        protocols: other ways to average that the report has.
    """

    whole: CalibrationMeter
    regions: Mapping[str, CalibrationMeter]
    protocols: Sequence[str] = ()

    @property
    def meters(self) -> list[CalibrationMeter]:
        """That of whole images, then those of the regions."""
        return [self.whole, *self.regions.values()]

    def report(self, *, resamples: int = 1000) -> Report:
        """The report of whole images, with those of the regions inside."""
        parts = {
            name: _without_table(meter.compute(resamples=resamples))
            for name, meter in self.regions.items()
        }
        report = replace(self.whole.compute(resamples=resamples), regions=parts)
        if not self.protocols:
            return report
        return replace(report, protocols=scores_by_protocol(self.protocols, report, self.whole))


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_classes: int,
    ignore_index: int = 255,
    num_bins: int = 15,
    edge_rule: str = "right",
    device: torch.device | str | None = None,
    transform: Callable[[Tensor], Tensor] | Calibrator | None = None,
    regions: Mapping[str, Region] | None = None,
    protocols: Sequence[str] = (),
    per_image: bool = False,
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    pad_to: int = 1,
    padded: bool | None = None,
    multilabel: bool = False,
    progress: bool = True,
) -> Report:
    """Evaluate `model` on every batch of `loader`, at the resolution of the labels.

    The model runs in eval mode; its mode is restored afterwards. Under torch.distributed each rank
    evaluates its own share of the data (without repeats: shard by `indices[rank::world]`) and
    every rank returns the report of the whole.

    Args:
        model: any module from (N, ...) inputs to (N, C, *S) logits, or to a dict, tuple or object
            that holds them under "out" or "logits", or first.
        loader: gives (inputs, labels), or (inputs, labels, names of the images).
        num_classes: C.
        ignore_index: the label that means "do not count this pixel".
        num_bins: of the meter.
        edge_rule: of the meter.
        device: where to run; by default where the model's parameters are.
        transform: applied to the logits at label resolution. A fitted calibrator also gets the inputs,
            as calibrators that read images need.
        regions: parts of the images to evaluate as well, by name; see `segcal.metrics.regions`.
            Their reports are in `Report.regions`.
        protocols: other ways to average, such as "image" or "batch:8", whose scores are in
            `Report.protocols`; see `segcal.metrics.protocols`.
        per_image: keep sums per image, for intervals and for the worst images.
        names: of all images of the loader, in order; instead of names in the batches.
        class_names: for the report.
        pad_to: pad images right and below with 0 to sides of this multiple, and crop the logits.
        padded: whether images that are larger than their labels were padded right and below (the
            logits are cropped) or resized (the logits are resized back).
        multilabel: the logits are of C sigmoid outputs, and labels (N, C, *S) of 0, 1 or the ignore
            index; see `CalibrationMeter`.
        progress: show a progress bar (on rank 0).

    Raises:
        ValueError: a batch that does not fit, or labels or logits that cannot be counted.
    """
    with eval_mode(model) as network:
        source = LoaderPredictions(
            network,
            loader,
            num_classes=num_classes,
            class_names=class_names,
            ignore_index=ignore_index,
            device=device,
            names=names,
            pad_to=pad_to,
            padded=padded,
            multilabel=multilabel,
        )
        measured = measure(
            source,
            {NONE: _logit_map(transform)},
            regions=regions,
            protocols=protocols,
            num_bins=num_bins,
            edge_rule=edge_rule,
            per_image=per_image,
            title="evaluate",
            progress=progress,
        )
    return measured[NONE].report()


def measure(
    source: PredictionSource,
    calibrators: Mapping[str, LogitMap | None],
    *,
    regions: Mapping[str, Region] | None = None,
    protocols: Sequence[str] = (),
    observers: Mapping[str, Sequence[Observer]] | None = None,
    num_bins: int = 15,
    edge_rule: str = "right",
    per_image: bool = True,
    title: str = "",
    progress: bool | None = None,
) -> dict[str, Measured]:
    """Count the predictions of `source`, after each calibrator, in one pass.

    Every process counts its share; the meters that it returns hold the pixels of all processes.

    Args:
        source: the predictions.
        calibrators: by name; None leaves the predictions as they are.
        regions: parts of the images to count as well, by name.
        protocols: other ways to average that the reports shall have.
        observers: by calibrator, what shall see its logits and labels as well.
        num_bins: of the meters.
        edge_rule: of the meters.
        per_image: keep sums of each image, if they fit into memory.
        title: of the progress bar.
        progress: show a bar; by default if stderr is a terminal.
    """
    regions, observers = dict(regions or {}), observers or {}
    if FOREGROUND in check_protocols(protocols):
        regions[FOREGROUND] = any_present if source.multilabel else foreground
    if WHOLE_IMAGE in regions:
        raise ValueError(
            f"Expected other names for regions than {WHOLE_IMAGE!r}, which is the whole image"
        )
    tables = num_bins * len(calibrators) * (1 + len(regions))
    per_image = keeps_image_sums(source, tables, protocols, asked=per_image)

    def meter(region: str) -> CalibrationMeter:
        return new_meter(source, num_bins, edge_rule=edge_rule, per_image=per_image, region=region)

    measured = {
        name: Measured(meter(WHOLE_IMAGE), {region: meter(region) for region in regions}, protocols)
        for name in calibrators
    }
    for batch in with_progress(source, title, progress):
        if batch.continued and observers:
            raise ValueError(
                "Expected volumes that can be read whole for operating points and class sets, "
                f"which count by image, but got {(batch.names or ['one'])[0]}"
            )
        inside = [None, *(_inside(region, batch) for region in regions.values())]
        for name, calibrator in calibrators.items():
            scaled = calibrated(batch, calibrator)
            count_batch(measured[name].meters, scaled, inside)
            for observer in observers.get(name, ()):
                observer.update(scaled.logits, scaled.labels)
        del batch, inside, scaled  # before the next batch is made
    _share(source.skipped)
    for name, found in measured.items():
        for one in (*found.meters, *observers.get(name, ())):
            one.sync()
    return measured


def _inside(region: Region, batch: Predictions) -> Tensor:
    """The pixels of a batch in a region, as its labels are; it may look at slices beyond a part."""
    if batch.part is None:
        return region(batch.labels)
    start, stop = batch.part.start, batch.part.start + batch.labels.shape[-3]
    reach: int = getattr(region, "reach", 0)
    first = max(start - reach, 0)
    seen = region(batch.part.labels[..., first : stop + reach, :, :])
    return seen[..., start - first : stop - first, :, :]


def _without_table(report: Report) -> Report:
    """The report of a region without the table of images, which only that of whole images needs."""
    images = report.images
    return report if images is None else replace(report, images=replace(images, table=None))


def require_pixels(report: Report, what: str) -> Report:
    """The report itself; a ValueError that names `what` if it counted no labelled pixel."""
    if not report.protocol.pixels:
        raise ValueError(f"Expected labelled pixels in {what}, but got none")
    return report


def with_progress(
    source: PredictionSource, title: str, progress: bool | None = None
) -> Iterator[Predictions]:
    """This process's share of `source`, under a progress bar on the first process."""
    shown = sys.stderr.isatty() if progress is None else progress
    hidden = distributed.rank() != 0 or not shown
    total = source.num_images
    if total is not None:
        total = len(range(distributed.rank(), total, distributed.world_size()))
    with tqdm(total=total, desc=title, unit=" images", leave=False, disable=hidden) as bar:
        for batch in source:
            size = 0 if batch.continued else len(batch.labels)
            yield batch
            del batch  # before the next one is made
            bar.update(size)


def new_meter(
    source: PredictionSource,
    num_bins: int = 15,
    *,
    edge_rule: str = "right",
    per_image: bool = False,
    region: str = WHOLE_IMAGE,
) -> CalibrationMeter:
    """A meter for the predictions of `source`."""
    return CalibrationMeter(
        source.num_classes,
        num_bins,
        source.ignore_index,
        edge_rule=edge_rule,
        per_image=per_image,
        class_names=source.class_names,
        region=region,
        multilabel=source.multilabel,
    )


def count_batch(
    meters: Sequence[CalibrationMeter],
    batch: Predictions,
    inside: Sequence[Tensor | None] | None = None,
) -> None:
    """Count a batch of logits or of probabilities, in each meter the pixels inside its mask."""
    update_together(
        meters,
        batch.values,
        batch.labels,
        inside=inside,
        names=batch.names,
        probs=batch.are_probs,
    )


@torch.inference_mode()
def calibrated(batch: Predictions, calibrator: LogitMap | None) -> Predictions:
    """The batch with the logits that `calibrator` makes of its own; unchanged if that is None."""
    if calibrator is None:
        return batch
    return batch.with_logits(calibrator(batch.logits, batch.images))


def _logit_map(transform: Callable[[Tensor], Tensor] | Calibrator | None) -> LogitMap | None:
    if transform is None or isinstance(transform, Calibrator):
        return transform
    return lambda logits, images: transform(logits)


def keeps_image_sums(
    source: PredictionSource, tables: int, protocols: Sequence[str], *, asked: bool
) -> bool:
    """Whether meters keep sums of each image: if wanted, and if they fit into memory.

    Args:
        source: the predictions.
        tables: how many tables of K numbers per image all meters have.
        protocols: some need these sums.
        asked: the caller wants them, for intervals.

    Raises:
        ValueError: a protocol needs sums that do not fit.
    """
    needed = need_image_sums(protocols)
    if source.num_images is None or not (asked or needed):
        return asked or needed
    size = 8 * source.num_classes * tables * source.num_images
    if size <= _MAX_IMAGE_SUMS:
        return True
    if needed:
        raise ValueError(
            "Expected sums of each image to fit into memory for the protocols "
            f"{', '.join(protocols)}, but got too many images"
        )
    log.warning(
        "no intervals: the bootstrap over %d images of %d classes would take %.1f GiB",
        *(source.num_images, source.num_classes, size / 2**30),
    )
    return False


def _share(skipped: dict[str, str]) -> None:
    """Let every process know what any of them left out."""
    if distributed.is_distributed():
        parts: list[dict[str, str]] = [{}] * distributed.world_size()
        dist.all_gather_object(parts, skipped)
        for part in parts:
            skipped.update(part)
