"""The place that says which diagrams entries get, and writes them to files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from segcal.files import atomic_write
from segcal.metrics.scores import SCORES
from segcal.viz.classes import classwise_reliability, gap_heatmap
from segcal.viz.curves import convergence
from segcal.viz.entry import Entry, distinct, tell_apart
from segcal.viz.figure import png, svg, themed
from segcal.viz.reliability import confidence_histogram, reliability_diagram, wrong_confidence

_WRONG_WORDS = (
    "Confidence of wrong predictions",
    "What is wrong should be unsure: the further to the left, the better.",
)


@dataclass(frozen=True)
class Drawing:
    """A diagram yet to be drawn, and its words.

    Attributes:
        stem: of its file name.
        title: a few words.
        caption: how to read it.
        draw: makes it, in the style that is set when it is called.
        wide: whether it takes the whole width of a page.
    """

    stem: str
    title: str
    caption: str
    draw: Callable[[], Axes | Figure]
    wide: bool = False

    def figure(self) -> Figure:
        """The diagram, drawn in the project's style."""
        with themed():
            drawn = self.draw()
        figure = drawn.figure if isinstance(drawn, Axes) else drawn
        assert isinstance(figure, Figure)
        return figure


def comparison_drawings(entries: Sequence[Entry]) -> list[Drawing]:
    """The diagrams that hold all entries at once; none if there is nothing to compare."""
    if len(entries) == 1:
        return []
    reports = {entry.name: entry.report for entry in entries}
    return [
        Drawing(
            "reliability",
            "Reliability",
            "Accuracy of the predictions made with a given confidence. On the diagonal the two "
            "agree; below it is over-confident, above it under-confident.",
            lambda: reliability_diagram(reports),
        ),
        Drawing(
            "confidence_histogram",
            "Confidence",
            "How sure the predictions are.",
            lambda: confidence_histogram(reports),
        ),
        Drawing("wrong_confidence", *_WRONG_WORDS, lambda: wrong_confidence(reports)),
    ]


def training_drawings(entries: Sequence[Entry]) -> list[Drawing]:
    """The diagrams over training, as far as the logs have the scores."""
    histories = {entry.name: entry.history for entry in entries}  # all, so that colours agree
    logged = {score for lines in histories.values() for line in lines for score in line}
    shown = histories if len(entries) > 1 else entries[0].history
    return [
        Drawing(
            f"convergence_{score}",
            f"{SCORES[score].label} over training",
            "Measured on the hold-out after each epoch; the ring marks the weights kept.",
            partial(convergence, shown, score=score),
        )
        for score in ("ece", "sce")
        if f"holdout/{score}" in logged
    ]


def entry_drawings(entry: Entry, *, max_classes: int = 100) -> list[Drawing]:
    """The diagrams of one entry by itself; of more classes than that, the worst calibrated."""
    report = entry.report
    classes = report.protocol.num_classes
    which = f"the {max_classes} of {classes} classes with the largest class-j-ECE"
    which = "every class" if classes <= max_classes else which
    return [
        Drawing(
            "reliability",
            "Reliability",
            "Bars: accuracy of the predictions in a bin of confidence. Coloured: how far it is "
            "from their confidence. The strip shows how many there are.",
            lambda: reliability_diagram(report),
        ),
        Drawing(
            "confidence_histogram",
            "Confidence",
            "How sure the predictions are. The two dashed lines meet when the network is "
            "calibrated on the whole.",
            lambda: confidence_histogram(report),
        ),
        Drawing("wrong_confidence", *_WRONG_WORDS, lambda: wrong_confidence(report)),
        Drawing(
            "classwise_reliability",
            "Reliability by class",
            f"For {which}: how often it is the label, against the probability given to it. "
            "The number is the class-j-ECE.",
            lambda: classwise_reliability(report, limit=max_classes),
            wide=True,
        ),
        Drawing(
            "gap_heatmap",
            "Gaps by class and bin",
            f"For {which}: probability minus frequency. Red is over-confident, blue "
            "under-confident, hatched has no pixels. Not weighted by how many there are.",
            lambda: gap_heatmap(report, limit=max_classes),
            wide=True,
        ),
    ]


def write_figures(entries: Sequence[Entry], folder: str | os.PathLike[str]) -> list[Path]:
    """Write every diagram as PNG and SVG; those of one among several entries in its own folder.

    Returns:
        The files written.
    """
    entries, folder = distinct(entries), Path(folder)
    together = [*comparison_drawings(entries), *training_drawings(entries)]
    planned = [(folder, drawing) for drawing in together]
    parts = tell_apart([_slug(entry.name) for entry in entries])
    for entry, part in zip(entries, parts, strict=True):
        place = folder / part if len(entries) > 1 else folder
        planned += [(place, drawing) for drawing in entry_drawings(entry)]
    written = []
    for place, drawing in planned:
        figure = drawing.figure()
        for suffix, encode in ((".png", png), (".svg", svg)):
            path = place / (drawing.stem + suffix)
            with atomic_write(path, "wb") as file:
                file.write(encode(figure))
            written.append(path)
    return written


def _slug(name: str) -> str:
    """A name as part of a path: letters, digits and + . _ - alone, and no dot in front."""
    return re.sub(r"[^\w.+-]+", "-", name).strip(".-") or "entry"
