"""The trainings that a table or figure needs, and how hyper-parameters are chosen.

The paper's protocol: each loss has a small grid of hyper-parameters, and the most accurate model on
the hold-out is the one reported. Here the first seed tries the grid and the others take its choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

Scale = Literal["small", "full"]
Hyper = tuple[tuple[str, float], ...]  # (name, value) of the loss's hyper-parameters
Evaluation = tuple[str, tuple[str, str] | None]  # post-hoc method and shift of the test data
PLAIN: Evaluation = ("none", None)

# Supplement of the paper, section 1, and section 5 for MDCA. Label smoothing has alpha = 0.1 and
# FLSD gamma = 3 throughout; these are the defaults of segcal.build_loss.
GRIDS: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "full": {
        "beta": {"mdca": (1, 5, 10, 15, 20, 25), "dca": (1, 5, 10, 15, 20, 25), "mmce": (2, 4)},
        "gamma": {"fl": (1, 2, 3)},
    },
    "small": {
        "beta": {"mdca": (1, 10), "dca": (1, 10), "mmce": (2,)},
        "gamma": {"fl": (1, 3)},
    },
}
USUAL = {"mdca": 1.0, "dca": 1.0, "mmce": 2.0, "fl": 3.0}  # without a grid


def grid(
    loss: str,
    scale: Scale,
    *,
    tune: bool = True,
    own: Mapping[str, tuple[float, ...]] | None = None,
) -> tuple[Hyper, ...]:
    """The hyper-parameters to try for `loss`; one set if there is nothing to choose.

    Args:
        loss: the training loss.
        scale: whose grid of `GRIDS`.
        tune: whether there are grids at all, or the usual values alone.
        own: values to try by name, instead of the grid's.
    """
    base, _, aux = loss.partition("+")
    axes = []
    for name, term in (("beta", aux), ("gamma", base)):
        values = GRIDS[scale][name].get(term)
        if values is None:
            continue
        values = (own or {}).get(name, values) if tune else (USUAL[term],)
        axes.append([(name, float(value)) for value in values])
    return tuple(product(*axes))


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        config: name of a file in configs/.
        loss: the training loss.
        hyper: its hyper-parameters.
        seed: of the training.
        options: other options than the config's, as (dotted name, value).
    """

    config: str
    loss: str
    hyper: Hyper = ()
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Name of its folder: all that tells it from the other runs of a grid."""
        chosen = [f"{name}{value:g}" for name, value in self.hyper]
        chosen += [f"{name}{value}" for name, value in self.options]
        return "-".join([self.config.replace("/", "_"), self.loss, *chosen, f"seed{self.seed}"])


@dataclass(frozen=True)
class Method:
    """A loss on a data set and network, over seeds, with hyper-parameters still to be chosen.

    Attributes:
        config: name of a file in configs/.
        loss: the training loss.
        grid: hyper-parameters to choose from.
        seeds: the first of them chooses.
        evaluations: what the chosen runs are evaluated on and with.
        options: see `Training`.
    """

    config: str
    loss: str
    grid: tuple[Hyper, ...] = ((),)
    seeds: tuple[int, ...] = (0,)
    evaluations: frozenset[Evaluation] = field(default_factory=lambda: frozenset({PLAIN}))
    options: tuple[tuple[str, str], ...] = ()

    def candidates(self) -> list[Training]:
        """The runs that the hyper-parameters are chosen by."""
        return [Training(self.config, self.loss, h, self.seeds[0], self.options) for h in self.grid]

    def chosen(self, hyper: Hyper) -> list[Training]:
        """The runs that are reported."""
        return [Training(self.config, self.loss, hyper, seed, self.options) for seed in self.seeds]

    @property
    def key(self) -> tuple[object, ...]:
        """What two methods share when they are the same trainings."""
        return self.config, self.loss, self.grid, self.seeds, self.options


def merge_methods(methods: Iterable[Method]) -> list[Method]:
    """Each method once, with the evaluations of all its copies."""
    merged: dict[tuple[object, ...], Method] = {}
    for method in methods:
        known = merged.setdefault(method.key, method)
        together = known.evaluations | method.evaluations
        merged[method.key] = replace(known, evaluations=together)
    return list(merged.values())
