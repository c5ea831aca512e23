"""A table of the paper as it is laid out there, with our numbers beside the printed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from reproduction.paper import AVERAGE, Table, titles
from segcal.metrics.scores import SCORES, UNITS
from segcal.sweep.definition import Sweep
from segcal.sweep.results import Results, conditions
from segcal.viz.tables import Cell, Number, Sheet
from segcal.viz.tables import Table as PlainTable


def make_sheet(
    table: Table, sweep: Sweep, numbers: Sequence[Number], command: str, remarks: Sequence[str]
) -> Sheet:
    """The table ready to be written.

    Args:
        table: of the paper.
        sweep: that made our numbers.
        numbers: every number of the table.
        command: that made it.
        remarks: how it was made, one sentence or two each.
    """
    names = {
        name: titles()[name] if name == config else f"{titles()[name]} (here: {config})"
        for name, config in zip(table.experiments, sweep.config, strict=True)
        if name in titles()
    }
    tables = [_beside(table, metric, numbers, names) for metric in table.units]
    said = [*remarks, *verdicts(table, numbers)]
    return Sheet(table.name, sweep.title, command, said, tables, numbers, table.notes)


def numbers(table: Table, results: Results) -> list[Number]:
    """Every number of a table: the paper's, and ours as far as it is measured.

    Experiments, shifts and classes go by their order: at a small scale others take their places.
    """
    sweep, places = results.sweep, conditions(results.sweep)
    rows = {(r.method.config, r.name): r for every in sweep.tables().values() for r in every}

    def seeds(metric: str, row: str, column: str) -> tuple[float, ...]:
        want = table.want(row, column)
        if want is None:
            each = [seeds(metric, row, c) for c in table.columns if c != AVERAGE]
            return tuple(map(fmean, zip(*each, strict=True))) if all(each) else ()
        place = table.columns.index(column)
        clean = {"rotation": 0, "domain": 1}.get(table.column_kind)  # rotation:0 is as they are
        found = results.number(
            rows[sweep.config[table.experiments.index(want.experiment)], want.row],
            metric,
            places[0 if clean is None else place + clean],
            of_class=None if want.of_class is None else place,
            brief=True,
        )
        factor = UNITS[table.units[metric]].scale / SCORES[metric].scale
        return tuple(factor * value for value in found.seeds)

    return [
        Number(
            *(metric, unit, row, column, seeds(metric, row, column)),
            printed=table.printed(metric, row, column),
        )
        for metric, unit in table.units.items()
        for row in table.rows
        for column in table.columns
    ]


def _beside(
    table: Table, metric: str, numbers: Sequence[Number], names: Mapping[str, str]
) -> PlainTable:
    """One metric, in its unit of this table: the paper does not always print the usual one."""
    found = {(n.row, n.column): n for n in numbers if n.metric == metric}
    heading = f"{SCORES[metric].title} ({table.units[metric]})"
    rows = []
    for row in table.rows:
        shown = [found[row, column] for column in table.columns]
        cells = [Cell(number.text, f"({number.printed:g})") for number in shown]
        rows.append((names.get(row, row), cells))
    return PlainTable(
        f"{heading}, {SCORES[metric].better} is better: ours (the paper's)",
        ["", *(names.get(column, column) for column in table.columns)],
        rows,
    )


def verdicts(table: Table, numbers: Sequence[Number]) -> list[str]:
    """How often adding MDCA to a base loss helps, here and in the paper, for each metric."""
    by_place = {(n.metric, *_names(table, n)): n for n in numbers}
    found = []
    for metric in table.units:
        pairs = []
        for (m, loss, place), number in by_place.items():
            base = by_place.get((m, loss.removesuffix("+mdca"), place))
            if m == metric and loss.endswith("+mdca") and base and number.column != AVERAGE:
                pairs.append((number, base))
        if pairs:
            here = [(a.mean, b.mean) for a, b in pairs]
            paper = [(a.printed, b.printed) for a, b in pairs]
            found.append(
                f"Against its base loss, MDCA {'raises' if SCORES[metric].higher else 'lowers'} "
                f"{SCORES[metric].title} in {_better(here, metric)} cases here and in "
                f"{_better(paper, metric)} in the paper."
            )
    return found


def _names(table: Table, number: Number) -> tuple[str, str]:
    """The loss, and everything else that tells a number's place in the table."""
    kinds = f"{table.row_kind} / {table.column_kind}".split(" / ")
    names = f"{number.row} / {number.column}".split(" / ")
    named = dict(zip(kinds, names, strict=True))
    loss = named.pop("loss")
    return loss, " / ".join(named.values())


def _better(pairs: Sequence[tuple[float | None, float | None]], metric: str) -> str:
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    better = sum(a > b if SCORES[metric].higher else a < b for a, b in known)
    return f"{better} of {len(known)}"
