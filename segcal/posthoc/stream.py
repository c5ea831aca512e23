"""Reads a hold-out: passes over its batches, with sums in float64 and over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segcal import distributed
from segcal.pixels import (
    Pixels,
    countable,
    cut,
    expected_labels,
    flatten,
    is_distribution,
)

# Values worked on at once: 2 MB of float64, which stays in a core's cache.
_BLOCK_VALUES = 1 << 18
LARGEST = 1e30  # a logit below its negative, such as float32's least or -inf, masks its class


@dataclass(frozen=True, eq=False)
class HoldoutBatch:
    """One batch of a hold-out.

    Attributes:
        logits: (N, C, *S) as given.
        images: (N, channels, *) as given, or None.
        numbers: (N,) the images' numbers in the whole hold-out, unique over ranks.
        pixels: logits and labels, flat; K sigmoid outputs are folded.
    """

    logits: Tensor
    images: Tensor | None
    numbers: range
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class PixelBlock:
    """Some pixels in float64: logits (n, C, l), target (n, l) and valid (n, l)."""

    logits: Tensor
    target: Tensor
    valid: Tensor

    def sum(self, *terms: Tensor) -> Tensor:
        """(len(terms),) the sum of each (n, l) term over the valid pixels."""
        return torch.stack([term.masked_fill(~self.valid, 0).sum() for term in terms])


@dataclass(frozen=True)
class Survey:
    """What the first pass found, over all ranks: classes, channels of the images, valid pixels.

    With K sigmoid outputs, `num_classes` is K and `count` is the number of valid labels.
    """

    num_classes: int
    image_channels: int
    count: int


class Total:
    """Running sums over the batches it is shown, of `terms`: pixels to a (size,) vector."""

    def __init__(self, terms: Callable[[Pixels], Tensor], size: int) -> None:
        self._terms = terms
        self._sums = torch.zeros(size + 1, dtype=torch.float64)  # the last counts pixels

    def __call__(self, batch: HoldoutBatch) -> None:
        """Add one batch."""
        self.add(batch.pixels)

    def add(self, pixels: Pixels) -> Total:
        """Add some pixels; returns self."""
        terms = self._terms(pixels)
        count = pixels.valid.sum(dtype=torch.float64)[None]
        self._sums = _plus(self._sums, torch.cat([terms, count]))
        return self

    def over_ranks(self, stream: Stream) -> tuple[Tensor, int]:
        """(size,) the sums on the CPU, and the number of valid pixels, over the stream's ranks."""
        sums = stream.sum_over_ranks(self._sums.cpu())
        return sums[:-1], int(sums[-1])

    def alone(self) -> Tensor:
        """(size,) the sums of this process, on the CPU."""
        return self._sums[:-1].cpu()


