"""`segcal compare`: how models differ on the same images, with intervals."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from segcal.evaluation.results import state_path
from segcal.metrics import CalibrationMeter, Difference, paired_differences
from segcal.metrics.scores import SCORES


def compare_states(options: argparse.Namespace) -> None:
    """Print how models differ from the first on the same images, with 95 % intervals."""
    paths = [state_path(path) for path in options.states]
    first, *others = (CalibrationMeter.load(path) for path in paths)
    rows = []
    for path, meter in zip(paths[1:], others, strict=True):
        try:
            found = paired_differences([first], [meter], resamples=options.resamples)
        except ValueError as error:
            raise ValueError(f"{error} ({paths[0]} and {path})") from None
        rows.append((str(path), found))
    print(f"difference from {paths[0]} (95 % interval over images); * where it leaves out 0\n")
    print(to_table(rows))


def to_table(rows: Sequence[tuple[str, Mapping[str, Difference]]]) -> str:
    """A markdown table with a row for each model."""
    columns = [score for name, score in SCORES.items() if name in rows[0][1]]
    lines = [
        "| | " + " | ".join(score.heading for score in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, differences in rows:
        texts = [differences[score.name].texts(score) for score in columns]
        cells = [f"{value} ({interval})" for value, interval in texts]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
