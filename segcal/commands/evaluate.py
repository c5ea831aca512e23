"""`segcal eval`: evaluates runs and saved predictions, and writes reports and pages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from segcal import distributed
from segcal.data.shift import DATA, Shift
from segcal.distributed import choose_device, process_group
from segcal.evaluation.calibrate import Triage, choose_on_holdout, fit_calibrators
from segcal.evaluation.evaluate import Measured, measure, require_pixels
from segcal.evaluation.on_ray import measure_on_ray
from segcal.evaluation.overlays import RANDOM, WORST, choose, draw, draw_shifts, require_images
from segcal.evaluation.results import (
    CALIBRATOR,
    COMPARISON,
    EVAL,
    PAGE,
    PAGES,
    STATE,
    Result,
    check_history,
    entry_name,
    method_folder,
    new_contents,
    open_page,
    read_result,
    require_writable,
    settle,
    shift_folder,
    write_pages,
    write_result,
)
from segcal.evaluation.saved import PredictionFolder, PredictionFormat
from segcal.evaluation.shifted import digest, evaluate_shift, file_digest
from segcal.evaluation.sources import EVERYTHING, NamedPredictions, SplitPredictions, shard_of
from segcal.metrics import Report
from segcal.metrics.regions import named_regions
from segcal.posthoc import NONE, Calibrator
from segcal.viz.overlay import Picture
from segcal.viz.page import PageRow
from segcal.viz.tables import CLEAN, describe_report, shift_text


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: the network of a run, or its saved predictions.

    Attributes:
        name: what tables call it.
        home: its folder; results go to `eval` inside.
        source: the predictions to evaluate.
        holdout: makes the predictions to fit post-hoc methods on.
        shifted: makes the predictions under a shift.
        key: makes a digest of the network and its settings.
        config: the settings of the run, YAML.
        history: its log, one record per epoch.
    """

    name: str
    home: Path
    source: NamedPredictions
    holdout: Callable[[], NamedPredictions]
    shifted: Callable[[Shift], SplitPredictions]
    key: Callable[[], str] = str
    config: str = ""
    history: Sequence[Mapping[str, Any]] = ()


def run_subject(folder: Path, options: argparse.Namespace, device: torch.device) -> Subject:
    """The run in `folder`, on the part of its data that is asked for."""
    from segcal.run import open_run
    from segcal.settings import to_dict
    from segcal.training.config import CONFIG  # saved predictions need none of these
    from segcal.training.trainer import LOG

    run = open_run(folder, weights=f"{options.weights}.pt", skip_bad=options.skip_bad)

    def split(name: str, shard: tuple[int, int], shift: Shift | None = None) -> SplitPredictions:
        return run.predictions(
            name,
            device=device,
            batch_size=options.batch_size,
            workers=options.workers,
            shard=shard,
            shift=shift,
            limit=options.limit if name == options.split else None,  # the fit takes all
        )

    settings = to_dict(run.config)
    return Subject(
        name=folder.resolve().name,
        home=folder,
        source=split(options.split, options.shard),
        holdout=lambda: split("holdout", EVERYTHING),
        shifted=lambda shift: split("test", options.shard, shift),
        key=lambda: digest(
            file_digest(folder / f"{options.weights}.pt"), settings["data"], settings["model"]
        ),
        config=(folder / CONFIG).read_text(encoding="utf-8"),
        history=_read_log(folder / LOG),
    )


def saved_subject(path: Path, fit: Path | None, options: argparse.Namespace) -> Subject:
    """The predictions in `path`, with those in `fit` as hold-out."""
    stated = {field.name: getattr(options, field.name) for field in fields(PredictionFormat)}
    stated = {name: value for name, value in stated.items() if value is not None}

    def saved(path: Path, shard: tuple[int, int]) -> PredictionFolder:
        folder = _reader(options.format)(path, skip_bad=options.skip_bad, **stated)
        return shard_of(folder, shard, f"files in {path}")

    def shifted(shift: Shift) -> SplitPredictions:
        raise ValueError(f"Expected a run to evaluate under {shift}, but got predictions in {path}")

    def holdout() -> NamedPredictions:
        if fit is None:
            raise ValueError(
                "Expected --fit-predictions with --predictions for --posthoc, --operate and "
                "--conformal, but got none"
            )
        return saved(fit, EVERYTHING)

    resolved = path.resolve()
    return Subject(
        name=resolved.stem if path.is_file() else resolved.name,
        home=_saved_home(path),
        source=saved(path, options.shard),
        holdout=holdout,
        shifted=shifted,
    )


def _saved_home(path: Path) -> Path:
    """The folder of the results of saved predictions."""
    return path.parent if path.is_file() else path


