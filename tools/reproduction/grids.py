"""The hyper-parameters that the paper chooses from, for each loss.

The most accurate model on the hold-out is the one reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Literal

from segcal.sweep.plan import Hyper

Scale = Literal["small", "full"]

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
