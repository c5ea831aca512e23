"""`CalibrationMeter`: counts batches of predictions, and gives a `Report`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import segcal
from segcal import distributed
from segcal.files import Npz, atomic_write, utf8
from segcal.metrics.counting import count
from segcal.metrics.intervals import image_statistics
from segcal.metrics.regions import classes_outside
from segcal.metrics.report import BinTable, ClassHistogram, FineHistogram, Protocol, Report
from segcal.metrics.sums import (
    Settings,
    Sums,
    add_,
    class_edges,
    encode_about,
    fine_edges,
    moved,
    no_images,
    no_pixels,
    read_about,
)
from segcal.pixels import (
    check_batch,
    check_shapes,
    countable,
    each_rater,
    is_distribution,
    multilabel_labels,
)

log = logging.getLogger(__name__)
Names = Sequence[str] | None
_IMAGE_BINS = 2**20  # of the images that are counted at a time
_SOME = 8  # images, and pixels along each side, that are looked at to find probabilities


class CalibrationMeter:
    """Calibration and accuracy over any number of pixels: exact, streaming, mergeable.

        meter = CalibrationMeter(num_classes=21)
        for logits, labels in batches:
            meter.update(logits, labels)
        report = meter.compute()

    An update that fails does not change the meter. On the CPU it raises at once; on an
    accelerator, where a check would stall the queue, a batch with bad values adds nothing and
    `compute` raises. One thread at a time may use a meter; threads that count at the same time
    have a meter each and add them.

    Args:
        num_classes: K; from 2 on, or from 1 on with `multilabel`.
        num_bins: B equal bins over [0, 1].
        ignore_index: the label of pixels that do not count; None for 255, or -100 beyond 255
            classes.
        edge_rule: "right" for bins (lo, hi] with 0 in the first, "left" for [lo, hi) with 1 in
            the last. An edge k/B is rounded to the dtype of the probabilities.
        per_image: keep the sums of each image too, for intervals and for the worst images; about
            8·K·B bytes per image.
        class_names: K names for the report.
        region: what the counted pixels are, for the report; see `segcal.metrics.regions`.
        multilabel: the outputs are K sigmoids, and the labels (N, K, *S) are 0, 1 or ignored. Each
            pixel is K decisions, "class c or not", at p = 0.5; see docs/conventions.md.
        top_only: `update_probs` gets the probability of the predicted class alone, and 0 for all
            others. Scores that need those are NaN.
        raters: R; from 2 on, `update` takes the labels (R, N, *S) of R raters, each of which counts
            1/R of a pixel in the report.
    """

    def __init__(
        self,
        num_classes: int,
        num_bins: int = 15,
        ignore_index: int | None = None,
        *,
        edge_rule: str = "right",
        per_image: bool = False,
        class_names: Sequence[str] | None = None,
        region: str = "all",
        multilabel: bool = False,
        top_only: bool = False,
        raters: int = 1,
    ) -> None:
        self.settings = Settings(
            num_classes=num_classes,
            num_bins=num_bins,
            ignore_index=ignore_index,  # type: ignore[arg-type] # None is for `Settings` to replace
            edge_rule=edge_rule,
            per_image=per_image,
            class_names=None if class_names is None else tuple(map(str, class_names)),
            region=region,
            multilabel=multilabel,
            top_only=top_only,
            raters=raters,
        )
        self.reset()

    def reset(self) -> None:
        """Forget all pixels."""
        self._sums = no_pixels(self.settings)
        self._images: list[Sums] = []
        # Of the images whose sums are kept, in order; "" for no name, or no group.
        self.names: list[str] = []
        self.groups: list[str] = []
        self._synced = False
        self._like_probs: Tensor | None = None  # () bool of the first logits, once there were
        # Pixels whose predicted class a calibrator changed; None where nobody counts them.
        self.changed: int | None = None

    def update(
        self, logits: Tensor, labels: Tensor, *, names: Names = None, groups: Names = None
    ) -> None:
        """Count a batch of logits.

        Args:
            logits: (N, C, *S) of any floating dtype; the softmax is taken in float32 at least.
            labels: (N, *S) of an integer dtype; (N, C, *S) if `multilabel`; with `raters`, those of
                each rater along a first axis R.
            names: N names of the images; by default their running numbers. Only with `per_image`.
            groups: N names of what the images belong to, such as patients: images of one group are
                not independent. Only with `per_image`.

        A ValueError says what is wrong with shapes, dtypes, labels or values at pixels that count.
        """
        update_together([self], logits, labels, names=names, groups=groups)

    def update_probs(
        self, probs: Tensor, labels: Tensor, *, names: Names = None, groups: Names = None
    ) -> None:
        """Count a batch of (N, C, *S) probabilities; everything else is as for `update`.

        Values must lie in [0, 1] and sum to 1 over the classes, up to the rounding of their dtype
        (the sum to 1e-4 at least; those of `multilabel` have no sum). They are not normalised. For
        NLL, a probability of 0 counts as the smallest normal number of the dtype.
        """
        update_together([self], probs, labels, names=names, groups=groups, probs=True)

    def update_samples(
        self, probs: Tensor, labels: Tensor, *, names: Names = None, groups: Names = None
    ) -> None:
        """Count the mean of the probabilities of M members, such as networks or dropout samples.

        `probs` are (M, N, C, *S), and their mean is taken in float64; everything else is as for
        `update_probs`.
        """
        if probs.ndim < 3 or not len(probs):
            raise ValueError(
                f"Expected probabilities of shape (M, N, C, *S), but got {tuple(probs.shape)}"
            )
        probs = countable(probs, labels)[0]
        mean = sum(member.double() for member in probs) / len(probs)
        self.update_probs(torch.as_tensor(mean).to(probs), labels, names=names, groups=groups)

    def compute(self, *, resamples: int = 1000, seed: int = 0) -> Report:
        """The report of everything counted so far; scores are NaN if that is nothing.

        With sums per image, `resamples` and `seed` say how images are drawn for the intervals.
        Raises a ValueError if an accelerator met values that cannot be counted.
        """
        s = self.settings
        labels, logits, probs = self._sums["faults"].tolist()
        if labels or logits or probs:
            raise ValueError(
                "Expected finite logits, probabilities that sum to 1 and labels in "
                f"0..{1 if s.multilabel else s.num_classes - 1} or {s.ignore_index}, but got "
                f"{logits} pixels with logits not finite, {probs} with no probabilities and "
                f"{labels} with labels out of range; their batches were not counted"
            )
        self._warn_of_probs()
        images = None
        if s.per_image:
            images = image_statistics(
                self.image_sums(),
                [utf8(name) or f"image {i}" for i, name in enumerate(self.names)],
                self.groups,
                resamples=resamples,
                seed=seed,
                raters=s.raters,
                outside=() if s.multilabel else classes_outside(s.region, s.num_classes),
            )
        sums = {name: t.numpy() for name, t in moved(self._sums, "cpu", copy=True).items()}
        if s.raters > 1:
            sums = {n: array if n == "images" else array / s.raters for n, array in sums.items()}
        edges = np.arange(s.num_bins + 1) / s.num_bins

        def some(kind: str, *names: str) -> list[np.ndarray]:
            return [sums[f"{kind}_{name}"] for name in names]

        return Report(
            protocol=Protocol(
                num_classes=s.num_classes,
                num_bins=s.num_bins,
                edge_rule=s.edge_rule,
                ignore_index=s.ignore_index,
                average="decision" if s.multilabel else "pixel",
                region=s.region,
                images=int(sums["images"]),
                pixels=round(sums["top_count"].sum()),
                version=segcal.__version__,
                multilabel=s.multilabel,
                raters=s.raters,
            ),
            top=BinTable(edges, *some("top", "count", "hits", "confidence")),
            classes=BinTable(edges, *some("class", "count", "hits", "confidence")),
            fine=FineHistogram(
                fine_edges().numpy(), *some("fine", "correct", "wrong", "confidence")
            ),
            class_fine=ClassHistogram(
                class_edges().numpy(), *some("class_fine", "correct", "wrong")
            ),
            confusion=sums["confusion"],
            nll_sum=float(sums["nll"]),
            brier_sum=float(sums["brier"]),
            class_names=None if s.class_names is None else tuple(map(utf8, s.class_names)),
            images=images,
            changed=None if self.changed is None else self.changed / s.raters,
        )

    def sums(self) -> Sums:
        """The sums over all pixels, where the predictions are: the meter's own, not copies."""
        return self._sums

    def image_sums(self) -> Sums:
        """The sums of each image on the CPU, in the order of `names`; none unless `per_image`."""
        parts = [no_images(self.settings), *self._images]
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}

    def _warn_of_probs(self) -> None:
        if self._like_probs is not None and bool(self._like_probs):
            say_once(
                "the logits look like probabilities (at least 0, and of sum 1), and their softmax "
                "is counted; probabilities go to update_probs(), or into files as probs"
            )

    def __add__(self, other: CalibrationMeter) -> CalibrationMeter:
        """A new meter of the pixels of both."""
        if not isinstance(other, CalibrationMeter):
            return NotImplemented
        self.settings.require_equal(other.settings)
        merged = CalibrationMeter(**asdict(self.settings))
        merged._sums = moved(self._sums, self._sums["nll"].device, copy=True)
        add_(merged._sums, other._sums)
        merged._images = self._images + other._images  # which are never changed
        merged.names = self.names + other.names
        merged.groups = self.groups + other.groups
        merged._synced = self._synced or other._synced
        if self.changed is not None and other.changed is not None:
            merged.changed = self.changed + other.changed
        return merged

    def sync(self) -> CalibrationMeter:
        """Sum over all ranks, in place: afterwards every rank holds the whole. Returns self.

        Every rank must call it, those without pixels too. Without a process group, and a second
        time, it does nothing. A synced meter takes no more updates until `reset`.
        """
        if self._synced or not distributed.is_distributed():
            return self
        device = distributed.communication_device()
        self._sums = moved(self._sums, device)
        distributed.sum_(*self._sums.values())
        if self.changed is not None:
            self.changed = int(distributed.total(torch.tensor(self.changed)))
        if self.settings.per_image:
            images = moved(self.image_sums(), device)
            self._images = [{name: distributed.concatenate(t) for name, t in images.items()}]
            self.names = [*chain(*distributed.gathered(self.names))]
            self.groups = [*chain(*distributed.gathered(self.groups))]
        self._synced = True
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as plain tensors on the CPU that share nothing with the meter."""
        about = encode_about(
            self.settings, self.names, self.groups, synced=self._synced, changed=self.changed
        )
        return {
            **moved(self._sums, "cpu", copy=True),
            **{f"image.{name}": tensor for name, tensor in self.image_sums().items()},
            "about": about,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, replacing what was counted.

        Raises a ValueError if the settings are others, or it is not such a state; the meter is
        then as it was.
        """
        settings, about = read_about(state)
        self.settings.require_equal(settings)
        self._sums = moved({name: state[name] for name in self._sums}, "cpu", copy=True)
        self._images = [{k[6:]: v.clone() for k, v in state.items() if k.startswith("image.")}]
        self.names, self.groups = about["names"], about["groups"]
        self._synced, self.changed = bool(about["synced"]), about["changed"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as npz (no pickle inside); `path` is never half-written."""
        arrays: dict[str, Any] = {name: t.numpy() for name, t in self.state_dict().items()}
        with atomic_write(path, "wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibrationMeter:
        """The meter that `save` wrote; a ValueError names the file if it is something else."""
        try:
            with Npz(Path(path), own=True) as arrays:
                state = {name: torch.from_numpy(arrays[name]) for name in arrays.keys}
            meter = cls(**asdict(read_about(state)[0]))
            meter.load_state_dict(state)
        except ValueError as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise ValueError(f"{path}: expected a saved CalibrationMeter: {reason}") from None
        return meter


@torch.no_grad()
def update_together(
    meters: Sequence[CalibrationMeter],
    values: Tensor,
    labels: Tensor,
    *,
    inside: Sequence[Tensor | None] | None = None,
    names: Names = None,
    groups: Names = None,
    probs: bool = False,
) -> None:
    """Count one batch in several meters that differ in the pixels they count: one softmax for all.

    update_together([whole, edges], logits, labels, inside=[None, boundary(3)(labels)])

    The meters have equal settings, but for class names and region. If this raises, all of them are
    as they were.

    Args:
        meters: the meters to update.
        values: (N, C, *S) logits, or probabilities if `probs`.
        labels: as for `CalibrationMeter.update`. With `raters`, a meter of one rater may count
            those inside its mask.
        inside: for each meter, bool of the labels' shape: what it counts; None for all.
        names: as for `CalibrationMeter.update`, as are `groups`.
    """
    masks: list[Tensor | None] = [None] * len(meters) if inside is None else [*inside]
    if len(masks) != len(meters) or not meters:
        raise ValueError(
            f"Expected a mask or None for each meter, but got {len(masks)} for {len(meters)}"
        )
    s = meters[0].settings
    for meter in meters:
        other = meter.settings
        s.require_equal(replace(other, class_names=s.class_names, region=s.region, raters=s.raters))
        if meter._synced:
            raise ValueError("Expected a meter that was not synced, but got one: reset() it first")
    values, labels, masks = _arranged(*countable(values.detach(), labels), masks, s)
    n = len(values)
    for what, given in (("names", names), ("groups", groups)):
        if given is not None and (isinstance(given, str) or len(given) != n):
            raise ValueError(f"Expected {n} {what}, one per image, but got {given!r:.200}")
    if not n:
        return
    # Few images at a time where their sums take more room than their pixels.
    step = max(_IMAGE_BINS // (s.num_classes * s.num_bins), 1) if s.per_image else n
    counted = []
    try:
        for first in range(0, n, step):
            some = slice(first, first + step)
            inner = [None if mask is None else mask[some] for mask in masks]
            counted.append(count(values[some], labels[some], inner, s, logits=not probs))
        faults = [batch.sums["faults"] for batches in counted for batch in batches]
        fine = not _can_look(values) or not any(found.any() for found in faults)
    except ValueError:  # labels out of range
        fine = False
    if not fine:
        check_batch(values, labels, s.ignore_index, probs=probs, multilabel=s.multilabel)
        raise ValueError("Expected values that can be counted, but some are no probabilities")
    # Nothing below can fail, so a batch is counted wholly or not at all.
    if not probs and meters[0]._like_probs is None:
        meters[0]._like_probs = _look_like_probs(values, multilabel=s.multilabel)
        if _can_look(values):
            meters[0]._warn_of_probs()
    for batches in counted:
        for meter, batch in zip(meters, batches, strict=True):
            if values.device.type != "cpu":
                meter._sums = moved(meter._sums, values.device)
            add_(meter._sums, batch.sums)
            if batch.images is not None:
                meter._images.append(batch.images)
    if s.per_image:
        for meter in meters:
            meter.names += [""] * n if names is None else map(str, names)
            meter.groups += [""] * n if groups is None else map(str, groups)


def _arranged(
    values: Tensor, labels: Tensor, inside: Sequence[Tensor | None], s: Settings
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The batch as it is counted, checked: masks have the labels' shape."""
    masks = [None if mask is None else mask.to(values.device) for mask in inside]
    if s.raters > 1:
        if len(labels) != s.raters:
            raise ValueError(f"Expected labels of {s.raters} raters, but got {tuple(labels.shape)}")
        # Raters become the last axis: a few rows of pixels can then be counted at a time.
        axis = 2 if s.multilabel else 1
        masks = [m if m is None else each_rater(values, m)[1].movedim(axis, -1) for m in masks]
        values, labels = each_rater(values, labels)
        values, labels = values.movedim(2, -1), labels.movedim(axis, -1)
    if s.multilabel:
        shape, labels = labels.shape, multilabel_labels(values, labels)
        masks = [m if m is None or m.shape != shape else m.view_as(labels) for m in masks]
    else:
        check_shapes(values, labels)
    if values.shape[1] != s.num_classes:
        raise ValueError(
            f"Expected {s.num_classes} classes in dimension 1, but got {tuple(values.shape)}"
        )
    for mask in masks:
        if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"Expected masks of bool and the labels' shape {tuple(labels.shape)}, "
                f"but got {mask.dtype} {tuple(mask.shape)}"
            )
    return values, labels, masks


def _look_like_probs(values: Tensor, *, multilabel: bool) -> Tensor:
    """() whether some of the (N, C, *S) logits are probabilities, by all that can be seen."""
    corner = values[(slice(_SOME), slice(None), *[slice(_SOME)] * (values.ndim - 2))]
    if multilabel:
        return ((corner >= 0) & (corner <= 1)).all() & (corner > 0).any()
    return is_distribution(corner, 1).all() & (corner.numel() > 0)


@functools.cache
def say_once(line: str) -> None:
    """Log a warning, if it is the first of these words in this process."""
    log.warning("%s", line)


def _can_look(tensor: Tensor) -> bool:
    """Whether looking at a value is free; on an accelerator it waits for all queued work."""
    return tensor.device.type == "cpu"
