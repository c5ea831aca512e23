"""The grammar BASE or BASE+AUX, and the module that it builds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from segcal.losses.auxiliary import AUXILIARY_LOSSES
from segcal.losses.base import BASE_LOSSES
from segcal.losses.softmax import statistics
from segcal.pixels import Pixels, expected_labels, flatten

_LOSSES = {**BASE_LOSSES, **AUXILIARY_LOSSES}
_SHARED = {"weight", "sync"}  # options every term gets from the criterion, not hyper-parameters


def build_loss(
    spec: str,
    *,
    ignore_index: int = 255,
    weight: Tensor | Sequence[float] | None = None,
    sync: bool = True,
    **hyper: float,
) -> Criterion:
    """Build the loss a spec names: "nll", "FL+MDCA", "ls+dca", … in any case.

    Args:
        spec: BASE or BASE+AUX, with BASE one of `BASE_LOSSES` and AUX of `AUXILIARY_LOSSES`.
        ignore_index: label of pixels that count for nothing.
        weight: (K,) class weights of the base loss.
        sync: take batch statistics over all ranks; False keeps them local.
        **hyper: `beta` (the auxiliary's factor, 1 unless told) and the hyper-parameters of the
            chosen terms: `gamma` for fl and flsd, `alpha` for ls, `bandwidth`, `sample` and
            `seed` for mmce. One that the spec has no use for is an error.
    """
    return Criterion(spec, ignore_index=ignore_index, weight=weight, sync=sync, **hyper)


class Criterion(nn.Module):
    """base + beta · aux on (N, C, *S) logits and (N, *S) labels; see `build_loss`.

    Drop-in for nn.CrossEntropyLoss. Computed in float32 at least, also under autocast.

    On a CPU a label out of range raises at once. On an accelerator looking would stall every
    step, so the count is read when it has arrived: the error comes a step or so later, and the
    bad pixels are ignored meanwhile.
    """

    weight: Tensor | None

    def __init__(
        self,
        spec: str,
        *,
        ignore_index: int = 255,
        weight: Tensor | Sequence[float] | None = None,
        sync: bool = True,
        **hyper: float,
    ) -> None:
        super().__init__()
        self.base, self.aux = parse_spec(spec)
        self.ignore_index = ignore_index
        self.sync = sync
        self.hyper = dict(hyper)
        beta = hyper.pop("beta", None)
        takers = [self.base] + ([self.aux] if self.aux else [])
        accepted = {name: _hyper_names(name) for name in takers}
        known = set().union(*accepted.values()) | ({"beta"} if self.aux else set())
        unknown = sorted(set(self.hyper) - known)
        if unknown:
            raise ValueError(
                f"Expected hyper-parameters of {self.spec!r} "
                f"({', '.join(sorted(known)) or 'it has none'}), but got {', '.join(unknown)}"
            )
        _require_numbers(self.hyper)
        self.beta = 1.0 if beta is None else beta
        self._options = {
            name: {key: value for key, value in hyper.items() if key in accepted[name]}
            for name in takers
        }
        self.register_buffer(
            "weight", None if weight is None else torch.as_tensor(weight, dtype=torch.float32)
        )
        self._late = _LateLabelCheck()

    @property
    def spec(self) -> str:
        """The loss in the grammar's lower-case form, such as "fl+mdca"."""
        return f"{self.base}+{self.aux}" if self.aux else self.base

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss."""
        return self.terms(logits, labels)["loss"]

    def terms(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The named parts, {"fl": …, "mdca": …, "loss": fl + beta · mdca}, each a scalar."""
        with torch.autocast(logits.device.type, enabled=False):
            pixels = flatten(logits, labels, self.ignore_index)
            self._late.look(pixels, self.ignore_index)
            names = [name for term in self._options for name in _statistics_of(term)]
            known = statistics(pixels, names)  # all in one pass
            parts = {}
            for term, options in self._options.items():
                shared = {"weight": self.weight} if term == self.base else {}
                parts[term] = _LOSSES[term](
                    pixels,
                    *(known[name] for name in _statistics_of(term)),
                    sync=self.sync,
                    **shared,
                    **options,
                )
            parts["loss"] = parts[self.base]
            if self.aux:
                parts["loss"] = parts[self.base] + self.beta * parts[self.aux]
        return parts

    def extra_repr(self) -> str:
        """What printing the module shows."""
        hyper = "".join(f", {key}={value}" for key, value in self.hyper.items())
        return f"{self.spec!r}, ignore_index={self.ignore_index}{hyper}"


def _require_numbers(hyper: dict[str, float]) -> None:
    for name, value in hyper.items():
        if value is None and name == "beta":
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not abs(value) < 1e18:  # NaN is not, nor what int64 cannot hold
            raise ValueError(f"Expected {name} to be a finite number, but got {value!r:.60}")


def parse_spec(spec: str) -> tuple[str, str | None]:
    """Split "FL+MDCA" into ("fl", "mdca"), and "nll" into ("nll", None)."""
    base, plus, aux = (part.strip() for part in spec.lower().partition("+"))
    if base not in BASE_LOSSES or (plus and aux not in AUXILIARY_LOSSES):
        raise ValueError(
            f"Expected a loss BASE or BASE+AUX with BASE one of {', '.join(BASE_LOSSES)} "
            f"and AUX one of {', '.join(AUXILIARY_LOSSES)}, but got {spec!r}"
        )
    return base, aux or None


def hyper_names(spec: str) -> set[str]:
    """The hyper-parameters that `build_loss(spec)` takes."""
    base, aux = parse_spec(spec)
    return _hyper_names(base) | (_hyper_names(aux) | {"beta"} if aux else set())


def _hyper_names(term: str) -> set[str]:
    parameters = inspect.signature(_LOSSES[term]).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - _SHARED


def _statistics_of(term: str) -> list[str]:
    """The softmax statistics a loss reads: its positional parameters after the pixels."""
    parameters = inspect.signature(_LOSSES[term]).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


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
                raise ValueError(f"{expected}, but got others in {count} pixels of late batches")
        arrived = torch.Event(pixels.dense.device)
        self._waiting = (self._total.to("cpu", non_blocking=True), arrived)
        arrived.record()

    def __getstate__(self) -> dict[str, None]:
        return {"_total": None, "_waiting": None}  # events neither copy nor pickle; criteria must
