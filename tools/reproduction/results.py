"""The numbers of the paper's tables, measured: one a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from reproduction import experiments
from reproduction.grids import Scale, grid
from reproduction.paper import AVERAGE, Table, Want
from segcal.metrics import Report
from segcal.metrics.scores import UNITS
from segcal.sweep.definition import MethodEntry, Sweep
from segcal.sweep.plan import Evaluation, Method, merge_methods
from segcal.sweep.render import Number
from segcal.sweep.store import Store


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
        evaluations: frozenset[Evaluation] = frozenset({Evaluation()}),
    ) -> Method:
        """A loss on an experiment, with the paper's grid of hyper-parameters."""
        grids = experiments.EXPERIMENTS[experiment].grids
        return Method(
            config=experiments.config_name(experiment, self.scale, self.data),
            loss=loss,
            grid=grid(loss, self.scale, tune=self.tune, own=grids.get(loss)),
            seeds=self.seeds,
            evaluations=evaluations,
        )

    def methods(self, table: Table) -> list[Method]:
        """All that a table needs."""
        wants = table.wants()
        return merge_methods(
            self.method(w.experiment, w.loss, frozenset({self.evaluation(w)})) for w in wants
        )

    def sweep(self, own: Sweep) -> Sweep:
        """A table of our own at this scale, with these seeds."""
        title = own.title
        if self.scale == "small":
            title = f"{title} (here: {experiments.stand_in_title(own.config, self.data)})"
        return replace(
            own,
            title=title,
            config=experiments.config_name(own.config, self.scale, self.data),
            entries=tuple(self._entry(entry) for entry in own.entries),
        )

    def _entry(self, entry: MethodEntry) -> MethodEntry:
        usual = {name: (value,) for name, value in grid(entry.loss, self.scale, tune=False)[0]}
        return replace(entry, seeds=self.seeds, hyper=entry.hyper if self.tune else usual)

    def evaluation(self, want: Want) -> Evaluation:
        """The evaluation that gives `want`."""
        return Evaluation(want.posthoc, self.shift(want.experiment, want.shift))

    def shift(self, experiment: str, shift: str) -> str:
        """The change to the test data, or what a stand-in does in its place."""
        config = experiments.config_name(experiment, self.scale, self.data)
        stand_in = experiments.STAND_INS.get(config)
        own = (stand_in and stand_in.shifts) or {}
        return own.get(shift, shift)

    def reports(self, want: Want) -> list[Report]:
        """The reports of `want`, one a seed; none while any is missing."""
        method = self.method(want.experiment, want.loss)
        return self.store.reports(method, self.evaluation(want))


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

    return [
        Number(
            metric,
            unit,
            row,
            column,
            seeds(metric, row, column),
            printed=table.printed(metric, row, column),
        )
        for metric, unit in table.units.items()
        for row in table.rows
        for column in table.columns
    ]


def score(report: Report, metric: str, table: Table, want: Want) -> float:
    """A score of a report as a fraction. Classes go by their place, whatever their names."""
    if metric == "class_ece" and want.of_class is not None:
        return float(report.class_ece[table.columns.index(want.of_class)])
    return float(getattr(report, metric))
