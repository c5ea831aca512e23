"""The numbers of a table, read from reports: one number a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from reproduction import experiments, plan
from reproduction.paper import AVERAGE, Table, Want
from reproduction.plan import Evaluation, Method, Scale
from reproduction.store import Store
from segcal.metrics import CalibrationMeter, Difference, Report, paired_differences
from segcal.metrics.scores import UNITS


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        metric: what it measures.
        unit: of `printed` and `seeds`.
        row: name of the row.
        column: name of the column.
        printed: the paper's number; None in tables of our own.
        seeds: ours, one a seed; empty while it is not measured.
        interval: ends of the 95 % interval over images, each the mean over seeds, or None.
    """

    metric: str
    unit: str
    row: str
    column: str
    printed: float | None
    seeds: tuple[float, ...]
    interval: tuple[float, float] | None = None

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return fmean(self.seeds) if self.seeds else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for fewer than two."""
        return stdev(self.seeds) if len(self.seeds) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """How the row `second` of a table differs from `first`, by metric, as fractions."""

    first: str
    second: str
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Setting:
    """At what scale, on which data, with how many seeds a grid is made, and where it is kept."""

    scale: Scale
    data: Path
    seeds: tuple[int, ...]
    tune: bool
    store: Store

    def method(
        self,
        experiment: str,
        loss: str,
        evaluations: frozenset[Evaluation] = frozenset({plan.PLAIN}),
    ) -> Method:
        """A loss on an experiment, with the paper's grid of hyper-parameters."""
        grids = experiments.EXPERIMENTS[experiment].grids
        return Method(
            config=experiments.config_name(experiment, self.scale, self.data),
            loss=loss,
            grid=plan.grid(loss, self.scale, tune=self.tune, own=grids.get(loss)),
            seeds=self.seeds,
            evaluations=evaluations,
        )

    def methods(self, table: Table) -> list[Method]:
        """All that a table needs."""
        wants = table.wants()
        return plan.merge_methods(
            self.method(w.experiment, w.loss, frozenset({self.evaluation(w)})) for w in wants
        )

    def evaluation(self, want: Want) -> Evaluation:
        """The evaluation that gives `want`."""
        return want.posthoc, self.shift(want.experiment, want.shift)

    def shift(self, experiment: str, shift: tuple[str, str] | None) -> tuple[str, str] | None:
        """The change to the test data, or what a stand-in does in its place."""
        config = experiments.config_name(experiment, self.scale, self.data)
        stand_in = experiments.STAND_INS.get(config)
        own = (stand_in and stand_in.shifts) or {}
        return own.get(shift, shift) if shift else None

    def reports(self, want: Want) -> list[Report]:
        """The reports of `want`, one a seed; none while any is missing."""
        return [Report.load(path) for path in self._paths(want)]

    def meters(self, want: Want) -> list[CalibrationMeter]:
        """The meters behind `reports`."""
        return [CalibrationMeter.load(path.with_suffix(".npz")) for path in self._paths(want)]

    def _paths(self, want: Want) -> list[Path]:
        method = self.method(want.experiment, want.loss)
        try:
            hyper = self.store.choice(method)
        except ValueError:
            return []
        if hyper is None:
            return []
        paths = [self.store.report(run, self.evaluation(want)) for run in method.chosen(hyper)]
        return paths if all(path.exists() for path in paths) else []


def numbers(table: Table, setting: Setting) -> list[Number]:
    """Every number of a table: the paper's, and ours as far as it is measured."""
    reports = {want: setting.reports(want) for want in table.wants()}

    def seeds(metric: str, row: str, column: str) -> tuple[float, ...]:
        columns = [c for c in table.columns if c != AVERAGE] if column == AVERAGE else [column]
        each = []  # (columns, seeds)
        for want in (table.want(row, c) for c in columns):
            assert want is not None
            each.append([score(report, metric, table, want) for report in reports[want]])
        if not all(each):
            return ()
        factor = UNITS[table.units[metric]].scale
        return tuple(factor * fmean(values) for values in zip(*each, strict=True))

    def interval(metric: str, row: str, column: str) -> tuple[float, float] | None:
        want = table.want(row, column)
        if want is None:
            return None
        found = [r.intervals[metric] for r in reports[want] if metric in r.intervals]
        if not found or len(found) < len(reports[want]):
            return None
        factor = UNITS[table.units[metric]].scale
        return factor * fmean(i.low for i in found), factor * fmean(i.high for i in found)

    return [
        Number(
            metric,
            unit,
            row,
            column,
            table.printed(metric, row, column),
            seeds(metric, row, column),
            interval(metric, row, column),
        )
        for metric, unit in table.units.items()
        for row in table.rows
        for column in table.columns
    ]


def comparisons(table: Table, setting: Setting) -> list[Comparison]:
    """The differences that a table of our own asks for, as far as they are measured."""
    found = []
    for pair in table.comparisons:
        meters = []
        for row in pair:
            want = table.want(row, table.columns[0])
            assert want is not None
            meters.append(setting.meters(want))
        if all(meters):
            found.append(Comparison(*pair, paired_differences(*meters)))
    return found


def score(report: Report, metric: str, table: Table, want: Want) -> float:
    """A score of a report as a fraction. Classes go by their place, whatever their names."""
    if metric == "class_ece" and want.of_class is not None:
        return float(report.class_ece[table.columns.index(want.of_class)])
    return float(getattr(report, metric))
