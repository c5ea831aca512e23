"""The grammar BASE or BASE+AUX+…: what each loss takes, and the module that a spec builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from segcal.losses.auxiliary import AUXILIARY_LOSSES, USUAL_BETA
from segcal.losses.base import BASE_LOSSES
from segcal.losses.softmax import statistics
from segcal.pixels import Pixels, expected_labels, flatten, label_mass, require_ignore_index

_SHARED = {"weight", "sync"}  # options that the criterion gives every term: no hyper-parameters
_LARGEST = 1e30  # a logit beyond it masks a class; a loss beyond it counts as infinite


@dataclass(frozen=True)
class HyperParameter:
    """A hyper-parameter of a loss: its type, its default and what it means."""

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


def build_loss(
    spec: str,
    *,
    ignore_index: int = 255,
    weight: Tensor | Sequence[float] | None = None,
    sync: bool = True,
    multilabel: bool = False,
    beta: float | Mapping[str, float] | None = None,
    **hyper: float,
) -> Criterion:
    """Build the loss a spec names: "nll", "FL+MDCA", "dicece+mdca+cp", … in any case.

    Args:
        spec: a base loss of `BASE_LOSSES`, alone or with one or more of `AUXILIARY_LOSSES`, all
            joined by "+".
        ignore_index: label of pixels that are not counted.
        weight: (K,) class weights of the base loss.
        sync: take batch statistics over all ranks; False keeps them local.
        multilabel: the logits are K sigmoid outputs and the labels (N, K, *S) of 0, 1 or
            `ignore_index`; K = 1 is a binary problem. Each output is a two-class problem with the
            logits (0, z): means over pixels are over the pixels of all of them, and statistics of
            a batch (mdca, dca, mmce, dece, dice) are taken for each class and averaged.
        beta: the auxiliary's weight, or {"mdca": 1, "cp": 0.1}. An auxiliary without a weight has
            its usual one (`USUAL_BETA`).
        **hyper: the hyper-parameters of the chosen terms, which are the keyword arguments of
            their functions. One of two terms goes to both; one of no term is an error.
    """
    return Criterion(
        spec,
        ignore_index=ignore_index,
        weight=weight,
        sync=sync,
        multilabel=multilabel,
        beta=beta,
        **hyper,
    )


class Criterion(nn.Module):
    """base + Σ beta · aux on (N, C, *S) logits and (N, *S) labels; see `build_loss`.

    Drop-in for nn.CrossEntropyLoss in training loops, under DistributedDataParallel and autocast,
    where it computes in float32 at least. The backward is written by hand: `create_graph=True`,
    which asks for second derivatives, and the transforms of torch.func (grad, vmap, jvp) raise a
    RuntimeError.

    A logit of −inf, or float32's least, masks a class: its p is 0. That works with every term that
    reads probabilities. Where it makes the loss infinite (ls, mbls and nacl read every logit, and
    a label may be a masked class) a CPU raises a ValueError; an accelerator returns inf, since
    a check would stall every step.

    On a CPU a label out of range raises at once. On an accelerator a check would stall every
    step, so the count is read when it has arrived: the error comes a step or so later, and the
    bad pixels are ignored meanwhile.

    Attributes:
        base: name of the base loss.
        beta: the weight of each auxiliary, by name.
    """

    weight: Tensor | None

    def __init__(
        self,
        spec: str,
        *,
        ignore_index: int = 255,
        weight: Tensor | Sequence[float] | None = None,
        sync: bool = True,
        multilabel: bool = False,
        beta: float | Mapping[str, float] | None = None,
        **hyper: float,
    ) -> None:
        super().__init__()
        self.base, auxiliaries = parse_spec(spec)
        self.spec = "+".join((self.base, *auxiliaries))  # the grammar's lower-case form
        require_ignore_index(ignore_index)
        self.ignore_index = ignore_index
        self.sync, self.multilabel = sync, multilabel
        self.hyper = dict(hyper)
        self._terms = [term(name) for name in (self.base, *auxiliaries)]
        known = hyper_names(spec)
        given = set(hyper) | (set() if beta is None else {"beta"})
        if given - known:
            raise ValueError(
                f"Expected hyper-parameters of {self.spec!r} "
                f"({', '.join(sorted(known)) or 'it has none'}), "
                f"but got {', '.join(sorted(given - known))}"
            )
        for part in self._terms:
            for name in part.hyper.keys() & hyper:
                _require_kind(name, hyper[name], part.hyper[name].kind)
        self.beta = {name: term(name).beta for name in auxiliaries} | _betas(beta, auxiliaries)
        self.register_buffer(
            "weight", None if weight is None else torch.as_tensor(weight, dtype=torch.float32)
        )
        self._late = _LateLabelCheck()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss."""
        return self.terms(logits, labels)["loss"]

    def terms(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The named parts, {"fl": …, "mdca": …, "loss": fl + beta · mdca}, each a scalar."""
        with torch.autocast(logits.device.type, enabled=False):
            pixels = flatten(logits, labels, self.ignore_index, multilabel=self.multilabel)
            pixels = pixels.never_empty()
            self._late.look(pixels, self.ignore_index)
            # One pass over the logits for what all the terms read.
            known = statistics(pixels, {name for part in self._terms for name in part.statistics})
            parts = {}
            for part in self._terms:
                options: dict[str, Any] = {
                    name: self.hyper[name] for name in part.hyper.keys() & self.hyper
                }
                if part.name == self.base:
                    options["weight"] = self.weight
                read = (known[name] for name in part.statistics)
                parts[part.name] = part.function(pixels, *read, sync=self.sync, **options)
            total = parts[self.base]
            for name, beta in self.beta.items():
                total = total + beta * parts[name]
            if logits.device.type == "cpu" and not total.abs() < _LARGEST:
                _explain(parts, pixels)
        return {**parts, "loss": total}

    def mass(self, labels: Tensor) -> Tensor:
        """The weight of a batch with these labels in a mean over batches: a scalar.

        That is its number of valid pixels, or the sum of their class weights. Of a batch that
        comes in parts, the mean of the parts' losses weighted so is the base loss of the whole.
        """
        return label_mass(labels, self.ignore_index, self.weight, multilabel=self.multilabel)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        shown = {"beta": self.beta, **self.hyper} if self.beta else self.hyper
        hyper = "".join(f", {key}={value}" for key, value in shown.items())
        multilabel = ", multilabel=True" if self.multilabel else ""
        return f"{self.spec!r}, ignore_index={self.ignore_index}{multilabel}{hyper}"


def _explain(parts: Mapping[str, Tensor], pixels: Pixels) -> None:
    """Raise a ValueError if logits that mask classes, or are as large, made a term infinite."""
    dense = pixels.dense.detach().masked_fill(~pixels.valid.unsqueeze(1), 0)
    masked = dense.abs() > _LARGEST
    if dense.isnan().any() or (dense == torch.inf).any() or not masked.any():
        return  # it has diverged: the loss says so itself
    name, value = next((n, float(p.detach())) for n, p in parts.items() if not p.abs() < _LARGEST)
    if masked.gather(1, pixels.target.unsqueeze(1)).any():
        raise ValueError(
            f"Expected labels whose logits are not masked (-inf or beyond {_LARGEST:g}), but some "
            f"are, and {name} is {value}; ignore those pixels, or leave their class unmasked"
        )
    raise ValueError(
        f"Expected logits within {_LARGEST:g} for {name}, which counts every class, but got "
        f"{float(dense.abs().max())}; leave masked classes out, or take a loss of their "
        "probabilities such as nll"
    )


def _betas(
    beta: float | Mapping[str, float] | None, auxiliaries: Sequence[str]
) -> dict[str, float]:
    """The weights that `beta` states, by auxiliary."""
    if beta is None:
        return {}
    if not isinstance(beta, Mapping):
        _require_kind("beta", beta, float)
        if len(auxiliaries) > 1:
            raise ValueError(
                f"Expected beta to name its auxiliary, as in "
                f"{{{', '.join(f'{name!r}: {beta}' for name in auxiliaries)}}}, but got {beta}"
            )
        beta = {auxiliaries[0]: beta}
    if not set(beta) <= set(auxiliaries):
        raise ValueError(
            f"Expected beta for {', '.join(auxiliaries)}, but got {', '.join(map(str, beta))}"
        )
    for name, value in beta.items():
        _require_kind(f"beta of {name}", value, float)
    return dict(beta)


def _require_kind(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is true or false for bool, and else a finite number, whole for int."""
    if kind is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    else:
        number = isinstance(value, Integral if kind is int else Real)
        wanted = "a whole number" if kind is int else "a finite number"
        # NaN is not below the limit, nor is what an int64 cannot hold.
        fits = number and not isinstance(value, bool) and abs(value) < 1e18
    if not fits:
        raise ValueError(f"Expected {name} to be {wanted}, but got {value!r:.60}")


class _LateLabelCheck:
    """Adds up out-of-range labels on the device and reads the sum once it has been delivered."""

    def __init__(self) -> None:
        self._total: Tensor | None = None  # on the device: over every batch so far
        self._waiting: tuple[Tensor, Any] | None = None  # a copy on its way, and its arrival

    def look(self, pixels: Pixels, ignore_index: int) -> None:
        """Count this batch; raise if a sum that has arrived meanwhile is not 0. Never waits."""
        if pixels.dense.device.type == "cpu":
            return  # flatten has looked already
        new = pixels.out_of_range
        self._total = new if self._total is None else self._total + new
        if self._waiting is not None:
            count, arrived = self._waiting
            if not arrived.query():
                return
            self._waiting = None
            if count:
                self._total = None
                expected = expected_labels(pixels.num_classes, ignore_index)
                raise ValueError(f"{expected}, but got others in {count} pixels of earlier batches")
        arrived = torch.Event(pixels.dense.device)
        self._waiting = (self._total.to("cpu", non_blocking=True), arrived)
        arrived.record()

    def __getstate__(self) -> dict[str, None]:
        return {"_total": None, "_waiting": None}  # events neither copy nor pickle; criteria must
