"""Diagrams over training: a score against the epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from segcal.metrics.scores import SCORES
from segcal.viz.figure import axes_or_new, plain
from segcal.viz.palette import run_style

History = Sequence[Mapping[str, Any]]  # the lines of a log.jsonl


def convergence(
    history: History | Mapping[str, History],
    ax: Axes | None = None,
    *,
    score: str = "ece",
    split: str = "holdout",
) -> Axes:
    """A score against the epoch, from the lines of log.jsonl.

    A ring marks the epoch whose weights were kept, which the log calls "best".

    Args:
        history: the lines of one run, or of several runs by name. Epochs without the score are
            skipped.
        ax: axes to draw on; those of a new figure if None.
        score: a name in `metrics.scores.SCORES` that the log has.
        split: the part of the data; the log calls its scores `split/score`.

    Returns:
        The axes drawn on.
    """
    if score not in SCORES:
        raise ValueError(f"Expected score to be one of {', '.join(SCORES)}, but got {score!r}")
    printed = SCORES[score]
    histories = history if isinstance(history, Mapping) else {"": history}
    ax = axes_or_new(ax, 4.4, 3.2)
    for index, (name, lines) in enumerate(histories.items()):
        points = [
            (line["epoch"], printed.scale * line[f"{split}/{score}"], line.get("best", False))
            for line in lines
            if line.get(f"{split}/{score}") is not None
        ]
        if not points:
            continue
        epochs, values, best = zip(*points, strict=True)
        style = run_style(index)
        ax.plot(epochs, values, label=plain(name) or None, markersize=3, **style)
        kept = [at for at, is_best in enumerate(best) if is_best][-1:]  # the last epoch called best
        for at in kept:
            where = [epochs[at]], [values[at]]
            ax.plot(*where, marker="o", markersize=9, fillstyle="none", color=style["color"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(ylim=(0, None), xlabel="epoch", ylabel=f"{printed.heading} on {split}")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax
