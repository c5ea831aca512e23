"""The place for sentences: what a report says, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segcal.metrics import Interval, Report
from segcal.viz.entry import Entry
from segcal.viz.reading import class_names

_EVEN = 0.0005  # mean confidence and accuracy that print alike (in %, one digit) are equal


class Phrase(NamedTuple):
    """A piece of a sentence, and what it speaks of: "over", "under", "even", or ""."""

    text: str
    kind: str = ""


def headline(entries: Sequence[Entry]) -> list[Phrase]:
    """What was found, in a few sentences."""
    return _one(entries[0].report) if len(entries) == 1 else _several(entries)


def verdict(report: Report) -> Phrase:
    """Whether the network is over- or under-confident on the whole, and by how much."""
    gap = report.mean_confidence - report.accuracy
    if np.isnan(gap):
        return Phrase("nothing was counted")
    if abs(gap) < _EVEN:
        return Phrase("as confident as accurate on the whole", "even")
    kind = "over" if gap > 0 else "under"
    return Phrase(f"{kind}-confident by {100 * abs(gap):.1f} points", kind)


def _one(report: Report) -> list[Phrase]:
    found = verdict(report)
    if not report.protocol.pixels:
        return [Phrase("Nothing was counted.")]
    names, worst = class_names(report), int(np.nanargmax(report.class_ece))
    return [
        Phrase(found.text[0].upper() + found.text[1:], found.kind),
        Phrase(
            f": mean confidence {100 * report.mean_confidence:.1f} %, "
            f"accuracy {100 * report.accuracy:.1f} %. "
            f"ECE is {100 * report.ece:.2f} %{_between(report.intervals.get('ece'))}; "
            f"the worst calibrated class is {names[worst]}, "
            f"with a class-j-ECE of {100 * report.class_ece[worst]:.2f} %."
        ),
    ]


def _several(entries: Sequence[Entry]) -> list[Phrase]:
    known = [entry for entry in entries if entry.report.protocol.pixels]
    if not known:
        return [Phrase("Nothing was counted.")]
    order = sorted(known, key=lambda entry: entry.report.ece)
    best, last = order[0], order[-1]
    found = verdict(best.report)
    accuracies = [100 * entry.report.accuracy for entry in known]
    phrases = [
        Phrase(f"{best.name}", "even"),
        Phrase(f" has the lowest ECE, {100 * best.report.ece:.2f} %, and is "),
        found,
        Phrase("."),
    ]
    if len(order) > 1:
        phrases.append(
            Phrase(
                f" {last.name} has the highest, {100 * last.report.ece:.2f} %."
                f" Accuracy is between {min(accuracies):.1f} and {max(accuracies):.1f} %."
            )
        )
        phrases += _overlap(order)
    return phrases


def _overlap(order: Sequence[Entry]) -> list[Phrase]:
    """A caution where the interval of the best ECE meets another's."""
    best = order[0].report.intervals.get("ece")
    if best is None:
        return []
    rivals = [
        entry.name
        for entry in order[1:]
        if (other := entry.report.intervals.get("ece")) is not None and other.low <= best.high
    ]
    if not rivals:
        return []
    return [Phrase(f" Its 95 % interval overlaps that of {', '.join(rivals)}.")]


def _between(interval: Interval | None) -> str:
    if interval is None or np.isnan(interval.low):
        return ""
    return f" ({100 * interval.low:.2f} to {100 * interval.high:.2f} with 95 % confidence)"
