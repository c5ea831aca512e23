"""The diagrams of an evaluation: which there are, their captions, and their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from segcal.files import atomic_write
from segcal.metrics.scores import SCORES
from segcal.runtime import begin
from segcal.viz.diagrams import (
    classwise_reliability,
    confidence_histogram,
    convergence,
    gap_heatmap,
    reliability_diagram,
    risk_coverage,
    wrong_confidence,
)
from segcal.viz.entry import PageRow, distinct, shifted, tell_apart
from segcal.viz.figure import png, svg, themed
from segcal.viz.shifts import (
    believed_accuracy,
    kinds_and_severities,
    severity_curve,
    severity_curves,
)

_WRONG_WORDS = (
    "Confidence of wrong predictions",
    "Wrong predictions should have low confidence: the further to the left, the better.",
)

_RISK_WORDS = (
    "Risk and coverage",
    "How many of the most confident predictions are wrong. Marks: results here of thresholds that "
    "were chosen on the hold-out, with 95 % intervals.",
)


@dataclass(frozen=True, eq=False)
class Drawing:
    """A diagram that can be drawn, with its title and caption.

    Attributes:
        stem: the file name without its suffix.
        title: a few words.
        caption: how to read the diagram.
        draw: draws it, in the matplotlib style that is active when it is called.
        wide: whether the diagram takes the whole width of the page.
    """

    stem: str
    title: str
    caption: str
    draw: Callable[[], Axes | Figure]
    wide: bool = False

    @cached_property
    def figure(self) -> Figure:
        """The diagram, drawn in the project's style."""
        with themed():
            drawn = self.draw()
            figure = drawn.figure if isinstance(drawn, Axes) else drawn
            assert isinstance(figure, Figure)
            layout = figure.get_layout_engine()
            if layout is not None:  # computed once: before each file it would take two more draws
                layout.execute(figure)
                figure.set_layout_engine(None)
        return figure

    @cached_property
    def svg(self) -> bytes:
        """The diagram as SVG."""
        return svg(self.figure)


class Drawings:
    """All diagrams of some entries; each is drawn once, for its file and for the page.

    Args:
        entries: with distinct names. A diagram is drawn when it is asked for, or after `begin`.

    Attributes:
        together: diagrams that show all entries, by the part of the page that they belong to.
        own: for each entry, the diagrams that show it alone.
    """

    def __init__(self, entries: Sequence[PageRow]) -> None:
        self.together = {
            "comparison": comparison_drawings(entries),
            "training": training_drawings(entries),
            "shift": shift_drawings(entries),
        }
        self.own = [entry_drawings(entry) for entry in entries]
        self._end: Callable[[], list[dict[str, bytes]]] | None = None

    def _each(self) -> list[Drawing]:
        """Every diagram, those that take longest first."""
        drawings = [drawing for part in (*self.together.values(), *self.own) for drawing in part]
        return sorted(drawings, key=lambda drawing: not drawing.wide)

    def begin(self) -> None:
        """Begin to draw in other processes, where there are cores for them."""
        self._end = begin([partial(_files, drawing) for drawing in self._each()])

    def files(self) -> dict[Drawing, dict[str, bytes]]:
        """The content of the files of every diagram, by their suffix."""
        if self._end is None:
            self.begin()
        assert self._end is not None
        drawn = dict(zip(self._each(), self._end(), strict=True))
        for drawing, files in drawn.items():
            vars(drawing)["svg"] = files[".svg"]  # for the page, if another process drew it
        return drawn


def comparison_drawings(entries: Sequence[PageRow]) -> list[Drawing]:
    """The diagrams that show all entries together; none for a single entry."""
    if len(entries) == 1:
        return []
    reports = {entry.name: entry.report for entry in entries}
    return [
        Drawing(
            "reliability",
            "Reliability",
            "Accuracy of the predictions with a given confidence. On the diagonal the two are "
            "equal; below it a network is over-confident, above it under-confident.",
            lambda: reliability_diagram(reports),
        ),
        Drawing(
            "confidence_histogram",
            "Confidence",
            "How many predictions have a given confidence.",
            lambda: confidence_histogram(reports),
        ),
        Drawing("wrong_confidence", *_WRONG_WORDS, lambda: wrong_confidence(reports)),
        Drawing("risk_coverage", *_RISK_WORDS, lambda: risk_coverage(reports)),
    ]


