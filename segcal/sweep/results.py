"""The tables and diagrams of a sweep, from the evaluations of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from segcal import viz
from segcal.evaluation.folder import REPORT, STATE, place
from segcal.files import atomic_write
from segcal.metrics import (
    CalibrationMeter,
    Difference,
    Interval,
    Report,
    mean_intervals,
    paired_differences,
)
from segcal.metrics.scores import SCORES
from segcal.posthoc import CALIBRATORS, NONE
from segcal.sweep.definition import Row, Sweep, shown
from segcal.sweep.runner import Runs
from segcal.viz.plots import figure_png, new_figure, severity_curve, themed
from segcal.viz.tables import Cell, Number, Sheet, Table, above_interval, difference_table, put_into

MASK = "mask_changed"  # a column wherever a calibrator may change the predicted class
INTERVAL = "mean ± deviation over seeds, [95 % interval], values of the seeds"


@dataclass(frozen=True)
class Condition:
    """What numbers are means over: shifts of the test images, "" for the clean ones."""

    title: str
    shifts: tuple[str, ...] = ("",)
    severity: int | None = None


CLEAN = Condition("clean test images", severity=0)


def conditions(sweep: Sweep) -> list[Condition]:
    """The clean images, the mean over corruptions at each severity, and other shifts by name."""
    groups: dict[tuple[str, int | None], list[str]] = {}
    for shift in sweep.shifts():
        name = str(shift) if shift.severity is None else f"severity {shift.severity}"
        groups.setdefault((name, shift.severity), []).append(str(shift))
    images = "" if sweep.limit is None else f", {sweep.limit} images"
    found = [CLEAN]
    for (group, severity), names in groups.items():
        title = f"mean over {len(names)} corruptions of {group}" if len(names) > 1 else names[0]
        found.append(Condition(title + images, tuple(names), severity))
    return found


class Results:
    """What is measured of a sweep, as far as it is done."""

    def __init__(self, sweep: Sweep, runs: Runs) -> None:
        self.sweep, self.runs = sweep, runs
        # Each file is read once.
        self._report = cache(Report.load)
        self._meters, self._intervals = cache(self._read_meters), cache(self._mean_intervals)

    def sheet(self, command: str, remarks: Sequence[str] = ()) -> Sheet:
        """All tables and numbers."""
        tables: list[Table] = []
        numbers: list[Number] = []
        for (table, every), condition in product(
            self.sweep.tables().items(), conditions(self.sweep)
        ):
            shifts = set(condition.shifts) - {""}
            rows = [row for row in every if shifts <= {*map(str, row.method.shifts)}]
            before = f"{table}: " if table else ""
            where = f"{before}{condition.title}"
            caption = where[0].upper() + where[1:]

            scores = list(self.sweep.scores)
            calibrators = {
                CALIBRATORS[r.posthoc.partition("@")[0]] for r in rows if r.posthoc != NONE
            }
            if MASK not in scores and not all(one.keeps_mask for one in calibrators):
                scores.append(MASK)
            lines = {r.name: [self.number(r, s, condition, where) for s in scores] for r in rows}
            numbers += chain(*lines.values())
            cells = [(name, [number.cell for number in line]) for name, line in lines.items()]
            tables.append(Table(f"{caption}: {INTERVAL}", ["", *map(_heading, scores)], cells))
            if differences := self._differences(rows, condition):
                title = f"{caption}: differences on the same images"
                tables.append(difference_table(differences, title=title, corner=""))
            for score in self.sweep.by_class:
                if lines := self._of_classes(rows, score, condition, where):
                    numbers += chain(*lines.values())
                    tables.append(
                        _plain_table(f"{caption}: {_heading(score)}", "class", rows, lines)
                    )
            for score in scores if len(condition.shifts) > 1 else ():
                lines = {
                    shift: [
                        self.number(r, score, Condition("", (shift,)), before + shift, brief=True)
                        for r in rows
                    ]
                    for shift in condition.shifts
                }
                numbers += chain(*lines.values())
                if score in self.sweep.by_shift:
                    title = f"{where}, one by one: {_heading(score)}"
                    tables.append(_plain_table(title, "shift", rows, lines))

        noisy = [n for n in numbers if n.mean and n.interval and n.mean > n.interval[1]]
        labels = dict.fromkeys(SCORES[number.metric].label for number in noisy)
        said = [*self.remarks(), *remarks, *([f"{above_interval(labels)}."] if labels else [])]
        return Sheet(self.sweep.name, self.sweep.title, command, said, tables, numbers)

    def _of_classes(
        self, rows: Sequence[Row], score: str, condition: Condition, where: str
    ) -> dict[str, list[Number]]:
        """A score of classes: by class, one number per row; nothing while none is measured."""
        reports = (self.reports(row, shift) for row in rows for shift in condition.shifts)
        first = next((some[0] for some in reports if some), None)
        if first is None:
            return {}
        classes = first.class_names or map(str, range(first.protocol.num_classes))
        return {
            name: [self.number(r, score, condition, f"{where}: {name}", c) for r in rows]
            for c, name in enumerate(classes)
        }

    def reports(self, row: Row, shift: str = "") -> list[Report]:
        """The reports of a row under one shift, one per seed; none while any is missing."""
        return [self._report(folder / REPORT) for folder in self._folders(row, shift)]

    def _read_meters(self, row: Row, condition: Condition) -> list[list[CalibrationMeter]]:
        """The sums behind a row: for each seed, those under each shift; none if any is missing."""
        folders = [self._folders(row, shift) for shift in condition.shifts]  # (shifts, seeds)
        return [
            [CalibrationMeter.load(folder / STATE) for folder in shifts]
            for shifts in (zip(*folders, strict=True) if all(folders) else ())
        ]

    def _mean_intervals(self, row: Row, condition: Condition) -> Mapping[str, Interval]:
        meters = self._meters(row, condition)
        several = len(meters[0][0].names) > 1  # one image has no interval
        return mean_intervals(meters) if several else {}

    def number(
        self,
        row: Row,
        score: str,
        condition: Condition = CLEAN,
        column: str = "",
        of_class: int | None = None,
        *,
        brief: bool = False,
    ) -> Number:
        """A score of a row: for each seed its mean over the shifts of `condition`.

        A score of one class (`of_class`) or a `brief` one has no interval.
        """
        unit, factor = SCORES[score].unit, SCORES[score].scale
        each = [self.reports(row, shift) for shift in condition.shifts]  # (shifts, seeds)
        if not all(each):
            return Number(score, unit, row.name, column, ())
        values = [[getattr(report, score) for report in reports] for reports in each]
        if of_class is not None:
            values = [[float(found[of_class]) for found in reports] for reports in values]
        seeds = tuple(factor * fmean(shifts) for shifts in zip(*values, strict=True))
        if any(map(math.isnan, seeds)):
            return Number(score, unit, row.name, column, ())
        if brief or of_class is not None:
            return Number(score, unit, row.name, column, seeds)
        found = self._intervals(row, condition).get(score)
        ends = None if found is None else (factor * found.low, factor * found.high)
        return Number(score, unit, row.name, column, seeds, ends)

    def _folders(self, row: Row, shift: str) -> list[Path]:
        """The folders of a row's evaluations, one per seed; none while any is missing."""
        method, reported = row.method, self.runs.reported(row)
        measured = all(method in self.runs.measured.get(each, ()) for each in reported)
        if not measured or shift not in ("", *map(str, method.shifts)):
            return []
        limit = method.limit if shift else None
        folders = [self.runs.evaluations(each, limit) for each in reported]
        return [folder / place(row.posthoc, shift) for folder in folders]

    def _differences(
        self, rows: Sequence[Row], condition: Condition
    ) -> dict[str, dict[str, Difference]]:
        """The differences that are asked for."""
        by_name = {row.name: row for row in rows}
        found = {}
        for first, second in self.sweep.compare:
            if not {first, second} <= by_name.keys():
                continue
            one, other = by_name[first], by_name[second]
            meters = self._meters(one, condition), self._meters(other, condition)
            if all(meters) and len(meters[0][0][0].names) > 1:
                same = self.runs.reported(one) == self.runs.reported(other)
                every = paired_differences(*meters, same_trainings=same)
                scores = {s: every[s] for s in self.sweep.scores if s in every}
                found[f"{first} → {second}"] = scores
        return found

    def remarks(self) -> list[str]:
        """How the numbers came about."""
        counts = sorted({len(method.seeds) for method in self.sweep.methods})
        seeds = " or ".join(map(str, counts)) + (" seeds" if counts[-1] > 1 else " seed")
        said = [f"{seeds} per method; calibrators are fitted on the clean hold-out."]
        if any(row.ensemble for method in self.sweep.methods for row in method.rows()):
            said.append(
                "An ensemble is the mean of the probabilities of the seeds of a method, and its "
                "calibrators are fitted on that mean; its interval is over images only."
            )
        tuned = [method.select for method in self.sweep.methods if len(method.grid) > 1]
        if tuned:
            rules = " or ".join(SCORES[rule].label for rule in dict.fromkeys(tuned))
            said.append(
                f"Hyper-parameters are chosen by {rules} on the hold-out with the first seed, "
                "never on the test images."
            )
        for method in self.sweep.methods:
            count, chosen = len(method.grid), self.runs.choice(method)
            if count > 1 and chosen is not None:
                before = f"{method.table}, " if method.table else ""
                text = ", ".join(f"{name} {shown(value)}" for name, value in chosen)
                said.append(f"{before}{method.name}: {text} chosen, of {count}.")
        return said

    def figures(self) -> dict[str, Figure]:
        """The diagrams of the rows in `draw`, by the suffix of their names.

        Reliability on the clean images (first seeds), and scores against severity (means over
        seeds and corruptions).
        """
        tables = self.sweep.tables()
        graded = [c for c in conditions(self.sweep) if c.severity is not None]
        graded.sort(key=lambda condition: condition.severity or 0)
        found = {}
        for number, every in enumerate(tables.values(), 1):
            ending = f"_{number}" if len(tables) > 1 else ""
            rows = [row for row in every if row.name in self.sweep.draw and self.reports(row)]
            if not rows:
                continue
            found[ending] = new_figure(5.4, 5.4)
            first = {row.name: self.reports(row)[0] for row in rows}
            viz.reliability_diagram(first, found[ending].subplots(), counts=False)
            if len(graded) > 2:
                found[f"_severity{ending}"] = figure = new_figure(8.8, 3.4)
                for ax, score in zip(figure.subplots(1, 2), ("ece", "accuracy"), strict=True):
                    means: dict[str, dict[int, float]] = {row.name: {} for row in rows}
                    for row, condition in product(rows, graded):
                        mean = self.number(row, score, condition, brief=True).mean
                        if mean is not None:
                            value = mean / SCORES[score].scale
                            means[row.name][condition.severity or 0] = value
                    severity_curve(means, ax, score=score)
        return found


