"""Draws the paper's figures again, from reports and logs of our runs.

A figure shows the runs of the first seed; sweeps over a setting show the mean over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from reproduction.grids import grid
from reproduction.paper import Want
from reproduction.results import Setting
from segcal import viz
from segcal.metrics import Report
from segcal.metrics.scores import SCORES
from segcal.sweep.plan import Evaluation, Hyper, Method
from segcal.training.trainer import LOG
from segcal.viz.figure import new_figure, run_style

Pairs = tuple[tuple[str, tuple[str, ...]], ...]  # (experiment, losses), a row of a figure each

_PAIRS: dict[str, Pairs] = {
    "reliability": (
        ("cifar10_resnet32", ("nll", "nll+mdca")),
        ("svhn_resnet20", ("ls", "ls+mdca")),
    ),
    "reliability_fl": (("cifar10_resnet32", ("fl", "fl+mdca")),),
    "dca_mdca": (
        ("cifar10_resnet32", ("nll+dca", "nll+mdca")),
        ("cifar10_resnet32", ("fl+dca", "fl+mdca")),
    ),
    "wrong_confidence": (("cifar10_resnet32", ("nll", "nll+mdca")),),
    # The caption's decay at epochs 50 and 70 is the schedule of SVHN.
    "convergence": (("svhn_resnet20", ("nll+mdca", "nll+mmce", "nll+dca")),),
}
BATCH_SIZES = {"full": (16, 32, 64, 128, 256, 512, 1024), "small": (16, 64, 256)}
BETAS = {
    "full": (0.25, 0.5, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50),
    "small": (0.25, 1, 5, 25),
}


@dataclass(frozen=True)
class FigureMaker:
    """How to make a figure: the methods it needs, and its pictures by the suffix of their name."""

    needs: Callable[[Setting], list[Method]]
    draw: Callable[[Setting], Mapping[str, Figure]]


def of_pairs(name: str, draw: Callable[[Setting, Pairs], Figure]) -> FigureMaker:
    """A figure that compares losses on experiments."""

    def needs(setting: Setting) -> list[Method]:
        return [setting.method(where, loss) for where, losses in _PAIRS[name] for loss in losses]

    return FigureMaker(needs, lambda setting: {"": draw(setting, _PAIRS[name])})


def first_report(setting: Setting, experiment: str, loss: str) -> Report:
    """The report of the first seed."""
    return setting.reports(Want(experiment, loss))[0]


def diagrams_and_histograms(setting: Setting, pairs: Pairs) -> Figure:
    """A row for each pair: reliability diagrams, then confidence histograms."""
    figure = new_figure(13, 3.6 * len(pairs))
    axes = figure.subplots(len(pairs), 4, squeeze=False)
    for row, (experiment, losses) in zip(axes, pairs, strict=True):
        for column, loss in enumerate(losses):
            shown = first_report(setting, experiment, loss)
            viz.reliability_diagram(shown, row[column], counts=False).set_title(loss)
            viz.confidence_histogram(shown, row[column + 2]).set_title(loss, loc="right")
    return figure


def overlaid_diagrams(setting: Setting, pairs: Pairs) -> Figure:
    """A reliability diagram for each pair, its losses as lines."""
    figure = new_figure(4.4 * len(pairs), 4.4)
    axes = figure.subplots(1, len(pairs), squeeze=False)
    for ax, (experiment, losses) in zip(axes.flat, pairs, strict=True):
        reports = {loss: first_report(setting, experiment, loss) for loss in losses}
        viz.reliability_diagram(reports, ax, counts=False)
    return figure


def wrong_confidences(setting: Setting, pairs: Pairs) -> Figure:
    """The confidence of wrong predictions."""
    ((experiment, losses),) = pairs
    figure = new_figure(5, 4)
    reports = {loss: first_report(setting, experiment, loss) for loss in losses}
    viz.wrong_confidence(reports, figure.subplots())
    return figure


def convergences(setting: Setting, pairs: Pairs) -> Figure:
    """ECE and SCE on the hold-out against the epoch."""
    ((experiment, losses),) = pairs
    histories = {loss: _log(setting, setting.method(experiment, loss)) for loss in losses}
    figure = new_figure(9, 3.4)
    for ax, score in zip(figure.subplots(1, 2), ("ece", "sce"), strict=True):
        viz.convergence(histories, ax, score=score)
    return figure


def _log(setting: Setting, method: Method) -> list[dict[str, Any]]:
    hyper = setting.store.choice(method)
    assert hyper is not None
    path = setting.store.trained_folder(method.chosen(hyper)[0]) / LOG
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _swept(setting: Setting, experiment: str, loss: str, hyper: Hyper, **options: str) -> Method:
    config = setting.method(experiment, loss).config
    return Method(config, loss, (hyper,), setting.seeds, options=tuple(options.items()))


def _usual(loss: str, setting: Setting) -> Hyper:
    return grid(loss, setting.scale, tune=False)[0]


def batch_sizes(setting: Setting) -> dict[str, dict[float, Method]]:
    """The methods of the figure on batch sizes, by loss and batch size."""
    return {
        loss: {
            size: _swept(
                setting, "cifar10_resnet32", loss, _usual(loss, setting), batch_size=str(size)
            )
            for size in BATCH_SIZES[setting.scale]
        }
        for loss in ("fl+mdca", "fl")
    }


def betas(setting: Setting) -> dict[str, dict[float, Method]]:
    """The methods of the figure on beta."""
    gamma = tuple(pair for pair in _usual("fl+mdca", setting) if pair[0] == "gamma")
    return {
        "fl+mdca": {
            beta: _swept(setting, "svhn_resnet20", "fl+mdca", (("beta", float(beta)), *gamma))
            for beta in BETAS[setting.scale]
        }
    }


def sweep(
    name: str,
    methods: Callable[[Setting], dict[str, dict[float, Method]]],
    scores: Sequence[str],
) -> FigureMaker:
    """A figure of scores against a setting."""

    def needs(setting: Setting) -> list[Method]:
        return [method for line in methods(setting).values() for method in line.values()]

    def draw(setting: Setting) -> dict[str, Figure]:
        figure = new_figure(4.2 * len(scores), 3.4)
        for ax, score in zip(figure.subplots(1, len(scores)), scores, strict=True):
            for index, (loss, line) in enumerate(methods(setting).items()):
                values = [SCORES[score].scale * _mean(setting, m, score) for m in line.values()]
                ax.plot(list(line), values, label=loss, markersize=4, **run_style(index))
            ax.set(xscale="log", xlabel=name, ylabel=SCORES[score].heading)
            ax.set_xticks(list(line), [f"{at:g}" for at in line])
            ax.minorticks_off()
            ax.legend()
        return {"": figure}

    return FigureMaker(needs, draw)


def _mean(setting: Setting, method: Method, score: str) -> float:
    runs = method.chosen(method.grid[0])
    reports = [Report.load(setting.store.report(run, Evaluation())) for run in runs]
    return fmean(float(getattr(each, score)) for each in reports)


FIGURES: dict[str, FigureMaker] = {
    "reliability": of_pairs("reliability", diagrams_and_histograms),
    "reliability_fl": of_pairs("reliability_fl", diagrams_and_histograms),
    "dca_mdca": of_pairs("dca_mdca", overlaid_diagrams),
    "wrong_confidence": of_pairs("wrong_confidence", wrong_confidences),
    "convergence": of_pairs("convergence", convergences),
    "batch_size": sweep("batch size", batch_sizes, ("ece", "sce", "accuracy")),
    "beta": sweep("beta", betas, ("sce", "accuracy")),
}
