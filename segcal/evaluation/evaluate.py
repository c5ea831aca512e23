"""`evaluate` of a module, `evaluate_source` of any predictions, and the `Evaluation` it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segcal import distributed
from segcal.evaluation.measure import Groups, Watch, measure, require_pixels, watch_logits
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.drift import HoldoutProfile
from segcal.metrics.intervals import looks_like_sequence
from segcal.metrics.objects import ObjectRule
from segcal.metrics.raters import RaterAgreement
from segcal.metrics.regions import Region, named_regions
from segcal.metrics.scores import NEED_ALL_CLASSES, SCORES
from segcal.metrics.uncertainty import ErrorDetection
from segcal.posthoc import NONE, Calibrator, label, method_names
from segcal.sources.source import Batch, Source

if TYPE_CHECKING:
    from segcal.data.shift import Shift
    from segcal.metrics.conditions import Condition
    from segcal.viz import Overlay, PageRow

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

    def transformed(logits: Tensor, images: Tensor | None) -> Tensor:
        assert transform is not None
        if isinstance(transform, Calibrator):
            return transform(logits, images)
        return transform(logits)

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
            {NONE: None if transform is None else transformed},
            regions=regions,
            protocols=protocols,
            num_bins=num_bins,
            edge_rule=edge_rule,
            resamples=1000 if per_image else 0,
            progress=progress,
        )
    return measured[NONE].report


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

        rows = []
        for method in self.methods:
            first = method == NONE  # what is of the network is shown once
            fitted = self.calibrators.get(method)
            rows.append(
                PageRow(
                    name=title(self.name, method),
                    report=self.reports[method],
                    history=self.history if first else (),
                    config=self.config + (f"# post-hoc: {fitted}\n" if fitted else ""),
                    overlays=self.overlays.get(method, []),
                    skipped=self.skipped if first else {},
                    shifts={
                        shift: self.reports[method, shift]
                        for shift in self.shifts
                        if (method, shift) in self.reports
                    },
                    object_overlay=self.object_overlay if first else None,
                    notes=self.notes if first else (),
                )
            )
        return rows

    def broken(self, conditions: Sequence[Condition]) -> list[str]:
        """Which conditions the last post-hoc method breaks, or the network if there is none."""
        method = self.methods[-1]
        found = [condition.broken_by(self.reports[method]) for condition in conditions]
        return [f"{title(self.name, method)}: {line}" for line in found if line]

    def save(self, folder: str | Path) -> Path:
        """Write reports, states, calibrators, tables and the page; see `segcal.evaluation.folder`.

        What is in the folder is replaced when all is written. Under torch.distributed only the
        first process writes. Returns the path of the page.
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
    posthoc: str | Sequence[str] = (),
    shifts: str | Sequence[str | Shift] = (),
    fit_shift: str | None = None,
    fit_ood: str | Path | Source | None = None,
    fit_target: str | Path | Source | None = None,
    regions: str | Sequence[str] = (),
    protocols: str | Sequence[str] = (),
    operate: str | Sequence[Any] = (),
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
    and returns the numbers of the whole; the first one also draws. Several names may also be one
    text with commas between them, such as "ts,ets".

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
    """
    from segcal.evaluation.holdout import Choice, choose, holdout_notes, member_notes, recorded
    from segcal.evaluation.objects import (
        draw_objects,
        new_counter,
        object_note,
        object_reports,
        watch_objects,
    )
    from segcal.evaluation.overlays import draw_overlays, require_images
    from segcal.evaluation.shifts import evaluate_shift, open_shifts
    from segcal.evaluation.ways import fit_ways

    shifts = [shifts] if isinstance(shifts, str) else shifts
    posthoc, regions, protocols, operate = (
        names.split(",") if isinstance(names, str) else names
        for names in (posthoc, regions, protocols, operate)
    )
    method_names(",".join([NONE, *posthoc]))  # raises if one is unknown
    methods = [method for method in dict.fromkeys(posthoc) if method != NONE]
    if source.top_only and (methods or conformal or uncertainty):
        raise ValueError(
            "post-hoc methods, class sets and kinds of uncertainty need all classes, but "
            f"{source.name} has the top class of each pixel alone"
        )
    rule = ObjectRule.parse(objects) if isinstance(objects, str) else objects
    if rule and (source.top_only or source.raters > 1):
        raise ValueError("objects need the probabilities of all classes, and one rater")
    shifted = open_shifts(source, shifts)
    require_images(overlays, source)
    settings: dict[str, Any] = {"num_bins": num_bins, "progress": progress}

    # On the hold-out: fit calibrators, choose thresholds and class sets.
    fitted: dict[str, dict[str, Calibrator]] = {"": {}, **{shift: {} for shift in shifted}}
    chosen: dict[str, Choice] = {}
    if methods or operate or conformal or (rule and rule.calibrate):
        holdout = _open_holdout(source, holdout)
        with recorded(holdout, methods, progress=progress) as recording:
            fitted = fit_ways(
                methods,
                recording,
                holdout,
                source,
                shifted,
                fit_shift=fit_shift,
                fit_ood=fit_ood,
                fit_target=fit_target,
            )
            chosen = choose(recording, fitted[""], operate, conformal, rule, **settings)
    maps: dict[str, dict[str, Calibrator | None]]
    maps = {shift: {NONE: None, **found} for shift, found in fitted.items()}

    # On the test images: count everything in one pass, and once more under each shift.
    uncertainty = source.pools if uncertainty is None else uncertainty
    watches: dict[str, list[Watch]] = {method: [] for method in maps[""]}
    counters = {}
    for method, watching in watches.items():
        choice = chosen.get(method)
        watching += choice.watches if choice else []
        if source.raters > 1:
            watching.append(_watch_raters(source))
        if uncertainty:
            watching.append(watch_errors(source, resamples))
        if rule:
            counter = counters[method] = new_counter(rule, source)
            reports_of = partial(object_reports, counter, choice, num_bins, resamples)
            watching.append(watch_objects(counter, reports_of))
    measured = measure(
        source,
        maps[""],
        watches=watches,
        regions=named_regions(regions, source.num_classes, multilabel=source.multilabel),
        protocols=protocols,
        resamples=resamples,
        **settings,
    )
    clean = measured[NONE].report
    require_pixels(clean, source.name)
    reports: dict[Key, Report] = {method: found.report for method, found in measured.items()}
    meters: dict[Key, CalibrationMeter] = {m: found.meter for m, found in measured.items()}
    keys: dict[Key, str] = {}
    cache = None if cache is None else Path(cache)
    more = {"uncertainty": uncertainty, "resamples": resamples, **settings}
    for shift, changed in shifted.items():
        kept = evaluate_shift(changed, shift, maps[shift], cache, **more)
        for method, (found, keys[method, shift]) in kept.items():
            reports[method, shift], meters[method, shift] = found
    evaluation = Evaluation(
        source.name,
        reports,
        calibrators=fitted[""],
        profiles={method: c.profile for method, c in chosen.items() if c.profile is not None},
        meters=meters,
        keys=keys,
        object_calibrators={m: c.of_objects for m, c in chosen.items() if c.of_objects is not None},
        skipped=dict(source.skipped),
        config=source.config,
        history=source.history,
    )

    # For the reader: what to doubt, and pictures.
    evaluation.notes += member_notes(source)
    if chosen and holdout is not None:
        evaluation.notes += holdout_notes(chosen, measured, fitted[""])
        if source.fingerprint() == holdout.fingerprint() != "":
            evaluation.notes.append(
                "The hold-out is the test data itself: what was chosen on it looks better here "
                "than it is."
            )
    evaluation.notes += _notes(source, clean)
    if rule:
        evaluation.notes.append(object_note(clean.objects))
    if distributed.rank() == 0:
        evaluation.overlays = draw_overlays(overlays, num_overlays, source, shifted, maps, clean)
        if rule and num_overlays and overlays != "none":
            evaluation.object_overlay = draw_objects(counters[NONE], source)
    return evaluation


def _open_holdout(source: Source, holdout: Source | None) -> Source:
    """The hold-out that was given, or else the source's own, in the same groups."""
    holdout = source.holdout() if holdout is None else holdout
    if holdout is None:
        raise ValueError(
            "post-hoc methods, thresholds and class sets are chosen on a hold-out, and there is "
            "none: pass holdout= (--holdout or --holdout-fraction for --model, --fit-predictions "
            "for saved predictions)"
        )
    if holdout.top_only != source.top_only:
        raise ValueError("hold-out and test must both have all classes, or both the top one")
    if source.group and not holdout.group:
        holdout = copy.copy(holdout)
        holdout.group = source.group
    return holdout


