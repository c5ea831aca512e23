"""`segcal compare`: how models differ on the same images, with intervals."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from segcal.evaluation.folder import load_evaluation, state_file
from segcal.metrics import CalibrationMeter, Difference, paired_differences
from segcal.metrics.compare import Seed
from segcal.viz.tables import difference_table


def compare_states(options: argparse.Namespace) -> None:
    """Print how models differ from the first on the same images, with 95 % intervals."""
    if options.shift:
        _compare_shifts(options.states, options.resamples)
        return
    paths = [state_file(path) for path in options.states]
    first, *others = (CalibrationMeter.load(path) for path in paths)
    rows = [
        (str(path), _differences([first], [meter], options.resamples, f"{paths[0]} and {path}"))
        for path, meter in zip(paths[1:], others, strict=True)
    ]
    print(f"difference from {paths[0]}:\n")
    print(difference_table(dict(rows)).markdown())


def _compare_shifts(folders: Sequence[Path], resamples: int) -> None:
    """Print how models differ from the first under each shift, and in the mean over shifts."""
    meters = [load_evaluation(folder).meters for folder in folders]
    first, *others = (
        {key[1]: m[key] for key in m if key[0] == "none" and len(key) == 2} for m in meters
    )
    for folder, states in zip(folders[1:], others, strict=True):
        if set(states) != set(first):
            odd = sorted(set(states) ^ set(first))
            raise ValueError(
                f"Expected the same shifts in {folders[0]} and {folder}, "
                f"but {odd[0]} is in one alone"
            )
        pairs = {shift: (first[shift], states[shift]) for shift in first}
        both = f"{folders[0]} and {folder}"
        rows = [
            (shift, _differences([one], [other], resamples, f"{both} under {shift}"))
            for shift, (one, other) in pairs.items()
        ]
        before, after = ([pair[side] for pair in pairs.values()] for side in (0, 1))
        if len({tuple(sorted(meter.names)) for meter in before}) == 1:
            mean = _differences([before], [after], resamples, both)
            rows.append((f"mean over {len(pairs)} shifts", mean))
        print(f"difference of {folder} from {folders[0]}:\n")
        print(difference_table(dict(rows), corner="shift").markdown())


def _differences(
    first: Sequence[Seed],
    second: Sequence[Seed],
    resamples: int,
    which: str,
) -> dict[str, Difference]:
    try:
        return paired_differences(first, second, resamples=resamples)
    except ValueError as error:
        raise ValueError(f"{error} ({which})") from None
