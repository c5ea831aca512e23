"""Draws the paper's figures again, from reports and logs of our runs.

A figure shows the runs of the first seed; sweeps over a setting show the mean over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from segcal import viz
from segcal.metrics import Report
from segcal.metrics.scores import SCORES
from segcal.sweep.definition import Row, Sweep
from segcal.sweep.results import Results
from segcal.training.trainer import LOG
from segcal.viz.plots import new_figure
from segcal.viz.style import run_style

CIFAR10, SVHN = 0, 1  # places in the configs of paper/auxiliaries
Parts = tuple[tuple[int, tuple[str, ...]], ...]  # (place of a config, losses) each


@dataclass(frozen=True)
class FigureMaker:
    """How to make a figure.

    Attributes:
        sweep: of configs/sweeps/paper that has its runs.
        parts: the parts of that sweep that it shows, each a sweep of its own.
        draw: the pictures by the suffix of their name, from the results of each part.
    """

    sweep: str
    parts: Callable[[Sweep], list[Sweep]]
    draw: Callable[[Sequence[Results]], Mapping[str, Figure]]


def compared(parts: Parts, draw: Callable[[Sequence[Results]], Figure]) -> FigureMaker:
    """A figure that compares losses, whose runs are those of the table of auxiliaries."""

    def part(sweep: Sweep, place: int, losses: tuple[str, ...]) -> Sweep:
        config = sweep.config[place]
        methods = {method.loss: method for method in sweep.methods if method.config == config}
        return replace(sweep, config=(config,), methods=tuple(methods[loss] for loss in losses))

    return FigureMaker(
        "auxiliaries",
        lambda sweep: [part(sweep, *each) for each in parts],
        lambda results: {"": draw(results)},
    )


def row_of(results: Results, config: str, loss: str) -> Row:
    """The row of a loss, without post-hoc calibration."""
    rows = [row for method in results.sweep.methods for row in method.rows()]
    (row,) = [r for r in rows if r.method.config == config and r.name == f"{loss} / none"]
    return row


def first_reports(results: Results, place: int = 0) -> dict[str, Report]:
    """The report of the first seed for each loss, trained with the config at `place`."""
    config = results.sweep.config[place]
    losses = dict.fromkeys(method.loss for method in results.sweep.methods)
    rows = {loss: row_of(results, config, loss) for loss in losses}
    return {loss: results.reports(row)[0] for loss, row in rows.items()}


def diagrams_and_histograms(results: Sequence[Results]) -> Figure:
    """A row for each part: reliability diagrams, then confidence histograms."""
    figure = new_figure(13, 3.6 * len(results))
    axes = figure.subplots(len(results), 4, squeeze=False)
    for row, part in zip(axes, results, strict=True):
        for column, (loss, shown) in enumerate(first_reports(part).items()):
            viz.reliability_diagram(shown, row[column], counts=False).set_title(loss)
            viz.confidence_histogram(shown, row[column + 2]).set_title(loss, loc="right")
    return figure


def overlaid_diagrams(results: Sequence[Results]) -> Figure:
    """A reliability diagram for each part, its losses as lines."""
    figure = new_figure(4.4 * len(results), 4.4)
    axes = figure.subplots(1, len(results), squeeze=False)
    for ax, part in zip(axes.flat, results, strict=True):
        viz.reliability_diagram(first_reports(part), ax, counts=False)
    return figure


def wrong_confidences(results: Sequence[Results]) -> Figure:
    """The confidence of wrong predictions."""
    figure = new_figure(5, 4)
    viz.wrong_confidence(first_reports(results[0]), figure.subplots())
    return figure


def convergences(results: Sequence[Results]) -> Figure:
    """ECE and SCE on the hold-out against the epoch."""
    sweep = results[0].sweep
    histories = {}
    for method in sweep.methods:
        path = first_folder(results[0], row_of(results[0], sweep.config[0], method.loss)) / LOG
        lines = path.read_text(encoding="utf-8").splitlines()
        histories[method.loss] = [json.loads(line) for line in lines]
    figure = new_figure(9, 3.4)
    for ax, score in zip(figure.subplots(1, 2), ("ece", "sce"), strict=True):
        viz.convergence(histories, ax, score=score)
    return figure


def first_folder(results: Results, row: Row) -> Path:
    """The folder of the first seed's run."""
    return results.runs.config(results.runs.chosen(row.method)[0]).folder


def against(setting: str) -> FigureMaker:
    """A figure of mean scores against the setting that the sweep of its name varies."""

    def draw(results: Sequence[Results]) -> dict[str, Figure]:
        (found,) = results
        scores = found.sweep.scores
        figure = new_figure(4.2 * len(scores), 3.4)
        for ax, score in zip(figure.subplots(1, len(scores)), scores, strict=True):
            lines: dict[str, dict[float, float]] = {}
            for method in found.sweep.methods:
                at = dict((*method.grid[0], *method.options))[setting]
                mean = found.number(method.rows()[0], score, brief=True).mean
                assert mean is not None
                lines.setdefault(method.loss, {})[float(at)] = mean
            for index, (loss, line) in enumerate(lines.items()):
                style = run_style(index)
                ax.plot(list(line), list(line.values()), label=loss, markersize=4, **style)
            ax.set(xscale="log", xlabel=setting.replace("_", " "), ylabel=SCORES[score].heading)
            ax.set_xticks(list(line), [f"{at:g}" for at in line])
            ax.minorticks_off()
            ax.legend()
        return {"": figure}

    return FigureMaker(setting, lambda found: [found], draw)


FIGURES: dict[str, FigureMaker] = {
    "reliability": compared(
        ((CIFAR10, ("nll", "nll+mdca")), (SVHN, ("ls", "ls+mdca"))), diagrams_and_histograms
    ),
    "reliability_fl": compared(((CIFAR10, ("fl", "fl+mdca")),), diagrams_and_histograms),
    "dca_mdca": compared(
        ((CIFAR10, ("nll+dca", "nll+mdca")), (CIFAR10, ("fl+dca", "fl+mdca"))), overlaid_diagrams
    ),
    "wrong_confidence": compared(((CIFAR10, ("nll", "nll+mdca")),), wrong_confidences),
    # The caption's decay at epochs 50 and 70 is the schedule of SVHN.
    "convergence": compared(((SVHN, ("nll+mdca", "nll+mmce", "nll+dca")),), convergences),
    "batch_size": against("batch_size"),
    "beta": against("beta"),
}
