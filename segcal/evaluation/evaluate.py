"""The evaluation loop, and what is built on it: `evaluate`, `evaluate_source`, `Evaluation`.

`measure` makes one pass over the batches of a source, with a meter for every calibrator and
region. The trainer, the commands, sweeps and adapters call it.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from segcal import distributed
from segcal.metrics import CalibrationMeter, Report, update_together
from segcal.metrics.drift import HoldoutProfile
from segcal.metrics.intervals import looks_like_sequence
from segcal.metrics.objects import ObjectCounter, ObjectRule
from segcal.metrics.protocols import (
    FOREGROUND,
    check_protocols,
    need_image_sums,
    scores_by_protocol,
)
from segcal.metrics.raters import RaterAgreement
from segcal.metrics.regions import Region, any_present, foreground, named_regions
from segcal.metrics.scores import NEED_ALL_CLASSES, SCORES
from segcal.metrics.uncertainty import ErrorDetection
from segcal.posthoc import NONE, Calibrator, label
from segcal.sources.source import Batch, Source

if TYPE_CHECKING:
    from segcal.data.shift import Shift
    from segcal.metrics.conditions import Condition
    from segcal.viz import Overlay, PageRow

log = logging.getLogger(__name__)
WHOLE_IMAGE = "all"  # the whole image, among the names of regions
EVERY = 60.0  # seconds between lines of progress, where there is no terminal
_MAX_IMAGE_SUMS = 2 * 2**30  # bytes of per-image sums, all meters together

# Takes (N, C, *S) logits, and the (N, 3, H, W) images if there are any, to (N, C, *S) logits.
LogitMap = Callable[[Tensor, Tensor | None], Tensor]
Meters = dict[str, CalibrationMeter]  # of one calibrator by region, `WHOLE_IMAGE` first
Key = str | tuple[str, str]  # "ts", or ("ts", "fog:3") under a shift


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_classes: int,
    ignore_index: int | None = None,
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
    progress: bool | None = True,
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
        ignore_index: the label that is not counted; None: 255, or -100 if 255 is a class.
        num_bins: bins of the meter.
        edge_rule: rule of the meter for the edges of its bins.
        device: where to run; by default where the model's parameters are.
        transform: applied to the logits at label resolution. A fitted calibrator also gets the
            inputs, as calibrators that read images need.
        regions: parts of the images to evaluate as well, by name; see `segcal.metrics.regions`.
            Their reports are in `Report.regions`.
        protocols: other ways to average, such as "image" or "batch:8", whose scores are in
            `Report.protocols`; see `segcal.metrics.protocols`.
        per_image: keep sums per image, for intervals and for the worst images.
        names: names of all images of the loader, in order, instead of names in the batches.
        class_names: C names for the report.
        pad_to: pad images right and below with 0 to sides of this multiple, and crop the logits.
        padded: whether images that are larger than their labels were padded right and below (the
            logits are cropped) or resized (the logits are resized back).
        multilabel: the logits are of C sigmoid outputs, and labels (N, C, *S) of 0, 1 or the ignore
            index; see `CalibrationMeter`.
        progress: show a progress bar (on rank 0).

    Raises:
        ValueError: a batch that does not fit, or labels or logits that cannot be counted.
    """
    from segcal.sources.network import LoaderSource, eval_mode

    calibrator: LogitMap | None
    if transform is None or isinstance(transform, Calibrator):
        calibrator = transform
    else:
        plain = transform

        def calibrator(logits: Tensor, images: Tensor | None) -> Tensor:
            return plain(logits)

    with eval_mode(model) as network:
        source = LoaderSource(
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
            name="evaluate",
        )
        measured = measure(
            source,
            {NONE: calibrator},
            regions=regions,
            protocols=protocols,
            num_bins=num_bins,
            edge_rule=edge_rule,
            per_image=per_image,
            progress=progress,
        )
    return report_of(measured[NONE], protocols)


