"""`segcal eval`: evaluates runs and saved predictions, and writes reports and pages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from segcal import distributed
from segcal.commands.subjects import Subject, run_subject, saved_subject, shift_words
from segcal.evaluation.calibrate import fit_scalers
from segcal.evaluation.evaluate import measure, require_pixels
from segcal.evaluation.overlays import choose, draw, require_images
from segcal.evaluation.results import (
    COMPARISON,
    EVAL,
    PAGE,
    POSTHOC,
    SCALER,
    STATE,
    Result,
    entry_name,
    new_contents,
    read_result,
    require_writable,
    write_pages,
    write_result,
)
from segcal.evaluation.sources import EVERYTHING
from segcal.metrics import Report
from segcal.metrics.scores import SCORES
from segcal.runtime import choose_device, process_group
from segcal.training.log import describe_scores
from segcal.viz import Entry


def evaluate_inputs(options: argparse.Namespace) -> None:
    """Evaluate what the options name, each by itself, and compare them if there are several."""
    device = choose_device(options.device)
    inputs = [*options.inputs, *options.predictions]
    comparison = options.out or inputs[0].parent / COMPARISON
    require_writable(comparison)
    with process_group(device):
        results: list[Result] = []
        for found in _found(options, device):
            if isinstance(found, Result):
                results.append(found)
                continue
            alone = options.out is not None and len(inputs) == 1
            home = found.home / _folder_name(options)
            results += _evaluate_one(found, options.out if alone else home, options)
        if len(inputs) > 1 and distributed.rank() == 0:
            with new_contents(comparison) as staging:
                write_pages(results, staging, "Comparison")
            _say(f"comparison: {comparison / PAGE}")


def _found(options: argparse.Namespace, device: torch.device) -> Iterator[Result | Subject]:
    """What was named, in order, opened when its turn comes: one network in memory at a time."""
    for path in options.inputs:
        is_report = path.suffix == ".json"
        yield read_result(path) if is_report else run_subject(path, options, device)
    fits = options.fit_predictions or [None] * len(options.predictions)
    for path, fit in zip(options.predictions, fits, strict=True):
        yield saved_subject(path, fit, options)


def _folder_name(options: argparse.Namespace) -> str:
    parts = [EVAL, *(words.replace(" ", "-") for words in shift_words(options))]
    if options.shard != EVERYTHING:
        parts.append(f"{options.shard[0] + 1}-of-{options.shard[1]}")
    return "-".join(parts)


def _evaluate_one(subject: Subject, folder: Path, options: argparse.Namespace) -> list[Result]:
    """Evaluate one model, as it is and after each post-hoc method; the first process writes."""
    require_writable(folder)
    require_images(options.overlays, subject.source)
    scalers = fit_scalers(options.posthoc, subject.holdout, title=f"{subject.name}: hold-out")
    measured = measure(
        subject.source,
        scalers,
        num_bins=options.num_bins,
        per_image=options.resamples > 0,
        title=subject.name,
    )
    reports = {
        method: require_pixels(found.report(resamples=options.resamples), subject.name)
        for method, found in measured.items()
    }
    if distributed.rank() != 0:
        return []
    indices = choose(options.overlays, options.num_overlays, subject.source, reports["none"])
    drawn = draw(subject.source, indices, scalers)
    skipped = list(subject.source.skipped.values())
    results = []
    with new_contents(folder) as staging:
        for method, report in reports.items():
            name = entry_name(subject.name, method)
            scaler = scalers[method]
            place = staging if scaler is None else staging / POSTHOC / method
            config = subject.config if scaler is None else f"{subject.config}# post-hoc: {scaler}\n"
            history = subject.history if scaler is None else ()  # drawn once a run
            entry = Entry(name, report, history, config, skipped=skipped)
            results.append(write_result(Result(subject.name, method, entry), drawn[method], place))
            if scaler is not None:
                scaler.save(place / SCALER)
            if options.save_state or options.shard != EVERYTHING:
                measured[method].whole.save(place / STATE)
            _say(f"{name}: {describe_report(report)}")
        write_pages(results, staging, subject.name)
    if skipped:
        known = {*subject.source.names, *subject.source.skipped}
        _say(f"left out {len(skipped)} of {len(known)} files; the report lists them")
    _say(f"report: {folder / PAGE}")
    return results


def describe_report(report: Report) -> str:
    """The scores of a report in one line."""
    dense = report.protocol.pixels > report.protocol.images  # not one label per image
    return describe_scores({n: v for n, v in report.scores.items() if dense or not SCORES[n].dense})


def _say(line: str) -> None:
    if distributed.rank() == 0:
        print(line, flush=True)
