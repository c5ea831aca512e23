"""The place for `segcal compare`: is one model better than another on the same images?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from segcal.commands.parser import Parser, at_least
from segcal.engine.results import STATE
from segcal.metrics import CalibrationMeter, Difference, paired_differences

_UNITS = {"ece": ("ECE", "%", 100), "sce": ("SCE", "1e-3", 1000)}
_UNITS |= {"accuracy": ("accuracy", "%", 100), "miou": ("mIoU", "%", 100)}


def compare(arguments: Sequence[str], prog: str) -> None:
    """Say how models differ from the first on the same images, with 95 % intervals."""
    parser = Parser(prog, compare.__doc__ or "")
    parser.add_argument(
        "states",
        nargs="+",
        type=Path,
        metavar="STATE",
        help=f"{STATE} that `segcal eval --save-state` or `CalibrationMeter.save` wrote, or the "
        "folder it is in; the others are compared with the first",
    )
    parser.add_argument(
        "--resamples", type=at_least(1), default=1000, help="of the bootstrap over images"
    )
    options = parser.parse_intermixed_args(arguments)
    if len(options.states) < 2:
        raise ValueError(f"Expected two states or more to compare, but got {len(options.states)}")
    paths = [path / STATE if path.is_dir() else path for path in options.states]
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
    lines = [
        "| | " + " | ".join(f"{title} ({unit})" for title, unit, _ in _UNITS.values()) + " |",
        "|---|" + "---:|" * len(_UNITS),
    ]
    for name, differences in rows:
        cells = [_cell(differences[score], factor) for score, (_, _, factor) in _UNITS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(difference: Difference, factor: int) -> str:
    value, low, high = (factor * x for x in (difference.value, difference.low, difference.high))
    return f"{value:+.2f}{'*' if difference.sure else ''} ({low:+.2f} to {high:+.2f})"