def measure(
    source: Source,
    calibrators: Mapping[str, LogitMap | None],
    *,
    regions: Mapping[str, Region] | None = None,
    protocols: Sequence[str] = (),
    observers: Mapping[str, Sequence[Any]] | None = None,
    detection: Mapping[str, ErrorDetection] | None = None,
    objects: Mapping[str, ObjectCounter] | None = None,
    num_bins: int = 15,
    edge_rule: str = "right",
    per_image: bool = True,
    progress: bool | None = None,
) -> dict[str, Meters]:
    """Count the predictions of `source`, after each calibrator, in one pass.

    Every process counts its share; the meters that it returns hold the pixels of all processes.

    Args:
        source: the predictions.
        calibrators: by name; None leaves the predictions as they are.
        regions: parts of the images to count as well, by name.
        protocols: other ways to average that the reports shall have.
        observers: by calibrator, counters of operating points and class sets, whose `update` sees
            the same logits and labels.
        detection: by calibrator, histograms of uncertainty.
        objects: by calibrator, counters of objects.
        num_bins: bins of the meters.
        edge_rule: rule of the meters for the edges of their bins.
        per_image: keep sums of each image, if they fit into memory.
        progress: show a bar; by default if stderr is a terminal.

    Returns:
        By calibrator the meters by region; the first, `WHOLE_IMAGE`, counts whole images.
    """
    regions, observers, detection = dict(regions or {}), observers or {}, detection or {}
    objects = objects or {}
    if FOREGROUND in check_protocols(protocols):
        regions[FOREGROUND] = any_present if source.multilabel else foreground
    if WHOLE_IMAGE in regions:
        raise ValueError(f"a region cannot be called {WHOLE_IMAGE!r}: that is the whole image")
    raters = [f"rater {r + 1}" for r in range(source.raters)] if source.raters > 1 else []
    tables = num_bins * len(calibrators) * (1 + len(regions) + len(raters))
    per_image = _keeps_image_sums(source, tables, protocols, asked=per_image)
    measured = {
        name: {
            region: new_meter(
                source,
                num_bins,
                edge_rule=edge_rule,
                per_image=per_image,
                region=region,
                raters=1 if region in raters else source.raters,
            )
            for region in (WHOLE_IMAGE, *regions, *raters)
        }
        for name in calibrators
    }
    for name, calibrator in calibrators.items():
        measured[name][WHOLE_IMAGE].changed = None if calibrator is None else 0
    for batch in with_progress(source, progress):
        assert batch.labels is not None  # `with_progress` has looked
        labels = batch.labels
        if raters:
            inside = [None, *(torch.stack([*map(region, labels)]) for region in regions.values())]
            number = torch.arange(len(raters), device=labels.device)
            number = number.view(-1, *[1] * (labels.ndim - 1)).expand_as(labels)
            inside += [number == r for r in range(len(raters))]
        else:
            inside = [None, *(region(labels) for region in regions.values())]
        mask = batch.mask if any(calibrators.values()) else None
        for name, calibrator in calibrators.items():
            found = calibrated(batch, calibrator)
            whole = measured[name][WHOLE_IMAGE]
            if whole.changed is not None:
                valid = batch.labels != source.ignore_index
                whole.changed += int(((found.mask != mask) & valid).sum())
            groups = source.groups_of(batch.names)
            count_batch([*measured[name].values()], found, inside, groups=groups)
            found = found.with_each_rater() if raters else found
            assert found.labels is not None
            for observer in observers.get(name, ()):
                values = found.values if source.top_only else found.logits
                observer.update(values, found.labels, groups)
            if name in detection:
                detection[name].update(found.probs, found.labels, found.spread, groups)
            if name in objects:
                objects[name].update(found.probs, batch.labels, batch.names, groups)
        del batch, inside, found, mask  # before the next batch is made
    if distributed.is_distributed():  # every process shall know what any of them left out
        parts: list[Any] = [None] * distributed.world_size()
        dist.all_gather_object(parts, (source.skipped, source.score_sums))
        for skipped, sums in parts:
            source.skipped.update(skipped)
            source.score_sums = {**source.score_sums, **sums}
    for name, meters in measured.items():
        for one in (*meters.values(), *observers.get(name, ())):
            one.sync()
        for counted in (detection, objects):
            if name in counted:
                counted[name].sync()
    return measured


