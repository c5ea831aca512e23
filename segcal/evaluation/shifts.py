"""Evaluation under shift: one pass over each changed test set, whose results are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import segcal
from segcal import distributed
from segcal.evaluation.evaluate import (
    WHOLE_IMAGE,
    measure,
    new_detection,
    report_of,
    require_pixels,
)
from segcal.evaluation.folder import place, store, stored
from segcal.metrics import CalibrationMeter, Report
from segcal.posthoc import NONE, Calibrator
from segcal.sources.source import Source, digest

if TYPE_CHECKING:
    from segcal.data.shift import Shift

FORMAT = 1  # of stored results; a change of what a number means makes it larger


def open_shifts(source: Source, shifts: Sequence[str | Shift]) -> dict[str, Source]:
    """The source under each shift, by names such as "fog:3"; text may name several shifts."""
    if not shifts:
        return {}
    from segcal.data.shift import Shift, parse_shifts

    asked = [
        shift
        for given in shifts
        for shift in ([given] if isinstance(given, Shift) else parse_shifts(given))
    ]
    folders: dict[Path, Shift] = {}
    for shift in asked:
        first = folders.setdefault(place(NONE, str(shift)), shift)
        if first != shift:
            raise ValueError(
                f"the results under {first.name}:{first.value} and {shift.name}:{shift.value} "
                "would be in one folder: rename one of them"
            )
    return {str(shift): source.shifted(shift) for shift in folders.values()}


def evaluate_shift(
    source: Source,
    shift: str,
    calibrators: Mapping[str, Calibrator | None],
    cache: Path | None,
    resamples: int,
    *,
    uncertainty: bool = False,
    **settings: Any,
) -> dict[str, tuple[Report, CalibrationMeter, str]]:
    """The report, the meter and the key of each calibrator, in one pass over a shifted source.

    Args:
        source: the predictions on the changed images.
        shift: its name.
        calibrators: by short name, fitted on the clean hold-out; None for "none".
        cache: a folder of results; see `evaluate_source`.
        resamples: resamples over the images, for intervals; 0 for none.
        uncertainty: whether to compare kinds of uncertainty as finders of errors.
        **settings: of `measure`.
    """
    fingerprint = "" if cache is None else source.fingerprint()
    counted = (source.group, resamples, settings.get("num_bins"), uncertainty)
    about = (FORMAT, segcal.__version__, fingerprint, shift, *counted)
    keys = {name: digest(*about, learned(c)) for name, c in calibrators.items()}
    found: dict[str, tuple[Report, CalibrationMeter]] = {}
    if cache is not None and fingerprint:
        kept = {name: stored(cache / place(name, shift), key) for name, key in keys.items()}
        known = [[name for name, result in kept.items() if result is not None]]
        if distributed.is_distributed():  # the first process alone may see the files
            dist.broadcast_object_list(known)
            results = [kept]
            dist.broadcast_object_list(results)
            kept = results[0]
        found = {name: result for name, result in kept.items() if result is not None}
    missing = {name: c for name, c in calibrators.items() if name not in found}
    if missing:
        detection = new_detection(source, missing, resamples) if uncertainty else {}
        measured = measure(
            source, missing, detection=detection, per_image=resamples > 0, **settings
        )
        for name, meters in measured.items():
            report = require_pixels(report_of(meters, resamples=resamples), source.name)
            if name in detection:
                found_errors = detection[name].compute(resamples=resamples)
                report = replace(report, detection=found_errors)
            found[name] = report, meters[WHOLE_IMAGE]
            if cache is not None and fingerprint and distributed.rank() == 0:
                folder = cache / place(name, shift)
                store(folder, report, meters[WHOLE_IMAGE], {"key": keys[name], "shift": shift})
    return {name: (*found[name], keys[name]) for name in calibrators}


def learned(calibrator: Calibrator | None) -> list[Any]:
    """What a calibrator learned, to five digits: another fit may differ in the last."""
    if calibrator is None:
        return []
    tensors = calibrator.state_dict().items()
    return [
        calibrator.name,
        *((name, [f"{v:.5g}" for v in t.flatten().tolist()]) for name, t in tensors),
    ]