def _watch_raters(source: Source) -> Watch:
    """Counts how often the raters agree."""
    counter = RaterAgreement(source.raters, source.ignore_index, multilabel=source.multilabel)
    return watch_logits(counter, lambda report: replace(report, raters=counter.compute()))


def watch_errors(source: Source, resamples: int) -> Watch:
    """Counts how well each kind of uncertainty finds errors."""
    counter = ErrorDetection(
        source.num_classes,
        source.ignore_index,
        multilabel=source.multilabel,
        per_image=resamples > 0,
    )

    def update(batch: Batch, groups: Groups) -> None:
        assert batch.labels is not None
        counter.update(batch.probs, batch.labels, batch.spread, groups)

    def complete(report: Report) -> Report:
        found = counter.compute(resamples=resamples, raters=source.raters)
        return replace(report, detection=found)

    return Watch(update, counter.sync, complete)


def _notes(source: Source, report: Report) -> list[str]:
    """What to know of the predictions, whatever the calibrator."""
    notes = []
    dense = report.protocol.pixels > report.protocol.images
    if dense and report.intervals and not source.group and looks_like_sequence(source.names):
        notes.append(
            f"Names such as {source.names[0]} and {source.names[1]} look like frames of a video or "
            "slices of a patient. If they are, the intervals are too short: --group REGEX (group= "
            "of the source) makes what belongs together one unit."
        )
    if sums := source.score_sums:
        mean = sum(sums.values()) / len(sums)
        low, high = (end(sums, key=sums.__getitem__) for end in (min, max))
        notes.append(
            "The network gives scores, which were divided by their sum over the classes: "
            f"{mean:.3f} on average, from {sums[low]:.3f} ({low}) to {sums[high]:.3f} ({high}). "
            "What is missing to 1 was given to no class."
        )
    if source.top_only:
        labels = ", ".join(s.label for n, s in SCORES.items() if n in NEED_ALL_CLASSES)
        notes.append(f"Only the top class is known. These need all classes: {labels}.")
    if report.raters is not None:
        share = SCORES["accuracy"].text
        notes.append(
            f"The {source.raters} raters agree on {share(report.raters.agreement)} of the "
            f"pixels. The accuracy of one rater against the others is "
            f"{share(report.raters.ceiling)}: a network above it agrees with the raters more than "
            "they do with each other."
        )
    return notes
