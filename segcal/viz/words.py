"""The result of an evaluation in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segcal.metrics import Interval, Report
from segcal.metrics.scores import SCORES
from segcal.viz.entry import Entry
from segcal.viz.reading import class_names
from segcal.viz.shifts import mean_over_shifts, shifted

_EVEN = 0.0005  # mean confidence and accuracy that print alike (in %, one digit) are equal


class Phrase(NamedTuple):
    """A piece of a sentence, and its kind: "over", "under", "even", or ""."""

    text: str
    kind: str = ""


def headline(entries: Sequence[Entry]) -> list[Phrase]:
    """The main result, in a few sentences."""
    found = _one(entries[0].report) if len(entries) == 1 else _several(entries)
    return [*found, *_under_shift(shifted(entries))]


def verdict(report: Report) -> Phrase:
    """Whether the network is over- or under-confident overall, and by how much."""
    gap = report.mean_confidence - report.accuracy
    if np.isnan(gap):
        return Phrase("nothing was counted")
    if abs(gap) < _EVEN:
        return Phrase("as confident as accurate overall", "even")
    kind = "over" if gap > 0 else "under"
    return Phrase(f"{kind}-confident by {100 * abs(gap):.1f} points", kind)


def _one(report: Report) -> list[Phrase]:
    if not report.protocol.pixels:
        return [Phrase("Nothing was counted.")]
    found = verdict(report)
    names, worst = class_names(report), int(np.nanargmax(report.class_ece))
    return [
        Phrase(found.text[0].upper() + found.text[1:], found.kind),
        Phrase(
            f": mean confidence {_value('mean_confidence', report.mean_confidence)}, "
            f"accuracy {_value('accuracy', report.accuracy)}. "
            f"ECE is {_value('ece', report.ece)}{_between(report.intervals.get('ece'))}; "
            f"the worst calibrated class is {names[worst]}, "
            f"with a class\u2011j\u2011ECE of {_value('class_ece', report.class_ece[worst])}."
        ),
    ]


def _under_shift(entries: Sequence[Entry]) -> list[Phrase]:
    """The mean over shifts, of the best model if there are several."""
    if not entries:
        return []
    best = min(entries, key=lambda entry: mean_over_shifts(entry, "ece"))
    ece, accuracy, confidence = (
        _value(name, mean_over_shifts(best, name))
        for name in ("ece", "accuracy", "mean_confidence")
    )
    count = len(best.shifts)
    under = f" Under {count} shifts" if count > 1 else f" Under {best.shifts[0].shift}"
    mean = "mean " if count > 1 else ""
    if len(entries) == 1:
        subject = f"{under} the {mean}ECE is {ece}"
    else:
        subject = f"{under} {best.name} has the lowest {mean}ECE, {ece}"
    return [Phrase(f"{subject}: confidence {confidence}, accuracy {accuracy}.")]


def _several(entries: Sequence[Entry]) -> list[Phrase]:
    order = sorted(
        (entry for entry in entries if entry.report.protocol.pixels),
        key=lambda entry: entry.report.ece,
    )
    if not order:
        return [Phrase("Nothing was counted.")]
    best, last = order[0], order[-1]
    phrases = [
        Phrase(best.name, "even"),
        Phrase(f" has the lowest ECE, {_value('ece', best.report.ece)}, and is "),
        verdict(best.report),
        Phrase("."),
    ]
    if last is not best:
        accuracies = sorted(entry.report.accuracy for entry in order)
        low, high = (_value("accuracy", accuracies[end]) for end in (0, -1))
        accuracy = f"{low} for all" if low == high else f"between {low} and {high}"
        phrases.append(
            Phrase(
                f" {last.name} has the highest, {_value('ece', last.report.ece)}. "
                f"Accuracy is {accuracy}."
            )
        )
    return [*phrases, *_overlap(order)]


def _overlap(order: Sequence[Entry]) -> list[Phrase]:
    """A caution if the interval of the lowest ECE overlaps another one."""
    best = order[0].report.intervals.get("ece")
    rivals = [
        entry.name
        for entry in order[1:]
        if (other := entry.report.intervals.get("ece")) and best and other.low <= best.high
    ]
    if not rivals:
        return []
    whose = "those" if len(rivals) > 1 else "that"
    return [Phrase(f" Its 95\u00a0% interval overlaps {whose} of {', '.join(rivals)}.")]


def _between(interval: Interval | None) -> str:
    if interval is None or np.isnan(interval.low):
        return ""
    low, high = (SCORES["ece"].number(end) for end in (interval.low, interval.high))
    return f" ({low} to {high} with 95\u00a0% confidence)"


def _value(score: str, value: float) -> str:
    """A score and its unit, joined by a no-break space."""
    return SCORES[score].brief(value).replace(" ", "\u00a0")
