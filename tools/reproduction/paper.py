"""The tables and figures of the paper, with every number that it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PAPER = Path(__file__).with_name("paper.yaml")
OWN = ("voc_half", "cifar10_small")  # of configs/sweeps/
AVERAGE = "average"  # the column that is the mean of the others


@dataclass(frozen=True)
class Want:
    """What one number of a table is measured on.

    Attributes:
        experiment: the data set and network, named as a file in configs/.
        loss: the training loss.
        posthoc: none, ts or dc.
        shift: the change to the test data, such as rotation:15; empty for none.
        of_class: the class, for class-j-ECE.
    """

    experiment: str
    loss: str
    posthoc: str = "none"
    shift: str = ""
    of_class: str | None = None

    @property
    def row(self) -> str:
        """The row of a sweep that has it."""
        return f"{self.loss} / {self.posthoc}"


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        name: what `tools/reproduce.py` and its sweep are called.
        label: of the LaTeX source.
        row_kind: what the rows' names mean: experiment, loss, or loss / posthoc.
        column_kind: what the columns' names mean: experiment, loss, class, domain or rotation.
        rows: names of the rows.
        columns: names of the columns.
        units: unit of each metric.
        values: by metric and row, one number per column, in that unit.
        experiment: the one of the whole table, where neither rows nor columns name it.
        notes: doubts about the paper's numbers.
    """

    name: str
    label: str
    row_kind: str
    column_kind: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    units: dict[str, str]
    values: dict[str, dict[str, tuple[float, ...]]]
    experiment: str | None
    notes: tuple[str, ...]

    def want(self, row: str, column: str) -> Want | None:
        """What the numbers at `row` and `column` are measured on; None for an average."""
        if AVERAGE in (row, column):
            return None
        named = {"experiment": self.experiment}
        for kinds, names in ((self.row_kind, row), (self.column_kind, column)):
            named |= dict(zip(kinds.split(" / "), names.split(" / "), strict=True))
        shifts = [f"{kind}:{named[kind]}" for kind in ("domain", "rotation") if kind in named]
        return Want(
            experiment=str(named["experiment"]),
            loss=str(named["loss"]),
            posthoc=named.get("posthoc") or "none",
            shift=shifts[0] if shifts else "",
            of_class=named.get("class"),
        )

    def wants(self) -> Iterator[Want]:
        """What the whole table is measured on, each thing once."""
        found = (self.want(row, column) for row in self.rows for column in self.columns)
        yield from dict.fromkeys(want for want in found if want is not None)

    @property
    def experiments(self) -> list[str]:
        """Its experiments, in order."""
        return list(dict.fromkeys(want.experiment for want in self.wants()))

    def printed(self, metric: str, row: str, column: str) -> float:
        """The paper's number, in the unit of `metric`."""
        return self.values[metric][row][self.columns.index(column)]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: what we call it, its label in the LaTeX source, what it shows."""

    name: str
    label: str
    title: str


@dataclass(frozen=True)
class OwnTable:
    """A table that the paper does not have: the name of its sweep."""

    name: str
    label: str = ""


PaperItem = Table | Figure | OwnTable


@cache
def tables() -> dict[str, Table]:
    """Every table of the paper by name."""
    return {name: _table(name, entry) for name, entry in _paper()["tables"].items()}


def own_tables() -> dict[str, OwnTable]:
    """Our own tables by name."""
    return {name: OwnTable(name) for name in OWN}


@cache
def titles() -> dict[str, str]:
    """What tables call the experiments."""
    return _paper()["experiments"]


@cache
def figures() -> dict[str, Figure]:
    """Every figure of the paper by name."""
    return {name: Figure(name, **entry) for name, entry in _paper()["figures"].items()}


def find(name: str) -> PaperItem:
    """The table or figure called `name`, by our name or the paper's label, with tab: or without.

    Raises:
        ValueError: there is none.
    """
    everything: dict[str, PaperItem] = {**tables(), **own_tables(), **figures()}
    for entry in everything.values():
        if name and name in (entry.name, entry.label, entry.label.partition(":")[2]):
            return entry
    raise ValueError(f"Expected one of {', '.join(everything)}, but got {name!r}")


def _table(name: str, entry: dict[str, Any]) -> Table:
    blocks = {metric: dict(block) for metric, block in entry["values"].items()}
    units = {metric: block.pop("unit") for metric, block in blocks.items()}
    return Table(
        name=name,
        label=entry["label"],
        row_kind=entry["rows"],
        column_kind=entry["columns"],
        rows=tuple(next(iter(blocks.values()))),
        columns=tuple(entry["across"]),
        units=units,
        values={m: {row: tuple(v) for row, v in block.items()} for m, block in blocks.items()},
        experiment=entry.get("experiment"),
        notes=tuple(entry.get("notes", ())),
    )


@cache
def _paper() -> dict[str, Any]:
    return yaml.safe_load(PAPER.read_text(encoding="utf-8"))
