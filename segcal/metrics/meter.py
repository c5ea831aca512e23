"""`CalibrationMeter`: counts batches of predictions, and gives a `Report`."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

import segcal
from segcal import distributed
from segcal.files import is_distribution
from segcal.metrics.counting import count
from segcal.metrics.faults import explain_labels, explain_multilabel_values, explain_values
from segcal.metrics.intervals import image_statistics
from segcal.metrics.report import Report
from segcal.metrics.state import (
    check_state,
    check_sums,
    decode_names,
    encode_names,
    encode_settings,
    of_this_version,
    read_state,
    write_state,
)
from segcal.metrics.sums import BatchSums, ImageSums, Settings, Sums, class_edges, fine_edges
from segcal.metrics.tables import BinTable, ClassHistogram, FineHistogram, Protocol
from segcal.pixels import check_shapes, countable, multilabel_labels

log = logging.getLogger(__name__)
_SOME = 8  # images, and pixels along each side, that are looked at to find probabilities
# Held while the sums of a meter are read or replaced, never while pixels are counted. One for all
# meters, because a meter that holds a lock could not be copied or sent to another process.
_LOCK = threading.RLock()


class CalibrationMeter:
    """Calibration and accuracy over any number of pixels: exact, streaming, mergeable.

    meter = CalibrationMeter(num_classes=21)
    for logits, labels in batches:
        meter.update(logits, labels)
    report = meter.compute()

    An update that fails does not change the meter. On the CPU it raises at once; on an
    accelerator, where a check would stall the queue, a batch with bad values adds nothing and
    `compute` raises. Several threads may update one meter.

    With `multilabel` the outputs are K sigmoids, and labels (N, K, *S) of 0, 1 or the ignore index:
    each pixel is K decisions, "class c or not", at p = 0.5. Scores of classes are of their own
    decisions, all other scores of the decisions of all classes; see docs/conventions.md.

    Args:
        num_classes: K; from 2 on, or from 1 on with `multilabel`.
        num_bins: B equal bins over [0, 1].
        ignore_index: the label that means "do not count this pixel".
        edge_rule: "right" for bins (lo, hi] with 0 in the first, "left" for [lo, hi) with 1 in
            the last. An edge k/B is rounded to the dtype of the probabilities.
        per_image: keep the sums of each image too, for intervals and for the worst images; about
            8·K·B bytes per image.
        class_names: K names for the report.
        region: what the counted pixels are, for the report; see `segcal.metrics.regions`.
        multilabel: the outputs are of K sigmoids.
    """

    def __init__(
        self,
        num_classes: int,
        num_bins: int = 15,
        ignore_index: int = 255,
        *,
        edge_rule: str = "right",
        per_image: bool = False,
        class_names: Sequence[str] | None = None,
        region: str = "all",
        multilabel: bool = False,
    ) -> None:
        names = None if class_names is None else tuple(class_names)
        self.settings = Settings(
            num_classes, num_bins, ignore_index, edge_rule, per_image, names, region, multilabel
        )
        self.reset()

    def reset(self) -> None:
        """Forget all pixels."""
        with _LOCK:
            s = self.settings
            self._sums = Sums.zeros(s.num_classes, s.num_bins, multilabel=s.multilabel)
            self._images: list[ImageSums] = []
            self._names: list[str] = []
            self._last: Sums | None = None  # of the last image, if it came alone
            self._synced = False
            self._like_probs: Tensor | None = None  # () bool of the first logits, once there were

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        names: Sequence[str] | None = None,
        continued: bool = False,
    ) -> None:
        """Count a batch of logits.

        Args:
            logits: (N, C, *S) of any floating dtype; the softmax is taken in float32 at least.
            labels: (N, *S) of an integer dtype; (N, C, *S) if `multilabel`.
            names: N names of the images; by default their running numbers. Only with `per_image`.
            continued: these are more pixels of the image before, such as the next slices of a
                volume that does not fit into memory; N is 1.

        Raises:
            ValueError: a wrong shape or dtype, labels out of range, or values that are not finite
                at a pixel that counts. The meter is then as it was.
        """
        update_together([self], logits, labels, names=names, continued=continued)

    def update_probs(
        self,
        probs: Tensor,
        labels: Tensor,
        *,
        names: Sequence[str] | None = None,
        continued: bool = False,
    ) -> None:
        """Count a batch of probabilities.

        Values must lie in [0, 1] and sum to 1 over the classes, up to the rounding of their dtype
        (the sum to 1e-4 at least; those of `multilabel` have no sum). They are not normalised. For
        NLL, a probability of 0 counts as the smallest normal number of the dtype.

        Args:
            probs: (N, C, *S) of any floating dtype.
            labels: (N, *S) of an integer dtype; (N, C, *S) if `multilabel`.
            names: as for `update`.
            continued: as for `update`.

        Raises:
            ValueError: as for `update`, or `probs` are no probabilities.
        """
        update_together([self], probs, labels, names=names, probs=True, continued=continued)

    def _add(self, batch: BatchSums, names: Sequence[str], *, continued: bool) -> None:
        with _LOCK:
            device = batch.sums.nll.device
            if device.type != "cpu":
                self._sums = self._sums.to(device)
            if continued:
                self._continue(batch)
                return
            batch.add_to(self._sums)
            self._last = batch.sums if len(names) == 1 else None
            if batch.images is not None:
                self._images.append(batch.images)
                self._names += names

    def _continue(self, batch: BatchSums) -> None:
        """Add more pixels of the last image."""
        assert self._last is not None  # `update_together` has looked
        known = self._last.images.clone()  # 1 if it had pixels before
        batch.add_to(self._sums)
        self._sums.images -= known * batch.sums.images  # it is one image still
        self._last.class_count += batch.sums.class_count
        self._last.images |= batch.sums.images
        if batch.images is not None:
            self._images[-1].add_(batch.images)
            self._images[-1].set_class_ace(self._last.class_count[None])

    def compute(self, *, resamples: int = 1000, seed: int = 0) -> Report:
        """The report of everything counted so far; scores are NaN if that is nothing.

        Args:
            resamples: of the bootstrap over images, if sums are kept per image.
            seed: of the bootstrap.

        Raises:
            ValueError: bad values were met on an accelerator.
        """
        s = self.settings
        with _LOCK:
            self._raise_faults()
            self._warn_of_probs()
            copy = self._sums.to("cpu", copy=True)
            by_image = self.image_sums()
            names = [name or f"image {i}" for i, name in enumerate(self._names)]
        images = None
        if s.per_image:
            images = image_statistics(by_image, names, resamples=resamples, seed=seed)
        sums = {name: tensor.numpy() for name, tensor in copy.tensors().items()}
        edges = np.arange(s.num_bins + 1) / s.num_bins
        by_class = sums["class_fine_correct"], sums["class_fine_wrong"]
        return Report(
            protocol=Protocol(
                num_classes=s.num_classes,
                num_bins=s.num_bins,
                edge_rule=s.edge_rule,
                ignore_index=s.ignore_index,
                average="decision" if s.multilabel else "pixel",
                region=s.region,
                images=int(sums["images"]),
                pixels=int(sums["top_count"].sum()),
                version=segcal.__version__,
                multilabel=s.multilabel,
            ),
            top=BinTable(edges, sums["top_count"], sums["top_hits"], sums["top_confidence"]),
            classes=BinTable(
                edges, sums["class_count"], sums["class_hits"], sums["class_confidence"]
            ),
            fine=FineHistogram(
                fine_edges().numpy(),
                sums["fine_correct"],
                sums["fine_wrong"],
                sums["fine_confidence"],
            ),
            class_fine=(
                ClassHistogram(class_edges().numpy(), *by_class) if len(by_class[0]) else None
            ),
            confusion=sums["confusion"],
            nll_sum=float(sums["nll"]),
            brier_sum=float(sums["brier"]),
            class_names=s.class_names,
            images=images,
        )

    @property
    def names(self) -> list[str]:
        """The names of the images whose sums are kept, in order; "" for those without a name."""
        return list(self._names)

    def sums(self) -> Sums:
        """The sums over all pixels, where the predictions are: the meter's own, not copies."""
        return self._sums

    def image_sums(self) -> ImageSums:
        """The sums of each image, in the order of `names`; none unless `per_image`."""
        s = self.settings
        empty = ImageSums.zeros(0, s.num_classes, s.num_bins, multilabel=s.multilabel)
        return ImageSums.cat([empty, *self._images])

    def _warn_of_probs(self) -> None:
        if self._like_probs is not None and bool(self._like_probs):
            _say_once(
                "the logits look like probabilities (at least 0, and of sum 1), and their softmax "
                "is counted; probabilities go to update_probs(), or into files as probs"
            )

    def _raise_faults(self) -> None:
        s = self.settings
        labels, logits, probs = self._sums.faults.tolist()
        if labels or logits or probs:
            raise ValueError(
                "Expected finite logits, probabilities that sum to 1 and labels in "
                f"0..{1 if s.multilabel else s.num_classes - 1} or {s.ignore_index}, but got "
                f"{logits} pixels with logits not finite, {probs} with no probabilities and "
                f"{labels} with labels out of range; their batches were not counted"
            )

    def __add__(self, other: CalibrationMeter) -> CalibrationMeter:
        """A new meter of the pixels of both."""
        if not isinstance(other, CalibrationMeter):
            return NotImplemented
        self.settings.require_equal(other.settings)
        merged = CalibrationMeter(**asdict(self.settings))
        with _LOCK:
            merged._sums = self._sums.to(self._sums.nll.device, copy=True)
            merged._sums.add_(other._sums)
            merged._images = self._images + other._images
            merged._names = self._names + other._names
            merged._synced = self._synced or other._synced
        return merged

    def sync(self) -> CalibrationMeter:
        """Sum over all ranks, in place: afterwards every rank holds the whole. Returns self.

        Every rank must call it, those without pixels too. Without a process group, and a second
        time, it does nothing. A synced meter takes no more updates until `reset`.
        """
        if self._synced or not distributed.is_distributed():
            return self
        device = distributed.communication_device()
        self._sums = self._sums.to(device)
        unknown = torch.tensor(int(not len(self._sums.class_fine_correct)), device=device)
        distributed.sum_(unknown)
        if unknown:  # to a rank that took over the state of an earlier version
            self._sums.drop_by_class()
        distributed.sum_(*self._sums.tensors().values())
        if self.settings.per_image:
            images = self.image_sums().tensors().items()
            self._images = [
                ImageSums(**{name: distributed.concatenate(t.to(device)) for name, t in images})
            ]
            text = distributed.concatenate(encode_names(self._names).to(device))
            self._names = decode_names(text.cpu())
        self._synced = True
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as plain tensors on the CPU that share nothing with the meter."""
        with _LOCK:
            state = self._sums.to("cpu", copy=True).tensors()
            for name, tensor in self.image_sums().tensors().items():
                state[f"image.{name}"] = tensor.clone()
            state["names"] = encode_names(self._names)
            state["synced"] = torch.tensor(self._synced)
        state["settings"] = encode_settings(self.settings)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, replacing what was counted.

        Raises:
            ValueError: other settings, not such a state, or sums that no pixels have. The meter is
            then as it was.
        """
        state = of_this_version(state)
        check_state(state, self.state_dict(), self.settings)
        names = decode_names(state["names"])
        images = {k[6:]: v.clone() for k, v in state.items() if k.startswith("image.")}
        if any(len(tensor) != len(names) for tensor in images.values()):
            raise ValueError(f"Expected sums of {len(names)} images, but got another number")
        sums = Sums(**{name: state[name].cpu() for name in self._sums.tensors()})
        by_image = ImageSums(**images)
        check_sums(sums, by_image, self.settings)
        with _LOCK:
            self._sums = sums.to("cpu", copy=True)
            self._images = [by_image]
            self._names = names
            self._last = None
            self._synced = bool(state["synced"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as npz (no pickle inside); `path` is never half-written."""
        write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibrationMeter:
        """The meter that `save` wrote.

        Raises:
            ValueError: the file is not a saved meter; the message names it.
        """
        try:
            settings, state = read_state(path)
            meter = cls(**asdict(settings))
            meter.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{path}: expected a saved CalibrationMeter: {error}") from None
        return meter


@torch.inference_mode(False)  # what a later part of an image adds to can be changed in any mode
@torch.no_grad()
def update_together(
    meters: Sequence[CalibrationMeter],
    values: Tensor,
    labels: Tensor,
    *,
    inside: Sequence[Tensor | None] | None = None,
    names: Sequence[str] | None = None,
    probs: bool = False,
    continued: bool = False,
) -> None:
    """Count one batch in several meters that differ in the pixels they count: one softmax for all.

    update_together([whole, edges], logits, labels, inside=[None, boundary(3)(labels)])

    Args:
        meters: of equal settings, but for class names and region.
        values: (N, C, *S) logits, as for `CalibrationMeter.update`.
        labels: (N, *S); (N, C, *S) for meters with `multilabel`.
        inside: for each meter, bool of the labels' shape: what it counts; None for all.
        names: of the N images.
        probs: the values are probabilities, as for `CalibrationMeter.update_probs`.
        continued: as for `CalibrationMeter.update`.

    Raises:
        ValueError: as for an update of one meter. All meters are then as they were.
    """
    inside = [None] * len(meters) if inside is None else inside
    if len(inside) != len(meters) or not meters:
        raise ValueError(
            f"Expected a mask or None for each meter, but got {len(inside)} for {len(meters)}"
        )
    s = meters[0].settings
    for meter in meters:
        alike = replace(meter.settings, class_names=s.class_names, region=s.region)
        s.require_equal(alike)
        if meter._synced:
            raise ValueError("Expected a meter that was not synced, but got one: reset() it first")
    values, labels = countable(values.detach(), labels)
    inside = [None if mask is None else mask.to(values.device) for mask in inside]
    if s.multilabel:
        given, labels = labels, multilabel_labels(values, labels)
        inside = [m if m is None or m.shape != given.shape else m.view_as(labels) for m in inside]
    else:
        check_shapes(values, labels)
    n, k = values.shape[:2]
    if k != s.num_classes:
        raise ValueError(
            f"Expected {s.num_classes} classes in dimension 1, but got {tuple(values.shape)}"
        )
    for mask in inside:
        if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"Expected masks of bool and the labels' shape {tuple(labels.shape)}, "
                f"but got {mask.dtype} {tuple(mask.shape)}"
            )
    if continued and (n != 1 or any(meter._last is None for meter in meters)):
        raise ValueError(
            f"Expected one image, after an update with one, to be continued, but got {n}"
        )
    if names is not None and (isinstance(names, str) or len(names) != n):
        raise ValueError(f"Expected {n} names, one per image, but got {names!r}")
    try:
        batches = count(values, labels, inside, s, logits=not probs)
    except ValueError as error:
        raise ValueError(
            explain_labels(values, labels, s.ignore_index, multilabel=s.multilabel)
        ) from error
    if _can_look(values) and any(batch.sums.faults.any() for batch in batches):
        why = explain_multilabel_values if s.multilabel else explain_values
        raise ValueError(why(values, labels, s.ignore_index, logits=not probs))
    # Nothing below can fail, so a batch is counted wholly or not at all.
    text = [""] * n if names is None else [str(name) for name in names]
    if not probs and meters[0]._like_probs is None:
        meters[0]._like_probs = _like_probs(values, multilabel=s.multilabel)
        if _can_look(values):
            meters[0]._warn_of_probs()
    with _LOCK:
        for meter, batch in zip(meters, batches, strict=True):
            meter._add(batch, text, continued=continued)


def _like_probs(logits: Tensor, *, multilabel: bool) -> Tensor:
    """() bool: whether the first pixels, of which there are a few, look like probabilities."""
    some = (slice(_SOME),)
    first = logits[some + (slice(None),) + some * (logits.ndim - 2)]
    if multilabel:
        return ((first >= 0) & (first <= 1)).all() & (first > 0).any()
    return is_distribution(first, 1).all() & (first.numel() > 0)


@functools.cache
def _say_once(line: str) -> None:
    log.warning("%s", line)


def _can_look(tensor: Tensor) -> bool:
    """Whether looking at a value is free; on an accelerator it waits for all queued work."""
    return tensor.device.type == "cpu"
