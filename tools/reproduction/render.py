"""A table of the paper with our numbers beside the printed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduction.paper import AVERAGE, Table
from segcal.metrics.scores import SCORES
from segcal.sweep.render import Block, Number, Sheet


def make_sheet(
    table: Table,
    numbers: Sequence[Number],
    titles: Mapping[str, str],
    command: str,
    remarks: Sequence[str],
) -> Sheet:
    """The table ready to be written.

    Args:
        table: of the paper.
        numbers: every number of it.
        titles: what to call rows and columns that have a longer name.
        command: that made it.
        remarks: how it was made, one sentence or two each.
    """
    blocks = [_block(table, metric, numbers, titles) for metric in table.units]
    said = [*remarks, *verdicts(table, numbers)]
    return Sheet(table.name, table.title, command, said, blocks, numbers, table.notes)


def _block(
    table: Table, metric: str, numbers: Sequence[Number], titles: Mapping[str, str]
) -> Block:
    """One metric, in its unit of this table: the paper does not always print the usual one."""
    found = {(n.row, n.column): n for n in numbers if n.metric == metric}
    heading = f"{SCORES[metric].title} ({table.units[metric]})"
    return Block(
        f"{heading}, {SCORES[metric].better} is better: ours (the paper's)",
        [titles.get(column, column) for column in table.columns],
        [
            (titles.get(row, row), [_beside(found[row, column]) for column in table.columns])
            for row in table.rows
        ],
    )


def _beside(number: Number) -> tuple[str, str]:
    return number.text, f"{number.printed:g}"


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