def report_of(meters: Meters, protocols: Sequence[str] = (), *, resamples: int = 1000) -> Report:
    """The report of whole images, with those of the regions, from the meters of one calibrator."""
    whole = meters[WHOLE_IMAGE]
    parts = {}
    for name, meter in meters.items():
        if name != WHOLE_IMAGE:  # the table of images is needed once
            part = meter.compute(resamples=resamples)
            images = None if part.images is None else replace(part.images, table=None)
            parts[name] = replace(part, images=images)
    report = replace(whole.compute(resamples=resamples), regions=parts)
    if not protocols:
        return report
    return replace(report, protocols=scores_by_protocol(protocols, report, whole))


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
    False. Unless `labelled` is False, a batch without labels is a ValueError.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    total = source.num_images
    if total is not None:
        total = len(range(distributed.rank(), total, distributed.world_size()))
    minutes = Minutes()
    with tqdm(
        total=total,
        desc=source.name,
        unit=" images",
        leave=False,
        disable=distributed.rank() != 0 or not shown,
    ) as bar:
        done = 0
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
    source: Source,
    num_bins: int = 15,
    *,
    edge_rule: str = "right",
    per_image: bool = False,
    region: str = WHOLE_IMAGE,
    raters: int = 1,
) -> CalibrationMeter:
    """A meter for the predictions of `source`."""
    return CalibrationMeter(
        source.num_classes,
        num_bins,
        source.ignore_index,
        edge_rule=edge_rule,
        per_image=per_image,
        class_names=source.class_names or None,
        region=region,
        multilabel=source.multilabel,
        top_only=source.top_only,
        raters=raters,
    )


def new_detection(
    source: Source, calibrators: Iterable[str], resamples: int
) -> dict[str, ErrorDetection]:
    """Histograms of uncertainty of the predictions of `source` after each calibrator."""
    return {
        name: ErrorDetection(
            source.num_classes,
            source.ignore_index,
            multilabel=source.multilabel,
            per_image=resamples > 0,
        )
        for name in calibrators
    }


def count_batch(
    meters: Sequence[CalibrationMeter],
    batch: Batch,
    inside: Sequence[Tensor | None] | None = None,
    *,
    groups: Sequence[str] | None = None,
) -> None:
    """Count a batch of logits or of probabilities, in each meter the pixels inside its mask."""
    assert batch.labels is not None  # `with_progress` has looked
    update_together(
        meters,
        batch.values,
        batch.labels,
        inside=inside,
        names=batch.names,
        groups=groups,
        probs=batch.are_probs,
    )


@torch.inference_mode()
def calibrated(batch: Batch, calibrator: LogitMap | None) -> Batch:
    """The batch with the logits that `calibrator` makes of its own; unchanged if that is None."""
    if calibrator is None:
        return batch
    return batch.with_logits(calibrator(batch.logits, batch.images))


def require_pixels(report: Report, what: str) -> Report:
    """The report itself; a ValueError that names `what` if it counted no labelled pixel."""
    if not report.protocol.pixels:
        raise ValueError(f"there are no labelled pixels in {what}")
    return report


def _keeps_image_sums(
    source: Source, tables: int, protocols: Sequence[str], *, asked: bool
) -> bool:
    """Whether meters keep sums of each image: if wanted, and if they fit into memory."""
    needed = need_image_sums(protocols)
    if source.num_images is None or not (asked or needed):
        return asked or needed
    size = 8 * source.num_classes * tables * source.num_images
    if size <= _MAX_IMAGE_SUMS:
        return True
    if needed:
        raise ValueError(
            f"the protocols {', '.join(protocols)} need sums of each image, which do not fit "
            f"into memory: {source.num_images} images of {source.num_classes} classes"
        )
    log.warning(
        "no intervals: the sums of %d images of %d classes would take %.1f GiB",
        source.num_images,
        source.num_classes,
        size / 2**30,
    )
    return False


