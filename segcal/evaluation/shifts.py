"""Evaluation under shift: one pass over each changed test set, whose results are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import segcal
from segcal import distributed
from segcal.evaluation.evaluate import watch_errors
from segcal.evaluation.folder import place, store, stored
from segcal.evaluation.measure import Measured, measure, require_pixels
from segcal.posthoc import NONE, Calibrator
from segcal.sources.members import learned
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
    *,
    resamples: int,
    uncertainty: bool = False,
    **settings: Any,
) -> dict[str, tuple[Measured, str]]:
    """What each calibrator gives, with the key of its result, in one pass over a shifted source.

    Results that are in the folder `cache` with the same key are read from there. The other
    arguments are those of `evaluate_source` and `measure`.
    """
    fingerprint = "" if cache is None else source.fingerprint()
    counted = (source.group, resamples, settings.get("num_bins"), uncertainty)
    about = (FORMAT, segcal.__version__, fingerprint, shift, *counted)
    keys = {name: digest(*about, learned(c)) for name, c in calibrators.items()}
    folders = {name: cache / place(name, shift) for name in keys} if cache and fingerprint else {}
    kept = [{name: stored(folder, keys[name]) for name, folder in folders.items()}]
    if distributed.is_distributed():  # the first process alone may see the files
        dist.broadcast_object_list(kept)
    found = {name: Measured(*result) for name, result in kept[0].items() if result is not None}
    missing = {name: c for name, c in calibrators.items() if name not in found}
    if missing:
        watches = {name: [watch_errors(source, resamples)] for name in missing if uncertainty}
        made = measure(source, missing, watches=watches, resamples=resamples, **settings)
        for name, (report, meter) in made.items():
            require_pixels(report, source.name)
            if name in folders and distributed.rank() == 0:
                store(folders[name], report, meter, {"key": keys[name], "shift": shift})
        found |= made
    return {name: (found[name], keys[name]) for name in calibrators}