def write_sweeps(
    sweeps: Sequence[Sweep],
    runs: Runs,
    out: Path,
    command: str,
    into: Path | None = None,
    mark: str = "",
    remarks: Sequence[str] | None = None,
) -> Iterator[Path]:
    """Write NAME.md, NAME.csv, NAME.html and diagrams of sweeps, as far as they are done.

    `command` made them. The Markdown file `into` also gets the tables, between the comments of
    `mark`, by default "sweep NAME". The remarks say how the runs were made, by default which
    weights are evaluated. Yields the paths.
    """
    for sweep in sweeps:
        results = Results(sweep, runs)
        said = [runs.weights_remark(sweep.methods[0])] if remarks is None else remarks
        sheet = results.sheet(command, said)
        if into is not None:
            put_into(into, mark or f"sweep {sweep.name}", sheet.markdown())
        drawn = save_figures(results.figures, sweep.name, out)
        yield from replace(sheet, pictures=[path.read_bytes() for path in drawn]).write(out)
        yield from drawn


def save_figures(make: Callable[[], Mapping[str, Figure]], name: str, folder: Path) -> list[Path]:
    """Draw figures and write each as PNG under `name` and its suffix; the paths."""
    with themed():
        figures = make()
    paths = []
    for ending, figure in figures.items():
        paths.append(folder / f"{name}{ending}.png")
        with atomic_write(paths[-1], "wb") as file:
            file.write(figure_png(partial(lambda drawn: drawn, figure)))
    return paths


def _heading(score: str) -> str:
    found = SCORES[score]
    return found.heading + {"higher": " ↑", "lower": " ↓", "neither": ""}[found.better]


def _plain_table(
    title: str, corner: str, rows: Sequence[Row], lines: Mapping[str, Sequence[Number]]
) -> Table:
    """A column per row of the sweep, without intervals."""
    cells = [(name, [Cell(number.text) for number in line]) for name, line in lines.items()]
    return Table(title, [corner, *(row.name for row in rows)], cells)
