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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal import distributed, posthoc
from segcal.evaluation.evaluate import (
    WHOLE_IMAGE,
    Key,
    Minutes,
    measure,
    report_of,
    require_pixels,
    with_progress,
)
from segcal.evaluation.objects import fit_objects
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.drift import HoldoutProfile, ProfileCounts
from segcal.metrics.intervals import sorted_sums, unit_sums
from segcal.metrics.objects import ObjectCounter
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
from segcal.sources.members import Members
from segcal.sources.saved import PredictionFolder
from segcal.sources.source import Batch, Source

log = logging.getLogger(__name__)


class Recording(Source):
    """The predictions of a source that were written to files, read again and again.

    Args:
        source: what was recorded.
        folder: of the files.
        batches: kind and names of each batch.
        device: where batches are put.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        batches: Sequence[tuple[Any, Sequence[str] | None]],
        device: torch.device,
    ) -> None:
        self.name, self.skipped = f"{source.name}, hold-out", source.skipped
        self.num_classes, self.class_names = source.num_classes, source.class_names
        self.ignore_index, self.multilabel = source.ignore_index, source.multilabel
        self.num_images, self.raters = source.num_images, source.raters
        self.group = source.group
        self._folder, self._batches, self._device = folder, batches, device

    def __iter__(self) -> Iterator[Batch]:
        for number, (kind, names) in enumerate(self._batches):
            files = sorted(self._folder.glob(f"{number}.*.npy"))  # logits, labels, images
            arrays = [torch.from_numpy(np.load(file, allow_pickle=False)) for file in files]
            values, labels, *images = (array.to(self._device) for array in arrays)
            yield Batch(names, kind, values, labels, images[0] if images else None)


@contextmanager
def recorded(
    source: Source, methods: Sequence[str] = (), *, progress: bool | None = None
) -> Iterator[Source]:
    """A hold-out that can be read many times, inside the block; its network runs once.

    Saved predictions are read where they are. Others are kept in a temporary folder, at 4 bytes
    per pixel and class, with the images if one of `methods` reads them.
    """
    if isinstance(source, PredictionFolder | Recording):
        yield source
        return
    names = {method.partition("@")[0] for method in methods}
    images = any(posthoc.CALIBRATORS[name].reads_images for name in names & {*posthoc.METHODS})
    with tempfile.TemporaryDirectory(prefix="segcal-") as name:
        folder, device = Path(name), torch.device("cpu")
        batches: list[tuple[Any, Sequence[str] | None]] = []
        for batch in with_progress(source, progress):
            assert batch.labels is not None
            if not batches:
                _check_space(source, batch, folder)
            parts = [batch.logits.float(), batch.labels]
            if images and batch.images is not None:
                parts.append(batch.images)
            for number, part in enumerate(parts):
                _save(folder / f"{len(batches)}.{number}.npy", part)
            batches.append(("sigmoid_logits" if batch.multilabel else "logits", batch.names))
            device = batch.values.device
            del batch, parts, part  # before the next is made
        yield Recording(source, folder, batches, device)


def _save(path: Path, tensor: Tensor) -> None:
    try:
        np.save(path, tensor.cpu().numpy(), allow_pickle=False)
    except OSError as error:
        # numpy says of a full disk only how much of the array was written.
        raise OSError(
            error.errno or errno.ENOSPC,
            f"cannot write the logits of the hold-out ({error.strerror or error}), which take 4 "
            "bytes per pixel and class; set TMPDIR to use another folder",
            str(path.parent),
        ) from None


def _check_space(source: Source, batch: Batch, folder: Path) -> None:
    """Raise if the disk is too small for all batches, if they are as large as `batch`."""
    if source.num_images is None:
        return
    batches = source.num_images / distributed.world_size() / len(batch.values)
    needed = 4 * batch.values.numel() * batches / 2**30
    free = shutil.disk_usage(folder).free / 2**30
    if needed > free:
        raise ValueError(
            f"the logits of the hold-out take {needed:.1f} GiB, but {folder.parent} has "
            f"{free:.1f} GiB free; set TMPDIR to use another folder"
        )


def fit(methods: Sequence[str], holdout: Source) -> dict[str, Calibrator]:
    """The fitted calibrator of each post-hoc method, by its short name.

    A warning of a fit, such as that it improved nothing, is logged in one line.

    Args:
        methods: short names, without "none".
        holdout: the predictions to fit on; a network runs over them once.
    """
    for method in methods:
        if method not in posthoc.METHODS:
            raise ValueError(
                f"{method!r} is no post-hoc method; choose from {', '.join(posthoc.METHODS)}"
            )
    if not methods:
        return {}
    with recorded(holdout, methods) as recording:
        calibrators = fit_on(methods, [recording])
    if holdout.skipped:
        log.warning("left out %d files of the hold-out that cannot be used", len(holdout.skipped))
    return calibrators


def fit_on(methods: Sequence[str], sources: Sequence[Source]) -> dict[str, Calibrator]:
    """The same, fitted on all of several sources; what a method has after @ is not looked at."""
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


def calibrate_members(members: Members, method: str, holdout: Members | None = None) -> Members:
    """The same members, each after a calibrator that was fitted on its own hold-out.

    Args:
        members: the ensemble.
        method: the short name of a post-hoc method.
        holdout: the predictions of the same members to fit on; by default their own hold-outs.
    """
    own = [m.holdout() for m in members.members] if holdout is None else holdout.members
    calibrators: list[Calibrator] = []
    for member, fit_on in zip(members.members, own, strict=True):
        if fit_on is None:
            raise ValueError(f"{member.name} has no hold-out to fit a calibrator on")
        calibrators += fit([method], fit_on).values()
    name = f"{members.name}, members + {posthoc.label(method)}"
    found = Members(members.members, pool=members.pool, calibrators=calibrators, name=name)
    found.group = members.group
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
                groups = source.groups_of(batch.names)
                if groups is None and len(self._sources) > 1 and batch.names is not None:
                    groups = list(batch.names)
                pair = [batch.logits, batch.labels, batch.images, groups]
                yield tuple(part for part in pair if part is not None)
                del batch, pair  # before the next is read


@dataclass
class Choices:
    """The thresholds and class sets that were chosen on a hold-out, and their counts on test.

    Attributes:
        meter: the sums of the hold-out, of the network as it is.
        reports: the reports of the hold-out by calibrator.
        accepted: by calibrator and target, the counts at its threshold.
        sets: by calibrator and promised miss rate, the counts of its class sets.
        misses: by calibrator and promised miss rate, the mean miss rate of the hold-out.
        profiles: by calibrator, what `segcal.apply` needs to know of the hold-out.
        of_objects: by calibrator, the map of the confidence of objects.
        object_targets: precisions that thresholds of objects shall reach.
    """

    meter: CalibrationMeter
    reports: dict[str, Report]
    profiles: dict[str, HoldoutProfile]
    accepted: dict[str, dict[Target, AcceptedPixels]] = field(default_factory=dict)
    sets: dict[str, dict[float, SetCounts]] = field(default_factory=dict)
    misses: dict[str, dict[float, float]] = field(default_factory=dict)
    of_objects: dict[str, Calibrator] = field(default_factory=dict)
    object_targets: Sequence[Target] = ()

    def observers(self) -> dict[str, list[AcceptedPixels | SetCounts]]:
        """What must see the test images, by calibrator; see `measure`."""
        return {
            name: [*self.accepted[name].values(), *self.sets[name].values()]
            for name in self.accepted
        }

    def complete(self, method: str, report: Report) -> Report:
        """The report of the test images with the operating points and class sets."""
        holdout = self.reports[method]
        images = holdout.protocol.images
        return replace(
            report,
            operating_points=tuple(
                counts.point(target, holdout.fine, images)
                for target, counts in self.accepted[method].items()
            ),
            class_sets=tuple(
                counts.sets(alpha, images, self.misses[method][alpha])
                for alpha, counts in self.sets[method].items()
            ),
        )


def choose(
    holdout: Source,
    calibrators: Mapping[str, Calibrator],
    operate: Sequence[str | Target] = (),
    conformal: Sequence[str | float] = (),
    objects: Mapping[str, ObjectCounter] | None = None,
    **settings: Any,
) -> Choices:
    """Choose thresholds and class sets after each calibrator, in one pass over the hold-out.

    `objects` count the objects of the hold-out, on which their calibrators are fitted.

    Raises:
        ValueError: the hold-out has no labelled pixels, or too few images for a miss rate.
    """
    every = [t if isinstance(t, Target) else Target.parse(t) for t in operate]
    targets = [t for t in every if t.kind != OBJECT_PRECISION]
    of_objects = [t for t in every if t.kind == OBJECT_PRECISION]
    objects = objects or {}
    if of_objects and not objects:
        raise ValueError(f"{of_objects[0]} needs objects: say of which classes (--objects)")
    misses = [m if isinstance(m, float) else check_miss(m) for m in conformal]
    if misses and holdout.multilabel:
        raise ValueError("class sets need one class per pixel, but these are sigmoid outputs")
    ignore, multilabel = holdout.ignore_index, holdout.multilabel
    if not (of_objects or any(counter.rule.calibrate for counter in objects.values())):
        objects = {}  # nothing is chosen on them
    maps: dict[str, Calibrator | None] = {NONE: None, **calibrators}
    rates = {name: [MissRates(ignore)] if misses else [] for name in maps}
    counts = {name: ProfileCounts(holdout.num_classes, multilabel=multilabel) for name in maps}
    observers = {  # of new images all classes are known
        name: [*rates[name], *([] if holdout.top_only else [counts[name]])] for name in maps
    }
    measured = measure(holdout, maps, observers=observers, objects=objects, **settings)
    reports = {
        name: require_pixels(report_of(meters, resamples=0), "the hold-out")
        for name, meters in measured.items()
    }
    choices = Choices(measured[NONE][WHOLE_IMAGE], reports, {}, object_targets=of_objects)
    for name in maps if objects else ():
        method, images = objects[name].rule.calibrate, objects[name].by_unit()
        if method:
            choices.of_objects[name] = fit_objects(method, images)
    for name, report in reports.items():
        found = {alpha: rates[name][0].choose(alpha) for alpha in misses}
        thresholds = {t: choose_threshold(report.fine, t) for t in targets}
        choices.accepted[name] = {
            t: AcceptedPixels(threshold, ignore, multilabel=multilabel, probs=holdout.top_only)
            for t, threshold in thresholds.items()
        }
        choices.sets[name] = {alpha: SetCounts(lam, ignore) for alpha, (lam, _) in found.items()}
        choices.misses[name] = {alpha: miss for alpha, (_, miss) in found.items()}
        if holdout.top_only:
            continue
        choices.profiles[name] = HoldoutProfile.of(
            report,
            counts[name],
            {str(t): threshold for t, threshold in thresholds.items()},
            {f"{alpha:g}": lam for alpha, (lam, _) in found.items()},
        )
    return choices


def notes(
    choices: Choices,
    reports: Mapping[Key, Report],
    meter: CalibrationMeter,
    calibrators: Mapping[str, Calibrator],
) -> list[str]:
    """What was fitted; which fit makes the test worse; and whether the hold-out is like the test.

    Args:
        choices: what was found on the hold-out.
        reports: the reports of the test images.
        meter: the sums of the test images, of the network as it is.
        calibrators: by short name, fitted on the hold-out.
    """
    holdout, test, lines = choices.reports[NONE], reports[NONE], []
    nll = SCORES["nll"]
    for method, calibrator in calibrators.items():
        fitted = ", ".join(
            f"{name.rstrip('_')} {value.item():.4g}"
            for name, value in calibrator.state_dict().items()
            if not value.ndim
        )
        way, label = method.partition("@")[2], posthoc.label(method)
        line = f"{label} was fitted on {holdout.protocol.images} hold-out images"
        if way:
            line = f"{label} was fitted on {posthoc.WAYS[way]}"
        if not calibrator.improved_:
            line += ", where it improved nothing, so it leaves the logits as they are"
        elif fitted:
            line += f": {fitted}"
        lines.append(f"{line}.")
        found = reports[method]
        if found.nll > test.nll + 1e-6:
            lines.append(
                f"{label} makes the NLL of the test images worse: "
                f"{nll.text(found.nll)} instead of {nll.text(test.nll)}."
            )
    for method, calibrator in choices.of_objects.items():
        after = "" if method == NONE else f" after {posthoc.label(method)}"
        line = f"The calibration of objects{after} ({calibrator.name}) was fitted on the hold-out"
        worth = "" if calibrator.improved_ else " and improved nothing, so it changes nothing"
        lines.append(f"{line}{worth}.")
    ours, theirs = _fractions(choices.meter), _fractions(meter)
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