@dataclass
class Evaluation:
    """What is known of one network: reports by calibrator and shift, and what a page shows.

    Attributes:
        name: what tables call the network.
        reports: by the short name of the calibrator ("none" is the network as it is), and by
            (calibrator, shift) under shifts: reports["ts"], reports["ts", "fog:3"].
        calibrators: the fitted calibrators by short name, without "none".
        profiles: by calibrator, what `segcal.apply` needs to know of the hold-out, if there is one.
        meters: the sums behind the reports, by the same keys.
        keys: digests of what the reports under shift depend on, by the same keys.
        overlays: pictures of some images, and of one under shifts, by calibrator.
        object_calibrators: the fitted maps of the confidence of objects, by short name.
        object_overlay: a picture of false and missed objects, PNG.
        skipped: the reason, by name, for each image that was left out.
        config: the settings behind the network as YAML.
        history: the log of its training, one record per epoch.
        notes: sentences for the reader: what was fitted, and what to doubt.
    """

    name: str
    reports: dict[Key, Report]
    calibrators: dict[str, Calibrator] = field(default_factory=dict)
    profiles: dict[str, HoldoutProfile] = field(default_factory=dict, repr=False)
    meters: Mapping[Key, CalibrationMeter] = field(default_factory=dict, repr=False)
    keys: dict[Key, str] = field(default_factory=dict, repr=False)
    overlays: dict[str, list[Overlay]] = field(default_factory=dict, repr=False)
    object_calibrators: dict[str, Calibrator] = field(default_factory=dict)
    object_overlay: bytes | None = field(default=None, repr=False)
    skipped: dict[str, str] = field(default_factory=dict)
    config: str = field(default="", repr=False)
    history: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    notes: list[str] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        """The short names of the calibrators; "none" is the first."""
        return [key for key in self.reports if isinstance(key, str)]

    @property
    def shifts(self) -> list[str]:
        """The shifts, such as "fog:3"."""
        return list(dict.fromkeys(key[1] for key in self.reports if isinstance(key, tuple)))

    def rows(self) -> list[PageRow]:
        """A row of tables and pages for each calibrator."""
        from segcal.viz import PageRow

        return [
            PageRow(
                name=title(self.name, method),
                report=self.reports[method],
                history=self.history if method == NONE else (),  # drawn once
                config=self.config
                + (
                    f"# post-hoc: {self.calibrators[method]}\n"
                    if method in self.calibrators
                    else ""
                ),
                overlays=self.overlays.get(method, []),
                skipped=self.skipped if method == NONE else {},
                shifts={
                    key[1]: report
                    for key, report in self.reports.items()
                    if isinstance(key, tuple) and key[0] == method
                },
                object_overlay=self.object_overlay if method == NONE else None,
                notes=self.notes if method == NONE else (),
            )
            for method in self.methods
        ]

    def broken(self, conditions: Sequence[Condition]) -> list[str]:
        """Which conditions the last post-hoc method breaks, or the network if there is none."""
        method = self.methods[-1]
        found = [condition.broken_by(self.reports[method]) for condition in conditions]
        return [f"{title(self.name, method)}: {line}" for line in found if line]

    def save(self, folder: str | Path) -> Path:
        """Write reports, states, calibrators, tables and the page; see `segcal.evaluation.folder`.

        What is in the folder is replaced when all is written. Under torch.distributed only the
        first process writes.

        Args:
            folder: made if missing.

        Returns:
            The path of the page.
        """
        from segcal.evaluation.folder import save

        return save(self, Path(folder))

    def _repr_html_(self) -> str:
        from segcal.viz.tables import score_tables

        rows = {title(self.name, method): self.reports[method] for method in self.methods}
        return str(score_tables(rows)[0].html())


def title(name: str, method: str) -> str:
    """What tables call a network after a post-hoc method."""
    return name if method == NONE else f"{name} + {label(method)}"


