"""The files of a grid: a folder a training, marked as each step is done."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.plan import Evaluation, Hyper, Method, Training
from segcal.files import atomic_write

TRAINED, FAILED, REPORTS = "trained.json", "failed.json", "reports"


@dataclass(frozen=True)
class Store:
    """The runs of a grid below `root`. Every question is answered by looking at the disk.

    So several processes can work on one grid, and one that starts late knows what is done.
    """

    root: Path

    def folder(self, run: Training) -> Path:
        """Where a run is kept."""
        return self.root / run.name

    def trained(self, run: Training) -> dict[str, Any] | None:
        """The hold-out scores of the best epoch, or None while the training is not complete."""
        return _read(self.folder(run) / TRAINED)

    def set_trained(self, run: Training, scores: dict[str, Any]) -> None:
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
        posthoc, shift = evaluation
        tested = "test" if shift is None else "".join(shift)
        return self.folder(run) / REPORTS / f"{tested}-{posthoc}.json"

    def missing(self, run: Training, method: Method) -> list[Evaluation]:
        """The evaluations of `method` that `run` still lacks, in a fixed order."""
        lacking = [e for e in method.evaluations if not self.report(run, e).exists()]
        return sorted(lacking, key=lambda evaluation: self.report(run, evaluation).name)

    def choice(self, method: Method) -> Hyper | None:
        """The hyper-parameters most accurate on the hold-out; None until all are trained.

        Equally accurate ones are told apart by their NLL. Candidates that failed do not count.

        Raises:
            ValueError: every candidate failed.
        """
        if len(method.grid) == 1:
            return method.grid[0]
        candidates = [run for run in method.candidates() if self.failure(run) is None]
        scores = [self.trained(run) for run in candidates]
        if not candidates:
            raise ValueError(f"no run of {method.config} {method.loss} could be trained")
        if any(score is None for score in scores):
            return None
        ranks = [(s["accuracy"], -s["nll"]) for s in scores if s is not None]
        return candidates[ranks.index(max(ranks))].hyper


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, record: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        json.dump(record, file, indent=1)
