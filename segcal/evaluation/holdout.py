"""What a hold-out decides: post-hoc fits, thresholds of confidence, and class sets.

The network runs once over its hold-out; the fits and the choices read its logits from files.
"""

from __future__ import annotations

import errno
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal import distributed, posthoc
from segcal.evaluation.measure import (
    Groups,
    Measured,
    Minutes,
    Watch,
    measure,
    require_pixels,
    watch_logits,
    with_progress,
)
from segcal.evaluation.objects import fit_objects, new_counter, watch_objects
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.drift import HoldoutProfile, ProfileCounts
from segcal.metrics.intervals import sorted_sums, unit_sums
from segcal.metrics.objects import ObjectCounter, ObjectRule
from segcal.metrics.scores import SCORES
from segcal.metrics.triage import (
    OBJECT_PRECISION,
    AcceptedPixels,
    MissRates,
    SetCounts,
    Target,
    check_miss,
    choose_threshold,
)
from segcal.posthoc import NONE, Calibrator
from segcal.sources.source import Batch, Changed, Kind, Source

log = logging.getLogger(__name__)


@contextmanager
def recorded(
    source: Source, methods: Sequence[str] = (), *, progress: bool | None = None
) -> Iterator[Source]:
    """A hold-out that can be read many times, inside the block; its network runs once.

    Saved predictions are read where they are. Others are kept in a temporary folder, at 4 bytes
    per pixel and class, with the images if one of `methods` reads them.
    """
    if source.stored:
        yield source
        return
    kinds = [posthoc.CALIBRATORS[method.partition("@")[0]] for method in methods]
    with tempfile.TemporaryDirectory(prefix="segcal-") as name:
        folder, device = Path(name), torch.device("cpu")
        batches: list[tuple[Kind, Sequence[str] | None]] = []
        for batch in with_progress(source, progress):
            assert batch.labels is not None
            if not batches and source.num_images is not None:  # is there room for all of them?
                share = source.num_images / distributed.world_size() / len(batch.values)
                needed = 4 * batch.values.numel() * share / 2**30
                free = shutil.disk_usage(folder).free / 2**30
                if needed > free:
                    raise ValueError(
                        f"the logits of the hold-out take {needed:.1f} GiB, but {folder.parent} "
                        f"has {free:.1f} GiB free; set TMPDIR to use another folder"
                    )
            arrays = {"values": batch.logits.float(), "labels": batch.labels}
            if any(kind.reads_images for kind in kinds) and batch.images is not None:
                arrays["images"] = batch.images
            try:
                for key, tensor in arrays.items():
                    np.save(folder / f"{len(batches)}.{key}.npy", tensor.cpu().numpy())
            except OSError as error:
                # numpy says of a full disk only how much of the array was written.
                raise OSError(
                    error.errno or errno.ENOSPC,
                    f"cannot write the logits of the hold-out ({error.strerror or error}), which "
                    "take 4 bytes per pixel and class; set TMPDIR to use another folder",
                    str(folder.parent),
                ) from None
            batches.append(("sigmoid_logits" if batch.multilabel else "logits", batch.names))
            device = batch.values.device
            del batch, arrays, tensor  # before the next is made

        def read(_: Source) -> Iterator[Batch]:
            for number, (kind, names) in enumerate(batches):
                found: dict[str, Any] = {
                    file.name.split(".")[1]: torch.from_numpy(np.load(file)).to(device)
                    for file in folder.glob(f"{number}.*.npy")
                }
                yield Batch(names, kind, **found)

        recording = Changed(source, read)
        recording.name, recording.stored = f"{source.name}, hold-out", True
        yield recording


def fit(method: str, holdout: Source) -> Calibrator:
    """The calibrator of a post-hoc method; a network runs once over the hold-out."""
    if method not in posthoc.METHODS:
        raise ValueError(
            f"{method!r} is no post-hoc method; choose from {', '.join(posthoc.METHODS)}"
        )
    with recorded(holdout, [method]) as recording:
        calibrator = fit_on([method], [recording])[method]
    if holdout.skipped:
        log.warning("left out %d files of the hold-out that cannot be used", len(holdout.skipped))
    return calibrator


def fit_on(methods: Sequence[str], sources: Sequence[Source]) -> dict[str, Calibrator]:
    """The calibrator of each method, fitted on all of several sources that are read many times.

    What a method has after @ is not looked at. A warning of a fit is logged in one line.
    """
    options = {"ignore_index": sources[0].ignore_index, "multilabel": sources[0].multilabel}
    names = {method: method.partition("@")[0] for method in methods}
    found = {method: posthoc.CALIBRATORS[name](**options) for method, name in names.items()}
    for method, calibrator in found.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calibrator.fit(_Pairs(sources, method))
        for warning in caught:
            log.warning("%s", warning.message)
    return found


