"""How far a grid is, what failed, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from segcal.sweep.plan import Method, Training
from segcal.sweep.store import Store


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
class Progress:
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
    def of(cls, methods: Sequence[Method], store: Store) -> Progress:
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
