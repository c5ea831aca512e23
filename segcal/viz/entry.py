"""Entries, the rows of a page or a comparison, and the tables that compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from segcal.data.shift import Shift
from segcal.files import utf8
from segcal.metrics import Report, rows


class Heading(NamedTuple):
    """The heading of a sortable column, and the order that the first click gives."""

    text: str
    first: str = "descending"


@dataclass(frozen=True)
class Overlay:
    """The panel of one image.

    Attributes:
        name: what is shown: the name of the image, or of a plane or a class of it.
        png: the panel; see `overlay_panel`.
        ece: the ECE of the image, if known.
        arrays: what the panel is drawn from, if known: labels, prediction, confidence and gap (NaN
            where pixels are ignored), each (H, W); top_classes and top_probs, (3, H, W), of the
            three likeliest classes; image, (H, W, 3), and palette, (C, 3), if there are any.
        class_names: of the arrays, if they have other classes than the report.
        image: the name of the image, if it is another one.
    """

    name: str
    png: bytes
    ece: float | None = None
    arrays: Mapping[str, np.ndarray] | None = field(default=None, compare=False, repr=False)
    class_names: Sequence[str] = ()
    image: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", utf8(self.name))
        object.__setattr__(self, "image", utf8(self.image) or self.name)


@dataclass(frozen=True)
class PageRow:
    """One row of a comparison: a run, or a run after a post-hoc method.

    Attributes:
        name: its name in tables and legends.
        report: its report.
        history: the lines of its log.jsonl, if there is one.
        config: the YAML of the run, if known.
        overlays: panels of some images.
        skipped: files that were left out, each with the reason.
        shifts: the reports of the same model under shifts, if it was evaluated there too.
        shift_overlay: the panel of one image, clean and under shifts.
    """

    name: str
    report: Report
    history: Sequence[Mapping[str, Any]] = ()
    config: str = ""
    overlays: Sequence[Overlay] = ()
    skipped: Sequence[str] = ()
    shifts: Mapping[Shift, Report] = field(default_factory=dict)
    shift_overlay: Overlay | None = None

    def __post_init__(self) -> None:
        for text in ("name", "config"):
            object.__setattr__(self, text, utf8(getattr(self, text)))
        object.__setattr__(self, "skipped", [utf8(line) for line in self.skipped])


def comparison_markdown(entries: Sequence[PageRow]) -> str:
    """A Markdown table with one row per entry: units in the header, intervals, best in bold."""
    return rows.to_markdown({entry.name: entry.report for entry in distinct(entries)})


def comparison_csv(entries: Sequence[PageRow]) -> str:
    """CSV with one row per entry: units in the header, then intervals and protocol."""
    return rows.to_csv({entry.name: entry.report for entry in distinct(entries)})


def distinct(entries: Sequence[PageRow]) -> list[PageRow]:
    """The entries with distinct names.

    Raises:
        ValueError: there are no entries.
    """
    if not entries:
        raise ValueError("Expected at least one entry, but got none")
    names = tell_apart([entry.name for entry in entries])
    return [replace(entry, name=name) for entry, name in zip(entries, names, strict=True)]


def shifted(entries: Sequence[PageRow]) -> list[PageRow]:
    """The entries that were evaluated under shift."""
    return [entry for entry in entries if entry.shifts]


def tell_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number added to repeated ones: "nll", "nll-2"."""
    taken: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}-{number}"
        taken.append(candidate)
    return taken
