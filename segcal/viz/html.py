"""The HTML page of an evaluation or a comparison: its sentences, its tables, its pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

import segcal
from segcal.files import atomic_write
from segcal.metrics import Interval, Report
from segcal.metrics.compare import Comparison
from segcal.metrics.rows import (
    TableCell,
    cell_of,
    cells_of,
    cells_of_values,
    columns_of,
    interval_notes,
    more_columns_of,
    part_tables,
)
from segcal.metrics.scores import SCORES, Score, ratio
from segcal.viz.diagrams import class_names, counted
from segcal.viz.drawings import Drawing, Drawings, entry_drawings
from segcal.viz.entry import Heading, Overlay, PageRow, distinct, shifted
from segcal.viz.figure import adaptive_svg, data_uri, run_style, svg_size, webp_uri
from segcal.viz.interactive import page_numbers, plot_library, to_json
from segcal.viz.shifts import mean_over_shifts, mean_table, score_tables, shifts_of


class Phrase(NamedTuple):
    """A piece of a sentence, and its kind: "over", "under", "even", or ""."""

    text: str
    kind: str = ""


def headline(entries: Sequence[PageRow]) -> list[Phrase]:
    """The main result, in a few sentences."""
    found = _one(entries[0].report) if len(entries) == 1 else _several(entries)
    return [*found, *_under_shift(shifted(entries))]


def verdict(report: Report) -> Phrase:
    """Whether the network is over- or under-confident overall, and by how much."""
    if np.isnan(report.bias):
        return Phrase("nothing was counted")
    text = SCORES["bias"].brief(report.bias)
    if text[0] not in "+-":  # it prints as 0
        return Phrase("as confident as accurate overall", "even")
    kind = "over" if report.bias > 0 else "under"
    return Phrase(f"{kind}-confident by {text[1:]}", kind)


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


def _under_shift(entries: Sequence[PageRow]) -> list[Phrase]:
    """The mean over shifts, of the best model if there are several."""
    if not entries:
        return []
    best = min(entries, key=lambda entry: mean_over_shifts(entry, "ece"))
    ece, accuracy, confidence = (
        _value(name, mean_over_shifts(best, name))
        for name in ("ece", "accuracy", "mean_confidence")
    )
    count = len(best.shifts)
    under = f" Under {count} shifts" if count > 1 else f" Under {next(iter(best.shifts))}"
    mean = "mean " if count > 1 else ""
    if len(entries) == 1:
        subject = f"{under} the {mean}ECE is {ece}"
    else:
        subject = f"{under} {best.name} has the lowest {mean}ECE, {ece}"
    return [Phrase(f"{subject}: confidence {confidence}, accuracy {accuracy}.")]


def _several(entries: Sequence[PageRow]) -> list[Phrase]:
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


def _overlap(order: Sequence[PageRow]) -> list[Phrase]:
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


_TILES = ("ece", "sce", "accuracy", "miou")
_CLASS_SCORES = tuple(
    SCORES[n]
    for n in ("class_iou", "class_dice", "accuracy", "class_ece", "class_ace", "class_bias")
)


def tiles(report: Report) -> list[tuple[Score, TableCell]]:
    """The four scores to see first, and their cells."""
    scores = [SCORES[name] for name in _TILES]
    return list(zip(scores, cells_of([report], scores)[0], strict=True))


def class_columns(report: Report) -> list[Heading]:
    """The columns of `class_rows` after the name."""
    return [
        Heading("no.", "ascending"),
        Heading("present (%)" if report.protocol.multilabel else f"{counted(report)} (%)"),
        *(Heading(s.heading, "ascending" if s.higher else "descending") for s in _CLASS_SCORES),
    ]


def class_rows(report: Report) -> list[dict[str, Any]]:
    """One row per class: name, cells, and its class-j-ECE relative to the largest one."""
    total = report.classes.count.sum(1).clip(1)  # (K,)
    right, _, truth = report.overlap
    accuracy = ratio(right, truth)
    if report.protocol.multilabel:  # of the decisions of the class, "absent" included
        accuracy = ratio(np.trace(report.confusion, axis1=1, axis2=2), report.classes.count.sum(1))
    scored = [
        (score, accuracy if score.name == "accuracy" else getattr(report, score.name))
        for score in _CLASS_SCORES
    ]
    bars = np.nan_to_num(report.class_ece)
    bars = bars / max(bars.max(), 1e-12)
    rows = []
    for c, name in enumerate(class_names(report)):
        cells = [TableCell(c, str(c)), cell_of(SCORES["accuracy"], float(truth[c] / total[c]))]
        cells += [cell_of(score, float(of_class[c])) for score, of_class in scored]
        rows.append({"name": name, "cells": cells, "bar": f"{bars[c]:.3f}"})
    return rows


def class_ece_table(entries: Sequence[PageRow]) -> dict[str, Any]:
    """The class-j-ECE of every class (row) and entry (column), the best of each row marked."""
    names = class_names(entries[0].report)
    score = SCORES["class_ece"]
    table = np.stack([entry.report.class_ece for entry in entries], axis=1)  # (K, E)
    rows = [
        {"name": name, "cells": cells_of_values(values, score)}
        for name, values in zip(names, table.tolist(), strict=True)
    ]
    columns = [Heading(entry.name) for entry in entries]
    return {"heading": score.heading, "columns": columns, "rows": rows}


def differences_table(comparison: Comparison) -> dict[str, Any]:
    """Each model's difference from the first by score; who is best, where that is sure."""
    first = next(iter(comparison.seeds))
    known = next(iter(comparison.differences.values()))
    scores = [score for name, score in SCORES.items() if name in known]
    rows = []
    for model, seeds in comparison.seeds.items():
        cells = []
        for score in scores:
            value, interval = "reference", ""
            if model != first:
                found = comparison.differences[model][score.name]
                value, interval = found.texts(score)
                interval = f"[{interval}]" if not found.withheld else interval
            best = comparison.best.get(score.name) == model
            cells.append(TableCell(0.0, value, interval, best))
        rows.append({"name": model, "seeds": seeds, "cells": cells})
    several = any(seeds > 1 for seeds in comparison.seeds.values())
    return {"first": first, "columns": scores, "rows": rows, "seeds": several}


