"""Saved states of evaluations: added up, and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from segcal.evaluation.evaluate import Evaluation, title
from segcal.evaluation.folder import REPORT, STATE, load_evaluation, state_file
from segcal.evaluation.measure import require_pixels
from segcal.metrics import CalibrationMeter, Difference, Report, paired_differences
from segcal.metrics.report import Detection
from segcal.posthoc import NONE

Rows = dict[str, dict[str, Difference]]  # differences by row and score


def merge_states(
    states: Sequence[str | Path], *, name: str = "", resamples: int = 1000
) -> Evaluation:
    """The evaluation of all images whose parts were evaluated apart.

    `states` are files that `CalibrationMeter.save` wrote, or folders of results with a state.npz.
    Tables call the network `name`, if no report beside a state says it.
    """
    paths = [state_file(Path(state)) for state in states]
    meters = [CalibrationMeter.load(path) for path in paths]
    seen: dict[str, Path] = {}  # images, and digests of states
    for path, meter in zip(paths, meters, strict=True):
        try:
            meters[0].settings.require_equal(meter.settings)
        except ValueError as error:
            raise ValueError(f"{error} ({paths[0]} and {path})") from None
        images = {image: image for image in meter.names if image}  # two may share a name
        if meter.compute(resamples=0).protocol.pixels:
            arrays = [(k, t.numpy().tobytes()) for k, t in sorted(meter.state_dict().items())]
            images[hashlib.sha256(repr(arrays).encode()).hexdigest()] = "all of it"
        for key, what in images.items():
            if key in seen:
                raise ValueError(
                    f"the states must be of different images, but {what} is in both {seen[key]} "
                    f"and {path}"
                )
            seen[key] = path
    described = [_described(path) for path in paths]
    methods = {about["method"]: path for about, path in zip(described, paths, strict=True) if about}
    if len(methods) > 1:
        shown = " and ".join(f"{method} in {path}" for method, path in methods.items())
        raise ValueError(f"the states must be of one post-hoc method, but are of {shown}")
    merged = reduce(add, meters)
    report = merged.compute(resamples=resamples)
    require_pixels(report, "the states")
    report = replace(report, detection=_detection(paths))
    skipped: dict[str, str] = {}
    for about in described:
        skipped |= about.get("skipped", {})
    known = [title(about["name"], about["method"]) for about in described if about]
    name = (known or [name or paths[0].stem])[0]
    return Evaluation(name, {NONE: report}, meters={NONE: merged}, skipped=skipped)


def _described(path: Path) -> dict[str, Any]:
    """What the report beside a state says of it, if an evaluation wrote one."""
    beside = path.with_name(REPORT)
    if path.name != STATE or not beside.is_file():
        return {}
    about = json.loads(beside.read_text(encoding="utf-8")).get("about", {})
    return about if {"name", "method"} <= about.keys() else {}


def _detection(paths: Sequence[Path]) -> tuple[Detection, ...]:
    """The histograms of uncertainty in the reports beside all states, added up.

    Reports do not hold the histograms of each image, so there are no intervals.
    """
    beside = [path.with_name(REPORT) for path in paths if path.name == STATE]
    if len(beside) < len(paths) or not all(path.is_file() for path in beside):
        return ()
    each = [{one.name: one for one in Report.load(path).detection} for path in beside]
    return tuple(
        Detection(
            name,
            np.sum([found[name].correct for found in each], axis=0),
            np.sum([found[name].wrong for found in each], axis=0),
            {},
        )
        for name in each[0]
        if all(name in found for found in each)
    )


def compare_states(
    states: Sequence[str | Path], *, shift: bool = False, resamples: int = 1000
) -> dict[str, Rows]:
    """How models differ from the first on the same images, by the title of a table.

    `states` are as for `merge_states`. With `shift` they are folders of results under shift, which
    are compared under each, and in the mean over shifts where these have the same images.
    """
    first, *others = map(str, states)
    if not shift:
        one = CalibrationMeter.load(state_file(Path(first)))
        rows = {}
        for other in others:
            meter = CalibrationMeter.load(state_file(Path(other)))
            rows[other] = _differences([one], [meter], f"{first} and {other}", resamples)
        return {f"Differences from {first}": rows}
    tables = {}
    mine = _shifted(first)
    for other in others:
        theirs = _shifted(other)
        if odd := sorted(mine.keys() ^ theirs.keys()):
            raise ValueError(
                f"{first} and {other} must have the same shifts, but {odd[0]} is in one alone"
            )
        both = f"{first} and {other}"
        rows = {
            name: _differences([mine[name]], [theirs[name]], f"{both} under {name}", resamples)
            for name in mine
        }
        if len({tuple(sorted(meter.names)) for meter in mine.values()}) == 1:
            pair = [list(mine.values())], [[theirs[name] for name in mine]]
            rows[f"mean over {len(mine)} shifts"] = _differences(*pair, both, resamples)
        tables[f"Differences of {other} from {first}"] = rows
    return tables


def _shifted(folder: str) -> Mapping[str, CalibrationMeter]:
    """The meters of the network as it is, or of the method of the folder, by shift."""
    path = Path(folder)
    method = _described(path / STATE).get("method", NONE)
    evaluation = load_evaluation(path if method == NONE else path.parent)
    found = {key[1]: meter for key, meter in evaluation.meters.items() if key[0] == method}
    if not found:
        raise ValueError(f"there are no results under shift in {folder}: run segcal eval --shift")
    return found


def _differences(first: Any, second: Any, what: str, resamples: int) -> dict[str, Difference]:
    try:
        return paired_differences(first, second, resamples=resamples)
    except ValueError as error:
        raise ValueError(f"{error} ({what})") from None
