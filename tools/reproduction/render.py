"""The place where a table becomes markdown, csv and html: the paper's numbers beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from reproduction.paper import AVERAGE, Table
from reproduction.results import Number
from segcal.files import atomic_write

METRICS = {
    "sce": "SCE",
    "ece": "ECE",
    "error": "Test error",
    "accuracy": "Accuracy",
    "miou": "mIoU",
    "class_ece": "Class-j-ECE",
}
DOWN = {"sce", "ece", "error", "class_ece"}  # smaller is better


@dataclass(frozen=True)
class Sheet:
    """A table ready to be written.

    Attributes:
        table: of the paper.
        numbers: every number of it.
        titles: what to call rows and columns that have a longer name.
        command: that made it.
        remarks: how it was made, one sentence or two each.
    """

    table: Table
    numbers: Sequence[Number]
    titles: dict[str, str]
    command: str
    remarks: Sequence[str]

    def title(self, name: str) -> str:
        """What a row or column is called."""
        return self.titles.get(name, name)

    def block(self, metric: str) -> list[tuple[str, list[Number]]]:
        """The rows of one metric: name, and a number a column."""
        of_metric = [number for number in self.numbers if number.metric == metric]
        return [(row, [n for n in of_metric if n.row == row]) for row in self.table.rows]

    def heading(self, metric: str) -> str:
        """Name, unit and direction of a metric."""
        arrow = "lower is better" if metric in DOWN else "higher is better"
        return f"{METRICS[metric]} ({self.table.units[metric]}), {arrow}"


def ours(number: Number) -> str:
    """Our number: mean ± deviation over seeds, or a dash while it is not measured."""
    if number.mean is None:
        return "–"
    if number.deviation is None:
        return f"{number.mean:.2f}"
    return f"{number.mean:.2f} ± {number.deviation:.2f}"


def verdicts(sheet: Sheet) -> list[str]:
    """How often adding MDCA to a base loss helps, here and in the paper, for each metric."""
    by_place = {(n.metric, *_names(sheet.table, n)): n for n in sheet.numbers}
    found = []
    for metric in sheet.table.units:
        pairs = []
        for (m, loss, place), number in by_place.items():
            base = by_place.get((m, loss.removesuffix("+mdca"), place))
            if m == metric and loss.endswith("+mdca") and base and number.column != AVERAGE:
                pairs.append((number, base))
        if pairs:
            here = [(a.mean, b.mean) for a, b in pairs if a.mean is not None and b.mean is not None]
            paper = [(a.printed, b.printed) for a, b in pairs]
            found.append(
                f"Against its base loss, MDCA {'lowers' if metric in DOWN else 'raises'} "
                f"{METRICS[metric]} in {_better(here, metric)} cases here and in "
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


def _better(pairs: Sequence[tuple[float, float]], metric: str) -> str:
    better = sum(a < b if metric in DOWN else a > b for a, b in pairs)
    return f"{better} of {len(pairs)}"


def to_markdown(sheet: Sheet) -> str:
    """One markdown table a metric; the paper's number in brackets behind ours."""
    lines = [f"### {sheet.table.title}", "", f"`{sheet.command}`", ""]
    lines += [f"- {remark}" for remark in (*sheet.remarks, *verdicts(sheet))]
    for metric in sheet.table.units:
        columns = [sheet.title(column) for column in sheet.table.columns]
        lines += ["", f"**{sheet.heading(metric)}**: ours (the paper's)", ""]
        lines += [_row(["", *columns]), _row(["---", *["---:"] * len(columns)])]
        for row, numbers in sheet.block(metric):
            cells = [f"{ours(n)} ({n.printed:g})" for n in numbers]
            lines.append(_row([sheet.title(row), *cells]))
    if sheet.table.notes:
        lines += ["", "On the paper's numbers:", ""]
        lines += [f"- {note}" for note in sheet.table.notes]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_csv(sheet: Sheet) -> str:
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


def to_html(sheet: Sheet) -> str:
    """One page without anything to fetch; every name is escaped."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("table.html")
    return page.render(sheet=sheet, ours=ours, verdicts=verdicts(sheet))


def write(sheet: Sheet, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.csv and NAME.html to `folder`; their paths."""
    texts = {"md": to_markdown(sheet), "csv": to_csv(sheet), "html": to_html(sheet)}
    paths = []
    for ending, text in texts.items():
        path = folder / f"{sheet.table.name}.{ending}"
        with atomic_write(path) as file:
            file.write(text)
        paths.append(path)
    return paths


def put_into(path: Path, mark: str, sheet: Sheet) -> None:
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
        file.write(f"{before}{start}\n{to_markdown(sheet)}{end}{after}")