def training_drawings(entries: Sequence[PageRow]) -> list[Drawing]:
    """The diagrams over training, for the scores that the logs have."""
    # Entries without a log are kept, so that an entry has the same colour in every diagram.
    histories = {entry.name: entry.history for entry in entries}
    logged = {score for lines in histories.values() for line in lines for score in line}
    shown = histories if len(entries) > 1 else entries[0].history
    return [
        Drawing(
            f"convergence_{score}",
            f"{SCORES[score].label} over training",
            "Measured on the hold-out after each epoch. A ring marks the epoch whose weights were "
            "kept.",
            partial(convergence, shown, score=score),
        )
        for score in ("ece", "sce")
        if f"holdout/{score}" in logged
    ]


def shift_drawings(entries: Sequence[PageRow]) -> list[Drawing]:
    """The diagrams of models under shift, as far as they were evaluated there."""
    if not shifted(entries):
        return []
    kinds, severities = kinds_and_severities(entries)
    drawings = [
        Drawing(
            f"shift_{score}",
            f"{word} against severity",
            f"The mean over {len(kinds)} corruption{'s' if len(kinds) > 1 else ''}.",
            partial(severity_curve, entries, score=score),
        )
        for score, word in (("ece", "ECE"), ("accuracy", "Accuracy"))
        if kinds
    ]
    drawings.append(
        Drawing(
            "shift_belief",
            "Confidence and accuracy under shift",
            "One point per shift: mean confidence against accuracy. Above the diagonal the "
            "network is over-confident; the ring marks the clean images.",
            partial(believed_accuracy, entries),
        )
    )
    if len(severities) > 1 and len(kinds) > 1:
        drawings.append(
            Drawing(
                "shift_ece_by_corruption",
                "ECE against severity, by corruption",
                "One diagram per corruption.",
                partial(severity_curves, entries),
                wide=True,
            )
        )
    return drawings


def entry_drawings(entry: PageRow, *, max_classes: int = 100) -> list[Drawing]:
    """The diagrams of one entry; of more than `max_classes` classes, the worst calibrated."""
    report = entry.report
    classes = report.protocol.num_classes
    which = f"the {max_classes} of {classes} classes with the largest class-j-ECE"
    which = "every class" if classes <= max_classes else which
    return [
        Drawing(
            "reliability",
            "Reliability",
            "Bars: accuracy of the predictions in each bin of confidence. Colour: the gap between "
            "accuracy and mean confidence. The strip shows how many predictions a bin holds.",
            lambda: reliability_diagram(report),
        ),
        Drawing(
            "confidence_histogram",
            "Confidence",
            "How many predictions have a given confidence. The dashed lines meet if mean "
            "confidence and accuracy are equal.",
            lambda: confidence_histogram(report),
        ),
        Drawing("wrong_confidence", *_WRONG_WORDS, lambda: wrong_confidence(report)),
        Drawing("risk_coverage", *_RISK_WORDS, lambda: risk_coverage(report)),
        Drawing(
            "classwise_reliability",
            "Reliability by class",
            f"For {which}: how often it is the label, against its predicted probability. "
            "The number is the class-j-ECE.",
            lambda: classwise_reliability(report, limit=max_classes),
            wide=True,
        ),
        Drawing(
            "gap_heatmap",
            "Gaps by class and bin",
            f"For {which}: predicted probability minus frequency. Red is over-confident, blue is "
            "under-confident, hatched bins have no pixels. Bins are not weighted by their pixels.",
            lambda: gap_heatmap(report, limit=max_classes),
            wide=True,
        ),
    ]


def write_figures(
    entries: Sequence[PageRow], folder: str | os.PathLike[str], *, drawings: Drawings | None = None
) -> list[Path]:
    """Write every diagram as PNG and SVG; several entries get a folder each for their own ones.

    Args:
        entries: at least one; repeated names get a number.
        folder: where the files go.
        drawings: of the entries, if they are at hand.

    Returns:
        The paths of the files.
    """
    entries, folder = distinct(entries), Path(folder)
    drawings = drawings or Drawings(entries)
    drawn = drawings.files()
    planned = [(folder, drawing) for part in drawings.together.values() for drawing in part]
    names = tell_apart([_slug(entry.name) for entry in entries])
    for name, own in zip(names, drawings.own, strict=True):
        place = folder / name if len(entries) > 1 else folder
        planned += [(place, drawing) for drawing in own]
    written = []
    for place, drawing in planned:
        for suffix, content in drawn[drawing].items():
            path = place / (drawing.stem + suffix)
            with atomic_write(path, "wb") as file:
                file.write(content)
            written.append(path)
    return written


def _files(drawing: Drawing) -> dict[str, bytes]:
    return {".png": png(drawing.figure), ".svg": drawing.svg}


def _slug(name: str) -> str:
    """A name as part of a path: only letters, digits and + . _ -, without a leading dot."""
    return re.sub(r"[^\w.+-]+", "-", name).strip(".-") or "entry"