def evaluate_source(
    source: Source,
    *,
    holdout: Source | None = None,
    posthoc: Sequence[str] = (),
    shifts: Sequence[str | Shift] = (),
    fit_shift: str | None = None,
    fit_ood: str | Path | Source | None = None,
    fit_target: str | Path | Source | None = None,
    regions: Sequence[str] = (),
    protocols: Sequence[str] = (),
    operate: Sequence[Any] = (),
    conformal: Sequence[Any] = (),
    uncertainty: bool | None = None,
    objects: str | ObjectRule | None = None,
    num_bins: int = 15,
    resamples: int = 1000,
    overlays: str = "worst",
    num_overlays: int = 8,
    cache: str | Path | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Evaluate a source as it is and after each post-hoc method, and under each shift.

    Under torch.distributed every process calls this with the same arguments, counts its share,
    and returns the numbers of the whole; the first one also draws.

    Args:
        source: the predictions to evaluate.
        holdout: the predictions that calibrators, operating points and class sets are chosen on;
            by default the source's own hold-out.
        posthoc: short names of post-hoc methods, such as "ts" or "ts@shift"; "none" is always
            there. See `segcal.evaluation.ways` for the ways to fit them.
        shifts: shifts to evaluate under as well, such as "fog:3"; they need a network.
        fit_shift: the changes of the hold-out that ts@shift and ts@set are fitted on; by default
            "all:1,3". The family of a corruption that is tested is left out.
        fit_ood: images of anything else, for ts@ood: a folder, or a source.
        fit_target: unlabelled images, for ts@target and ts@set: a folder, or a source. By default
            the test images, clean or under the shift, without their labels.
        regions: names of regions, such as "boundary:3"; see `segcal.metrics.regions`.
        protocols: other ways to average, such as "image"; see `segcal.metrics.protocols`.
        operate: targets of operating points, such as "accuracy=0.99".
        conformal: promised miss rates of class sets, such as 0.1.
        uncertainty: whether to compare kinds of uncertainty as finders of errors, which is in
            `Report.detection`; by default where members or views of a network are pooled.
        objects: the classes whose objects are evaluated too, such as "classes:1,2", or a whole
            `ObjectRule`; their scores are in `Report.objects`.
        num_bins: bins of confidence.
        resamples: resamples over the images, for intervals; 0 for none.
        overlays: the images to draw: worst, random, none, or names with commas between them.
        num_overlays: how many images to draw.
        cache: folder of results under shift: those of the same network, calibrator, settings and
            images are read from there, and new ones are stored. `Evaluation.save` writes the same
            files.
        progress: show bars; by default if stderr is a terminal.

    Raises:
        ValueError: in one line, what does not fit.
    """
    from segcal.evaluation import holdout as choosing
    from segcal.evaluation import overlays as drawing
    from segcal.evaluation.objects import draw_objects, object_note, object_reports
    from segcal.evaluation.shifts import evaluate_shift, open_shifts
    from segcal.evaluation.ways import fit_ways

    methods = [method for method in dict.fromkeys(posthoc) if method != NONE]
    if source.top_only and (methods or conformal or uncertainty):
        raise ValueError(
            "post-hoc methods, class sets and kinds of uncertainty need all classes, but "
            f"{source.name} has the top class of each pixel alone"
        )
    shifted = open_shifts(source, shifts)
    drawing.require_images(overlays, source)
    settings: dict[str, Any] = {"num_bins": num_bins, "progress": progress}
    fitted: dict[str, dict[str, Calibrator]] = {"": {}, **{shift: {} for shift in shifted}}
    ways: dict[str, Any] = {"fit_shift": fit_shift, "fit_ood": fit_ood, "fit_target": fit_target}
    chosen = None
    rule = ObjectRule.parse(objects) if isinstance(objects, str) else objects
    if rule and (source.top_only or source.raters > 1):
        raise ValueError("objects need the probabilities of all classes, and one rater")

    def counters() -> dict[str, ObjectCounter]:
        kind = (source.num_classes, source.ignore_index)
        if rule is None:
            return {}
        return {
            name: ObjectCounter(rule, *kind, multilabel=source.multilabel)
            for name in (NONE, *methods)
        }

    counted, on_holdout = counters(), counters()
    if methods or operate or conformal or (rule and rule.calibrate):
        holdout = source.holdout() if holdout is None else holdout
        if holdout is None:
            raise ValueError(
                "post-hoc methods, thresholds and class sets are chosen on a hold-out, and "
                "there is none: pass holdout= (--holdout or --holdout-fraction for --model, "
                "--fit-predictions for saved predictions)"
            )
        if holdout.top_only != source.top_only:
            raise ValueError("hold-out and test must both have all classes, or both the top one")
        if source.group and not holdout.group:
            holdout = copy.copy(holdout)
            holdout.group = source.group
        with choosing.recorded(holdout, methods, progress=progress) as recording:
            fitted = fit_ways(methods, recording, holdout, source, shifted, **ways)
            chosen = choosing.choose(
                recording, fitted[""], operate, conformal, on_holdout, **settings
            )
    calibrators = fitted[""]
    maps: dict[str, dict[str, Calibrator | None]]
    maps = {shift: {NONE: None, **found} for shift, found in fitted.items()}
    uncertainty = source.pools if uncertainty is None else uncertainty
    detection = new_detection(source, maps[""], resamples) if uncertainty else {}
    observers: dict[str, Sequence[Any]] = {}
    if chosen is not None:
        observers |= chosen.observers()
    agreement = None
    if source.raters > 1:
        agreement = RaterAgreement(source.raters, source.ignore_index, multilabel=source.multilabel)
        observers[NONE] = [*observers.get(NONE, ()), agreement]
    measured = measure(
        source,
        maps[""],
        detection=detection,
        objects=counted,
        regions=named_regions(regions, source.num_classes, multilabel=source.multilabel),
        protocols=protocols,
        observers=observers,
        per_image=resamples > 0,
        **settings,
    )
    reports: dict[Key, Report] = {}
    meters: dict[Key, CalibrationMeter] = {}
    keys: dict[Key, str] = {}
    raters = None if agreement is None else agreement.compute()
    for method, found in measured.items():
        report = require_pixels(report_of(found, protocols, resamples=resamples), source.name)
        report = replace(report, raters=raters)
        if method in detection:
            found_errors = detection[method].compute(resamples=resamples, raters=source.raters)
            report = replace(report, detection=found_errors)
        if rule:
            found_objects = object_reports(
                counted[method],
                on_holdout[method],
                None if chosen is None else chosen.of_objects.get(method),
                () if chosen is None else chosen.object_targets,
                num_bins=num_bins,
                resamples=resamples,
            )
            report = replace(report, objects=found_objects)
        reports[method] = report if chosen is None else chosen.complete(method, report)
        meters[method] = found[WHOLE_IMAGE]
    cache = None if cache is None else Path(cache)
    for shift, changed in shifted.items():
        for method, (report, meter, key) in evaluate_shift(
            changed,
            shift,
            maps[shift],
            cache,
            resamples,
            uncertainty=uncertainty,
            **settings,
        ).items():
            reports[method, shift], meters[method, shift] = report, meter
            keys[method, shift] = key
    notes = []
    if chosen is not None:
        notes = choosing.notes(chosen, reports, measured[NONE][WHOLE_IMAGE], calibrators)
        if holdout is not None and source.fingerprint() == holdout.fingerprint() != "":
            notes.append(
                "The hold-out is the test data itself: what was chosen on it looks better here "
                "than it is."
            )
    dense = reports[NONE].protocol.pixels > reports[NONE].protocol.images
    if dense and resamples and not source.group and looks_like_sequence(source.names):
        notes.append(
            f"Names such as {source.names[0]} and {source.names[1]} look like frames of a video or "
            "slices of a patient. If they are, the intervals are too short: --group REGEX (group= "
            "of the source) makes what belongs together one unit."
        )
    if found_sums := source.score_sums:
        mean = sum(found_sums.values()) / len(found_sums)
        low, high = (end(found_sums, key=found_sums.__getitem__) for end in (min, max))
        notes.append(
            "The network gives scores, which were divided by their sum over the classes: "
            f"{mean:.3f} on average, from {found_sums[low]:.3f} ({low}) to "
            f"{found_sums[high]:.3f} ({high}). What is missing to 1 was given to no class."
        )
    if source.top_only:
        labels = ", ".join(s.label for n, s in SCORES.items() if n in NEED_ALL_CLASSES)
        notes.append(f"Only the top class is known. These need all classes: {labels}.")
    evaluation = Evaluation(
        source.name,
        reports,
        calibrators,
        {} if chosen is None else chosen.profiles,
        meters,
        keys,
        object_calibrators={} if chosen is None else chosen.of_objects,
        skipped=dict(source.skipped),
        config=source.config,
        history=source.history,
        notes=notes,
    )
    if raters is not None:
        share = SCORES["accuracy"].text
        evaluation.notes.append(
            f"All {source.raters} raters give one label to {share(raters.agreement)} of the pixels."
            f" The accuracy of one rater against the others is {share(raters.ceiling)}: a network "
            "above it agrees with the raters more than they do with each other."
        )
    if rule:
        evaluation.notes.append(object_note(reports[NONE].objects))
    if distributed.rank() == 0:
        indices = drawing.choose(overlays, num_overlays, source, reports[NONE])
        evaluation.overlays = drawing.draw(source, indices, maps[""])
        if rule and num_overlays and overlays != "none":
            evaluation.object_overlay = draw_objects(counted[NONE], source)
        which = "random" if overlays == "worst" else overlays  # in the worst, a shift does little
        for index in drawing.choose(which, min(num_overlays, 1), source, reports[NONE]):
            for method, some in drawing.draw_shifts(source, shifted, index, maps).items():
                evaluation.overlays[method] += some
    return evaluation
