"""Every table of the project: reports, differences, shifts, sweeps.

A function such as `score_tables` turns reports into `Table`s of printed cells, and a `Table` writes
itself as Markdown or HTML. CSV holds exact numbers, in the unit that the header names.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePath
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segcal.files import atomic_write
from segcal.metrics import Difference, Interval, Report
from segcal.metrics.compare import Comparison
from segcal.metrics.protocols import PROTOCOL_SCORES, describe_protocol
from segcal.metrics.report import FROC_RATES, ObjectScores, OperatingPoint
from segcal.metrics.scores import LOGGED, SCORES, Score, number, ratio
from segcal.metrics.uncertainty import DETECTION, UNCERTAINTIES

CLEAN, MEAN = "clean", "mean over shifts"  # rows of tables under shift
FEW_IMAGES = 20  # fewer may all lack what is rare
LARGE_CLASS = 0.8  # a class with this share of the pixels decides scores over pixels
_POSTHOC = (SCORES["sce"], SCORES["ece"])
_DETECTION = tuple(SCORES[name] for name in DETECTION)
BACKGROUND = (SCORES["foreground_dice"], SCORES["foreground_ace"])  # to read beside much of it
_PARTS = tuple(SCORES[name] for name in PROTOCOL_SCORES)
_CLASS_SCORES = tuple(
    SCORES[name]
    for name in ("class_iou", "class_dice", "accuracy", "class_ece", "class_ace", "class_bias")
)
SHIFT_SCORES = tuple(
    SCORES[name]
    for name in ("ece", "sce", "accuracy", "overconfidence", "underconfidence", "mean_confidence")
)


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    note: str = ""  # in smaller print beside the text, such as an interval
    value: float = math.nan  # by which a page sorts
    best: bool = False  # of its column or row


@dataclass(frozen=True)
class Table:
    """A table of named rows, with sentences below it."""

    title: str
    columns: Sequence[str]  # headings with units; the first is above the names of the rows
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str] = ()

    @classmethod
    def of_rows(
        cls, title: str, corner: str, rows: Mapping[str, Mapping[str, Cell]], *notes: str
    ) -> Table:
        """From the cells of each row by heading; `corner` is the heading of the names."""
        headings = next(iter(rows.values()), {})
        lines = [(name, [*cells.values()]) for name, cells in rows.items()]
        return cls(title, [corner, *headings], lines, notes)

    @classmethod
    def of_columns(
        cls, title: str, corner: str, names: Iterable[str], columns: Mapping[str, Sequence[Cell]]
    ) -> Table:
        """From the cells of each column by heading, one for each of the names."""
        rows = zip(names, zip(*columns.values(), strict=True), strict=True)
        return cls(title, [corner, *columns], list(rows))

    def markdown(self) -> str:
        """The table in Markdown: the title and the best cells in bold, notes below."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines.append("| " + " | ".join(map(_one_line, self.columns)) + " |")
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        for name, cells in self.rows:
            shown = [f"**{c.text}** {c.note}" if c.best else f"{c.text} {c.note}" for c in cells]
            lines.append("| " + " | ".join([_one_line(name), *map(_one_line, shown)]) + " |")
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(lines) + "\n"

    def html(self, *, sortable: bool = False, tall: bool = False) -> Markup:
        """The table in HTML, escaped, without its title.

        With `sortable`, for pages with sort.js, a click on a heading sorts; with `tall`, a long
        table scrolls inside the page.
        """
        meanings = {score.heading: score.definition for score in SCORES.values()}
        return render_template(
            "table.html", table=self, sortable=sortable, tall=tall, meanings=meanings
        )


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("segcal.viz", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_template(name: str, **values: Any) -> Markup:
    """HTML of a template in the folder of the page, in which all values are escaped."""
    return Markup(_templates().get_template(name).render(values))


def csv_text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV with exact numbers; nothing where a value is None or NaN."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    for row in rows:
        writer.writerow(
            ["" if v is None or (isinstance(v, float) and math.isnan(v)) else v for v in row]
        )
    return text.getvalue()


# Numbers and names ------------------------------------------------------------------------------


def score_cell(score: Score, value: float, interval: Interval | None = None) -> Cell:
    """A fraction as `score` is printed, with its interval."""
    note = ""
    if interval is not None and not math.isnan(interval.low):
        note = f"[{score.number(interval.low)}, {score.number(interval.high)}]"
    return Cell(score.number(value), note, value * score.scale)


def ranked_cells(
    score: Score, values: Sequence[float], intervals: Sequence[Interval | None] | None = None
) -> list[Cell]:
    """The cells of one score, with the best marked as it is printed; none if all print alike."""
    ends = [None] * len(values) if intervals is None else intervals
    cells = [score_cell(score, value, end) for value, end in zip(values, ends, strict=True)]
    known = [cell for cell in cells if not math.isnan(cell.value)]
    if score.better == "neither" or len({cell.text for cell in known}) < 2:
        return cells
    best = (max if score.higher else min)(known, key=lambda cell: cell.value).text
    return [cell._replace(best=cell.text == best) for cell in cells]


def _share(value: float, interval: Interval | None = None) -> Cell:
    return score_cell(SCORES["accuracy"], value, interval)


def _count(count: int) -> Cell:
    return Cell(f"{count:,}", value=count)


def _threshold(value: float) -> Cell:
    return Cell(threshold_text(value), value=value)


def threshold_text(value: float) -> str:
    """A threshold of confidence: four digits, and more where it is close to 1."""
    if math.isnan(value):
        return "–"
    close = math.ceil(-math.log10(1 - value)) + 1 if 0.9 < value < 1 else 0
    return f"{value:.{max(4, close)}f}"


def describe_scores(scores: Mapping[str, Any], prefix: str = "") -> str:
    """Those of `scores` that a training logs, in one line, with their units."""
    found = [(score, scores.get(prefix + score.name)) for score in LOGGED]
    return ", ".join(f"{s.label} {s.text(value)}" for s, value in found if value is not None)


def describe_report(report: Report) -> str:
    """The scores of a report in one line."""
    dense = report.protocol.pixels > report.protocol.images  # not one label per image
    text = describe_scores({n: v for n, v in report.scores.items() if dense or not SCORES[n].dense})
    if report.changed is not None:
        score = SCORES["mask_changed"]
        text += f", {score.label} by {score.text(report.mask_changed)}"
    return text


def counted(report: Report) -> str:
    """What a report counts: pixels, samples (one label an image) or decisions (sigmoid outputs)."""
    if report.protocol.multilabel:
        return "decisions"
    return "samples" if report.protocol.pixels <= report.protocol.images else "pixels"


def class_names(report: Report) -> list[str]:
    """The K names of the classes; their numbers if the report has no names."""
    return list(report.class_names or map(str, range(report.protocol.num_classes)))


def distinct_names(paths: Sequence[str | PurePath]) -> list[str]:
    """Names of models by the parts of their paths that differ.

    T/dicece/test and T/ace/test are "dicece" and "ace". Equal paths get a number.
    """
    parts = [PurePath(path).parts for path in paths]
    common = set.intersection(*map(set, parts)) if parts else set()
    names = ["/".join(p for p in each if p not in common) or each[-1] for each in parts]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return tell_apart(names)


def tell_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number added to repeated ones: "nll", "nll-2"."""
    taken: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}-{count}"
        taken.append(candidate)
    return taken


# Reports ----------------------------------------------------------------------------------------


def to_markdown(
    reports: Mapping[str, Report],
    notes: Mapping[str, Sequence[str]] | None = None,
    *,
    brief: bool = False,
) -> str:
    """Tables with one row per report, the best in bold; then notes and the protocols.

    `notes` say what else is known of a report, such as the fitted temperature. A `brief` text has
    the main scores alone.
    """
    tables = score_tables(reports)[: 1 if brief else None]
    parts: dict[tuple[str, ...], list[tuple[str, Sequence[Cell]]]] = {}  # by title and headings
    for name, report in reports.items():
        before = f"{name}, " if len(reports) > 1 else ""
        for table in (*part_tables(report), *object_tables(report)):
            rows = parts.setdefault((table.title, *table.columns), [])
            rows += [(before + part, cells) for part, cells in table.rows]
    tables += [Table(title, columns, rows) for (title, *columns), rows in parts.items()]
    said = [f"- {name}: {note}" for name, some in (notes or {}).items() for note in some]
    said += [""] if said else []  # a line of its own after a list
    for describe in (reading_notes, lambda report: [protocol_sentence(report)]):
        said += dict.fromkeys(note for report in reports.values() for note in describe(report))
    return "\n".join([*(table.markdown() for table in tables), *said]) + "\n"


def to_csv(reports: Mapping[str, Report]) -> str:
    """CSV with one row per report: all scores in the units of the header, then the protocol."""
    columns = _columns(reports, main=True) + _columns(reports, main=False)
    known = [c for c in columns if any(c.name in r.intervals for r in reports.values())]
    protocol = ("region", "average", "num_bins", "edge_rule", "ignore_index", "images", "pixels")
    rows = []
    for name, report in reports.items():
        row: dict[str, object] = {"model": name}
        row |= {c.heading: getattr(report, c.name) * c.scale for c in columns}
        for column in known:
            found = report.intervals.get(column.name)
            for end in ("low", "high"):
                value = None if found is None else getattr(found, end) * column.scale
                row[f"{column.heading} 95% {end}"] = value
        row |= {key: getattr(report.protocol, key) for key in protocol}
        rows.append(row | {"segcal version": report.protocol.version})
    return csv_text([*rows[0]], [[*row.values()] for row in rows])


def score_tables(reports: Mapping[str, Report]) -> list[Table]:
    """The table of the main scores, and the one of all others; one row per report."""
    tables = []
    for main in (True, False):
        columns = {
            score.heading: ranked_cells(
                score,
                [getattr(report, score.name) for report in reports.values()],
                [report.intervals.get(score.name) for report in reports.values()],
            )
            for score in _columns(reports, main=main)
        }
        tables.append(Table.of_columns("", "model", reports, columns))
    return tables


def _columns(reports: Mapping[str, Report], *, main: bool) -> list[Score]:
    every = reports.values()
    scopes = {"pixels": True, "images": any(report.images is not None for report in every)}
    scopes["calibrator"] = any(report.changed is not None for report in every)
    first = BACKGROUND if any(large_class(report) == 0 for report in every) else ()
    columns = [*first, *(s for s in SCORES.values() if s not in first)]
    return [s for s in columns if scopes.get(s.scope) and (s.table or s in first) == main]


def part_tables(report: Report) -> list[Table]:
    """The tables of raters, regions, protocols, operating points and so on, if any."""

    def scores(part: Report) -> dict[str, Cell]:
        cells = (score_cell(s, getattr(part, s.name), part.intervals.get(s.name)) for s in _PARTS)
        return {s.heading: cell for s, cell in zip(_PARTS, cells, strict=True)}

    parts = dict(report.regions)
    raters = {}
    if report.raters is not None:  # the labels of each rater are a region
        against = "accuracy of the rater against the others (%)"
        raters["all"] = scores(report) | {against: _share(report.raters.ceiling)}
        for r, accuracy in enumerate(report.raters.accuracy, 1):
            if part := parts.pop(f"rater {r}", None):
                raters[f"rater {r}"] = scores(part) | {against: _share(accuracy)}
    regions = {
        name: scores(part) | {counted(report): _count(part.protocol.pixels)}
        for name, part in {report.protocol.region: report, **parts}.items()
    }
    protocols = {
        name: {s.heading: score_cell(s, found[s.name]) for s in _PARTS}
        | {"what it is": Cell(describe_protocol(name))}
        for name, found in report.protocols.items()
    }
    points = {
        point.target: _point_cells(point, "coverage", "accuracy")
        for point in report.operating_points
    }
    sets = {
        f"miss={found.miss:g}": {
            "λ": _threshold(found.lam),
            "miss rate on the hold-out (%)": _share(found.holdout_miss),
            "miss rate (%)": _share(found.miss_rate, found.interval),
            "classes in a set": Cell(number(found.set_size, 2), value=found.set_size),
            "empty sets (%)": _share(found.empty),
            "images of the hold-out": _count(found.holdout_images),
        }
        for found in report.class_sets
    }
    kinds: Sequence[Any] = report.detection
    errors = {
        s.heading: ranked_cells(s, [*map(s.of, kinds)], [k.intervals.get(s.name) for k in kinds])
        for s in _DETECTION
    }
    labels = [UNCERTAINTIES[kind.name].label for kind in kinds]
    found = [
        Table.of_rows("Raters", "against", raters),
        Table.of_rows("Regions", "region", regions if len(regions) > 1 else {}),
        Table.of_rows("Protocols", "protocol", protocols),
        Table.of_rows("Operating points", "target", points),
        Table.of_rows("Class sets", "promised miss rate", sets),
        Table.of_columns("Finding errors", "uncertainty", labels, errors),
    ]
    return [table for table in found if table.rows]


def _point_cells(point: OperatingPoint, coverage: str, accuracy: str) -> dict[str, Cell]:
    return {
        "threshold": _threshold(point.threshold),
        f"{coverage} on the hold-out (%)": _share(point.holdout_coverage),
        f"{accuracy} on the hold-out (%)": _share(point.holdout_accuracy),
        f"{coverage} (%)": _share(point.coverage, point.intervals.get("coverage")),
        f"{accuracy} (%)": _share(point.accuracy, point.intervals.get("accuracy")),
        "the target is": Cell(point.verdict),
    }


def object_tables(report: Report) -> list[Table]:
    """The tables of objects: their scores, in total and by class and size, and thresholds."""
    if not report.objects:
        return []
    first = report.objects[0]

    def cells(of: ObjectScores) -> dict[str, Cell]:
        false = (of.predicted - of.top.hits.sum()) / first.images
        return {
            "predicted": _count(of.predicted),
            "true": _count(of.truth),
            "precision (%)": _share(of.precision, of.intervals.get("precision")),
            "recall (%)": _share(of.recall, of.intervals.get("recall")),
            "confidence (%)": _share(of.confidence),
            SCORES["ece"].heading: _share(of.ece, of.intervals.get("ece")),
            "Brier (0-1)": Cell(number(of.brier, 4), value=of.brier),
            "AUROC (%)": _share(of.auroc, of.intervals.get("auroc")),
            "false per image": Cell(number(false, 2)),
        }

    by_name = {
        "as it is" if of.calibration == "none" else of.calibration: of for of in report.objects
    }
    whole = {name: cells(of.whole) for name, of in by_name.items()}
    points = {
        f"{point.target}, {name}": _point_cells(point, "recall", "precision")
        for name, of in by_name.items()
        for point in of.points
    }
    parts = {
        part.name if of is first else f"{part.name}, {name}": cells(part)
        for name, of in by_name.items()
        for part in of.parts
    }
    froc = {f"{rate:g}": _share(first.recall_at(rate)) for rate in FROC_RATES}
    of_images = f"Objects of {first.images:,} images: {first.rule}."
    found = [
        Table.of_rows("Objects", "confidence of objects", whole, of_images),
        Table.of_rows("Thresholds of objects", "target", points),
        Table.of_rows("Objects by class and size", "objects", parts),
        Table.of_rows("FROC", "false objects per image", {"recall (%)": froc}),
    ]
    return [table for table in found if table.rows]


def class_table(report: Report) -> Table:
    """One row per class: its share of the labels, and its scores."""
    right, _, truth = report.overlap
    decisions, share, accuracy = truth.sum(), f"{counted(report)} (%)", ratio(right, truth)
    if report.protocol.multilabel:  # of the decisions of the class, "absent" included
        decisions, share = report.confusion.sum((1, 2)), "present (%)"
        accuracy = ratio(np.trace(report.confusion, axis1=1, axis2=2), decisions)
    names = class_names(report)
    intervals = {} if report.images is None else report.images.class_intervals
    columns = {
        "no.": [Cell(str(c), value=c) for c in range(len(names))],
        share: [_share(part) for part in (truth / np.maximum(decisions, 1)).tolist()],
    }
    for score in _CLASS_SCORES:
        values = accuracy if score.name == "accuracy" else getattr(report, score.name)
        ends = intervals.get(score.name, [None] * len(names))
        columns[score.heading] = [
            score_cell(score, float(value), end) for value, end in zip(values, ends, strict=True)
        ]
    return Table.of_columns("Classes", "class", names, columns)


def class_ece_table(reports: Mapping[str, Report]) -> Table:
    """The class-j-ECE of every class (row) and report (column), the best of each row marked."""
    score = SCORES["class_ece"]
    values = np.stack([report.class_ece for report in reports.values()], axis=1)  # (K, models)
    names = class_names(next(iter(reports.values())))
    rows = [(n, ranked_cells(score, v)) for n, v in zip(names, values.tolist(), strict=True)]
    return Table(score.heading, ["class", *reports], rows)


def posthoc_table(reports: Mapping[tuple[str, str], Report]) -> Table:
    """SCE and ECE of each network (row) after each post-hoc method (column), as the paper has them.

    The reports are by (name of the network, short name of the method).
    """
    methods = list(dict.fromkeys(method for _, method in reports))
    rows = []
    for network in dict.fromkeys(network for network, _ in reports):
        found = [reports.get((network, method)) for method in methods]
        cells = []
        for score in _POSTHOC:
            cells += ranked_cells(score, [getattr(r, score.name, math.nan) for r in found])
        rows.append((network, cells))
    headings = [f"{score.heading} {method}" for score in _POSTHOC for method in methods]
    return Table("", ["model", *headings], rows)


def protocol_sentence(report: Report) -> str:
    """How a report was measured, in one sentence."""
    p = report.protocol
    bins = "(lo, hi]" if p.edge_rule == "right" else "[lo, hi)"
    sigmoids = " with a sigmoid each" if p.multilabel else ""
    intervals = "".join(f"; {note}" for note in interval_notes(report))
    raters = f" with {p.raters} raters" if p.raters > 1 else ""
    return (
        f"{p.average.capitalize()}-averaged over {p.pixels:,} {counted(report)} of "
        f"{p.images:,} image{'s' if p.images != 1 else ''}{raters}, region {p.region}, "
        f"{p.num_classes} classes{sigmoids}, {p.num_bins} equal bins {bins}, "
        f"label {p.ignore_index} ignored{intervals}; segcal {p.version}."
    )


def interval_notes(report: Report) -> list[str]:
    """What to know about the intervals of `report`: what they are, and which are missing."""
    notes = []
    if report.intervals:
        number, unit = report.protocol.images, "images"
        over = f"{number:,} images"
        if report.images is not None and report.images.groups is not None:
            number, unit = report.images.groups, "groups"
            over = f"{number:,} groups of {over}"
        notes.append(f"in brackets 95 % intervals over {over}")
        if number < FEW_IMAGES:
            notes.append(f"fewer than {FEW_IMAGES} {unit}: an interval may be too short")
        above = [
            SCORES[n].label for n, i in report.intervals.items() if getattr(report, n) > i.high
        ]
        notes += [above_interval(above)] if above else []
    missing: dict[str, list[str]] = {}  # scores by reason
    for name, why in ({} if report.images is None else report.images.withheld).items():
        missing.setdefault(why, []).append(SCORES[name].label if name in SCORES else name)
    return notes + [f"no interval for {', '.join(n)}: {why}" for why, n in missing.items()]


def above_interval(labels: Iterable[str]) -> str:
    """Why printed calibration errors may lie above their intervals."""
    return (
        f"{', '.join(labels)} above the interval: noise adds to the printed error, and the "
        "interval is for the error on infinitely many images"
    )


def reading_notes(report: Report) -> list[str]:
    """Which scores to read where one class, such as background, has most of the pixels."""
    largest = large_class(report)
    if largest is None:
        return []
    share = float(report.overlap[2][largest] / report.protocol.pixels)
    read = [SCORES["sce"], SCORES["miou"]]
    if largest == 0:
        read = [s for s in BACKGROUND if not math.isnan(getattr(report, s.name))]
    return [
        f"{class_names(report)[largest]} is {SCORES['accuracy'].brief(share)} of "
        f"the {counted(report)}, so accuracy, ECE and NLL mostly describe this class: for the "
        f"others read {', '.join(score.label for score in read)} and the table of classes."
    ]


def large_class(report: Report) -> int | None:
    """The class that most pixels have, if scores over all pixels mostly describe it."""
    p = report.protocol
    if p.multilabel or not p.pixels or (p.num_classes < 3 and counted(report) == "samples"):
        return None
    largest = int(report.overlap[2].argmax())
    return largest if report.overlap[2][largest] >= LARGE_CLASS * p.pixels else None


# Differences ------------------------------------------------------------------------------------


def difference_cell(score: Score, difference: Difference) -> Cell:
    """A difference with its interval, and a star if it is sure."""
    star = "*" if difference.sure else ""
    low, high = map(score.difference, (difference.low, difference.high))
    note = "" if math.isnan(difference.low) else f"[{low}, {high}]"
    value = difference.value * score.scale
    return Cell(score.difference(difference.value) + star, note, value)


def difference_table(
    rows: Mapping[str, Mapping[str, Difference]],
    *,
    title: str = "",
    corner: str = "model",
    best: Mapping[str, str] | None = None,
) -> Table:
    """Differences of scores, one row each; below, what a star means and what is not known.

    A row without differences is the reference. `best` is the row to mark, by score.
    """
    every = [(name, d) for found in rows.values() for name, d in found.items()]
    scores = [score for name, score in SCORES.items() if name in dict(every)]
    shown = []
    noted: dict[str, list[str]] = {}  # rows by what their intervals leave out
    for row, found in rows.items():
        cells = []
        for score in scores:
            known = found.get(score.name)
            cell = Cell("reference") if known is None else difference_cell(score, known)
            cells.append(cell._replace(best=(best or {}).get(score.name) == row))
        shown.append((row, cells))
        for note in dict.fromkeys(d.note for d in found.values() if d.note):
            noted.setdefault(note, []).append(row)
    compared = sum(map(bool, rows.values()))
    over = [
        note if len(some) == compared else f"{note} ({', '.join(some)})"
        for note, some in noted.items()
    ]
    notes = ["; ".join(["In brackets, the 95 % interval of the difference", *over]) + "."]
    if any(d.sure for _, d in every):
        notes[0] += " A star marks an interval that excludes 0."
    missing: dict[str, dict[str, None]] = {}
    for name, d in every:
        if d.withheld:
            missing.setdefault(d.withheld, {})[SCORES[name].label] = None
    notes += [f"No interval for {', '.join(labels)}: {why}." for why, labels in missing.items()]
    return Table(title, [corner, *(score.heading for score in scores)], shown, notes)


def comparison_table(comparison: Comparison) -> Table:
    """Each model's differences from the first; the best model of a score where that is sure."""
    first, several = next(iter(comparison.seeds)), max(comparison.seeds.values()) > 1
    names = {
        model: f"{model} ({count} seed{'s' if count > 1 else ''})" if several else model
        for model, count in comparison.seeds.items()
    }
    rows = {name: comparison.differences.get(model, {}) for model, name in names.items()}
    best = {score: names[model] for score, model in comparison.best.items()}
    return difference_table(rows, title=f"Differences from {first}", best=best)


# Shifts -----------------------------------------------------------------------------------------

ShiftedReports = Mapping[str, Mapping[str, Report]]
"""By model, the reports under each shift, such as "fog:3"; `CLEAN` is the one of clean images."""


def severity(shift: str) -> int | None:
    """The severity of a corruption such as "fog:3"; None for other shifts, 0 for `CLEAN`."""
    if shift == CLEAN:
        return 0
    kind, _, value = shift.partition(":")
    known = value.isdecimal() and kind not in ("rotation", "domain", "data")
    return int(value) if known else None


def shifts_of(models: ShiftedReports) -> list[str]:
    """All shifts, kinds in the order they were asked for, each by its value; without `CLEAN`."""
    found = list(dict.fromkeys(shift for reports in models.values() for shift in reports))
    found = [shift for shift in found if shift != CLEAN]
    kinds = list(dict.fromkeys(shift.partition(":")[0] for shift in found))

    def place(shift: str) -> tuple[int, float]:
        kind, _, value = shift.partition(":")
        try:
            return kinds.index(kind), float(value)
        except ValueError:
            return kinds.index(kind), 0.0

    return sorted(found, key=place)


def mean_over_shifts(reports: Mapping[str, Report], score: str) -> float:
    """The plain mean of a score over all shifts, without the clean images."""
    return fmean(getattr(report, score) for shift, report in reports.items() if shift != CLEAN)


def _shift_scores(models: ShiftedReports) -> tuple[Score, ...]:
    """The scores of tables under shift; with a calibrator, also how much of the mask it changes."""
    every = [report for reports in models.values() for report in reports.values()]
    known = any(report.changed is not None for report in every)
    return (*SHIFT_SCORES, SCORES["mask_changed"]) if known else SHIFT_SCORES


def shift_tables(models: ShiftedReports) -> list[Table]:
    """The means over shifts by model, then one table per score with a row per shift."""
    every, ece, scores = list(models.values()), SCORES["ece"], _shift_scores(models)
    means = {
        score.heading: [mean_over_shifts(reports, score.name) for reports in every]
        for score in scores
    }
    columns = {f"{CLEAN} {ece.heading}": ranked_cells(ece, [one[CLEAN].ece for one in every])}
    columns |= {s.heading: ranked_cells(s, means[s.heading]) for s in scores}
    tables = [Table.of_columns("", "model", models, columns)]
    for score in scores:
        lines = []
        for shift in [CLEAN, *shifts_of(models)]:
            values = [getattr(reports.get(shift), score.name, math.nan) for reports in every]
            lines.append((shift, ranked_cells(score, values)))
        lines.append((MEAN, ranked_cells(score, means[score.heading])))
        tables.append(Table(score.heading, ["shift", *models], lines))
    auroc: Any = SCORES["auroc"]
    for model, reports in models.items():
        if kinds := [UNCERTAINTIES[one.name].label for one in reports[CLEAN].detection]:
            lines = []
            for shift in [CLEAN, *shifts_of({model: reports})]:
                values = [auroc.of(one) for one in reports[shift].detection]
                lines.append((shift, ranked_cells(auroc, values)))
            named = f", {model}" if len(models) > 1 else ""
            title = f"{auroc.heading} of each uncertainty{named}"
            tables.append(Table(title, ["shift", *kinds], lines))
    return tables


def shift_csv(models: ShiftedReports) -> str:
    """CSV: a row per model and shift, and their mean; scores in the units of the header."""
    rows: list[list[object]] = []
    scores = _shift_scores(models)
    for model, reports in models.items():
        for shift in [CLEAN, *shifts_of({model: reports})]:
            grade = severity(shift)
            name = shift if grade is None else shift.partition(":")[0]
            values = [getattr(reports[shift], s.name) * s.scale for s in scores]
            rows.append([model, name, grade, *values])
        means = [mean_over_shifts(reports, s.name) * s.scale for s in scores]
        rows.append([model, MEAN, None, *means])
    return csv_text(["model", "shift", "severity", *(s.heading for s in scores)], rows)


def shift_text(models: ShiftedReports) -> str:
    """Lines for a terminal, one per model: accuracy; ECE clean, under each shift, in the mean."""
    accuracy, ece = SCORES["accuracy"], SCORES["ece"]
    shifts = [CLEAN, *shifts_of(models)]
    lines = [
        ["", accuracy.heading, ece.heading] + [""] * len(shifts),
        ["model", CLEAN, *shifts, MEAN],
    ]
    for model, reports in models.items():
        eces = [getattr(reports.get(shift), ece.name, math.nan) for shift in shifts]
        eces.append(mean_over_shifts(reports, ece.name))
        lines.append([model, accuracy.number(reports[CLEAN].accuracy), *map(ece.number, eces)])
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in lines
    )


