"""The diagrams of a sweep: reliability on clean images, and scores against severity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from segcal import viz
from segcal.files import atomic_write
from segcal.metrics.scores import SCORES
from segcal.sweep.definition import Row
from segcal.sweep.plan import Evaluation
from segcal.sweep.results import Condition, Results, conditions_of
from segcal.sweep.worker import to_shift
from segcal.viz.plots import draw_severities, new_figure, themed

SEVERITY_SCORES = ("ece", "accuracy")


def draw_sweep(results: Results) -> dict[str, Figure]:
    """The diagrams that the sweep asks for by `draw`, by the suffix of their names."""
    sweep = results.sweep
    figures = {}
    for number, variation in enumerate(sweep.variations()):
        ending = f"_{number + 1}" if len(sweep.variations()) > 1 else ""
        rows = [row for row in results.rows(variation) if row.name in sweep.draw]
        reports = {row.name: results.reports(row, Evaluation(row.posthoc)) for row in rows}
        if shown := {name: found[0] for name, found in reports.items() if found}:
            figure = new_figure(5.4, 5.4)
            viz.reliability_diagram(shown, figure.subplots(), counts=False)
            figures[ending] = figure
        if (curves := _severity_curves(results, rows)) is not None:
            figures[f"_severity{ending}"] = curves
    return figures


def _severity_curves(results: Results, rows: list[Row]) -> Figure | None:
    """Scores against severity, 0 being the clean images: means over seeds and corruptions."""
    clean, *others = conditions_of(results.sweep)
    conditions: dict[int, Condition] = {}
    for condition in others:
        shift = to_shift(condition.shifts[0])
        if shift is not None and shift.severity is not None:
            conditions[shift.severity] = condition
    if len(conditions) < 2:
        return None
    figure = new_figure(4.4 * len(SEVERITY_SCORES), 3.4)
    places = {0: clean, **dict(sorted(conditions.items()))}
    drawn = False
    for ax, score in zip(figure.subplots(1, len(SEVERITY_SCORES)), SEVERITY_SCORES, strict=True):
        lines = {}
        for row in rows:
            means = {
                s: results.number(row, score, condition, "", interval=False).mean
                for s, condition in places.items()
            }
            known = {s: mean / SCORES[score].scale for s, mean in means.items() if mean is not None}
            if len(known) > 1:
                lines[row.name] = known
        drawn |= bool(lines)
        draw_severities(lines, ax, score=score)
    return figure if drawn else None


def save_figures(make: Callable[[], Mapping[str, Figure]], name: str, folder: Path) -> list[Path]:
    """Draw figures and write each as a PNG under `name` and its suffix; the paths."""
    paths = []
    with themed():
        for ending, figure in make().items():
            paths.append(folder / f"{name}{ending}.png")
            with atomic_write(paths[-1], "wb") as file:
                figure.savefig(file, format="png", dpi=160)
    return paths
