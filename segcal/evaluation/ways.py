"""Calibrators for images that are unlike the hold-out, of which nobody has labels.

ts is fitted on the hold-out as it is; ts@shift, ts@ood, ts@target and ts@set are fitted in the ways
of `segcal.posthoc.WAYS`. Three of these ways only make other batches of logits and labels, so
every calibrator can be fitted on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from segcal import distributed
from segcal.evaluation.holdout import fit_on, recorded
from segcal.evaluation.shifts import open_shifts
from segcal.metrics.uncertainty import entropy
from segcal.posthoc import WAYS, Calibrator, TemperatureScaling
from segcal.sources.network import LoaderSource
from segcal.sources.source import Batch, Changed, Source

FIT_SHIFT = "all:1,3"
COPIES = 4  # changed copies of a hold-out image: time and disk do not grow with the shifts
MOST_IMAGES = 64  # unlabelled images that are looked at
SHARE = 0.65  # of an image in a mixture
log = logging.getLogger(__name__)
_RIDGE = 0.01  # of the regression on statistics, which have unit variance


def fit_ways(
    methods: Sequence[str],
    recording: Source,
    holdout: Source,
    source: Source,
    shifted: Mapping[str, Source],
    *,
    fit_shift: str | None = None,
    fit_ood: str | Path | Source | None = None,
    fit_target: str | Path | Source | None = None,
) -> dict[str, dict[str, Calibrator]]:
    """The calibrator of each method, by shift of the test images; "" for images as they are.

    - ts is fitted on the hold-out as it is.
    - ts@shift (Tomani et al., CVPR 2021): also on four corrupted copies of each image. Under a
      corruption, no other one of its family was fitted.
    - ts@ood (Roschewitz et al. 2025, arXiv 2507.07780): also on as many pixels of unrelated images.
      Their labels are drawn at random, so that their mean NLL is −(1/K) Σ_c log p_c.
    - ts@target (PseudoCal, Hu et al., ICML 2024): on 0.65 x_a + 0.35 x_b of two unlabelled images,
      with the class predicted for x_a as the label where that for x_b is another.
    - ts@set (after Wang et al. 2024, arXiv 2402.09204): log T is a linear function of the mean
      confidence, entropy and margin of unlabelled images, fitted on the hold-out and its copies
      under each corruption but those of the family that is tested.

    `recording` is the recorded hold-out, `source` and `shifted` are the test images as they are and
    by shift. The other arguments are those of `evaluate_source`.
    """
    from segcal.data.shift import parse_shifts

    given = {"fit_shift": fit_shift, "fit_ood": fit_ood, "fit_target": fit_target}
    ways = _by_way(methods, given, multilabel=source.multilabel)
    with ExitStack() as stack:

        def kept(some: Source) -> Source:
            return stack.enter_context(recorded(some, methods))

        copies = []  # with the families of their changes
        if ways["shift"] or ways["set"]:
            copies = [
                (family, kept(some)) for family, some in _copies(holdout, fit_shift or FIT_SHIFT)
            ]
        plain = fit_on(ways[""], [recording])

        @cache
        def of_shift(family: str) -> dict[str, Calibrator]:
            used = [some for of, some in copies if of != family]
            return fit_on(ways["shift"], [recording, *used])

        @cache
        def of_ood() -> dict[str, Calibrator]:
            most = recording.num_images or MOST_IMAGES
            other = kept(Changed(_images(source, fit_ood).limited(most), guesses))
            return fit_on(ways["ood"], balanced([recording, other]))

        @cache
        def of_target(target: Source) -> dict[str, Calibrator]:
            order = np.random.default_rng(0).permutation(len(target.names))
            mixed = kept(Changed(target.only(order.tolist()), mixtures))
            try:
                return fit_on(ways["target"], [mixed])
            except ValueError as error:  # such as: one class is predicted everywhere
                log.warning("the hold-out is fitted on instead of %s: %s", mixed.name, error)
            return fit_on(ways["target"], [recording])

        @cache
        def point(some: Source) -> tuple[Tensor, float]:
            return statistics(some), float(fit_on(["ts"], [some])["ts"].temperature_.log())

        def of_set(target: Source, family: str) -> dict[str, Calibrator]:
            known = [point(recording), *(point(some) for of, some in copies if of != family)]
            found = TemperatureScaling(ignore_index=source.ignore_index)
            found._start(source.num_classes, 0)
            found.temperature_.fill_(predicted_temperature(known, statistics(target)))
            found.nll_before_ = found.nll_after_ = float("nan")  # nobody has the labels
            found.improved_, found.passes_ = True, 1
            return {"ts@set": found}

        found = {}
        stated = None if fit_target is None else _images(source, fit_target).limited(MOST_IMAGES)
        for shift, changed in {"": source, **shifted}.items():
            family = parse_shifts(shift)[0].family if shift else ""
            made = {**plain, **of_shift(family)}
            if ways["ood"]:
                made |= of_ood()
            if ways["target"] or ways["set"]:
                target = changed.limited(MOST_IMAGES) if stated is None else stated
                made |= of_target(target) if ways["target"] else {}
                made |= of_set(target, family) if ways["set"] else {}
            found[shift] = {method: made[method] for method in methods}
        return found


def _by_way(
    methods: Sequence[str], given: Mapping[str, object], *, multilabel: bool
) -> dict[str, list[str]]:
    """The methods by what they have after @; raise if they do not fit the options."""
    ways = {way: [m for m in methods if m.partition("@")[2] == way] for way in ("", *WAYS)}
    users = {"fit_shift": ("shift", "set"), "fit_ood": ("ood",), "fit_target": ("target", "set")}
    for option, those in users.items():
        if given[option] is not None and not any(ways[way] for way in those):
            raise ValueError(f"{option} is of use to methods such as ts@{those[0]}: name one")
    if ways["ood"] and given["fit_ood"] is None:
        raise ValueError("ts@ood and the like need fit_ood (--fit-ood), a folder of other images")
    if ways["set"] not in ([], ["ts@set"]):
        raise ValueError("a temperature is all that statistics can predict: ts@set")
    if multilabel and len(ways[""]) < len(methods):
        raise ValueError("methods with @ need one class per pixel, but these are sigmoid outputs")
    return ways


def _copies(holdout: Source, fit_shift: str) -> list[tuple[str, Source]]:
    """The hold-out under each shift, with its family; each image under four of the shifts."""
    from segcal.data.shift import parse_shifts

    shifts = parse_shifts(fit_shift)
    for shift in shifts:
        if shift.brings_images:
            raise ValueError(f"fit_shift changes the hold-out, but {shift} brings other images")
    opened = open_shifts(holdout, shifts)
    found = []
    for number, (shift, changed) in enumerate(zip(shifts, opened.values(), strict=True)):
        every = range(len(changed.names))
        chosen = [i for i in every if (number - COPIES * i) % len(shifts) < COPIES]
        if chosen:
            found.append((shift.family, changed.only(chosen)))
    return found


def _images(source: Source, given: str | Path | Source | None) -> Source:
    assert given is not None
    return given if isinstance(given, Source) else source.on_images(given)


def guesses(source: Source) -> Iterator[Batch]:
    """Batches whose labels are drawn at random, each class as often as the others."""
    generator = torch.Generator().manual_seed(distributed.rank())
    for batch in source:
        shape = (len(batch.values), *batch.values.shape[2:])
        labels = torch.randint(source.num_classes, shape, generator=generator)
        yield replace(batch, labels=labels.to(batch.values.device))


def balanced(sources: Sequence[Source]) -> list[Source]:
    """Sources of which so many pixels are ignored, at random, that all have equally many left."""
    counts = torch.zeros(len(sources), dtype=torch.int64)
    for number, source in enumerate(sources):
        for batch in source:
            assert batch.labels is not None
            counts[number] += (batch.labels != source.ignore_index).sum().cpu()
    counts = counts.to(distributed.communication_device())
    distributed.sum_(counts)

    def thinned(share: float) -> Callable[[Source], Iterator[Batch]]:
        def batches(source: Source) -> Iterator[Batch]:
            generator = torch.Generator().manual_seed(distributed.rank())
            for batch in source:
                assert batch.labels is not None
                out = torch.rand(batch.labels.shape, generator=generator) >= share
                labels = batch.labels.masked_fill(out.to(batch.labels.device), source.ignore_index)
                yield replace(batch, labels=labels)

        return batches

    shares = (counts.min() / counts.clamp(min=1)).tolist()
    return [Changed(one, thinned(share)) for one, share in zip(sources, shares, strict=True)]


def mixtures(source: Source) -> Iterator[Batch]:
    """The network on each image mixed with the one before, labelled with what it predicts.

    Inputs are mixed 0.65 to 0.35. Pixels where both images are predicted alike are ignored.
    """
    if not isinstance(source, LoaderSource):
        raise ValueError("ts@target and the like mix images: they need a single network")
    before: tuple[Tensor, Tensor] | None = None  # the last image and its prediction
    for inputs, labels, names in source.inputs():
        if not inputs.is_floating_point():
            raise ValueError("ts@target and the like mix images, but these inputs are texts")
        predicted = source.pooled(inputs, labels, names).values.argmax(1)  # (N, *S)
        other, theirs = before or (inputs[-1:], predicted[-1:])
        if other.shape[2:] != inputs.shape[2:]:
            other = interpolate(other, inputs.shape[2:], mode="bilinear")
            theirs = interpolate(theirs[None].float(), predicted.shape[1:])[0].long()
        other = torch.cat([other, inputs[:-1]])
        theirs = torch.cat([theirs, predicted[:-1]])
        before = inputs[-1:], predicted[-1:]
        batch = source.pooled(SHARE * inputs + (1 - SHARE) * other, labels, names)
        alike = predicted == theirs
        yield replace(batch, labels=predicted.masked_fill(alike, source.ignore_index))


def statistics(source: Source) -> Tensor:
    """(3,) mean confidence, mean entropy, and mean margin of log p, over all pixels."""
    total = torch.zeros(4, dtype=torch.float64, device=distributed.communication_device())
    for batch in source:
        log_p = batch.logits.double().log_softmax(1)
        first, second = log_p.topk(2, 1).values.unbind(1)
        terms = first.exp(), entropy(log_p.exp()), first - second, torch.ones_like(first)
        total += torch.stack([term.sum() for term in terms]).to(total)
    distributed.sum_(total)
    return (total[:3] / total[3]).cpu()


def predicted_temperature(known: Sequence[tuple[Tensor, float]], statistics: Tensor) -> float:
    """A temperature for a set of images with these statistics; log T is linear in them.

    It is learned from the statistics and log T of `known` sets, and lies within theirs.
    """
    x, y = torch.stack([s for s, _ in known]), torch.tensor([t for _, t in known]).to(statistics)
    mean, scale = x.mean(0), x.std(0, correction=0).clamp_min(1e-12)
    z = (x - mean) / scale  # (sets, 3)
    ridge = _RIDGE * len(z) * torch.eye(3).to(z)
    slope = torch.linalg.solve(z.T @ z + ridge, z.T @ (y - y.mean()))
    log_t = y.mean() + ((statistics - mean) / scale) @ slope
    return float(log_t.clamp(y.min(), y.max()).exp())