def calibrate_members(source: Source, method: str, holdouts: Sequence[Source] = ()) -> Source:
    """The mean of the same members or views, each after a calibrator of its own.

    Each is fitted on the member's own hold-out, or on its one of `holdouts`.
    """
    calibrators: list[Calibrator] = []
    own: Sequence[Source | None] = holdouts or [member.holdout() for member in source.members]
    for member, holdout in zip(source.members, own, strict=False):
        if holdout is None:
            raise ValueError(f"{member.name} has no hold-out to fit a calibrator on")
        calibrators.append(fit(method, holdout))
    found = source.with_calibrators(calibrators)
    found.name = f"{source.name}, members + {posthoc.label(method)}"
    return found


class _Pairs:
    """Sources as the batches that fits take: logits, labels, images and groups, where known.

    Of several sources, images of one name are copies of one image, which belong together.
    """

    def __init__(self, sources: Sequence[Source], method: str) -> None:
        self._sources, self._method, self._read, self._minutes = sources, method, 0, Minutes()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for source in self._sources:
            for batch in source:
                self._read += len(batch.values)
                name = posthoc.label(self._method)
                self._minutes.say(f"fitting {name}: {self._read} images read")
                if source.raters > 1:
                    batch = batch.with_each_rater()
                groups: Groups = source.groups_of(batch.names)
                if groups is None and len(self._sources) > 1:
                    groups = batch.names
                pair = [batch.logits, batch.labels, batch.images, groups]
                yield tuple(part for part in pair if part is not None)
                del batch, pair  # before the next is read


@dataclass
class Choice:
    """What a hold-out decides about the predictions after one calibrator."""

    report: Report  # of the hold-out
    meter: CalibrationMeter
    profile: HoldoutProfile | None  # for `segcal.apply`; None where only the top class is known
    watches: list[Watch]  # count the test images at the thresholds, and with the class sets
    objects: ObjectCounter | None = None  # of the hold-out, where something is chosen on them
    of_objects: Calibrator | None = None  # maps the confidence of objects
    object_targets: Sequence[Target] = ()  # precisions that thresholds of objects shall reach


def choose(
    holdout: Source,
    calibrators: Mapping[str, Calibrator],
    operate: Sequence[str | Target] = (),
    conformal: Sequence[str | float] = (),
    rule: ObjectRule | None = None,
    **settings: Any,
) -> dict[str, Choice]:
    """Choose thresholds and class sets after each calibrator, in one pass over the hold-out.

    See `evaluate_source`. `rule` says what the objects are; `settings` are of `measure`.
    """
    every = [t if isinstance(t, Target) else Target.parse(t) for t in operate]
    targets = [t for t in every if t.kind != OBJECT_PRECISION]
    object_targets = [t for t in every if t.kind == OBJECT_PRECISION]
    if object_targets and rule is None:
        raise ValueError(f"{object_targets[0]} needs objects: say of which classes (--objects)")
    misses = [m if isinstance(m, float) else check_miss(m) for m in conformal]
    if misses and holdout.multilabel:
        raise ValueError("class sets need one class per pixel, but these are sigmoid outputs")
    if rule is not None and not (rule.calibrate or object_targets):
        rule = None  # nothing is chosen on objects
    maps: dict[str, Calibrator | None] = {NONE: None, **calibrators}
    rates = {name: MissRates(holdout.ignore_index) for name in maps}
    counts = {
        name: ProfileCounts(holdout.num_classes, multilabel=holdout.multilabel) for name in maps
    }
    objects = {name: new_counter(rule, holdout) for name in maps} if rule else {}
    watches: dict[str, list[Watch]] = {name: [] for name in maps}
    for name, watching in watches.items():
        watching += [watch_logits(rates[name])] if misses else []
        watching += [] if holdout.top_only else [watch_logits(counts[name])]
        watching += [watch_objects(objects[name])] if rule else []
    measured = measure(holdout, maps, watches=watches, per_image=True, resamples=0, **settings)
    choices = {}
    for name, (report, meter) in measured.items():
        require_pixels(report, "the hold-out")
        thresholds = {target: choose_threshold(report.fine, target) for target in targets}
        sets = {alpha: rates[name].choose(alpha) for alpha in misses}
        choice = Choice(report, meter, None, [], object_targets=object_targets)
        for target, threshold in thresholds.items():
            choice.watches.append(_watch_point(holdout, report, target, threshold))
        for alpha, (lam, miss) in sets.items():
            choice.watches.append(_watch_sets(holdout, report, alpha, lam, miss))
        if not holdout.top_only:  # of new images all classes are known
            choice.profile = HoldoutProfile.of(
                report,
                counts[name],
                {str(target): threshold for target, threshold in thresholds.items()},
                {f"{alpha:g}": lam for alpha, (lam, _) in sets.items()},
            )
        if rule:
            choice.objects = objects[name]
            if rule.calibrate:
                choice.of_objects = fit_objects(rule.calibrate, objects[name].by_unit())
        choices[name] = choice
    return choices