def _rows(
    reports: Sequence[Report], columns: Sequence[Score], *, marked: bool
) -> list[list[TableCell]]:
    """The cells of `cells_of`, with the best of each column marked or not."""
    return [
        [cell._replace(best=cell.best and marked) for cell in row]
        for row in cells_of(reports, columns)
    ]


def worst_images(report: Report) -> list[tuple[str, str, str]]:
    """(name, ECE, pixels) of the worst calibrated images, as printed."""
    ece = SCORES["ece"]
    return [(each.name, ece.number(each.ece), f"{each.pixels:,}") for each in report.worst_images]


_SIGMOIDS = ", with a sigmoid each: one decision per pixel and class, at p = 0.5"


def facts(report: Report) -> list[tuple[str, str]]:
    """The protocol as (name, text) lines."""
    p = report.protocol
    rule = "(lo, hi], 0 in the first" if p.edge_rule == "right" else "[lo, hi), 1 in the last"
    what = counted(report)
    of = "" if what == "samples" else f" of {p.images:,} images"
    lines = [
        ("counted", f"{p.pixels:,} {what}{of}"),
        ("region", p.region),
        ("averaged over", what if p.average == "pixel" else f"{p.average}s"),
        ("classes", f"{p.num_classes}{_SIGMOIDS if p.multilabel else ''}"),
        ("bins", f"{p.num_bins} of equal width, {rule}"),
        ("ignored label", str(p.ignore_index)),
    ]
    lines += [("intervals", note) for note in interval_notes(report)]
    return [*lines, ("measured with", f"segcal {p.version}")]


_MAX_CLASSES = 24  # in the diagrams of the page; its tables have all classes
_APP = ("base", "reliability", "thresholds", "inspector", "images")  # one script, in this order
_QUALITY = 88  # WEBP quality of overlays, which may be photographs


def write_page(
    entries: Sequence[PageRow],
    path: str | os.PathLike[str],
    *,
    title: str = "Calibration report",
    drawings: Drawings | None = None,
    comparison: Comparison | None = None,
    static: bool = False,
) -> None:
    """Write one self-contained HTML file about one entry, or a comparison of several.

    Styles, script and pictures are inside. A content security policy in the file forbids the
    browser to fetch anything and to run any other script. All names are escaped.

    Args:
        entries: at least one; repeated names get a number.
        path: the file, written completely or not at all.
        title: the page's heading.
        drawings: of the entries, if they are at hand.
        comparison: how the models differ, if it is known.
        static: leave out what answers to the reader, for mail and print: 1.4 MB less.
    """
    text = render_page(
        entries, title=title, drawings=drawings, comparison=comparison, static=static
    )
    with atomic_write(path) as file:
        file.write(text)


