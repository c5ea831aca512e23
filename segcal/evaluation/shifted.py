"""Evaluation under shift: one pass over each changed test set, whose results are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import segcal
from segcal import distributed
from segcal.data.corruptions import CORRUPTIONS
from segcal.data.samples import ArrayPart, FilePart, Samples
from segcal.data.shift import Shift, ShiftedPart
from segcal.evaluation.evaluate import measure, require_pixels
from segcal.evaluation.results import (
    REPORT,
    STATE,
    Result,
    entry_name,
    kept_report,
    method_folder,
    write_result,
)
from segcal.evaluation.sources import SplitPredictions
from segcal.metrics import Report
from segcal.posthoc import Calibrator
from segcal.viz.page import PageRow


def evaluate_shift(
    source: SplitPredictions,
    calibrators: Mapping[str, Calibrator | None],
    folder: Path,
    *,
    run: str,
    shift: Shift,
    key: str,
    num_bins: int = 15,
    resamples: int = 1000,
) -> dict[str, Report]:
    """Evaluate a network under one shift, after each post-hoc method.

    Every report is stored in `folder` with its state and a digest of all that it depends on; a
    later call with the same digest reads it from there.

    Args:
        source: the predictions on the changed images.
        calibrators: post-hoc methods by name, fitted on the clean hold-out; None for "none".
        folder: of the results of this shift.
        run: name of the network.
        shift: the change.
        key: names the network: a digest of its weights and settings.
        num_bins: of the meters.
        resamples: of the bootstrap over images; 0 for no intervals.

    Returns:
        A report for each calibrator; on other processes than the first, nothing.
    """
    corruption = CORRUPTIONS.get(shift.name)
    numbers = None if corruption is None else (corruption.large, corruption.small)
    about = (
        segcal.__version__,
        key,
        _fingerprint(source.samples),
        shift.name,
        str(shift.value),
        numbers,
    )
    keys = {
        name: digest(*about, num_bins, resamples, _learned(calibrator))
        for name, calibrator in calibrators.items()
    }
    kept = {name: kept_report(method_folder(folder, name), keys[name]) for name in calibrators}
    missing = _agreed({name: report is None for name, report in kept.items()})
    if missing:
        measured = measure(
            source,
            {name: calibrators[name] for name in missing},
            num_bins=num_bins,
            per_image=resamples > 0,
            title=f"{run}, {shift}",
        )
        if distributed.rank() == 0:
            for name, found in measured.items():
                report = found.report(resamples=resamples)
                kept[name] = require_pixels(report, f"{run} under {shift}")
                entry = PageRow(
                    entry_name(f"{run}, {shift}", name),
                    report,
                    skipped=dict(source.skipped),
                )
                place = method_folder(folder, name)
                # The report holds the key: it is removed first and written last.
                (place / REPORT).unlink(missing_ok=True)
                found.whole.save(place / STATE)
                write_result(Result(f"{run}, {shift}", name, entry), (), place, key=keys[name])
    return {name: report for name, report in kept.items() if report is not None}


def _fingerprint(samples: Samples) -> str:
    """A digest that changes when the items do: their names, and sizes and times of files."""
    part = samples.part
    while isinstance(part, ShiftedPart):
        part = part.part
    found = hashlib.sha256("\0".join(samples.names).encode("utf-8", "surrogatepass"))
    if isinstance(part, FilePart):
        for path in (*part.images, *part.mask_files):
            about = path.stat()
            found.update(f"{path} {about.st_size} {about.st_mtime_ns}\0".encode("utf-8", "replace"))
    elif isinstance(part, ArrayPart):
        for array in (part.images, part.labels):
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def digest(*parts: Any) -> str:
    """A digest of plain values."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """A digest of the contents of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:  # hashlib.file_digest came with Python 3.11
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def _learned(calibrator: Calibrator | None) -> list[Any]:
    """What a calibrator learned, to five digits: a fit that is made again may differ in the last."""
    if calibrator is None:
        return []
    tensors = calibrator.state_dict().items()
    return [
        calibrator.name,
        *((name, [f"{v:.5g}" for v in t.flatten().tolist()]) for name, t in tensors),
    ]


def _agreed(missing: Mapping[str, bool]) -> list[str]:
    """The names that are missing on the first process, which alone may see the files."""
    flags = torch.zeros(len(missing), dtype=torch.int64, device=distributed.communication_device())
    if distributed.rank() == 0:
        flags += torch.tensor(list(missing.values()), device=flags.device)
    distributed.sum_(flags)
    return [name for name, flag in zip(missing, flags.tolist(), strict=True) if flag]