def _reader(name: str) -> type[PredictionFolder]:
    """What reads the files of a --format."""
    if name != "nnunet":
        return PredictionFolder
    from segcal.integrations.nnunet import NnunetFolder

    return NnunetFolder


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return check_history([json.loads(line) for line in lines])
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}: Expected one JSON object of numbers per line, but got {error}"
        ) from None


def evaluate_inputs(options: argparse.Namespace) -> None:
    """Evaluate each of the inputs, and compare them if there are several."""
    shifts = _shifts(options)
    device = choose_device(options.device)
    first = [*options.inputs, *options.predictions][0]
    comparison = options.out or first.parent / COMPARISON
    _require_places(options, comparison)
    with process_group(device):
        results: list[Result] = []
        page: Path | None = None  # the last that was written, which shows all
        for opened in _open_inputs(options, device):
            if isinstance(opened, Result):
                results.append(opened)
                continue
            folder = _result_folder(opened.home, options)
            settle(folder)
            results += _evaluate_one(opened, folder, shifts, options)
            page = folder / PAGE
            if _number_of_inputs(options) == 1:
                _say_shifts(results)
            _say(f"report: {page}")
        if _number_of_inputs(options) > 1 and distributed.rank() == 0:
            with new_contents(comparison, PAGES) as staging:
                write_pages(results, staging, "Comparison", static=options.static)
            _say_shifts(results)
            page = comparison / PAGE
            _say(f"comparison: {page}")
        if options.open and page is not None and distributed.rank() == 0:
            open_page(page)


def _require_places(options: argparse.Namespace, comparison: Path) -> None:
    """Raise if results cannot be written, or those of two inputs would be in one folder."""
    homes = [(path, path) for path in options.inputs if path.suffix != ".json"]
    homes += [(path, _saved_home(path)) for path in options.predictions]
    places = [(str(path), _result_folder(home, options)) for path, home in homes]
    if _number_of_inputs(options) > 1:
        places.append(("the comparison", comparison))
    taken: dict[Path, str] = {}
    for what, folder in places:
        require_writable(folder)
        if folder.resolve() in taken:
            raise ValueError(
                f"Expected results in different folders, but got {folder} for {what} and for "
                f"{taken[folder.resolve()]}: evaluate them one at a time, with --out"
            )
        taken[folder.resolve()] = what


def _number_of_inputs(options: argparse.Namespace) -> int:
    return len(options.inputs) + len(options.predictions)


def _open_inputs(options: argparse.Namespace, device: torch.device) -> Iterator[Result | Subject]:
    """The inputs in order, each opened when its turn comes: one network in memory at a time."""
    for path in options.inputs:
        is_report = path.suffix == ".json"
        yield read_result(path) if is_report else run_subject(path, options, device)
    fits = options.fit_predictions or [None] * len(options.predictions)
    for path, fit in zip(options.predictions, fits, strict=True):
        yield saved_subject(path, fit, options)


def _result_folder(home: Path, options: argparse.Namespace) -> Path:
    """Where the results of one input go."""
    if options.out is not None and _number_of_inputs(options) == 1:
        return options.out
    name = EVAL if options.limit is None else f"{EVAL}-limit-{options.limit}"
    if options.shard != EVERYTHING:
        name += f"-{options.shard[0] + 1}-of-{options.shard[1]}"
    return home / name


def _evaluate_one(
    subject: Subject, folder: Path, shifts: Sequence[Shift], options: argparse.Namespace
) -> list[Result]:
    """Evaluate one model, as it is and after each post-hoc method; the first process writes."""
    shifted = {shift: subject.shifted(shift) for shift in shifts}
    require_images(options.overlays, subject.source)
    calibrators = fit_calibrators(
        options.posthoc, subject.holdout, title=f"{subject.name}: hold-out"
    )
    measured, reports = _measure(subject, calibrators, options)
    for method, report in reports.items():
        _say(f"{entry_name(subject.name, method)}: {describe_report(report)}")
    under = _evaluate_shifts(subject, shifted, calibrators, folder, options)
    if distributed.rank() != 0:
        return []
    skipped = dict(subject.source.skipped)
    entries = {
        method: PageRow(
            entry_name(subject.name, method),
            report,
            subject.history if calibrators[method] is None else (),  # drawn once per run
            subject.config
            + (f"# post-hoc: {calibrators[method]}\n" if calibrators[method] else ""),
            skipped=skipped,
            shifts={str(shift): found for shift, found in under[method].items()},
        )
        for method, report in reports.items()
    }
    indices = choose(options.overlays, options.num_overlays, subject.source, reports[NONE])
    panel = _shift_overlay(subject, shifted, calibrators, reports[NONE], options)
    entries[NONE] = replace(entries[NONE], shift_overlay=panel)
    drawn = draw(subject.source, indices, calibrators)
    results = []
    with new_contents(folder) as staging:
        for method, entry in entries.items():
            calibrator = calibrators[method]
            place = method_folder(staging, method)
            result = Result(subject.name, method, entry, measured[method].whole)
            results.append(write_result(result, drawn[method], place))
            if calibrator is not None:
                calibrator.save(place / CALIBRATOR)
            if options.save_state or options.shard != EVERYTHING:
                measured[method].whole.save(place / STATE)
        write_pages(results, staging, subject.name, static=options.static)
    if skipped:
        known = {*subject.source.names, *subject.source.skipped}
        _say(f"left out {len(skipped)} of {len(known)} files; the report lists them")
    return results


