"""Folders of `segcal eval` as one CSV file of table, row, column, value, as in docs/results.

python tools/results_csv.py OUT.csv evals/A evals/B

A folder is a table, named like it. A row is a shift and a calibrator, such as "clean ts", with the
scores, the ends of their 95 % intervals, and what the calibrator changes, as a paired difference
from the network as it is. The rows "mean" are means over all shifts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import segcal
from segcal.metrics import Difference, Interval, paired_differences
from segcal.metrics.compare import mean_intervals
from segcal.metrics.scores import SCORES
from segcal.posthoc import NONE
from segcal.viz.tables import CLEAN, csv_text

_SCORES = (
    "accuracy", "miou", "nll", "ece", "sce", "bias", "overconfidence", "underconfidence", "aurc",
    "auroc",
)  # fmt: skip
_DIFFERENCES = ("ece", "sce")
_DIGITS = 6
Values = Iterator[tuple[str, float]]


def scores(values: Mapping[str, float], intervals: Mapping[str, Interval]) -> Values:
    """Columns of scores, each with its interval where there is one, in the printed unit."""
    for name in _SCORES:
        score = SCORES[name]
        yield score.heading, values[name] * score.scale
        if found := intervals.get(name):
            yield f"{score.heading} low", found.low * score.scale
            yield f"{score.heading} high", found.high * score.scale


def differences(found: Mapping[str, Difference]) -> Values:
    """Columns of the paired differences from the network as it is."""
    for name in _DIFFERENCES:
        score, one = SCORES[name], found[name]
        ends = {"": one.value, " low": one.low, " high": one.high}
        for end, value in ends.items():
            yield f"{score.heading} minus {NONE}{end}", value * score.scale


def rows(folder: Path, resamples: int) -> Iterator[tuple[str, str, float]]:
    """Row, column and value of everything in a folder of results."""
    evaluation = segcal.load_evaluation(folder)
    keys = {k if isinstance(k, tuple) else (k, CLEAN): k for k in evaluation.reports}
    for method, calibrator in evaluation.calibrators.items():
        temperature = getattr(calibrator, "temperature_", None)
        if temperature is not None:
            yield f"{CLEAN} {method}", "temperature", float(temperature)
    for (method, shift), key in keys.items():
        report, row = evaluation.reports[key], f"{shift} {method}"
        yield row, "images", report.protocol.images or 0
        values = {name: getattr(report, name) for name in _SCORES}
        yield from ((row, *each) for each in scores(values, report.intervals))
        if method != NONE:
            pair = [[evaluation.meters[k]] for k in (keys[NONE, shift], key)]
            found = paired_differences(*pair, fixed=True, resamples=resamples)
            yield from ((row, *each) for each in differences(found))
    shifts = [shift for method, shift in keys if method == NONE and shift != CLEAN]
    methods = [method for method, shift in keys if shift == CLEAN]
    for method in methods if shifts else ():
        row = f"mean {method}"
        reports = [evaluation.reports[method, shift] for shift in shifts]
        meters = {m: [evaluation.meters[m, shift] for shift in shifts] for m in (NONE, method)}
        values = {name: fmean(getattr(r, name) for r in reports) for name in _SCORES}
        intervals = mean_intervals([meters[method]], fixed=True, resamples=resamples)
        yield from ((row, *each) for each in scores(values, intervals))
        if method != NONE:
            pair = [[meters[NONE]], [meters[method]]]
            found = paired_differences(*pair, fixed=True, resamples=resamples)
            yield from ((row, *each) for each in differences(found))


def main() -> None:
    """Read the options and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--resamples", type=int, default=1000, help="as in segcal eval")
    options = parser.parse_args()
    table = [
        (folder.name, row, column, f"{value:.{_DIGITS}g}")
        for folder in options.folders
        for row, column, value in rows(folder, options.resamples)
    ]
    options.out.write_text(csv_text(["table", "row", "column", "value"], table), encoding="utf-8")


if __name__ == "__main__":
    main()
