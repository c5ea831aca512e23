"""`segcal merge`: adds up the states of parts of a data set, and reports on the whole."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

from segcal.evaluation.evaluate import require_pixels
from segcal.evaluation.results import (
    PAGE,
    REPORT,
    STATE,
    Result,
    entry_name,
    new_contents,
    read_result,
    require_writable,
    state_path,
    write_pages,
    write_result,
)
from segcal.metrics import CalibrationMeter, Report
from segcal.posthoc import NONE
from segcal.viz.page import PageRow
from segcal.viz.tables import counted, describe_report


def merge_states(options: argparse.Namespace) -> None:
    """Add up states that `segcal eval --save-state` or `CalibrationMeter.save` wrote."""
    paths = [state_path(path) for path in options.states]
    _require_places(paths, options.out, options.report)
    meters = [CalibrationMeter.load(path) for path in paths]
    _require_alike(paths, meters)
    _require_disjoint(paths, meters)
    _require_different(paths, meters)
    parts = [_described(path) for path in paths]
    _require_one_method(paths, parts)
    merged = reduce(add, meters)
    report = require_pixels(merged.compute(resamples=options.resamples), "the states")
    result = _whole(parts, report, (options.out or paths[0]).stem)
    print(f"{result.entry.name}: {describe_report(report)}")
    protocol = report.protocol
    total = f"{protocol.pixels} {counted(report)}"
    print(f"{protocol.images} images, {total} from {len(paths)} states")
    if options.report is not None:
        with new_contents(options.report) as staging:
            result = write_result(result, [], staging)
            write_pages([result], staging, result.run, static=options.static)
    if options.out is not None:  # after the report, whose folder may be the same
        merged.save(options.out)
        print(f"state: {options.out}")
    if options.report is not None:
        print(f"report: {options.report / PAGE}")


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


def _described(path: Path) -> Result | None:
    """What the report beside a state says of it, if `segcal eval` wrote one."""
    beside = path.with_name(REPORT)
    return read_result(beside) if path.name == STATE and beside.is_file() else None


def _require_one_method(paths: Sequence[Path], parts: Sequence[Result | None]) -> None:
    methods = {part.method: path for path, part in zip(paths, parts, strict=True) if part}
    if len(methods) > 1:
        shown = " and ".join(f"{method} in {path}" for method, path in methods.items())
        raise ValueError(f"Expected states of one post-hoc method, but got {shown}")


def _whole(parts: Sequence[Result | None], report: Report, name: str) -> Result:
    """The result of all parts together, described as the first of them that is described."""
    known = [part for part in parts if part is not None]
    first = known[0] if known else Result(name, NONE, PageRow(name, report))
    entry = replace(
        first.entry,
        name=entry_name(first.run, first.method),
        report=report,
        overlays=(),
        skipped={n: why for part in known for n, why in part.entry.skipped.items()},
    )
    return replace(first, entry=entry)
