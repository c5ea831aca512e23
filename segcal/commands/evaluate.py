"""`segcal eval`: evaluates runs and saved predictions, and writes reports and pages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from segcal import distributed
from segcal.commands.parser import Parser, at_least, checked, names, shard
from segcal.commands.subjects import Subject, run_subject, saved_subject, shift_words
from segcal.evaluation.calibrate import fit_scalers, method_names
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


def evaluate(arguments: Sequence[str], prog: str) -> None:
    """Evaluate runs, or predictions saved by any framework: report, diagrams, overlays, page."""
    options = _parse(arguments, prog)
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


def _parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(prog, evaluate.__doc__ or "")
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a report.json; several are compared",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--split",
        choices=("test", "holdout"),
        default="test",
        help="part of the data to evaluate a run on",
    )
    parser.add_argument(
        "--rotation",
        type=float,
        metavar="DEGREES",
        help="rotate the test images of classification runs counter-clockwise",
    )
    parser.add_argument("--domain", help="test runs on this domain of their data (pacs)")
    parser.add_argument(
        "--posthoc",
        type=checked(method_names),
        default=(),
        metavar="METHODS",
        help="post-hoc methods to fit on the hold-out and compare: none,ts,vs,ms,dc,lts",
    )
    _add_output_arguments(parser)
    _add_prediction_arguments(parser)
    options = parser.parse(arguments)
    if not options.inputs and not options.predictions:
        parser.error("Expected the folder of a run, or --predictions, but got neither")
    if options.predictions and shift_words(options):
        parser.error("Expected runs with --rotation and --domain, but got --predictions")
    if len(options.fit_predictions) not in (0, len(options.predictions)):
        parser.error(
            f"Expected one --fit-predictions for each of {len(options.predictions)} "
            f"--predictions, but got {len(options.fit_predictions)}"
        )
    return options


def _add_output_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results; default: eval in the run, or for a comparison the folder "
        f"{COMPARISON} beside the first run",
    )
    parser.add_argument(
        "--save-state",
        action="store_true",
        help=f"also write {STATE}, the sums behind each report, which segcal merge adds up",
    )
    parser.add_argument(
        "--shard",
        type=checked(shard),
        default=EVERYTHING,
        metavar="K/N",
        help="evaluate only every N-th image from the K-th on, and save the state for segcal merge",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out files that cannot be used, and list them"
    )
    parser.add_argument("--num-bins", type=at_least(1), default=15, help="bins of confidence")
    parser.add_argument(
        "--resamples",
        type=at_least(0),
        default=1000,
        help="of the bootstrap over images that gives intervals; 0 for none",
    )
    parser.add_argument(
        "--overlays",
        default="worst",
        help="images to draw: worst, random, none, or names with commas between them",
    )
    parser.add_argument("--num-overlays", type=at_least(0), default=4, help="how many to draw")


def add_run_arguments(parser: Parser) -> None:
    """The options of every command that opens a run."""
    parser.add_argument(
        "--weights", choices=("best", "last"), default="best", help="checkpoint of the run"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument(
        "--batch-size", type=at_least(1), help="images at a time; default: as in training"
    )
    parser.add_argument("--workers", type=at_least(0), default=2, help="processes that read images")


def _add_prediction_arguments(parser: Parser) -> None:
    group = parser.add_argument_group(
        "saved predictions", "The format is described in docs/predictions.md."
    )
    group.add_argument("--predictions", nargs="+", type=Path, default=[], metavar="DIR")
    group.add_argument(
        "--fit-predictions",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="saved predictions to fit --posthoc on, one for each of --predictions",
    )
    group.add_argument("--kind", choices=("logits", "probs"), help="what .npy files hold")
    group.add_argument("--layout", choices=("chw", "hwc"), help="default: chw")
    group.add_argument("--labels", type=Path, metavar="DIR", help="folder of the labels")
    group.add_argument("--images", type=Path, metavar="DIR", help="folder of images to draw on")
    group.add_argument("--num-classes", type=at_least(2))
    group.add_argument("--class-names", type=names, metavar="A,B,...")
    group.add_argument("--ignore-index", type=int, help="label that is not counted; default: 255")
    group.add_argument(
        "--align-corners",
        action="store_const",
        const=True,
        help="how small predictions are resized to their labels; see torch's interpolate",
    )


def describe_report(report: Report) -> str:
    """The scores of a report in one line."""
    dense = report.protocol.pixels > report.protocol.images  # not one label per image
    return describe_scores({n: v for n, v in report.scores.items() if dense or not SCORES[n].dense})


def _say(line: str) -> None:
    if distributed.rank() == 0:
        print(line, flush=True)
