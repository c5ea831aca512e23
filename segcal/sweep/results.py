"""The tables of a sweep, from the reports of its runs and the sums behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from segcal.metrics import (
    CalibrationMeter,
    Interval,
    Report,
    mean_intervals,
    paired_differences,
)
from segcal.metrics.scores import SCORES
from segcal.sweep.definition import Row, Sweep, Variation
from segcal.sweep.plan import Evaluation, Hyper, value_text
from segcal.sweep.store import Store
from segcal.sweep.worker import to_shift
from segcal.viz.tables import Cell, Number, Sheet, Table, above_interval, difference_table

INTERVAL = "mean ± deviation over seeds, 95 % interval, seeds"
DIFFERENCE = "differences on the same images"


@dataclass(frozen=True)
class Condition:
    """Evaluations that numbers are means over.

    Attributes:
        title: in words.
        shifts: shifts of the test images; "" for the clean ones.
        limit: number of images; None for all.
    """

    title: str
    shifts: tuple[str, ...] = ("",)
    limit: int | None = None

    def evaluations(self, row: Row) -> list[Evaluation]:
        """Those of a row."""
        return [Evaluation(row.posthoc, shift, self.limit) for shift in self.shifts]


CLEAN_IMAGES = Condition("clean test images")


def conditions_of(sweep: Sweep) -> list[Condition]:
    """The clean images, the mean over corruptions at each severity, and other shifts by name."""
    groups: dict[str, list[str]] = {}
    for name in sweep.shifts():
        shift = to_shift(name)
        assert shift is not None
        group = name if shift.severity is None else f"severity {shift.severity}"
        groups.setdefault(group, []).append(name)
    images = "" if sweep.limit is None else f", {sweep.limit} images"
    conditions = [CLEAN_IMAGES]
    for group, names in groups.items():
        title = f"mean over {len(names)} corruptions of {group}" if len(names) > 1 else names[0]
        conditions.append(Condition(title + images, tuple(names), sweep.limit))
    return conditions


@dataclass(frozen=True)
class Results:
    """What is measured of a sweep; reports are read once."""

    sweep: Sweep
    store: Store
    _reports: dict[tuple[object, ...], list[Report]] = field(default_factory=dict)
    _meters: dict[tuple[object, ...], list[CalibrationMeter]] = field(default_factory=dict)
    _known: dict[tuple[object, ...], dict[str, Interval]] = field(default_factory=dict)

    def sheet(self, command: str, remarks: Sequence[str] = ()) -> Sheet:
        """The tables, as far as the sweep is done."""
        blocks: list[Table] = []
        numbers: list[Number] = []
        for variation in self.sweep.variations():
            every = self.rows(variation)
            prefix = self.sweep.in_words(variation)
            for condition in conditions_of(self.sweep):
                title = f"{prefix}: {condition.title}" if prefix else condition.title
                caption = title if prefix else title[0].upper() + title[1:]
                rows = [
                    row for row in every if row.method.evaluations >= {*condition.evaluations(row)}
                ]
                found = {
                    (row.name, score): self.number(row, score, condition, title)
                    for row in rows
                    for score in self.sweep.scores
                }
                numbers += found.values()
                blocks.append(self._scores(caption, rows, found))
                blocks += self._differences(caption, rows, condition)
                for score in self.sweep.by_class:
                    lines = self._classes(rows, condition, score, title)
                    numbers += (number for line in lines.values() for number in line)
                    blocks.append(self._by_class(caption, score, rows, lines))
                if len(condition.shifts) > 1:
                    single = self._single(rows, condition, prefix)
                    numbers += single.values()
                    blocks += self._by_shift(caption, rows, condition, single)
        said = [*self.remarks(), *remarks, *remarks_on_noise(numbers)]
        return Sheet(self.sweep.name, self.sweep.title, command, said, blocks, numbers)

    def rows(self, variation: Variation) -> list[Row]:
        """The rows of a variation; those of further rules where they chose otherwise."""
        first, *others = self.sweep.select
        rows = self.sweep.rows(variation, first)
        chosen = {row.name: self.store.choice(row.method) for row in rows}
        for rule in others:
            for row in self.sweep.rows(variation, rule):
                if self.store.choice(row.method) not in (None, chosen[row.name]):
                    rows.append(Row(by_rule(row.name, rule), row.method, row.posthoc))
        return rows

    def reports(self, row: Row, evaluation: Evaluation) -> list[Report]:
        """The reports of a row, one per seed; none while any is missing."""
        key = (row.method.key, evaluation)
        if key not in self._reports:
            self._reports[key] = self.store.reports(row.method, evaluation)
        return self._reports[key]

    def meters(self, row: Row, condition: Condition) -> list[list[CalibrationMeter]]:
        """The sums behind a row: for each seed, under each shift of `condition`; or none."""
        found = []
        for evaluation in condition.evaluations(row):
            key = (row.method.key, evaluation)
            if key not in self._meters:
                self._meters[key] = self.store.meters(row.method, evaluation)
            if not self._meters[key]:
                return []
            found.append(self._meters[key])
        return [list(shifts) for shifts in zip(*found, strict=True)]

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
        """A score of a row: for each seed its mean over the shifts of `condition`; its interval.

        A score of classes is that of the class with the index `of_class`, without an interval.
        """

        def value(report: Report) -> float:
            found = getattr(report, score)
            return found if of_class is None else float(found[of_class])

        unit, factor = SCORES[score].unit, SCORES[score].scale
        each = [self.reports(row, e) for e in condition.evaluations(row)]  # (shifts, seeds)
        if not all(each):
            return Number(score, unit, row.name, column, ())
        seeds = [fmean(map(value, reports)) for reports in zip(*each, strict=True)]
        found = (
            self._intervals(row, condition).get(score) if interval and of_class is None else None
        )
        ends = None if found is None else (factor * found.low, factor * found.high)
        return Number(score, unit, row.name, column, tuple(factor * s for s in seeds), ends)

    def _intervals(self, row: Row, condition: Condition) -> dict[str, Interval]:
        key = (row.method.key, row.posthoc, condition)
        if key not in self._known:
            meters = self.meters(row, condition)
            several = len(meters[0][0].names) > 1  # one image has no interval
            self._known[key] = mean_intervals(meters) if several else {}
        return self._known[key]

    def _single(
        self, rows: Sequence[Row], condition: Condition, prefix: str
    ) -> dict[tuple[str, str, str], Number]:
        """The numbers of every row under each shift by itself."""
        found = {}
        for row in rows:
            for shift in condition.shifts:
                alone = Condition(shift, (shift,), condition.limit)
                column = f"{prefix}: {shift}" if prefix else shift
                for score in self.sweep.scores:
                    found[row.name, shift, score] = self.number(
                        row, score, alone, column, interval=False
                    )
        return found

    def _classes(
        self, rows: Sequence[Row], condition: Condition, score: str, title: str
    ) -> dict[str, list[Number]]:
        """By class, its numbers of every row; none as long as nothing is measured."""
        reports = (self.reports(row, e) for row in rows for e in condition.evaluations(row))
        first = next((found[0] for found in reports if found), None)
        if first is None:
            return {}
        names = first.class_names or tuple(map(str, range(first.protocol.num_classes)))
        return {
            name: [self.number(r, score, condition, f"{title}: {name}", of_class=c) for r in rows]
            for c, name in enumerate(names)
        }

    def _scores(
        self, caption: str, rows: Sequence[Row], found: Mapping[tuple[str, str], Number]
    ) -> Table:
        scores = self.sweep.scores
        return Table(
            f"{caption}: {INTERVAL}",
            ["method", *(_heading(score, arrow=True) for score in scores)],
            [(row.name, [found[row.name, s].cell for s in scores]) for row in rows],
        )

    def _differences(self, caption: str, rows: Sequence[Row], condition: Condition) -> list[Table]:
        """The differences that are asked for, also between the rows of further rules."""
        by_name = {row.name: row for row in rows}
        pairs = []
        for rule in self.sweep.select:
            for pair in self.sweep.compare:
                of_rule = tuple(
                    n if by_rule(n, rule) not in by_name else by_rule(n, rule) for n in pair
                )
                pairs.append(pair if rule == self.sweep.select[0] else of_rule)
        shown = []
        for first, second in dict.fromkeys(pairs):
            if not {first, second} <= by_name.keys():
                continue
            meters = [self.meters(by_name[name], condition) for name in (first, second)]
            if all(meters) and len(meters[0][0][0].names) > 1:
                keys = [by_name[name].method.key for name in (first, second)]
                found = paired_differences(*meters, same_trainings=keys[0] == keys[1])
                shown.append((f"{first} → {second}", found))
        if not shown:
            return []
        kept = {n: {s: d for s, d in f.items() if s in self.sweep.scores} for n, f in shown}
        return [difference_table(kept, title=f"{caption}: {DIFFERENCE}", corner="methods")]

    def _by_shift(
        self,
        caption: str,
        rows: Sequence[Row],
        condition: Condition,
        found: Mapping[tuple[str, str, str], Number],
    ) -> list[Table]:
        return [
            Table(
                f"{caption}, one by one: {_heading(score, arrow=True)}",
                ["shift", *(row.name for row in rows)],
                [
                    (shift, [Cell(found[row.name, shift, score].text) for row in rows])
                    for shift in condition.shifts
                ],
            )
            for score in self.sweep.by_shift
        ]

    def _by_class(
        self, caption: str, score: str, rows: Sequence[Row], lines: Mapping[str, Sequence[Number]]
    ) -> Table:
        return Table(
            f"{caption}: {_heading(score, arrow=True)}",
            ["class", *(row.name for row in rows)],
            [(name, [Cell(number.text) for number in line]) for name, line in lines.items()],
        )

    def remarks(self) -> list[str]:
        """How the numbers came about."""
        counts = sorted({len(entry.seeds) for entry in self.sweep.entries})
        seeds = " or ".join(map(str, counts)) + (" seeds" if counts[-1] > 1 else " seed")
        said = [f"{seeds} per method; post-hoc methods are fitted on the clean hold-out."]
        rules = " and by ".join(SCORES[rule].label for rule in self.sweep.select)
        if any(len(method.grid) > 1 for method in self.sweep.methods()):
            said.append(
                f"Hyper-parameters are chosen by {rules} on the hold-out with the first seed, "
                "never on the test images."
            )
        for variation in self.sweep.variations():
            words = self.sweep.in_words(variation)
            before = f"{words}, " if words else ""
            for entry in self.sweep.entries:
                methods = {
                    SCORES[rule].label: self.sweep.method(entry, variation, rule)
                    for rule in self.sweep.select
                }
                chosen = {label: self.store.choice(method) for label, method in methods.items()}
                count = len(next(iter(methods.values())).grid)  # the same for every rule
                if count > 1 and all(chosen.values()):
                    said.append(f"{before}{entry.name}: {_choices(chosen)}, of {count}.")
        return said


def remarks_on_noise(numbers: Iterable[Number]) -> list[str]:
    """Which scores have a number above its interval, and why; nothing if none has."""
    above = (n for n in numbers if n.mean and n.interval and n.mean > n.interval[1])
    labels = dict.fromkeys(SCORES[number.metric].label for number in above)
    return [f"{above_interval(labels)}."] if labels else []


def _choices(chosen: Mapping[str, Hyper | None]) -> str:
    """What each rule chose; once, if they all chose the same."""
    texts = {
        rule: ", ".join(f"{name} {value_text(value)}" for name, value in hyper or ())
        for rule, hyper in chosen.items()
    }
    if len(set(texts.values())) == 1:
        return f"{next(iter(texts.values()))} chosen" + (" by both" if len(texts) == 2 else "")
    return "; ".join(f"{text} chosen by {rule}" for rule, text in texts.items())


def by_rule(row: str, rule: str) -> str:
    """The name of a row whose hyper-parameters a further rule chose."""
    method, _, posthoc = row.rpartition(" / ")
    return f"{method} by {SCORES[rule].label} / {posthoc}"


def _heading(score: str, *, arrow: bool = False) -> str:
    found = SCORES[score]
    better = {"higher": " ↑", "lower": " ↓", "neither": ""}[found.better]
    return f"{found.title} ({found.unit}){better if arrow else ''}"
