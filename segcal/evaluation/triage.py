"""Triage: thresholds and class sets that are chosen on a hold-out and checked on test images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from segcal.evaluation.evaluate import LogitMap, measure, require_pixels
from segcal.evaluation.sources import PredictionSource
from segcal.metrics import Report
from segcal.metrics.conformal import MissRates, SetCounts
from segcal.metrics.operating import AcceptedPixels, Target, choose_threshold


@dataclass(frozen=True)
class Triage:
    """What was chosen for one scaler, and the counts of the test images under it.

    Attributes:
        holdout: the report of the hold-out.
        accepted: by target, the counts at its threshold.
        sets: by promised miss rate, the counts of its class sets.
        holdout_miss: by promised miss rate, the mean miss rate of the hold-out.
    """

    holdout: Report
    accepted: Mapping[Target, AcceptedPixels] = field(default_factory=dict)
    sets: Mapping[float, SetCounts] = field(default_factory=dict)
    holdout_miss: Mapping[float, float] = field(default_factory=dict)

    @property
    def observers(self) -> list[AcceptedPixels | SetCounts]:
        """What must see the test images; see `measure`."""
        return [*self.accepted.values(), *self.sets.values()]

    def complete(self, report: Report) -> Report:
        """The report of the test images with the operating points and class sets."""
        images = self.holdout.protocol.images
        return replace(
            report,
            operating_points=tuple(
                counts.point(target, self.holdout.fine, images)
                for target, counts in self.accepted.items()
            ),
            class_sets=tuple(
                counts.sets(alpha, images, self.holdout_miss[alpha])
                for alpha, counts in self.sets.items()
            ),
        )


def choose_on_holdout(
    holdout: Callable[[], PredictionSource],
    scalers: Mapping[str, LogitMap | None],
    *,
    targets: Sequence[Target] = (),
    misses: Sequence[float] = (),
    title: str = "",
) -> dict[str, Triage]:
    """Choose thresholds and class sets after each scaler, in one pass over the hold-out.

    Args:
        holdout: makes the predictions to choose on.
        scalers: by name; None leaves the predictions as they are.
        targets: of operating points.
        misses: promised miss rates of class sets.
        title: of the progress bar.

    Returns:
        By the name of the scaler.

    Raises:
        ValueError: the hold-out has no labelled pixels, or too few images for a miss rate.
    """
    source = holdout()
    ignore, multilabel = source.ignore_index, source.multilabel
    if misses and multilabel:
        raise ValueError(
            "Expected predictions of one class per pixel for class sets, but got sigmoid outputs"
        )
    rates = {name: MissRates(ignore) for name in scalers if misses}
    watching = {name: [found] for name, found in rates.items()}
    measured = measure(source, scalers, observers=watching, per_image=False, title=title)
    triage = {}
    for name, found in measured.items():
        report = require_pixels(found.report(resamples=0), "the hold-out")
        chosen = {alpha: rates[name].choose(alpha) for alpha in misses}
        triage[name] = Triage(
            report,
            {
                t: AcceptedPixels(choose_threshold(report.fine, t), ignore, multilabel=multilabel)
                for t in targets
            },
            {alpha: SetCounts(lam, ignore) for alpha, (lam, _) in chosen.items()},
            {alpha: miss for alpha, (_, miss) in chosen.items()},
        )
    return triage
