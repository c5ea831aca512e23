"""The tables and diagrams of a sweep, from the evaluations of its runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from segcal import viz
from segcal.evaluation.folder import REPORT, STATE
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
from segcal.sweep.definition import Row, Sweep, Variation, shown
from segcal.sweep.runner import Runs
from segcal.viz.plots import draw_severities, figure_png, new_figure, themed
from segcal.viz.tables import Cell, Number, Sheet, Table, above_interval, difference_table, put_into

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


@dataclass(frozen=True)
class Results:
    """What is measured of a sweep, as far as it is done."""

    sweep: Sweep
    runs: Runs
    _reports: dict[Path, Report] = field(default_factory=dict)  # each is read once
    _meters: dict[Hashable, list[list[CalibrationMeter]]] = field(default_factory=dict)
    _known: dict[Hashable, Mapping[str, Interval]] = field(default_factory=dict)

    def sheet(self, command: str, remarks: Sequence[str] = ()) -> Sheet:
        """All tables and numbers."""
        tables: list[Table] = []
        numbers: list[Number] = []
        for variation in self.sweep.variations():
            before = f"{variation.title}: " if variation.title else ""
            every = self.rows(variation)
            for condition in conditions(self.sweep):
                rows = [r for r in every if _is_evaluated(r, condition)]
                made = self._tables(rows, condition, f"{before}{condition.title}")
                for table, found in (*made, *self._by_shift(rows, condition, before)):
                    tables += [] if table is None else [table]
                    numbers += found
        noisy = [n for n in numbers if n.mean and n.interval and n.mean > n.interval[1]]
        labels = dict.fromkeys(SCORES[number.metric].label for number in noisy)
        said = [*self.remarks(), *remarks, *([f"{above_interval(labels)}."] if labels else [])]
        return Sheet(self.sweep.name, self.sweep.title, command, said, tables, numbers)

    def rows(self, variation: Variation) -> list[Row]:
        """The rows of a variation; those of further rules where they chose otherwise."""
        first, *others = self.sweep.select
        rows = self.sweep.rows(variation, first)
        chosen = {row.name: self.runs.choice(row.tuning) for row in rows}
        for rule in others:
            for row in self.sweep.rows(variation, rule):
                if self.runs.choice(row.tuning) not in (None, chosen[row.name]):
                    rows.append(replace(row, name=by_rule(row.name, rule)))
        return rows

    def reports(self, row: Row, shift: str = "") -> list[Report]:
        """The reports of a row under one shift, one per seed; none while any is missing."""
        folders = self._folders(row, shift)
        for folder in folders:
            if folder not in self._reports:
                self._reports[folder] = Report.load(folder / REPORT)
        return [self._reports[folder] for folder in folders]

    def meters(self, row: Row, condition: Condition) -> list[list[CalibrationMeter]]:
        """The sums behind a row: for each seed, those under each shift; none if any is missing."""
        key = (row, condition)
        if key not in self._meters:
            folders = [self._folders(row, shift) for shift in condition.shifts]  # (shifts, seeds)
            self._meters[key] = [
                [CalibrationMeter.load(folder / STATE) for folder in shifts]
                for shifts in (zip(*folders, strict=True) if all(folders) else ())
            ]
        return self._meters[key]

    def number(
        self,
        row: Row,
        score: str,
        condition: Condition,
        column: str,
        *,
        interval: bool = True,
        of_class: int | None = None,
    ) -> Number:
        """A score of a row: for each seed its mean over the shifts of `condition`.

        Args:
            row: the row.
            score: a key of `SCORES`.
            condition: which images.
            column: the name of the number's column.
            interval: whether the mean over seeds has an interval.
            of_class: the index of a class, for a score of classes; it has no interval.
        """

        def value(report: Report) -> float:
            found = getattr(report, score)
            return found if of_class is None else float(found[of_class])

        unit, factor = SCORES[score].unit, SCORES[score].scale
        each = [self.reports(row, shift) for shift in condition.shifts]  # (shifts, seeds)
        if not all(each):
            return Number(score, unit, row.name, column, ())
        seeds = [factor * fmean(map(value, reports)) for reports in zip(*each, strict=True)]
        ends = None
        if interval and of_class is None:
            found = self._intervals(row, condition).get(score)
            ends = None if found is None else (factor * found.low, factor * found.high)
        return Number(score, unit, row.name, column, tuple(seeds), ends)

    def _folders(self, row: Row, shift: str) -> list[Path]:
        """The folders of a row's evaluations, one per seed; none while any is missing."""
        limit = row.tuning.limit if shift else None
        reported = self.runs.reported(row)
        found = [self.runs.evaluated(t, row.posthoc, shift, limit) for t in reported]
        known = [folder for folder in found if folder is not None]
        return known if len(known) == len(found) else []

    def _intervals(self, row: Row, condition: Condition) -> Mapping[str, Interval]:
        key = (row, condition)
        if key not in self._known:
            meters = self.meters(row, condition)
            several = len(meters[0][0].names) > 1  # one image has no interval
            self._known[key] = mean_intervals(meters) if several else {}
        return self._known[key]

    def _tables(
        self, rows: Sequence[Row], condition: Condition, title: str
    ) -> Iterator[tuple[Table | None, list[Number]]]:
        """The scores of the rows, their differences, and their scores by class."""
        scores = self.sweep.scores
        found = {row.name: [self.number(row, s, condition, title) for s in scores] for row in rows}
        caption = title[0].upper() + title[1:]
        yield (
            Table(
                f"{caption}: {INTERVAL}",
                ["", *map(_heading, scores)],
                [(name, [number.cell for number in numbers]) for name, numbers in found.items()],
            ),
            [number for numbers in found.values() for number in numbers],
        )
        if differences := self._differences(rows, condition):
            title_of = f"{caption}: differences on the same images"
            yield difference_table(differences, title=title_of, corner=""), []
        for score in self.sweep.by_class:
            reports = (self.reports(row, shift) for row in rows for shift in condition.shifts)
            first = next((some[0] for some in reports if some), None)
            if first is None:
                continue
            names = first.class_names or tuple(map(str, range(first.protocol.num_classes)))
            lines = [
                [self.number(r, score, condition, f"{title}: {name}", of_class=c) for r in rows]
                for c, name in enumerate(names)
            ]
            columns = ["class", *(row.name for row in rows)]
            table = Table(f"{caption}: {_heading(score)}", columns, _texts(names, lines))
            yield table, [number for line in lines for number in line]

    def _differences(
        self, rows: Sequence[Row], condition: Condition
    ) -> dict[str, dict[str, Difference]]:
        """The differences that are asked for, also between the rows of further rules."""
        by_name = {row.name: row for row in rows}
        pairs = list(self.sweep.compare)
        for rule in self.sweep.select[1:]:
            for pair in self.sweep.compare:
                first, second = (
                    name if by_rule(name, rule) not in by_name else by_rule(name, rule)
                    for name in pair
                )
                pairs.append((first, second))
        found = {}
        for first, second in dict.fromkeys(pairs):
            if not {first, second} <= by_name.keys():
                continue
            one, other = by_name[first], by_name[second]
            meters = self.meters(one, condition), self.meters(other, condition)
            if all(meters) and len(meters[0][0][0].names) > 1:
                same = self.runs.reported(one) == self.runs.reported(other)
                every = paired_differences(*meters, same_trainings=same)
                scores = {s: every[s] for s in self.sweep.scores if s in every}
                found[f"{first} → {second}"] = scores
        return found

    def _by_shift(
        self, rows: Sequence[Row], condition: Condition, before: str
    ) -> Iterator[tuple[Table | None, list[Number]]]:
        """Every score under each shift by itself, with a table if that is asked for."""
        for score in self.sweep.scores if len(condition.shifts) > 1 else ():
            lines = []
            for shift in condition.shifts:
                alone, column = Condition(shift, (shift,)), before + shift
                lines.append([self.number(r, score, alone, column, interval=False) for r in rows])
            table = None
            if score in self.sweep.by_shift:
                table = Table(
                    f"{before}{condition.title}, one by one: {_heading(score)}",
                    ["shift", *(row.name for row in rows)],
                    _texts(condition.shifts, lines),
                )
            yield table, [number for line in lines for number in line]

    def remarks(self) -> list[str]:
        """How the numbers came about."""
        counts = sorted({len(method.seeds) for method in self.sweep.methods})
        seeds = " or ".join(map(str, counts)) + (" seeds" if counts[-1] > 1 else " seed")
        said = [f"{seeds} per method; calibrators are fitted on the clean hold-out."]
        if any(ensemble for m in self.sweep.methods for _, _, ensemble in m.rows()):
            said.append(
                "An ensemble is the mean of the probabilities of the seeds of a method, and its "
                "calibrators are fitted on that mean; its interval is over images only."
            )
        rules = " and by ".join(SCORES[rule].label for rule in self.sweep.select)
        if any(len(tuning.grid) > 1 for tuning in self.sweep.tunings()):
            said.append(
                f"Hyper-parameters are chosen by {rules} on the hold-out with the first seed, "
                "never on the test images."
            )
        for variation in self.sweep.variations():
            before = f"{variation.title}, " if variation.title else ""
            for method in self.sweep.methods:
                tunings = [self.sweep.tuning(method, variation, r) for r in self.sweep.select]
                chosen = [self.runs.choice(tuning) for tuning in tunings]
                count = len(tunings[0].grid)  # the same for every rule
                if count == 1 or None in chosen:
                    continue
                texts = [", ".join(f"{n} {shown(v)}" for n, v in hyper or ()) for hyper in chosen]
                if len(set(texts)) == 1:
                    words = f"{texts[0]} chosen" + (" by both" if len(texts) == 2 else "")
                else:
                    labels = [SCORES[rule].label for rule in self.sweep.select]
                    each = zip(texts, labels, strict=True)
                    words = "; ".join(f"{text} chosen by {label}" for text, label in each)
                said.append(f"{before}{method.name}: {words}, of {count}.")
        return said

    def figures(self) -> dict[str, Figure]:
        """The diagrams of the rows in `draw`, by the suffix of their names.

        Reliability on the clean images (first seeds), and scores against severity (means over
        seeds and corruptions).
        """
        variations = self.sweep.variations()
        found = {}
        for number, variation in enumerate(variations, 1):
            ending = f"_{number}" if len(variations) > 1 else ""
            rows = [row for row in self.rows(variation) if row.name in self.sweep.draw]
            reports = {row.name: self.reports(row)[:1] for row in rows}
            if first := {name: each[0] for name, each in reports.items() if each}:
                found[ending] = new_figure(5.4, 5.4)
                viz.reliability_diagram(first, found[ending].subplots(), counts=False)
            graded = [c for c in conditions(self.sweep) if c.severity is not None]
            if len(graded) > 2 and first:
                found[f"_severity{ending}"] = figure = new_figure(8.8, 3.4)
                for ax, score in zip(figure.subplots(1, 2), ("ece", "accuracy"), strict=True):
                    means: dict[str, dict[int, float]] = {name: {} for name in first}
                    for row in (row for row in rows if row.name in first):
                        for condition in sorted(graded, key=lambda c: c.severity or 0):
                            mean = self.number(row, score, condition, "", interval=False).mean
                            if mean is not None:
                                means[row.name][condition.severity or 0] = (
                                    mean / SCORES[score].scale
                                )
                    draw_severities(means, ax, score=score)
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
    """Write the tables and diagrams of sweeps as far as they are done; the paths.

    Args:
        sweeps: the sweeps.
        runs: what is measured of them.
        out: where to write NAME.md, NAME.csv, NAME.html and diagrams.
        command: what made them.
        into: a Markdown file that also gets the tables, between the comments of `mark`.
        mark: by default "sweep NAME".
        remarks: how the runs were made; by default which weights are evaluated.
    """
    for sweep in sweeps:
        results = Results(sweep, runs)
        said = [runs.weights_remark(sweep.tunings()[0])] if remarks is None else remarks
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


def by_rule(row: str, rule: str) -> str:
    """The name of a row whose hyper-parameters a further rule chose."""
    method, _, posthoc = row.rpartition(" / ")
    return f"{method} by {SCORES[rule].label} / {posthoc}"


def _is_evaluated(row: Row, condition: Condition) -> bool:
    """Whether the row's method is evaluated under all shifts of a condition."""
    shifts = {"", *map(str, row.tuning.method.shifts)}
    return shifts >= set(condition.shifts)


def _heading(score: str) -> str:
    found = SCORES[score]
    return found.heading + {"higher": " ↑", "lower": " ↓", "neither": ""}[found.better]


def _texts(names: Sequence[str], lines: Sequence[Sequence[Number]]) -> list[tuple[str, list[Cell]]]:
    return [(name, [Cell(n.text) for n in line]) for name, line in zip(names, lines, strict=True)]
