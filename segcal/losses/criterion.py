"""All losses in two dicts, and the module that a spec BASE or BASE+AUX+… builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from segcal.losses.auxiliary import ace, cp, dca, dece, mbls, mdca, mmce
from segcal.losses.base import brier, dice, dicece, dual, fl, flsd, ls, nll
from segcal.losses.softmax import LossBatch, statistics
from segcal.losses.spatial import nacl, svls
from segcal.pixels import Pixels, flatten, label_mass, require_ignore_index

_LARGEST = 1e30  # a logit beyond it masks a class; a loss beyond it counts as infinite
_LABEL_CHECK = 50  # calls on an accelerator between two looks at the labels


@dataclass(frozen=True)
class Loss:
    """An entry of `BASE_LOSSES` or `AUXILIARY_LOSSES`."""

    function: Callable[..., Tensor]  # (batch, statistics…, *, hyper-parameters) -> scalar
    reads: tuple[str, ...] = ()  # names of `softmax.STATISTICS` that the function takes, in order
    beta: float = 1.0  # the usual weight of an auxiliary

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters, which are the function's keyword-only arguments: name, default."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def about(self) -> str:
        """The first line of the function's docstring, without its full stop."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0].rstrip(".")


# A new loss is one function and one entry here.
BASE_LOSSES = {
    "nll": Loss(nll, reads=("true_log_prob",)),
    "ls": Loss(ls, reads=("true_log_prob", "mean_log_prob")),
    "fl": Loss(fl, reads=("true_log_prob",)),
    "flsd": Loss(flsd, reads=("true_log_prob",)),
    "dual": Loss(dual, reads=("true_log_prob", "below_true")),
    "brier": Loss(brier, reads=("true_log_prob", "square_sum")),
    "svls": Loss(svls, reads=("true_log_prob",)),
    "dice": Loss(dice, reads=("true_log_prob", "class_sum")),
    "dicece": Loss(dicece, reads=("true_log_prob", "class_sum")),
}
AUXILIARY_LOSSES = {
    "mdca": Loss(mdca, reads=("class_sum",)),
    "dca": Loss(dca, reads=("confidence", "correct")),
    "mmce": Loss(mmce, reads=("confidence", "correct")),
    "cp": Loss(cp, reads=("entropy",), beta=0.1),
    "mbls": Loss(mbls, beta=0.1),
    "nacl": Loss(nacl, beta=0.1),
    "ace": Loss(ace, reads=("true_log_prob", "probs")),
    "dece": Loss(dece, beta=0.5),
}