def _measure(
    subject: Subject, calibrators: Mapping[str, Calibrator | None], options: argparse.Namespace
) -> tuple[dict[str, Measured], dict[str, Report]]:
    """The meters of one model after each post-hoc method, and their reports."""
    source, observers = subject.source, {}
    settings: dict[str, Any] = {
        "regions": named_regions(options.regions, source.num_classes, multilabel=source.multilabel),
        "protocols": options.protocol,
        "num_bins": options.num_bins,
        "per_image": options.resamples > 0,
    }
    triage: Mapping[str, Triage] = {}
    if options.operate or options.conformal:
        triage = choose_on_holdout(
            subject.holdout,
            calibrators,
            targets=options.operate,
            misses=options.conformal,
            title=f"{subject.name}: hold-out",
        )
        observers = {method: chosen.observers for method, chosen in triage.items()}
    if options.ray is not None and isinstance(source, PredictionFolder):
        measured = measure_on_ray(
            source, calibrators, cluster=options.ray, observers=observers, **settings
        )
    else:
        measured = measure(source, calibrators, observers=observers, title=subject.name, **settings)
    reports = {
        method: require_pixels(found.report(resamples=options.resamples), subject.name)
        for method, found in measured.items()
    }
    reports |= {method: chosen.complete(reports[method]) for method, chosen in triage.items()}
    return measured, reports


def _evaluate_shifts(
    subject: Subject,
    shifted: Mapping[Shift, SplitPredictions],
    calibrators: Mapping[str, Calibrator | None],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, dict[Shift, Report]]:
    """The reports of one model under each shift, by post-hoc method and shift."""
    found: dict[str, dict[Shift, Report]] = {method: {} for method in calibrators}
    key = subject.key() if shifted else ""
    for shift, source in shifted.items():
        reports = evaluate_shift(
            source,
            calibrators,
            shift_folder(folder, shift),
            run=subject.name,
            shift=shift,
            key=key,
            num_bins=options.num_bins,
            resamples=options.resamples,
        )
        for method, report in reports.items():
            found[method][shift] = report
            name = entry_name(f"{subject.name}, {shift}", method)
            _say(f"{name}: {describe_report(report)}")
    return found


def _shifts(options: argparse.Namespace) -> list[Shift]:
    """The shifts that were asked for; results of two must not have one name."""
    shifts = [*options.shift, *(Shift(DATA, str(root)) for root in options.shift_data)]
    folders = [shift.folder for shift in shifts]
    twice = next((name for name in folders if folders.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"Expected shifts whose results have different names, but got two {twice}")
    return shifts


def _shift_overlay(
    subject: Subject,
    shifted: Mapping[Shift, SplitPredictions],
    calibrators: Mapping[str, Calibrator | None],
    report: Report,
    options: argparse.Namespace,
) -> Picture | None:
    """The panel of one image, with each corruption at its middle severity.

    It is the first that was named, or a random one: in the worst, a shift has little left to do.
    """
    which = RANDOM if options.overlays == WORST else options.overlays
    indices = choose(which, min(options.num_overlays, 1), subject.source, report)
    if not shifted or not indices:
        return None
    kinds: dict[str, list[Shift]] = {}
    for shift in shifted:
        kinds.setdefault(shift.name if shift.severity is not None else str(shift), []).append(shift)
    chosen = [sorted(same, key=str)[len(same) // 2] for same in kinds.values()]
    sources = {str(shift): shifted[shift] for shift in chosen}
    return draw_shifts(subject.source, sources, indices[0], calibrators)


def _say_shifts(results: Sequence[Result]) -> None:
    rows = [result.entry for result in results if result.entry.shifts]
    if rows:
        models = {row.name: {CLEAN: row.report, **row.shifts} for row in rows}
        _say(f"\n{shift_text(models)}\n")


def _say(line: str) -> None:
    if distributed.rank() == 0:
        print(line, flush=True)