class Stream:
    """A hold-out that can be read again and again.

    Args:
        batches: a re-iterable of (logits, labels) or (logits, labels, images).
        ignore_index: the label that means "do not count this pixel".
        sync: sum over all ranks, each of which reads its own share of the hold-out.
        multilabel: the logits are of K sigmoid outputs.

    Attributes:
        passes: how often the batches were read.
    """

    def __init__(
        self, batches: Iterable[Any], *, ignore_index: int, sync: bool, multilabel: bool = False
    ) -> None:
        if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
            raise ValueError(
                "Expected batches that can be read more than once, such as a list or a "
                f"DataLoader, but got a {type(batches).__name__}"
            )
        self.passes = 0
        self._batches = batches
        self._ignore_index = ignore_index
        self._sync = sync
        self.multilabel = multilabel
        self._count: int | None = None

    def __iter__(self) -> Iterator[HoldoutBatch]:
        self.passes += 1
        ranks, rank = self._ranks()
        seen = 0
        for item in self._batches:
            logits, labels, images = _unpack(item)
            logits, labels = countable(logits, labels)
            pixels = flatten(logits, labels, self._ignore_index, multilabel=self.multilabel)
            # As in the share indices[rank::ranks], so that an image has the same number however
            # many ranks there are.
            numbers = range(seen * ranks + rank, (seen + len(logits)) * ranks + rank, ranks)
            seen += len(logits)
            yield HoldoutBatch(logits, images, numbers, pixels)

    def survey(self, visit: Callable[[HoldoutBatch], None]) -> Survey:
        """The first pass: check everything, and show every batch to `visit`.

        Raises:
            ValueError: logits that are not finite, or are probabilities; labels out of range;
                no valid pixel, or only one class of them.
        """
        shapes: set[tuple[int, int]] = set()
        counts = faults = torch.zeros(0, dtype=torch.float64)
        logits_like = False  # some pixel cannot be probabilities
        for batch in self:
            channels = 0 if batch.images is None else batch.images.shape[1]
            shapes.add((batch.logits.shape[1], channels))
            if len(shapes) > 1:
                raise ValueError(_describe_mixture(shapes))
            pixels = batch.pixels
            counts = _plus(counts, pixels.labels.bincount(minlength=pixels.num_classes).double())
            bad = pixels.out_of_range.new_zeros(1)
            for block in pixel_blocks(pixels):
                bad += block.sum(~(block.logits.abs().amax(1) <= LARGEST))  # NaN is not
                logits_like = logits_like or not self._like_probabilities(block)
            faults = _plus(faults, torch.cat([bad, pixels.out_of_range[None]]).double())
            visit(batch)
        num_classes, image_channels = self._agree(shapes)
        outcomes = 2 if self.multilabel else num_classes
        sums = torch.zeros(outcomes + 3, dtype=torch.float64)
        sums[: len(counts)] = counts.cpu()
        sums[outcomes : outcomes + len(faults)] = faults.cpu()
        sums[-1] = logits_like
        sums = self.sum_over_ranks(sums)
        self._check(sums[:outcomes], *sums[outcomes:].tolist())
        self._count = int(sums[:outcomes].sum())
        return Survey(num_classes, image_channels, self._count)

    def total(self, terms: Callable[[Pixels], Tensor], size: int) -> Tensor:
        """(size,) Σ of terms(pixels) over all pixels and ranks: one more pass over the batches."""
        total = Total(terms, size)
        for batch in self:
            total(batch)
        sums, count = total.over_ranks(self)
        if count != self._count:
            raise ValueError(
                f"Expected the same {self._count} pixels whenever the batches are read, "
                f"but got {count} in pass {self.passes}"
            )
        return sums

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """`sums` of this rank as those of all ranks; unchanged without `sync`."""
        if not self._sync or not distributed.is_distributed():
            return sums
        total = sums.to(distributed.communication_device(), copy=True)
        distributed.sum_(total)
        return total.to(sums.device)

    def concatenate(self, tensor: Tensor) -> Tensor:
        """The rows of every rank's `tensor`; unchanged without `sync`."""
        if not self._sync or not distributed.is_distributed():
            return tensor
        device = distributed.communication_device()
        return distributed.concatenate(tensor.to(device)).to(tensor.device)

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        """The first rank's `tensor`, of the same shape on every rank; unchanged without `sync`."""
        return self.sum_over_ranks(tensor if self._ranks()[1] == 0 else torch.zeros_like(tensor))

    def _ranks(self) -> tuple[int, int]:
        return (distributed.world_size(), distributed.rank()) if self._sync else (1, 0)

    def _agree(self, shapes: set[tuple[int, int]]) -> tuple[int, int]:
        """(classes, image channels), also on a rank that had no batches."""
        own = torch.tensor([[*shape] for shape in shapes], dtype=torch.int64).reshape(-1, 2)
        found = {(int(k), int(channels)) for k, channels in self.concatenate(own)}
        if not found:
            raise ValueError("Expected batches of (logits, labels), but got none")
        if len(found) > 1:
            raise ValueError(_describe_mixture(found))
        return found.pop()

    def _check(self, counts: Tensor, bad: float, outside: float, logits_like: float) -> None:
        total = int(counts.sum())
        if outside:
            raise ValueError(
                f"{expected_labels(len(counts), self._ignore_index)}, "
                f"but got others in {int(outside)} pixels"
            )
        if bad:
            raise ValueError(
                f"Expected finite logits, but {int(bad)} of {total} pixels have NaN, infinity or "
                f"values past {LARGEST:g}; fit on logits whose classes are not masked"
            )
        if not total:
            raise ValueError("Expected a hold-out with valid pixels, but all of it is ignored")
        if (counts > 0).sum() == 1:
            raise ValueError(
                "Expected a hold-out of at least 2 classes, but all "
                f"{total} valid pixels are of class {int(counts.argmax())}"
            )
        if not logits_like:
            sums, function, inverse = " and the classes of every pixel sum to 1", "softmax", "log"
            if self.multilabel:
                sums, function, inverse = "", "sigmoid", "logit"
            raise ValueError(
                f"Expected logits, but got probabilities: every value is in 0..1{sums}; pass the "
                f"network's output before the {function}, or probabilities.{inverse}()"
            )

    def _like_probabilities(self, block: PixelBlock) -> bool:
        """Whether the valid pixels could all be probabilities, once rounded to half precision."""
        if self.multilabel:
            z = block.logits[:, 1]
            found = (z >= 0) & (z <= 1)
        else:
            found = is_distribution(block.logits, 1, rounded_to=torch.float16)
        return bool((found | ~block.valid).all())


def sum_of_blocks(terms: Callable[[PixelBlock], Tensor], pixels: Pixels, size: int) -> Tensor:
    """(size,) Σ of terms(block) over the blocks of `pixels`."""
    total = torch.zeros(size, dtype=torch.float64, device=pixels.dense.device)
    for block in pixel_blocks(pixels):
        total += terms(block)
    return total


def pixel_blocks(pixels: Pixels) -> Iterator[PixelBlock]:
    """`pixels` in blocks of bounded size, in float64."""
    dense = pixels.dense
    for images, part in cut(dense.shape, max(1, _BLOCK_VALUES // dense.shape[1])):
        logits = dense[images, :, part].double()
        yield PixelBlock(logits, pixels.target[images, part], pixels.valid[images, part])


def _unpack(item: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if (
        not isinstance(item, Sequence)
        or len(item) not in (2, 3)
        or not all(isinstance(part, Tensor) for part in item)
    ):
        raise ValueError(
            "Expected batches of (logits, labels) or (logits, labels, images) tensors, "
            f"but got {_describe(item)}"
        )
    logits, labels = item[0].detach(), item[1]
    return logits, labels, item[2].detach() if len(item) == 3 else None


def _describe(item: Any) -> str:
    if not isinstance(item, tuple | list):
        return type(item).__name__
    return f"({', '.join(type(part).__name__ for part in item)})"


def _describe_mixture(shapes: set[tuple[int, int]]) -> str:
    found = " and ".join(f"{k} classes with {c} image channels" for k, c in sorted(shapes))
    return f"Expected every batch to have the same classes and image channels, but got {found}"


def _plus(total: Tensor, term: Tensor) -> Tensor:
    """Add, on the term's device, to a total that starts empty or as zeros on the CPU."""
    return term if not len(total) else total.to(term.device) + term
