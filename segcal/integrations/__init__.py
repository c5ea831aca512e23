"""Adapters to other frameworks, one module each; only that module imports the framework.

Every one counts with `segcal.CalibrationMeter`, so the numbers are those of `segcal eval`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from segcal.metrics import Report
from segcal.metrics.scores import LOGGED, SCORES
from segcal.sources.source import resize


def missing(package: str, extra: str) -> ImportError:
    """What to raise if `package` is not installed; it names the extra that has it."""
    return ImportError(f"{package} is not installed: pip install 'segcal[{extra}]'")


def chosen_scores(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names, checked; by default those of the training log: accuracy, mIoU, NLL, ECE, SCE."""
    if names is None:
        return tuple(score.name for score in LOGGED)
    names = (names,) if isinstance(names, str) else tuple(names)
    known = [name for name, score in SCORES.items() if score.scope != "classes"]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no score {name!r} to log: take some of {', '.join(known)}")
    return names


def scalars(report: Report, names: Sequence[str], prefix: str = "") -> dict[str, float]:
    """The scores of a report by name, as fractions, for a framework's log."""
    return {f"{prefix}{name}": float(getattr(report, name)) for name in names}


def at_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """(N, C, *S) logits at the size of the labels, (N, *S) or (N, C, *S)."""
    return resize(logits, labels.shape[labels.ndim - logits.ndim + 2 :])