def render_page(
    entries: Sequence[PageRow],
    *,
    title: str = "Calibration report",
    drawings: Drawings | None = None,
    comparison: Comparison | None = None,
    static: bool = False,
) -> str:
    """The page of `write_page` as text."""
    entries = distinct(entries)
    drawings = drawings or Drawings(entries)
    reports = [entry.report for entry in entries]
    numbers = None if static else page_numbers(entries)
    scripts = [_part("sort.js")]
    if not static:
        scripts = [*plot_library(), "".join(_part(f"app/{name}.js") for name in _APP), *scripts]
    environment = Environment(
        loader=PackageLoader("segcal.viz", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=title,
        version=segcal.__version__,
        style=Markup(_part("style.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(map(_hash, scripts))),
        numbers=None if numbers is None else Markup(to_json(numbers)),
        inspected=numbers is not None and bool(numbers["inspected"]),
        listed=any(entry.report.worst_images for entry in entries),
        headline=headline(entries),
        differences=None if comparison is None else differences_table(comparison),
        scores=[
            {"columns": columns, "rows": _rows(reports, columns, marked=comparison is None)}
            for columns in (columns_of(reports), more_columns_of(reports))
        ],
        intervals=any(report.intervals for report in reports),
        figures=[_figure(drawing) for drawing in drawings.together["comparison"]],
        training=[_figure(drawing) for drawing in drawings.together["training"]],
        class_ece=class_ece_table(entries) if len(entries) > 1 else None,
        shift=_shift_view(entries, drawings.together["shift"]),
        class_columns=class_columns(reports[0]),
        ece_heading=SCORES["ece"].heading,
        entries=[
            {"index": index, "color": run_style(index)["color"], **_view(*pair, static=static)}
            for index, pair in enumerate(zip(entries, drawings.own, strict=True))
        ],
    )


def _shift_view(entries: Sequence[PageRow], drawings: Sequence[Drawing]) -> dict[str, Any] | None:
    """What the template shows of models under shift; None if none was evaluated there."""
    if not shifted(entries):
        return None
    return {
        "count": len(shifts_of(entries)),
        "means": mean_table(entries),
        "tables": score_tables(entries),
        **_figures(drawings),
        "overlays": [
            {"model": entry.name, **_overlay(entry.shift_overlay)}
            for entry in entries
            if entry.shift_overlay is not None
        ],
    }


def _view(entry: PageRow, drawings: Sequence[Drawing], *, static: bool) -> dict[str, Any]:
    """The values that the template shows of one entry; no panels of images to look into."""
    if entry.report.protocol.num_classes > _MAX_CLASSES:  # its wide diagrams would be too large
        smaller = entry_drawings(entry, max_classes=_MAX_CLASSES)
        drawings = [small if small.wide else d for d, small in zip(drawings, smaller, strict=True)]
    return {
        "name": entry.name,
        "verdict": verdict(entry.report),
        "ece": SCORES["ece"].brief(entry.report.ece),
        "tiles": tiles(entry.report),
        **_figures(drawings),
        "classes": class_rows(entry.report),
        "parts": part_tables(entry.report),
        "overlays": _overlays([o for o in entry.overlays if static or o.arrays is None]),
        "worst": worst_images(entry.report),
        "counted": counted(entry.report),
        "skipped": entry.skipped,
        "facts": facts(entry.report),
        "config": entry.config,
    }


def _figures(drawings: Sequence[Drawing]) -> dict[str, list[dict[str, Any]]]:
    return {
        "figures": [_figure(drawing) for drawing in drawings if not drawing.wide],
        "wide_figures": [_figure(drawing) for drawing in drawings if drawing.wide],
    }


def _figure(drawing: Drawing) -> dict[str, Any]:
    width, height = svg_size(drawing.svg)
    return {
        "title": drawing.title,
        "caption": drawing.caption,
        "uri": data_uri(adaptive_svg(drawing.svg), "image/svg+xml"),
        "width": width,
        "height": height,
    }


def _overlays(overlays: Sequence[Overlay]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor() as pool:  # compressing holds no lock of the interpreter
        return list(pool.map(_overlay, overlays))


def _overlay(overlay: Overlay) -> dict[str, Any]:
    ece = SCORES["ece"]
    image = Image.open(io.BytesIO(overlay.png))
    return {
        "name": overlay.name,
        "image": overlay.image,
        "ece": None if overlay.ece is None or math.isnan(overlay.ece) else ece.brief(overlay.ece),
        "uri": webp_uri(image, _QUALITY),
        "width": image.width,
        "height": image.height,
    }


def _hash(script: str) -> str:
    """The source of a content security policy that allows this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _part(name: str) -> str:
    return (files("segcal.viz") / "page" / name).read_text(encoding="utf-8")
