"""The files of a grid: a folder a training, marked as each step is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.files import atomic_write
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.scores import SCORES
from segcal.sweep.plan import Evaluation, Hyper, Method, Training

TRAINED, FAILED, REPORTS = "trained.json", "failed.json", "reports"


@dataclass(frozen=True)
class Store:
    """The runs of a grid below `root`. Every question is answered by looking at the disk.

    Attributes:
        root: folder of the folders of the runs.
        found: of runs that were trained elsewhere, what `trained` is to say, by name.
    """

    root: Path
    found: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def folder(self, run: Training) -> Path:
        """Where what is known of a run is kept."""
        return self.root / run.name

    def trained_folder(self, run: Training) -> Path:
        """Where its checkpoints are: its own folder, unless it was found elsewhere."""
        elsewhere = (self.trained(run) or {}).get("folder")
        return self.folder(run) if elsewhere is None else Path(elsewhere)

    def trained(self, run: Training) -> dict[str, Any] | None:
        """The hold-out scores of the best epoch, or None while the training is not complete."""
        return _read(self.folder(run) / TRAINED) or self.found.get(run.name)

    def set_trained(self, run: Training, scores: Mapping[str, Any]) -> None:
        """Mark the training as complete."""
        _write(self.folder(run) / TRAINED, scores)

    def failure(self, run: Training) -> str | None:
        """Why the run could not be made, or None."""
        record = _read(self.folder(run) / FAILED)
        return None if record is None else str(record["reason"])

    def set_failure(self, run: Training, reason: str) -> None:
        """Mark the run as one that could not be made."""
        _write(self.folder(run) / FAILED, {"reason": reason})

    def forget_failure(self, run: Training) -> None:
        """Let the run be tried again."""
        (self.folder(run) / FAILED).unlink(missing_ok=True)

    def report(self, run: Training, evaluation: Evaluation) -> Path:
        """Where the report of an evaluation is, once it is there."""
        return self.folder(run) / REPORTS / f"{evaluation.name}.json"

    def missing(self, run: Training, method: Method) -> list[Evaluation]:
        """The evaluations of `method` that `run` still lacks, in a fixed order."""
        lacking = [e for e in method.evaluations if not self.report(run, e).exists()]
        return sorted(lacking, key=lambda evaluation: evaluation.name)

    def choice(self, method: Method) -> Hyper | None:
        """The hyper-parameters that are best on the hold-out; None until all are trained.

        Equally good ones are told apart by their NLL. Candidates that failed do not count; if all
        did, there is no choice.
        """
        if len(method.grid) == 1:
            return method.grid[0]
        candidates = [run for run in method.candidates() if self.failure(run) is None]
        scores = [self.trained(run) for run in candidates]
        if not candidates or any(score is None for score in scores):
            return None
        sign = 1 if SCORES[method.select].higher else -1
        ranks = [(sign * s[method.select], -s["nll"]) for s in scores if s is not None]
        return candidates[ranks.index(max(ranks))].hyper

    def reports(self, method: Method, evaluation: Evaluation) -> list[Report]:
        """The reports of the chosen runs, one a seed; none while any is missing."""
        return [Report.load(path) for path in self._paths(method, evaluation)]

    def meters(self, method: Method, evaluation: Evaluation) -> list[CalibrationMeter]:
        """The meters behind `reports`."""
        paths = self._paths(method, evaluation)
        return [CalibrationMeter.load(path.with_suffix(".npz")) for path in paths]

    def _paths(self, method: Method, evaluation: Evaluation) -> list[Path]:
        hyper = self.choice(method)
        if hyper is None:
            return []
        paths = [self.report(run, evaluation) for run in method.chosen(hyper)]
        return paths if all(path.exists() for path in paths) else []


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        json.dump(record, file, indent=1)