# Sweeps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """One number of a sweep's tables, by the names of its row and column."""

    metric: str  # a key of `SCORES`
    unit: str
    row: str
    column: str
    seeds: tuple[float, ...]  # one value per seed; empty while it is not measured
    interval: tuple[float, float] | None = None  # ends of the 95 % interval of the mean
    printed: float | None = None  # the number of a paper, if it is compared with one

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return fmean(self.seeds) if self.seeds else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for fewer than two."""
        return stdev(self.seeds) if len(self.seeds) > 1 else None

    @property
    def text(self) -> str:
        """Mean ± deviation over seeds, or a dash while it is not measured."""
        known = [value for value in (self.mean, self.deviation) if value is not None]
        return " ± ".join(map(self._text, known)) or "–"

    @property
    def cell(self) -> Cell:
        """Mean and deviation; as the note, the interval and the values of the seeds."""
        notes = []
        if self.interval is not None:
            notes.append(f"[{', '.join(map(self._text, self.interval))}]")
        if len(self.seeds) > 1:
            notes.append(f"seeds {', '.join(map(self._text, self.seeds))}")
        return Cell(self.text, "; ".join(notes), math.nan if self.mean is None else self.mean)

    def _text(self, value: float) -> str:
        return f"{value:.{SCORES[self.metric].digits}f}"


@dataclass(frozen=True)
class Sheet:
    """The tables of a sweep, ready to be written."""

    name: str  # of the files
    title: str
    command: str  # that made the tables
    remarks: Sequence[str]  # how they were made, one sentence or two each
    tables: Sequence[Table]
    numbers: Sequence[Number]  # every number, for the CSV
    notes: Sequence[str] = ()  # doubts about the numbers of a paper that stand beside ours
    pictures: Sequence[bytes] = ()  # diagrams for the page, PNG

    def markdown(self) -> str:
        """The tables in Markdown, with the command and the remarks above them."""
        lines = [f"### {self.title}", "", f"`{self.command}`", ""]
        lines += [f"- {remark}" for remark in self.remarks]
        lines += [f"\n{table.markdown().rstrip()}" for table in self.tables]
        if self.notes:
            lines += ["", "On the paper's numbers:", "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """One line per number, with the value of each seed."""
        paper = any(n.printed is not None for n in self.numbers)
        headings = ["table", "metric", "unit", "row", "column", *["paper"] * paper]
        rows = []
        for n in self.numbers:
            low, high = n.interval or (None, None)
            rows.append(
                [self.name, n.metric, n.unit, n.row, n.column, *[n.printed] * paper]
                + ["" if v is None else f"{v:.6g}" for v in (n.mean, n.deviation, low, high)]
                + [" ".join(f"{value:.6g}" for value in n.seeds)]
            )
        return csv_text([*headings, "mean", "deviation", "low", "high", "seeds"], rows)

    def html(self) -> str:
        """One page without anything to fetch; every name is escaped."""
        uris = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in self.pictures]
        style = (files("segcal.viz") / "page" / "style.css").read_text(encoding="utf-8")
        return render_template("sheet.html", sheet=self, pictures=uris, style=Markup(style))

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.md, NAME.csv and NAME.html to `folder`; their paths."""
        paths = []
        for ending, make in (("md", self.markdown), ("csv", self.csv), ("html", self.html)):
            paths.append(folder / f"{self.name}.{ending}")
            with atomic_write(paths[-1]) as file:
                file.write(make())
        return paths


def put_into(path: Path, mark: str, markdown: str) -> None:
    """Put a table into a Markdown file: between the comments of its mark, or at the end."""
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if start not in text:
        text = f"{text.rstrip()}\n\n{start}\n{end}\n".lstrip()
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has {start} without {end} after it: add the second comment.")
    with atomic_write(path) as file:
        file.write(f"{before}{start}\n{markdown}{end}{after}")