def describe() -> str:
    """A Markdown table of all losses, for the docs."""
    lines = ["| loss | what it is | hyper-parameters | usual β |", "|---|---|---|---|"]
    for name, loss in {**BASE_LOSSES, **AUXILIARY_LOSSES}.items():
        shown = {key: value for key, value in loss.hyper.items() if key != "seed"}
        hyper = ", ".join(f"`{key}` {_shown(value)}" for key, value in shown.items())
        beta = f"{loss.beta:g}" if name in AUXILIARY_LOSSES else "base"
        about = loss.about.replace("|", "\\|")
        lines.append(f"| `{name}` | {about} | {hyper or 'none'} | {beta} |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def parse_spec(spec: str) -> tuple[str, tuple[str, ...]]:
    """Split "FL+MDCA+CP" into ("fl", ("mdca", "cp")), and "nll" into ("nll", ())."""
    base, *auxiliaries = (part.strip() for part in spec.lower().split("+"))
    known = base in BASE_LOSSES and set(auxiliaries) <= set(AUXILIARY_LOSSES)
    if not known or len(set(auxiliaries)) < len(auxiliaries):
        raise ValueError(
            f"There is no loss {spec!r}: write BASE, BASE+AUX or BASE+AUX+AUX…, with BASE one of "
            f"{', '.join(BASE_LOSSES)} and each AUX another of {', '.join(AUXILIARY_LOSSES)}"
        )
    return base, tuple(auxiliaries)


def hyper_names(spec: str) -> set[str]:
    """The hyper-parameters that `build_loss(spec)` takes."""
    base, auxiliaries = parse_spec(spec)
    names = {*BASE_LOSSES[base].hyper, *(n for a in auxiliaries for n in AUXILIARY_LOSSES[a].hyper)}
    return names | ({"beta"} if auxiliaries else set())


class Criterion(nn.Module):
    """The loss that a spec names: base + Σ beta · auxiliary, as in "nll", "FL+MDCA", "dicece+cp".

    Call it with (N, C, *S) logits and (N, *S) labels. It is a drop-in for nn.CrossEntropyLoss in
    training loops, under torch.compile, DistributedDataParallel and autocast (it computes in
    float32 at least). torch.func.grad and second derivatives work too; torch.func.vmap does not,
    because labels are looked at.

    A logit of −inf, or float32's least, masks a class: its p is 0. Where that makes the loss
    infinite (ls, mbls and nacl read every logit, and a label may be a masked class) a CPU raises a
    ValueError, as it does for a label out of range. An accelerator and a compiled loss, where
    checks would stall every step, return inf; they ignore labels out of range and count them, and
    `check_labels` looks at the count, as every 50th call does on an accelerator.

    Args:
        spec: a base loss of `BASE_LOSSES`, alone or with some of `AUXILIARY_LOSSES`, joined by "+".
        ignore_index: label of pixels that are not counted; None is 255, or −100 where the logits
            have more than 255 classes.
        weight: (K,) class weights of the base loss.
        sync: take batch statistics over all ranks; False keeps them local.
        multilabel: the logits are K sigmoid outputs and the labels (N, K, *S) of 0, 1 or
            `ignore_index`; K = 1 is a binary problem. Each output is a two-class problem with the
            logits (0, z): means over pixels are over the pixels of all of them, and statistics of
            a batch (mdca, dca, mmce, dece, dice) are taken for each class and averaged.
        raters: R; from 2 on, labels are (R, N, *S), of R raters who count 1/R each.
        beta: the auxiliary's weight, or {"mdca": 1, "cp": 0.1}; by default that of its entry.
        **hyper: the keyword arguments of the chosen losses' functions, such as gamma=3.
    """

    weight: Tensor | None
    _outside: Tensor

    def __init__(
        self,
        spec: str,
        *,
        ignore_index: int | None = None,
        weight: Tensor | Sequence[float] | None = None,
        sync: bool = True,
        multilabel: bool = False,
        raters: int = 1,
        beta: float | Mapping[str, float] | None = None,
        **hyper: float,
    ) -> None:
        super().__init__()
        self.base, auxiliaries = parse_spec(spec)
        self.spec = "+".join((self.base, *auxiliaries))  # in lower case
        if ignore_index is not None:
            require_ignore_index(ignore_index)
        self.ignore_index = ignore_index
        self.sync, self.multilabel, self.raters = sync, multilabel, raters
        self.hyper = dict(hyper)
        known = hyper_names(spec)
        odd = sorted({*hyper, *(() if beta is None else ("beta",))} - known)
        if odd:
            raise ValueError(
                f"The loss {self.spec!r} has no {', '.join(odd)}: "
                f"it takes {', '.join(sorted(known)) or 'none'}"
            )
        losses = {name: AUXILIARY_LOSSES[name] for name in auxiliaries}
        self.beta = {name: loss.beta for name, loss in losses.items()} | _betas(beta, auxiliaries)
        # Each term: its name, its entry and its hyper-parameters as far as they are stated.
        self._terms: list[tuple[str, Loss, dict[str, float]]] = []
        for name, loss in {self.base: BASE_LOSSES[self.base], **losses}.items():
            stated = {key: hyper[key] for key in loss.hyper if key in hyper}
            for key, value in stated.items():
                _require_kind(key, value, type(loss.hyper[key]))
            self._terms.append((name, loss, stated))
        self.register_buffer(
            "weight", None if weight is None else torch.as_tensor(weight, dtype=torch.float32)
        )
        # Labels out of range in the batches since the last look at them.
        self.register_buffer("_outside", torch.zeros((), dtype=torch.int64), persistent=False)
        self._calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss."""
        return self.terms(logits, labels)["loss"]

    def terms(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The named parts, {"fl": …, "mdca": …, "loss": fl + beta · mdca}, each a scalar."""
        checked = logits.device.type == "cpu" and not torch.compiler.is_compiling()
        if self.raters > 1:  # every rater's image is one of the batch: neighbours stay neighbours
            if len(labels) != self.raters:
                raise ValueError(
                    f"Expected labels (R, N, *S) of {self.raters} raters, "
                    f"but got {tuple(labels.shape)}"
                )
            logits = logits.repeat(self.raters, *[1] * (logits.ndim - 1))
            labels = labels.flatten(0, 1)
        with torch.autocast(logits.device.type, enabled=False):
            pixels = flatten(logits, labels, self.ignore_index, multilabel=self.multilabel)
            pixels = pixels.never_empty()
            if not checked:
                self._outside = self._outside.to(logits.device) + pixels.out_of_range
            # One pass over the logits for what all the terms read.
            known = statistics(pixels, {name for _, loss, _ in self._terms for name in loss.reads})
            parts = {}
            for name, loss, hyper in self._terms:
                batch = LossBatch(pixels, self.weight if name == self.base else None, self.sync)
                parts[name] = loss.function(batch, *(known[read] for read in loss.reads), **hyper)
            total = parts[self.base]
            for name, beta in self.beta.items():
                total = total + beta * parts[name]
            if checked and not total.abs() < _LARGEST:
                _explain(parts, pixels)
        if not checked and not torch.compiler.is_compiling():
            self._calls += 1
            if self._calls % _LABEL_CHECK == 0:
                self.check_labels()
        return {**parts, "loss": total}

    def check_labels(self) -> None:
        """Raise a ValueError if earlier batches had labels out of range. Waits for the device."""
        count = int(self._outside)
        self._outside = torch.zeros_like(self._outside)
        if count:
            raise ValueError(
                f"{count} labels of earlier batches are neither a class nor the ignored label "
                f"(ignore_index={self.ignore_index}); those pixels were left out of the loss"
            )

    def mass(self, labels: Tensor) -> Tensor:
        """The number of valid pixels, or the sum of their class weights: a scalar.

        The mean of the losses of a batch's parts, weighted so, is the base loss of the whole.
        """
        if self.ignore_index is None:
            raise ValueError("State ignore_index: the weight of a batch depends on it")
        labels = labels.flatten(0, 1) if self.raters > 1 else labels
        return label_mass(labels, self.ignore_index, self.weight, multilabel=self.multilabel)

    def extra_repr(self) -> str:
        shown = {"beta": self.beta, **self.hyper} if self.beta else self.hyper
        hyper = "".join(f", {key}={value}" for key, value in shown.items())
        multilabel = ", multilabel=True" if self.multilabel else ""
        return f"{self.spec!r}, ignore_index={self.ignore_index}{multilabel}{hyper}"


build_loss = Criterion


def _explain(parts: Mapping[str, Tensor], pixels: Pixels) -> None:
    """Raise a ValueError if logits that mask classes, or are as large, made a term infinite."""
    dense = pixels.dense.detach().masked_fill(~pixels.valid.unsqueeze(1), 0)
    masked = dense.abs() > _LARGEST
    if dense.isnan().any() or (dense == torch.inf).any() or not masked.any():
        return  # it has diverged: the loss says so itself
    name, value = next((n, float(p.detach())) for n, p in parts.items() if not p.abs() < _LARGEST)
    if masked.gather(1, pixels.target.unsqueeze(1)).any():
        raise ValueError(
            f"Some labels are classes whose logits are masked (-inf or beyond {_LARGEST:g}), so "
            f"{name} is {value}; ignore those pixels, or leave their class unmasked"
        )
    raise ValueError(
        f"{name} counts every class, and a logit is as large as {float(dense.abs().max())}, beyond "
        f"{_LARGEST:g}; leave masked classes out, or take a loss of their probabilities such as nll"
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
            example = ", ".join(f"{name!r}: {beta}" for name in auxiliaries)
            raise ValueError(f"beta={beta} does not say of which auxiliary: write {{{example}}}")
        beta = {auxiliaries[0]: beta}
    if not set(beta) <= set(auxiliaries):
        raise ValueError(
            f"beta is for {', '.join(auxiliaries)}, but names {', '.join(map(str, beta))}"
        )
    for name, value in beta.items():
        _require_kind(f"beta of {name}", value, float)
    return dict(beta)


def _require_kind(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is true or false for bool, and else a finite number, whole for int."""
    number, wanted = {
        bool: (bool, "true or false"),
        int: (Integral, "a whole number"),
        float: (Real, "a finite number"),
    }[kind]
    # NaN is not below the limit, nor is what an int64 cannot hold.
    fits = isinstance(value, number) and isinstance(value, bool) == (kind is bool)
    if not (fits and abs(value) < 1e18):
        raise ValueError(f"{name} must be {wanted}, but it is {value!r:.60}")