def _watch_point(holdout: Source, report: Report, target: Target, threshold: float | None) -> Watch:
    """Counts the test images at an operating point; `report` is of the hold-out."""
    counter = AcceptedPixels(
        threshold, holdout.ignore_index, multilabel=holdout.multilabel, probs=holdout.top_only
    )

    def complete(test: Report) -> Report:
        point = counter.point(target, report.fine, report.protocol.images)
        return replace(test, operating_points=(*test.operating_points, point))

    return watch_logits(counter, complete)


def _watch_sets(holdout: Source, report: Report, alpha: float, lam: float, miss: float) -> Watch:
    """Counts the test images with the sets of `lam`, which miss `miss` of the hold-out."""
    counter = SetCounts(lam, holdout.ignore_index)

    def complete(test: Report) -> Report:
        sets = counter.sets(alpha, report.protocol.images, miss)
        return replace(test, class_sets=(*test.class_sets, sets))

    return watch_logits(counter, complete)


def holdout_notes(
    chosen: Mapping[str, Choice],
    measured: Mapping[str, Measured],
    calibrators: Mapping[str, Calibrator],
) -> list[str]:
    """What was fitted; which fit makes the test worse; and whether the hold-out is like the test.

    `chosen` is of the hold-out, and `measured` of the test images.
    """
    lines = []
    holdout, test, nll = chosen[NONE].report, measured[NONE].report, SCORES["nll"]
    for method, calibrator in calibrators.items():
        label, way = posthoc.label(method), method.partition("@")[2]
        fitted_on = posthoc.WAYS[way] if way else f"{holdout.protocol.images} hold-out images"
        lines.append(f"{label} was fitted on {fitted_on}{_learned(calibrator)}.")
        after = measured[method].report.nll
        if after > test.nll + 1e-6:
            lines.append(
                f"{label} makes the NLL of the test images worse: "
                f"{nll.text(after)} instead of {nll.text(test.nll)}."
            )
    for method, choice in chosen.items():
        if (objects := choice.of_objects) is not None:
            name = "" if method == NONE else f" after {posthoc.label(method)}"
            line = f"The calibration of objects{name} ({objects.name}) was fitted on the hold-out"
            worth = "" if objects.improved_ else " and improved nothing, so it changes nothing"
            lines.append(f"{line}{worth}.")
    ours, theirs = _fractions(chosen[NONE].meter), _fractions(measured[NONE].meter)
    sure = [
        name
        for name in ours.keys() & theirs.keys()
        if abs(ours[name][0] - theirs[name][0]) > 3 * math.hypot(ours[name][1], theirs[name][1])
    ]
    if sure:
        shown = ", ".join(
            f"{score.label} {score.text(getattr(holdout, name))} and "
            f"{score.text(getattr(test, name))}"
            for name, score in SCORES.items()
            if name in (*sure, "nll")
        )
        better = holdout.accuracy > test.accuracy and holdout.nll < test.nll
        lines.append(
            f"Hold-out and test differ by more than chance: {shown}. What was chosen on the "
            "hold-out may not suit the test images."
            + (" Was the network trained on the hold-out?" if better else "")
        )
    return lines


def member_notes(source: Source) -> list[str]:
    """What was fitted to each member before the mean."""
    return [
        f"{posthoc.label(calibrator.name)} of {member.name} was fitted on its hold-out"
        f"{_learned(calibrator)}."
        for member, calibrator in zip(source.members, source.calibrators, strict=False)
        if calibrator is not None
    ]


def _learned(calibrator: Calibrator) -> str:
    """The end of a sentence about a fit: its numbers, or that it improved nothing."""
    if not calibrator.improved_:
        return ", where it improved nothing, so it leaves the logits as they are"
    numbers = ", ".join(
        f"{name.rstrip('_')} {value.item():.4g}"
        for name, value in calibrator.state_dict().items()
        if not value.ndim
    )
    return f": {numbers}" if numbers else ""


def _fractions(meter: CalibrationMeter) -> dict[str, tuple[float, float]]:
    """Accuracy, mean confidence and their difference, with standard errors over images.

    Images that have groups count by group.
    """
    sums = unit_sums(sorted_sums(meter.image_sums(), meter.names, meter.groups)[1])
    pixels, gap, hits = sums["pixels"], sums["top_gap"].sum(1), sums["hits"].astype(np.float64)
    if len(pixels) < 2:
        return {}
    totals = {"bias": gap}
    if not meter.settings.multilabel:
        totals |= {"accuracy": hits, "mean_confidence": gap + hits}
    found = {}
    for name, total in totals.items():
        fraction = total.sum() / pixels.sum()
        variance = ((total - fraction * pixels) ** 2).sum() * len(total) / (len(total) - 1)
        found[name] = float(fraction), float(np.sqrt(variance) / pixels.sum())
    return found
