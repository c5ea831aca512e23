"""`segcal eval`: evaluates runs and saved predictions, and writes reports and pages."""

from __future__ import annotations

import argparse
import webbrowser
from dataclasses import fields
from pathlib import Path

from segcal import distributed
from segcal.data.shift import DATA, Shift
from segcal.distributed import choose_device, process_group
from segcal.evaluation.evaluate import Evaluation, evaluate_source, title
from segcal.evaluation.folder import EVAL, load_evaluation, require_writable, write_comparison
from segcal.sources import Source, open_source
from segcal.sources.saved import PredictionFormat
from segcal.viz.tables import describe_report


def evaluate_inputs(options: argparse.Namespace) -> None:
    """Evaluate each of the inputs, and compare them if there are several."""
    fits = options.fit_predictions or [None] * len(options.predictions)
    inputs = [(path, None) for path in options.inputs]
    inputs += list(zip(options.predictions, fits, strict=True))
    comparison = options.out or inputs[0][0].parent / "comparison"
    places: dict[Path, str] = {}
    for path, _ in inputs:
        if path.suffix != ".json":
            folder = _folder(path, options, len(inputs))
            require_writable(folder)
            if (first := places.setdefault(folder.resolve(), str(path))) != str(path):
                raise ValueError(
                    f"the results of {first} and {path} would be in one folder: evaluate them one "
                    "at a time, with --out"
                )
    if len(inputs) > 1:
        require_writable(comparison)
    device = choose_device(options.device)
    with process_group(device):
        found, page = [], Path()
        for path, fit in inputs:
            if path.suffix == ".json":
                found.append(load_evaluation(path))
                continue
            evaluation = _evaluate(path, fit, str(device), options, len(inputs))
            page = evaluation.save(_folder(path, options, len(inputs)), static=options.static)
            found.append(evaluation)
            _say(evaluation)
            if distributed.rank() == 0:
                print(f"report: {page}", flush=True)
        if len(inputs) > 1:
            page = write_comparison(found, comparison, static=options.static)
            if distributed.rank() == 0:
                print(f"comparison: {page}", flush=True)
        if options.open and distributed.rank() == 0:
            webbrowser.open(page.resolve().as_uri())


def _folder(path: Path, options: argparse.Namespace, inputs: int) -> Path:
    """Where the results of one input go."""
    if options.out is not None and inputs == 1:
        return Path(options.out)
    name = EVAL if options.limit is None else f"{EVAL}-limit-{options.limit}"
    if options.shard[1] > 1:
        name += f"-{options.shard[0] + 1}-of-{options.shard[1]}"
    return (path.parent if path.is_file() else path) / name


def _evaluate(
    path: Path, fit: Path | None, device: str, options: argparse.Namespace, inputs: int
) -> Evaluation:
    saved = path in options.predictions
    holdout: Source | None = None
    if saved:
        stated = {
            field.name: getattr(options, field.name, None) for field in fields(PredictionFormat)
        }
        stated |= {"format": options.format, "skip_bad": options.skip_bad}
        source = open_source(path, **stated)
        holdout = None if fit is None else open_source(fit, **stated)
    else:
        source = open_source(
            path,
            split=options.split,
            weights=options.weights,
            device=device,
            batch_size=options.batch_size,
            workers=options.workers,
            skip_bad=options.skip_bad,
        )
    if options.limit is not None:
        source = source.limited(options.limit)
    if options.shard[1] > 1:
        source = source.shard(*options.shard)
    return evaluate_source(
        source,
        holdout=holdout,
        posthoc=options.posthoc,
        shifts=[*options.shift, *(Shift(DATA, str(root)) for root in options.shift_data)],
        regions=options.regions,
        protocols=options.protocol,
        operate=options.operate,
        conformal=options.conformal,
        num_bins=options.num_bins,
        resamples=options.resamples,
        overlays=options.overlays,
        num_overlays=options.num_overlays,
        cache=_folder(path, options, inputs),
    )


def _say(evaluation: Evaluation) -> None:
    if distributed.rank() != 0:
        return
    for key, report in evaluation.reports.items():
        method, shift = key if isinstance(key, tuple) else (key, "")
        name = f"{evaluation.name}, {shift}" if shift else evaluation.name
        print(f"{title(name, method)}: {describe_report(report)}")
    for line in evaluation.notes:
        print(line)
    if evaluation.skipped:
        print(f"left out {len(evaluation.skipped)} files; the report lists them")
