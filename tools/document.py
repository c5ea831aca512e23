"""Writes the tables of docs/ that are made from the code.

python tools/document.py
"""

from __future__ import annotations

from pathlib import Path

from segcal.losses import describe
from segcal.metrics.scores import SCORES
from segcal.viz.tables import put_into

ROOT = Path(__file__).parents[1]


def scores() -> str:
    """Every score with its heading, its direction and its definition."""
    lines = ["| name | printed as | better | definition |", "|---|---|---|---|"]
    for name, score in SCORES.items():
        definition = score.definition.replace("|", "\\|")
        lines.append(f"| `{name}` | {score.heading} | {score.better} | {definition} |")
    return "\n".join(lines) + "\n"


def losses() -> str:
    """Every loss with its hyper-parameters and its usual weight."""
    return f"{describe()}\n"


TABLES = {  # by file and mark
    ("docs/conventions.md", "scores"): scores,
    ("docs/choosing.md", "losses"): losses,
}


def write_tables(root: Path) -> None:
    """Write every table into its file below `root`, between the comments of its mark."""
    for (path, mark), table in TABLES.items():
        put_into(root / path, mark, table())


if __name__ == "__main__":
    write_tables(ROOT)
