"""The trainings of a grid, their evaluations, and what is still to be chosen.

Each method has a small grid of hyper-parameters. The first seed tries all of it; the best on the
hold-out is reported, and the other seeds take its choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from segcal.posthoc import NONE

OptionValue = float | int | str | bool
Hyper = tuple[tuple[str, OptionValue], ...]  # (name, value) of the loss's hyper-parameters
Options = tuple[tuple[str, OptionValue], ...]  # (dotted name, value) of other settings


@dataclass(frozen=True)
class Evaluation:
    """What a trained network is evaluated on and with.

    Attributes:
        posthoc: short name of a post-hoc method, or none.
        shift: shift of the test images, as in fog:3; empty for the clean images.
        limit: evaluate on this many images, evenly spaced; None for all.
    """

    posthoc: str = NONE
    shift: str = ""
    limit: int | None = None

    @property
    def name(self) -> str:
        """Name of its files: test-ts, fog3-limit150-none."""
        where = file_word(self.shift.replace(":", "")) or "test"
        limit = "" if self.limit is None else f"-limit{self.limit}"
        return f"{where}{limit}-{self.posthoc}"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        config: a YAML file, or the name of one in configs/.
        loss: the training loss.
        hyper: its hyper-parameters.
        seed: random seed of the training.
        options: settings that replace those of the config.
    """

    config: str
    loss: str
    hyper: Hyper = ()
    seed: int = 0
    options: Options = ()

    @property
    def name(self) -> str:
        """Name of its folder: all that tells it from the other runs of a grid."""
        config = Path(self.config)
        base = config.stem if config.suffix == ".yaml" else self.config.replace("/", "_")
        chosen = [f"{name}{value_text(value)}" for name, value in (*self.hyper, *self.options)]
        return "-".join(map(file_word, [base, self.loss, *chosen, f"seed{self.seed}"]))


@dataclass(frozen=True)
class Method:
    """A loss on a data set and network, over seeds, with hyper-parameters still to be chosen.

    Attributes:
        config: see `Training`.
        loss: the training loss.
        grid: hyper-parameters to choose from.
        seeds: the first of them chooses.
        evaluations: what the chosen runs are evaluated on and with.
        options: see `Training`.
        select: the score on the hold-out that chooses.
    """

    config: str
    loss: str
    grid: tuple[Hyper, ...] = ((),)
    seeds: tuple[int, ...] = (0,)
    evaluations: frozenset[Evaluation] = field(default_factory=lambda: frozenset({Evaluation()}))
    options: Options = ()
    select: str = "accuracy"

    def candidates(self) -> list[Training]:
        """The runs that the hyper-parameters are chosen by."""
        return [Training(self.config, self.loss, h, self.seeds[0], self.options) for h in self.grid]

    def chosen(self, hyper: Hyper) -> list[Training]:
        """The runs that are reported."""
        return [Training(self.config, self.loss, hyper, seed, self.options) for seed in self.seeds]

    @property
    def key(self) -> tuple[object, ...]:
        """What two methods share when they are the same trainings."""
        rule = self.select if len(self.grid) > 1 else None
        return self.config, self.loss, self.grid, self.seeds, self.options, rule


def merge_methods(methods: Iterable[Method]) -> list[Method]:
    """Each method once, with the evaluations of all its copies."""
    merged: dict[tuple[object, ...], Method] = {}
    for method in methods:
        known = merged.setdefault(method.key, method)
        together = known.evaluations | method.evaluations
        merged[method.key] = replace(known, evaluations=together)
    return list(merged.values())


def combinations(axes: Mapping[str, Sequence[OptionValue]]) -> tuple[Hyper, ...]:
    """Every combination of one value for each name; one empty one if there are no names."""
    return tuple(product(*([(name, value) for value in axes[name]] for name in axes)))


def value_text(value: OptionValue) -> str:
    """A value as file names and command lines spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def file_word(text: str) -> str:
    """The text with nothing in it that a file name cannot have."""
    return re.sub(r"[^\w.+=-]+", "_", text)
