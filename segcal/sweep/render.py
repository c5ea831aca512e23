"""Tables as markdown, csv and html."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from jinja2 import Environment, FileSystemLoader

from segcal.files import atomic_write
from segcal.metrics.scores import SCORES


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        metric: what it measures.
        unit: unit of `printed` and `seeds`.
        row: name of the row.
        column: name of the column.
        seeds: one value per seed; empty while it is not measured.
        interval: ends of the 95 % interval over images of the mean over seeds, or None.
        printed: the number of a paper, if it is compared with one.
    """

    metric: str
    unit: str
    row: str
    column: str
    seeds: tuple[float, ...]
    interval: tuple[float, float] | None = None
    printed: float | None = None

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
        if self.mean is None:
            return "–"
        if self.deviation is None:
            return self._text(self.mean)
        return f"{self._text(self.mean)} ± {self._text(self.deviation)}"

    @property
    def interval_text(self) -> str:
        """LOW to HIGH, or nothing."""
        return "" if self.interval is None else " to ".join(map(self._text, self.interval))

    def _text(self, value: float) -> str:
        return f"{value:.{SCORES[self.metric].digits}f}"


@dataclass(frozen=True)
class Block:
    """A part of a page: rows under one caption, each cell a text and a smaller note, or none."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Sheet:
    """Tables ready to be written.

    Attributes:
        name: name of the files.
        title: what the tables show.
        command: the command that made them.
        remarks: how they were made, one sentence or two each.
        blocks: the tables.
        numbers: every number, for the csv.
        notes: doubts about the numbers of a paper that are printed beside ours.
        pictures: diagrams for the page, png.
    """

    name: str
    title: str
    command: str
    remarks: Sequence[str]
    blocks: Sequence[Block]
    numbers: Sequence[Number]
    notes: Sequence[str] = ()
    pictures: Sequence[bytes] = ()


def sheet_markdown(sheet: Sheet) -> str:
    """A markdown table for each block; the note of a cell in brackets behind it."""
    lines = [f"### {sheet.title}", "", f"`{sheet.command}`", ""]
    lines += [f"- {remark}" for remark in sheet.remarks]
    for block in sheet.blocks:
        lines += ["", f"**{block.caption}**", ""]
        lines += [_row(["", *block.columns]), _row(["---", *["---:"] * len(block.columns)])]
        for title, cells in block.rows:
            shown = [f"{text} ({note})" if note else text for text, note in cells]
            lines.append(_row([title, *shown]))
    if sheet.notes:
        lines += ["", "On the paper's numbers:", ""]
        lines += [f"- {note}" for note in sheet.notes]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sheet_csv(sheet: Sheet) -> str:
    """One line per number, with the value of each seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    paper = any(n.printed is not None for n in sheet.numbers)
    writer.writerow(
        ["table", "metric", "unit", "row", "column", *["paper"] * paper]
        + ["mean", "deviation", "low", "high", "seeds"]
    )
    for n in sheet.numbers:
        low, high = n.interval or (None, None)
        writer.writerow(
            [sheet.name, n.metric, n.unit, n.row, n.column, *[n.printed] * paper]
            + ["" if v is None else f"{v:.6g}" for v in (n.mean, n.deviation, low, high)]
            + [" ".join(f"{value:.6g}" for value in n.seeds)]
        )
    return text.getvalue()


def sheet_html(sheet: Sheet) -> str:
    """One page without anything to fetch; every name is escaped."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pictures = [base64.b64encode(png).decode() for png in sheet.pictures]
    return environment.get_template("sheet.html").render(sheet=sheet, pictures=pictures)


def write_sheet(sheet: Sheet, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.csv and NAME.html to `folder`; their paths."""
    texts = {"md": sheet_markdown(sheet), "csv": sheet_csv(sheet), "html": sheet_html(sheet)}
    paths = []
    for ending, text in texts.items():
        path = folder / f"{sheet.name}.{ending}"
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
