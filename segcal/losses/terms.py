"""What each loss reads and takes, found in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from torch import Tensor

from segcal.losses.auxiliary import AUXILIARY_LOSSES, USUAL_BETA
from segcal.losses.base import BASE_LOSSES

_SHARED = {"weight", "sync"}  # options that the criterion gives every term: no hyper-parameters


@dataclass(frozen=True)
class HyperParameter:
    """What a loss takes by name: its type, its default and what it is."""

    kind: type
    default: Any
    meaning: str


@dataclass(frozen=True)
class Term:
    """One loss of the grammar.

    Attributes:
        name: in the grammar.
        function: (pixels, statistics…, *, options) -> scalar.
        statistics: of the softmax, its positional parameters after the pixels.
        hyper: its hyper-parameters by name, the annotated keyword-only parameters.
        beta: the weight of an auxiliary that is not told another; 1 for a base loss.
        summary: the first line of its docstring.
    """

    name: str
    function: Callable[..., Tensor]
    statistics: tuple[str, ...]
    hyper: dict[str, HyperParameter]
    beta: float
    summary: str


def term(name: str) -> Term:
    """The loss that `BASE_LOSSES` or `AUXILIARY_LOSSES` has under `name`."""
    function = {**BASE_LOSSES, **AUXILIARY_LOSSES}[name]
    parameters = inspect.signature(function).parameters.values()
    hints = get_type_hints(function, include_extras=True)
    return Term(
        name,
        function,
        statistics=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:],
        hyper={
            p.name: HyperParameter(hints[p.name].__origin__, p.default, *hints[p.name].__metadata__)
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.name not in _SHARED
        },
        beta=USUAL_BETA.get(name, 1.0),
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
    )


def all_terms() -> list[Term]:
    """Every loss, the base losses first."""
    return [term(name) for name in (*BASE_LOSSES, *AUXILIARY_LOSSES)]


def parse_spec(spec: str) -> tuple[str, tuple[str, ...]]:
    """Split "FL+MDCA+CP" into ("fl", ("mdca", "cp")), and "nll" into ("nll", ())."""
    base, *auxiliaries = (part.strip() for part in spec.lower().split("+"))
    known = base in BASE_LOSSES and set(auxiliaries) <= set(AUXILIARY_LOSSES)
    if not known or len(set(auxiliaries)) < len(auxiliaries):
        raise ValueError(
            f"Expected a loss BASE or BASE+AUX, or BASE+AUX+AUX…, with BASE one of "
            f"{', '.join(BASE_LOSSES)} and each AUX another of {', '.join(AUXILIARY_LOSSES)}, "
            f"but got {spec!r}"
        )
    return base, tuple(auxiliaries)


def hyper_names(spec: str) -> set[str]:
    """The hyper-parameters that `build_loss(spec)` takes."""
    base, auxiliaries = parse_spec(spec)
    names = {name for part in (base, *auxiliaries) for name in term(part).hyper}
    return names | ({"beta"} if auxiliaries else set())
