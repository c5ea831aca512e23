"""Several predictions of the same images as one: ensembles, folds, and views of one network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from segcal import distributed
from segcal.files import BadFile
from segcal.metrics.uncertainty import entropy
from segcal.posthoc import Calibrator
from segcal.sources.source import Batch, Choose, Source, digest

if TYPE_CHECKING:
    from segcal.data.shift import Shift
    from segcal.sources.network import LoaderSource

Pool = Literal["probs", "logits"]


@torch.inference_mode()
def pooled(batches: Iterable[Batch], pool: Pool = "probs") -> Batch:
    """The mean of the members' predictions of the same images, with how much they differ.

    Sums are float64, and one batch is in memory at a time. A single batch is returned as it is.

    Args:
        batches: one of each member, with equal names and labels.
        pool: take the mean of probabilities, or of logits (the geometric mean of probabilities).

    Raises:
        ValueError: the batches differ in names, shapes or labels.
    """
    iterator = iter(batches)
    first = next(iterator)
    batch = next(iterator, None)
    if batch is None:
        return first
    two_class = first.multilabel  # a sigmoid output is a distribution over absent and present
    total = torch.zeros_like(first.values, dtype=torch.float64)  # (N, C, *S)
    squares, logits = torch.zeros_like(total), torch.zeros_like(total) if pool == "logits" else None
    entropies: Tensor | float = 0.0
    dtype = torch.promote_types(first.values.dtype, torch.float32)

    def add(member: Batch) -> None:
        nonlocal entropies
        probs = member.probs.to(dtype)
        entropies = entropies + _entropy(probs, two_class).double()
        total.add_(probs)
        squares.addcmul_(probs, probs)
        if logits is not None:
            z = member.logits.to(dtype)
            logits.add_(z if two_class else z.log_softmax(1))

    add(first)
    first = replace(first, values=first.values.new_zeros(0))  # a part of it would keep the whole
    count = 1
    while batch is not None:
        _check_equal(first, batch, total.shape)
        add(batch)
        count += 1
        del batch
        batch = next(iterator, None)
    mean = total / count
    values = mean if logits is None else logits / count
    shown = mean if logits is None else values.sigmoid() if two_class else values.softmax(1)
    spread_of = squares.div_(count).sub_(mean.square()).clamp_min_(0)
    variance = spread_of if two_class else spread_of.gather(1, shown.argmax(1, True))[:, 0]
    information = (_entropy(mean.to(dtype), two_class) - entropies / count).clamp_min_(0)
    result = replace(
        first,
        values=values.to(dtype),
        spread={"mutual_information": information.float(), "variance": variance.float()},
    )
    if logits is not None:
        return result.with_logits(result.values)
    return replace(result, kind="sigmoid_probs" if two_class else "probs")


def _entropy(probs: Tensor, two_class: bool) -> Tensor:
    if two_class:  # of each of C sigmoid outputs
        return entropy(torch.stack([probs, 1 - probs], 1))
    return entropy(probs)


def _check_equal(first: Batch, other: Batch, shape: Sequence[int]) -> None:
    """Raise unless a batch is of the same images, classes and labels as the first."""
    names = list(other.names or first.names or ())
    if first.names is not None and names != list(first.names):
        raise ValueError(
            f"the members have different images: {_some(first.names)} and {_some(names)}"
        )
    name = names[0] if names else "a batch"
    if other.values.shape != shape or other.multilabel != first.multilabel:
        raise ValueError(
            f"the members have predictions of different shapes or kinds for {name}: "
            f"{tuple(shape)} and {tuple(other.values.shape)}"
        )
    ours, theirs = first.labels, other.labels
    if (ours is None) != (theirs is None) or (
        ours is not None and theirs is not None and not torch.equal(ours, theirs.to(ours.device))
    ):
        raise ValueError(
            f"the members have different labels for {name}: they must be predictions of the same "
            "data"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


class Members(Source):
    """The mean of several sources on the same images: an ensemble, or the folds of one.

    Predictions are aligned by the names of the images, and the labels must agree. Networks on the
    same data set work batch by batch; other sources are read one image at a time.

    Args:
        members: sources with equal classes.
        pool: take the mean of probabilities, or of logits.
        calibrators: one for each member, applied before the mean; None for a member as it is.
        name: what tables call it.

    Raises:
        ValueError: there are no members, or they differ in classes, ignored label or images.
    """

    def __init__(
        self,
        members: Sequence[Source],
        *,
        pool: Pool = "probs",
        calibrators: Sequence[Calibrator | None] = (),
        name: str = "ensemble",
    ) -> None:
        if not members:
            raise ValueError("an ensemble needs at least one member")
        if any(member.top_only for member in members):
            raise ValueError("members need all classes, not the top class of each pixel alone")
        if pool not in get_args(Pool):
            raise ValueError(f"pool must be probs or logits, but is {pool!r}")
        self.members, self.pool, self.name = tuple(members), pool, name
        self.calibrators = tuple(calibrators) or (None,) * len(self.members)
        if len(self.calibrators) != len(self.members):
            raise ValueError(
                f"{len(self.members)} members need as many calibrators, but there are "
                f"{len(self.calibrators)}"
            )
        first = self.members[0]
        for key in ("num_classes", "class_names", "ignore_index", "multilabel", "raters"):
            setattr(self, key, getattr(first, key))
            for other in self.members[1:]:
                if getattr(other, key) != getattr(first, key):
                    raise ValueError(
                        f"the members {first.name} and {other.name} differ in {key}: "
                        f"{getattr(first, key)} and {getattr(other, key)}"
                    )
        self.palette, self.num_images, self.group = first.palette, first.num_images, first.group
        listed = "".join(f"- {member.name}\n" for member in self.members)
        self.config = f"pool: {pool}\nmembers:\n{listed}"
        self.pools = len(self.members) > 1
        self.skipped = {}
        for member in self.members:
            self.skipped.update(member.skipped)
        self.names = [name for name in first.names if name not in self.skipped]
        self._places = [{n: i for i, n in enumerate(m.names)} for m in self.members]
        for member, places in zip(self.members, self._places, strict=True):
            known = {*self.names, *self.skipped}
            missing = [name for name in self.names if name not in places]
            more = [name for name in places if name not in known]
            if missing or (more and self.names):
                raise ValueError(
                    f"the members have different images: {_some(missing or more)} "
                    f"{'is not in' if missing else 'is only in'} {member.name}"
                )
        if self.names and len(self.names) < len(first.names):
            self.num_images = len(self.names)

    @property
    def _networks(self) -> list[LoaderSource]:
        """The members, if all are networks that give the same batches in the same order."""
        from segcal.sources.network import LoaderSource  # which uses `pooled`

        size = getattr(self.members[0], "batch_size", 0)
        found = [
            member
            for member in self.members
            if isinstance(member, LoaderSource)
            and list(member.names) == list(self.names)
            and getattr(member, "batch_size", 0) == size
        ]
        return found if len(found) == len(self.members) else []

    def __iter__(self) -> Iterator[Batch]:
        networks = self._networks
        keys = {network.input_key() for network in networks}
        if len(keys) == 1 and keys != {""}:
            for inputs in networks[0].inputs():  # read once for all members
                yield self._pooled(network.pooled(*inputs) for network in networks)
        elif networks or not self.names:
            leader, *others = (iter(member) for member in self.members)
            for first in leader:  # one batch after another, so that they are not all in memory
                yield self._pooled(chain([first], (next(other, None) for other in others)))
            if any(next(other, None) is not None for other in others):
                raise ValueError("the members have different numbers of images")
        else:
            for index in range(distributed.rank(), len(self.names), distributed.world_size()):
                try:
                    yield self[index]
                except BadFile as error:
                    if not any(getattr(member, "skip_bad", False) for member in self.members):
                        raise
                    self.skipped[self.names[index]] = str(error)

    def _pooled(self, batches: Iterable[Batch | None]) -> Batch:
        def calibrated(batch: Batch | None, calibrator: Calibrator | None) -> Batch:
            if batch is None:
                raise ValueError("the members have different numbers of images")
            return batch.calibrated(calibrator)

        return pooled(map(calibrated, batches, self.calibrators), self.pool)

    def __getitem__(self, index: int) -> Batch:
        name = self.names[index]
        each = zip(self.members, self._places, strict=True)
        return self._pooled(member[places[name]] for member, places in each)

    def image(self, index: int) -> np.ndarray | None:
        """That of the first member."""
        return self.members[0].image(self._places[0][self.names[index]])

    def affine(self, index: int) -> np.ndarray | None:
        """That of the first member."""
        return self.members[0].affine(self._places[0][self.names[index]])

    def with_members(
        self,
        members: Sequence[Source],
        name: str = "",
        calibrators: Sequence[Calibrator | None] = (),
    ) -> Members:
        """Other members, pooled in the same way, by default after the same calibrators."""
        calibrators, name = calibrators or self.calibrators, name or self.name
        found = Members(members, pool=self.pool, calibrators=calibrators, name=name)
        found.group = self.group
        return found

    def with_calibrators(self, calibrators: Sequence[Calibrator | None]) -> Members:
        """The same members, each after another calibrator."""
        return self.with_members(self.members, calibrators=calibrators)

    def only(self, indices: Sequence[int]) -> Members:
        """The same members on some of the images."""
        names = [self.names[i] for i in indices]
        each = zip(self.members, self._places, strict=True)
        return self.with_members(
            [member.only([places[n] for n in names]) for member, places in each]
        )

    def take(self, choose: Choose) -> Source:
        """The same members on the images that a function of their number chooses."""
        if not self._networks:
            return super().take(choose)
        return self.with_members([member.take(choose) for member in self.members])

    def shifted(self, shift: Shift) -> Members:
        """The same members on images that a shift changes."""
        members = [member.shifted(shift) for member in self.members]
        return self.with_members(members, f"{self.name}, {shift}")

    def on_images(self, folder: str | Path, *, skip_bad: bool = False) -> Members:
        """The same members on the images of a folder, which have no labels."""
        return self.with_members([m.on_images(folder, skip_bad=skip_bad) for m in self.members])

    def holdout(self) -> Members | None:
        """The same members on their hold-out, where all have the same one."""
        members = [member.holdout() for member in self.members]
        known = [member for member in members if member is not None]
        return self.with_members(known) if len(known) == len(members) else None

    def fingerprint(self) -> str:
        """A digest of those of the members and of their calibrators; empty if one is unknown."""
        known = [member.fingerprint() for member in self.members]
        return digest(self.pool, known, *map(learned, self.calibrators)) if all(known) else ""


def learned(calibrator: Calibrator | None) -> list[Any]:
    """What a calibrator learned, to five digits: another fit may differ in the last."""
    if calibrator is None:
        return []
    tensors = calibrator.state_dict().items()
    numbers = [(name, [f"{v:.5g}" for v in t.flatten().tolist()]) for name, t in tensors]
    return [calibrator.name, *numbers]
