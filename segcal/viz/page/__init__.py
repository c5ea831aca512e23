"""The HTML page of an evaluation or a comparison: one file that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from bokeh.util.paths import bokehjs_path
from markupsafe import Markup

import segcal
from segcal.files import atomic_write, utf8
from segcal.metrics import Report
from segcal.metrics.compare import FIXED, Comparison
from segcal.metrics.scores import NEED_ALL_CLASSES, SCORES, Score
from segcal.viz import tables
from segcal.viz.overlay import Overlay
from segcal.viz.page.numbers import data_uri, page_numbers, to_json
from segcal.viz.style import run_style
from segcal.viz.tables import CLEAN, Cell, Table, mean_over_shifts

_TILES = tuple(SCORES[name] for name in ("ece", "sce", "accuracy", "miou"))
_LOST = tuple(SCORES[name] for name in ("miou", "accuracy"))  # what calibration may cost
_SCRIPTS = ("base", "reliability", "thresholds", "objects", "more", "inspector", "images")


@dataclass(frozen=True)
class PageRow:
    """One row of a page: a network as it is, or after a post-hoc method."""

    name: str
    report: Report
    history: Sequence[Mapping[str, Any]] = ()  # the lines of its log.jsonl
    config: str = ""  # the YAML that it was made with
    overlays: Sequence[Overlay] = ()
    shifts: Mapping[str, Report] = field(default_factory=dict)  # by shift such as "fog:3"
    object_overlay: bytes | None = None  # a picture of false and missed objects, PNG
    skipped: Mapping[str, str] = field(default_factory=dict)  # why, by name of the file
    notes: Sequence[str] = ()  # what else to know, a sentence each

    def __post_init__(self) -> None:
        skipped = {utf8(name): utf8(why) for name, why in self.skipped.items()}
        texts = {"name": utf8(self.name), "config": utf8(self.config), "skipped": skipped}
        vars(self).update(texts)  # the class is frozen


def write_page(
    rows: Sequence[PageRow],
    path: str | os.PathLike[str],
    *,
    title: str = "Calibration report",
    comparison: Comparison | None = None,
) -> None:
    """Write one self-contained HTML file about one row, or a comparison of several.

    Styles, scripts and pictures are inside. A content security policy in the file forbids the
    browser to fetch anything and to run any other script. All names are escaped, and repeated
    names get a number. `comparison` says how the models differ, if it is known.
    """
    text = render_page(rows, title=title, comparison=comparison)
    with atomic_write(path) as file:
        file.write(text)


def render_page(
    rows: Sequence[PageRow],
    *,
    title: str = "Calibration report",
    comparison: Comparison | None = None,
) -> str:
    """The page of `write_page` as text."""
    if not rows:
        raise ValueError("A page needs at least one row.")
    names = tables.tell_apart([row.name for row in rows])
    rows = [replace(row, name=name) for row, name in zip(rows, names, strict=True)]
    reports = {row.name: row.report for row in rows}
    shifted = {row.name: {CLEAN: row.report, **row.shifts} for row in rows if row.shifts}
    main, more = tables.score_tables(reports)
    if comparison is not None:  # it says who is best, where that is sure
        main, more = _unmarked(main), _unmarked(more)
    numbers = page_numbers(rows)
    bundles = ("bokeh.min.js", "bokeh-api.min.js")  # no widgets, tables or WebGL
    scripts = [(bokehjs_path() / "js" / name).read_text(encoding="utf-8") for name in bundles]
    scripts += ["".join(_part(f"{name}.js") for name in _SCRIPTS), _part("sort.js")]
    noted = [row for row in rows if row.notes]
    several = len(noted) > 1
    own = [f"{row.name}: {note}" if several else note for row in noted for note in row.notes]
    return tables.render_template(
        "report.html",
        title=title,
        **_frame(scripts),
        tables=tables,
        rows=rows,
        colors=[run_style(index)["color"] for index in range(len(rows))],
        verdicts=[verdict(row.report).text for row in rows],
        ece=SCORES["ece"],
        numbers=Markup(to_json(numbers)),
        inspected=bool(numbers["inspected"]),
        trained=any(line.get("holdout/ece") is not None for row in rows for line in row.history),
        headline=headline(rows, comparison),
        notes=own,
        reading=dict.fromkeys(note for row in rows for note in tables.reading_notes(row.report)),
        tiles=_tiles(rows[0].report),
        main=main,
        more=more,
        differences=None if comparison is None else tables.comparison_table(comparison),
        class_ece=tables.class_ece_table(reports),
        shifts=tables.shifts_of(shifted),
        shift_tables=tables.shift_tables(shifted) if shifted else [],
        object_overlays={
            row.name: data_uri(row.object_overlay, "image/png")
            for row in rows
            if row.object_overlay is not None
        },
    )


def _frame(scripts: Sequence[str]) -> dict[str, Any]:
    """What every page has; the hashes allow its scripts in its content security policy."""
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    return {
        "version": segcal.__version__,
        "style": Markup(_part("style.css")),
        "scripts": [Markup(script) for script in scripts],
        "script_hashes": Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
    }


class Section(NamedTuple):
    """A part of a page without plots that answer to the reader."""

    name: str  # for links
    title: str
    lead: str  # a sentence or two
    tables: Sequence[Table] = ()
    figures: Mapping[str, str] = {}  # data URIs of pictures by caption
    key: Mapping[str, str] = {}  # what the colours of the pictures mean: CSS colours by name


def write_sections(
    path: str | os.PathLike[str],
    sections: Sequence[Section],
    *,
    title: str,
    headline: Sequence[Phrase],
    tiles: Mapping[str, Cell],
) -> None:
    """Write a self-contained HTML file of tables and figures; `tiles` are the main numbers."""
    text = tables.render_template(
        "sections.html",
        **_frame([_part("sort.js")]),
        title=title,
        headline=headline,
        tiles=tiles,
        sections=sections,
    )
    with atomic_write(path) as file:
        file.write(utf8(text))


def _unmarked(table: Table) -> Table:
    rows = [(name, [cell._replace(best=False) for cell in cells]) for name, cells in table.rows]
    return replace(table, rows=rows)


def _tiles(report: Report) -> list[tuple[Score, Cell]]:
    tiles = [s for s in _TILES if not (report.top_only and s.name in NEED_ALL_CLASSES)]
    if tables.large_class(report) == 0 and report.images is not None:
        tiles[2:] = tables.BACKGROUND
    intervals = report.intervals
    return [
        (s, tables.score_cell(s, getattr(report, s.name), intervals.get(s.name))) for s in tiles
    ]


# Sentences --------------------------------------------------------------------------------------


class Phrase(NamedTuple):
    """A piece of a sentence, and its kind: "over", "under", "even", or ""."""

    text: str
    kind: str = ""


def headline(rows: Sequence[PageRow], comparison: Comparison | None = None) -> list[Phrase]:
    """The main result, in a few sentences."""
    known = [row for row in rows if row.report.protocol.pixels]
    if not known:
        return [Phrase("Nothing was counted.")]
    found = _one(known[0].report) if len(rows) == 1 else _several(known, comparison)
    shifted = {r.name: {CLEAN: r.report, **r.shifts} for r in known if r.shifts}
    if not shifted:
        return found
    best = min(shifted, key=lambda name: mean_over_shifts(shifted[name], "ece"))
    means = {
        score: _value(score, mean_over_shifts(shifted[best], score))
        for score in ("ece", "mean_confidence", "accuracy")
    }
    count = len(shifted[best]) - 1
    under = f" Under {count} shifts" if count > 1 else f" Under {tables.shifts_of(shifted)[0]}"
    mean = "mean " if count > 1 else ""
    subject = f"the {mean}ECE is" if len(rows) == 1 else f"{best} has the lowest {mean}ECE,"
    confidence = f"confidence {means['mean_confidence']}, accuracy {means['accuracy']}"
    return [*found, Phrase(f"{under} {subject} {means['ece']}: {confidence}.")]


def verdict(report: Report) -> Phrase:
    """Whether the network is over- or under-confident overall, and by how much."""
    if np.isnan(report.bias):
        return Phrase("nothing was counted")
    text, interval = SCORES["bias"].brief(report.bias), report.intervals.get("bias")
    if text[0] not in "+-":  # it prints as 0
        return Phrase("as confident as accurate overall", "even")
    if interval is not None and interval.low <= 0 <= interval.high:
        low, high = (SCORES["bias"].number(end) for end in (interval.low, interval.high))
        spread = f"{low} to {high}".replace("-", "−")
        return Phrase(f"neither over- nor under-confident beyond chance ({spread} points)", "even")
    kind = "over" if report.bias > 0 else "under"
    return Phrase(f"{kind}-confident by {text[1:]}", kind)


def _one(report: Report) -> list[Phrase]:
    found = verdict(report)
    phrases = [
        Phrase(found.text[0].upper() + found.text[1:], found.kind),
        Phrase(f": mean confidence {_value('mean_confidence', report.mean_confidence)}, "),
        Phrase(f"accuracy {_value('accuracy', report.accuracy)}. "),
        Phrase(f"ECE is {_value('ece', report.ece)}"),
    ]
    interval = report.intervals.get("ece")
    if interval is not None and not np.isnan(interval.low):
        low, high = (SCORES["ece"].number(end) for end in (interval.low, interval.high))
        phrases.append(Phrase(f" ({low} to {high} with 95\u00a0% confidence)"))
    if not np.isnan(report.class_ece).all():
        worst = int(np.nanargmax(report.class_ece))
        ece = _value("class_ece", report.class_ece[worst])
        name = tables.class_names(report)[worst]
        phrases.append(Phrase(f"; the worst calibrated class is {name}, with an ECE of {ece}"))
    return [*phrases, Phrase(".")]


def _several(rows: Sequence[PageRow], comparison: Comparison | None) -> list[Phrase]:
    best, *others = sorted(rows, key=lambda row: row.report.ece)
    phrases = [
        Phrase(best.name, "even"),
        Phrase(f" has the lowest ECE, {_value('ece', best.report.ece)}, and is "),
        verdict(best.report),
        Phrase("."),
    ]
    if others:
        phrases += _cost(best, rows)
        highest = _value("ece", others[-1].report.ece)
        phrases.append(Phrase(f" The ECE of {others[-1].name} is the highest, {highest}."))
    if comparison is not None and best.name in comparison.seeds:
        if comparison.best.get("ece") != best.name:
            fixed = all(found["ece"].note == FIXED for found in comparison.differences.values())
            chance = "of images" if fixed else "of images or of trainings"
            text = f" Which ECE is the lowest may be chance, {chance}: see the differences."
            phrases.append(Phrase(text))
        return phrases
    interval = best.report.intervals.get("ece")
    known = [(row.name, row.report.intervals.get("ece")) for row in others]
    rivals = [name for name, other in known if other and interval and other.low <= interval.high]
    if rivals:
        whose = "those" if len(rivals) > 1 else "that"
        text = f" The 95\u00a0% interval of {best.name} overlaps {whose} of {', '.join(rivals)}."
        phrases.append(Phrase(text))
    return phrases


def _cost(best: PageRow, rows: Sequence[PageRow]) -> list[Phrase]:
    """What the best calibrated model loses in mIoU and accuracy to the model that is best there."""
    dense = best.report.protocol.pixels > best.report.protocol.images
    lost: dict[str, list[str]] = {}  # by the model that is better
    for score in _LOST if dense else _LOST[1:]:
        rival = max(rows, key=lambda row: getattr(row.report, score.name))
        loss = 100 * (getattr(rival.report, score.name) - getattr(best.report, score.name))
        if rival is not best and loss >= 0.05:
            lost.setdefault(rival.name, []).append(f"{loss:.1f}\u00a0points of {score.label}")
    if not lost:
        what = "mIoU and accuracy" if dense else "accuracy"
        if len({(row.report.miou, row.report.accuracy) for row in rows}) == 1:
            return [Phrase(f" All have the same {what}.")]
        return [Phrase(f" It has the highest {what} too.")]
    what = " and ".join(f"{' and '.join(texts)} to {name}" for name, texts in lost.items())
    return [Phrase(" It loses "), Phrase(what, "even"), Phrase(".")]


def _value(score: str, value: float) -> str:
    """A score and its unit, joined by a no-break space."""
    return SCORES[score].brief(value).replace(" ", "\u00a0")


def _part(name: str) -> str:
    return (files("segcal.viz") / "page" / name).read_text(encoding="utf-8")
