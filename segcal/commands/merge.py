"""`segcal merge`: adds up the states of parts of a data set, and reports on the whole."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path

from segcal.evaluation.evaluate import NONE, Evaluation, require_pixels
from segcal.evaluation.folder import load_evaluation, require_writable, state_file
from segcal.metrics import CalibrationMeter
from segcal.viz.tables import counted, describe_report


def merge_states(options: argparse.Namespace) -> None:
    """Add up states that `segcal eval --save-state` or `CalibrationMeter.save` wrote."""
    paths = [state_file(path) for path in options.states]
    _require_places(paths, options.out, options.report)
    meters = [CalibrationMeter.load(path) for path in paths]
    _require_alike(paths, meters)
    _require_disjoint(paths, meters)
    _require_different(paths, meters)
    merged = reduce(add, meters)
    report = require_pixels(merged.compute(resamples=options.resamples), "the states")
    beside = [path.with_name("report.json") for path in paths]
    known = [load_evaluation(path) for path in beside if path.is_file()]
    name = known[0].name if known else (options.out or paths[0]).stem
    result = Evaluation(name, {NONE: report}, meters={NONE: merged})
    print(f"{name}: {describe_report(report)}")
    protocol = report.protocol
    total = f"{protocol.pixels} {counted(report)}"
    print(f"{protocol.images} images, {total} from {len(paths)} states")
    if options.report is not None:
        result.save(options.report, static=options.static)
    if options.out is not None:  # after the report, whose folder may be the same
        merged.save(options.out)
        print(f"state: {options.out}")
    if options.report is not None:
        print(f"report: {options.report / 'report.html'}")


def _require_places(states: Sequence[Path], out: Path | None, report: Path | None) -> None:
    """Raise if the results cannot be written, or would replace what they are made of."""
    for folder in filter(None, (report, out and out.parent)):
        require_writable(folder)
    if out is not None and out.is_dir():
        raise ValueError(f"Expected a file for the merged state, but {out} is a folder")
    for state in states:
        if report is not None and report.resolve() in state.resolve().parents:
            raise ValueError(
                f"Expected another folder for the report than {report}, which holds {state}"
            )


def _require_alike(paths: Sequence[Path], meters: Sequence[CalibrationMeter]) -> None:
    for path, meter in zip(paths, meters, strict=True):
        try:
            meters[0].settings.require_equal(meter.settings)
        except ValueError as error:
            raise ValueError(f"{error} ({paths[0]} and {path})") from None


def _require_disjoint(paths: Sequence[Path], meters: Sequence[CalibrationMeter]) -> None:
    """Refuse to count an image twice, as far as names can tell."""
    seen: dict[str, Path] = {}
    for path, meter in zip(paths, meters, strict=True):
        # Within one state, images may share a name: their meter was given them so.
        for name in set(filter(None, meter.names)):
            if name in seen:
                raise ValueError(
                    f"Expected states of different images, but {name} is in {seen[name]} and {path}"
                )
            seen[name] = path


def _require_different(paths: Sequence[Path], meters: Sequence[CalibrationMeter]) -> None:
    """Refuse to count a state twice, which images without names would not tell."""
    seen: dict[bytes, Path] = {}
    for path, meter in zip(paths, meters, strict=True):
        state = meter.state_dict()
        digest = b"".join(
            hashlib.sha256(name.encode() + tensor.numpy().tobytes()).digest()
            for name, tensor in sorted(state.items())
        )
        if digest in seen and state["top_count"].any():
            raise ValueError(
                f"Expected states of different images, but {seen[digest]} and {path} are the same"
            )
        seen[digest] = path
