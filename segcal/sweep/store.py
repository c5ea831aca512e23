"""The files of a grid, one folder per training: what is done, what failed, what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
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
        """The reports of the chosen runs, one per seed; none while any is missing."""
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


def every_run(method: Method, store: Store) -> list[Training]:
    """The runs of a method as far as they are known: candidates, then those reported."""
    runs = method.candidates() if len(method.grid) > 1 else []
    hyper = store.choice(method)
    return list(dict.fromkeys(runs if hyper is None else runs + method.chosen(hyper)))


def failures(methods: Sequence[Method], store: Store) -> list[str]:
    """The runs that could not be made, each with its reason."""
    runs = dict.fromkeys(run for method in methods for run in every_run(method, store))
    reasons = ((run.name, store.failure(run)) for run in runs)
    return [f"{name}: {reason}" for name, reason in reasons if reason is not None]


@dataclass(frozen=True)
class GridProgress:
    """How far a grid is.

    Attributes:
        done: trainings that are complete.
        total: all trainings. Where hyper-parameters are still to be chosen by several rules, each
            rule counts as if it chose others.
        reports: evaluations that are missing.
        seconds: estimate for what is missing, on one worker, by the mean of what is done; None as
            long as nothing is.
    """

    done: int
    total: int
    reports: int
    seconds: float | None

    @classmethod
    def of(cls, methods: Sequence[Method], store: Store) -> GridProgress:
        """The state of a grid."""
        runs: dict[Training, None] = {}
        lacking: set[tuple[Training, str]] = set()
        unknown: list[Method] = []  # whose hyper-parameters are still to be chosen
        for method in methods:
            runs |= dict.fromkeys(every_run(method, store))
            hyper = store.choice(method)
            if hyper is not None:
                for run in method.chosen(hyper):
                    lacking |= {(run, e.name) for e in store.missing(run, method)}
            elif not all(map(store.failure, method.candidates())):
                unknown.append(method)
        records = {run: store.trained(run) for run in runs}
        kept = [record for record in records.values() if record is not None]
        waiting = [r for r, record in records.items() if record is None and not store.failure(r)]
        later = sum(len(method.seeds) - 1 for method in unknown)
        reports = len([run for run, _ in lacking if not store.failure(run)])
        reports += sum(len(method.seeds) * len(method.evaluations) for method in unknown)
        training, each = (
            [record[name] for record in kept if name in record]
            for name in ("seconds", "seconds_per_report")
        )
        trainings = len(waiting) + later
        seconds = None
        if training or not trainings:
            seconds = trainings * _mean(training) + reports * _mean(each)
        return cls(len(kept), len(runs) + later, reports, seconds)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def in_time(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
