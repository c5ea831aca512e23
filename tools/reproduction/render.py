"""Tables as markdown, csv and html, the paper's numbers beside ours.

A table that is not in the paper shows intervals and differences between its rows instead.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from reproduction.paper import AVERAGE, Table
from reproduction.results import Comparison, Number
from segcal.files import atomic_write
from segcal.metrics.scores import SCORES


@dataclass(frozen=True)
class Block:
    """A part of a page: rows under one caption, each cell a text and a smaller note, or none."""

    caption: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Sheet:
    """A table ready to be written.

    Attributes:
        table: of the paper, or our own.
        numbers: every number of it.
        titles: what to call rows and columns that have a longer name.
        command: that made it.
        remarks: how it was made, one sentence or two each.
        comparisons: differences between rows.
    """

    table: Table
    numbers: Sequence[Number]
    titles: dict[str, str]
    command: str
    remarks: Sequence[str]
    comparisons: Sequence[Comparison] = ()

    def title(self, name: str) -> str:
        """What a row or column is called."""
        return self.titles.get(name, name)

    def blocks(self) -> list[Block]:
        """Its parts in order."""
        if not self.table.values:
            return [self._own(), self._differences()]
        return [self._of_paper(metric) for metric in self.table.units]

    def _of_paper(self, metric: str) -> Block:
        """One metric: a row and column for each of the paper's."""
        found = {(n.row, n.column): n for n in self.numbers if n.metric == metric}
        return Block(
            f"{self._heading(metric)}, {SCORES[metric].better} is better: ours (the paper's)",
            [self.title(column) for column in self.table.columns],
            [
                (self.title(row), [_beside(found[row, column]) for column in self.table.columns])
                for row in self.table.rows
            ],
        )

    def _own(self) -> Block:
        """All metrics side by side, for the one column that tables of our own have."""
        found = {(n.row, n.metric): n for n in self.numbers}
        return Block(
            f"{self.title(self.table.columns[0])}: ours (95 % interval over images)",
            [f"{self._heading(m)} {'↑' if SCORES[m].higher else '↓'}" for m in self.table.units],
            [
                (row, [(ours(found[row, m]), _interval(found[row, m])) for m in self.table.units])
                for row in self.table.rows
            ],
        )

    def _differences(self) -> Block:
        return Block(
            "Differences on the same images: mean over seeds (95 % interval over images); "
            "* where it leaves out 0",
            [self._heading(metric) for metric in self.table.units],
            [
                (
                    f"{c.first} → {c.second}",
                    [c.differences[metric].texts(SCORES[metric]) for metric in self.table.units],
                )
                for c in self.comparisons
            ],
        )

    def _heading(self, metric: str) -> str:
        """A score and its unit in this table: the paper does not always print the usual one."""
        return f"{SCORES[metric].title} ({self.table.units[metric]})"


def _beside(number: Number) -> tuple[str, str]:
    return ours(number), f"{number.printed:g}"


def _interval(number: Number) -> str:
    if number.interval is None:
        return ""
    low, high = (_text(number, end) for end in number.interval)
    return f"{low} to {high}"


def ours(number: Number) -> str:
    """Our number: mean ± deviation over seeds, or a dash while it is not measured."""
    if number.mean is None:
        return "–"
    if number.deviation is None:
        return _text(number, number.mean)
    return f"{_text(number, number.mean)} ± {_text(number, number.deviation)}"


def _text(number: Number, value: float) -> str:
    return f"{value:.{SCORES[number.metric].digits}f}"


def verdicts(sheet: Sheet) -> list[str]:
    """How often adding MDCA to a base loss helps, here and in the paper, for each metric.

    Tables of our own have differences with intervals instead.
    """
    if not sheet.table.values:
        return []
    by_place = {(n.metric, *_names(sheet.table, n)): n for n in sheet.numbers}
    found = []
    for metric in sheet.table.units:
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


def sheet_markdown(sheet: Sheet) -> str:
    """A markdown table for each part; the note of a cell in brackets behind it."""
    lines = [f"### {sheet.table.title}", "", f"`{sheet.command}`", ""]
    lines += [f"- {remark}" for remark in (*sheet.remarks, *verdicts(sheet))]
    for block in sheet.blocks():
        lines += ["", f"**{block.caption}**", ""]
        lines += [_row(["", *block.columns]), _row(["---", *["---:"] * len(block.columns)])]
        for title, cells in block.rows:
            shown = [f"{text} ({note})" if note else text for text, note in cells]
            lines.append(_row([title, *shown]))
    if sheet.table.notes:
        lines += ["", "On the paper's numbers:", ""]
        lines += [f"- {note}" for note in sheet.table.notes]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sheet_csv(sheet: Sheet) -> str:
    """One line a number, with the seeds' own values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["table", "metric", "unit", "row", "column", "paper", "mean", "deviation", "seeds"]
    )
    for n in sheet.numbers:
        seeds = " ".join(f"{value:.6g}" for value in n.seeds)
        mean = "" if n.mean is None else f"{n.mean:.6g}"
        deviation = "" if n.deviation is None else f"{n.deviation:.6g}"
        writer.writerow(
            [sheet.table.name, n.metric, n.unit, n.row, n.column, n.printed, mean, deviation, seeds]
        )
    return text.getvalue()


def sheet_html(sheet: Sheet) -> str:
    """One page without anything to fetch; every name is escaped."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("table.html")
    return page.render(sheet=sheet, verdicts=verdicts(sheet))


def write_sheet(sheet: Sheet, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.csv and NAME.html to `folder`; their paths."""
    texts = {"md": sheet_markdown(sheet), "csv": sheet_csv(sheet), "html": sheet_html(sheet)}
    paths = []
    for ending, text in texts.items():
        path = folder / f"{sheet.table.name}.{ending}"
        with atomic_write(path) as file:
            file.write(text)
        paths.append(path)
    return paths


def put_into(path: Path, mark: str, markdown: str) -> None:
    """Put a table into a markdown file: between the comments of its mark, or at the end."""
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if start not in text:
        text = f"{text.rstrip()}\n\n{start}\n{end}\n".lstrip()
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"Expected {end} after {start} in {path}, but there is none")
    with atomic_write(path) as file:
        file.write(f"{before}{start}\n{markdown}{end}{after}")
