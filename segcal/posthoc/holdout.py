"""A hold-out that is read batch after batch, and samples of it that only the seed changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from segcal import distributed
from segcal.pixels import Pixels, countable, flatten

LARGEST = 1e30  # a logit below its negative, such as float32's least or -inf, masks its class
_FOLDS = 3  # parts of the hold-out, each of which validates a fit on the others
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class HoldoutBatch:
    """One batch of a hold-out.

    Attributes:
        logits: (N, C, *S) as given.
        images: (N, channels, *) as given, or None.
        groups: N names of what the images belong to, or None.
        pixels: logits and labels, flat; K sigmoid outputs are folded into two-class problems.
    """

    logits: Tensor
    images: Tensor | None
    groups: Sequence[str] | None
    pixels: Pixels

    @property
    def values(self) -> Tensor:
        """(N, C, L) logits."""
        return flat(self.logits)

    @property
    def labels(self) -> Tensor:
        """(N, 1, L) labels, or (N, K, L) of sigmoid outputs; -1 where ignored."""
        n, length = len(self.logits), self.values.shape[2]
        known = self.pixels.target.masked_fill(~self.pixels.valid, -1)
        return known.reshape(n, -1, length) if n else known.new_zeros(0, 1, length)


def flat(logits: Tensor) -> Tensor:
    """(N, C, L) of logits (N, C, *S)."""
    return logits.flatten(2) if logits.ndim > 2 else logits.unsqueeze(2)


class Holdout:
    """A hold-out that can be read again and again, by all ranks together.

    Attributes:
        passes: how often it was read.
        num_classes: C, known after `survey`.
        image_channels: of the images beside the logits, 0 without; known after `survey`.
        count: the valid labels of all ranks; known after `survey`.
    """

    num_classes: int
    image_channels: int
    count: int

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        ignore_index: int | None = None,
        sync: bool = True,
        multilabel: bool = False,
    ) -> None:
        if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
            raise ValueError(
                "fit reads the batches more than once: pass a list or a DataLoader, "
                f"not a {type(batches).__name__}"
            )
        self.passes = 0
        self.multilabel = multilabel
        self.ranks = distributed.world_size() if sync else 1
        self.rank = distributed.rank() if sync else 0
        self._batches = batches
        self._ignore_index = ignore_index

    def __iter__(self) -> Iterator[HoldoutBatch]:
        self.passes += 1
        for given in self._batches:
            item, groups = given, None
            if isinstance(given, Sequence) and len(given) > 2 and isinstance(given[-1], list):
                *item, groups = given
            parts = [] if isinstance(item, Tensor) or not isinstance(item, Sequence) else item
            if len(parts) not in (2, 3) or not all(isinstance(part, Tensor) for part in parts):
                found = [type(part).__name__ for part in parts] or type(item).__name__
                raise ValueError(
                    "fit takes logits and labels, or batches of (logits, labels) or (logits, "
                    f"labels, images) tensors, but a batch is {found}"
                )
            logits, labels = countable(parts[0].detach(), parts[1])
            pixels = flatten(logits, labels, self._ignore_index, multilabel=self.multilabel)
            images = parts[2].detach() if len(parts) == 3 else None
            if groups is not None and len(groups) != len(logits):
                raise ValueError(f"Expected {len(logits)} groups, but got {len(groups)}")
            yield HoldoutBatch(logits, images, groups, pixels)

    def survey(self, visit: Callable[[HoldoutBatch], None]) -> None:
        """The first pass: check everything, and show every batch to `visit`.

        A fault on one rank is an error on all, so that none of them waits for the others.

        Raises:
            ValueError: logits that are not finite, or are probabilities; labels out of range;
                no valid pixel, or only one class of them.
        """
        fault, kinds, counts, logits_like = "", set(), Counter[int](), False
        try:
            for batch in self:
                channels = 0 if batch.images is None else batch.images.shape[1]
                kinds.add((batch.logits.shape[1], channels))
                pixels, valid = batch.pixels, batch.pixels.valid
                if outside := int(pixels.out_of_range):
                    raise ValueError(f"{outside} labels are neither classes nor the ignore index")
                low, high = pixels.dense.aminmax(dim=1)  # (N, L)
                if bad := int((~((low >= -LARGEST) & (high <= LARGEST)) & valid).sum()):  # NaN too
                    raise ValueError(
                        f"{bad} pixels of a batch have logits of NaN, infinity or past "
                        f"{LARGEST:g}; fit on finite logits whose classes are not masked"
                    )
                counts.update(dict(enumerate(pixels.target[valid].bincount().tolist())))
                logits_like = logits_like or not self._like_probabilities(pixels, low, high)
                visit(batch)
        except ValueError as error:
            fault = str(error)
        faults, *found = zip(*self.everyone((fault, kinds, counts, logits_like)), strict=True)
        for text in filter(None, faults):
            raise ValueError(text)
        kinds, total = set().union(*found[0]), sum(found[1], Counter[int]())
        if not kinds:
            raise ValueError("The hold-out has no batches of (logits, labels)")
        if len(kinds) > 1:
            listed = " and ".join(f"{c} classes with {i} image channels" for c, i in sorted(kinds))
            raise ValueError(f"All batches must have the same classes and images, but got {listed}")
        ((self.num_classes, self.image_channels),) = kinds
        self.count = total.total()
        if not total:
            raise ValueError("The hold-out has no valid pixels: all of it is ignored")
        if len(total) == 1:
            raise ValueError(
                f"The hold-out must have at least 2 classes, but all {self.count} valid pixels "
                f"are of class {next(iter(total))}"
            )
        if not any(found[2]):
            function, inverse = ("sigmoid", "logit") if self.multilabel else ("softmax", "log")
            raise ValueError(
                "The logits look like probabilities: all are in 0..1"
                + ("" if self.multilabel else " and sum to 1 over the classes")
                + f"; pass the network's output before the {function}, or "
                f"probabilities.{inverse}()"
            )

    def total(self, terms: Callable[[Pixels], Tensor]) -> Tensor:
        """Σ of terms(pixels) over all pixels and ranks, on the CPU: one more pass."""
        own, count = torch.zeros((), dtype=torch.float64), 0
        for batch in self:
            own = own + terms(batch.pixels).cpu()
            count += int(batch.pixels.valid.sum())
        totals, counts = zip(*self.everyone((own, count)), strict=True)
        if sum(counts) != self.count:
            raise ValueError(
                f"The hold-out must have the same {self.count} pixels whenever it is read, "
                f"but it has {sum(counts)} in pass {self.passes}"
            )
        return sum(totals, torch.zeros((), dtype=torch.float64))

    def everyone(self, value: T) -> list[T]:
        """The `value` of each rank; of this one alone without `sync`."""
        return [value] if self.ranks == 1 else distributed.gathered(value)

    def _like_probabilities(self, pixels: Pixels, low: Tensor, high: Tensor) -> bool:
        """Whether the valid pixels could all be probabilities, once rounded to half precision."""
        if self.multilabel:
            found = (pixels.dense[:, 1] >= 0) & (pixels.dense[:, 1] <= 1)
        else:
            found = (low >= 0) & (high <= 1.01)
            if found.any():
                found &= (pixels.dense.sum(1, dtype=torch.float64) - 1).abs() < 0.01
        return bool((found | ~pixels.valid).all())


class Draw:
    """Rows, such as pixels, drawn at random from a hold-out: at most `size` of all ranks.

    Every image has random numbers, seeded with its labels, and the rows with the smallest numbers
    are drawn. So neither the order of the images, nor batches, nor ranks change the sample. Images
    of equal labels are told apart by their order.
    """

    def __init__(self, holdout: Holdout, size: int, seed: int) -> None:
        self._holdout = holdout
        self._size = size
        self._seed = seed
        self._seen: Counter[bytes] = Counter()
        self._rows: list[tuple[Tensor, ...]] = []  # (numbers, keys, *columns) on the CPU or GPU
        self._limit = torch.inf  # rows with larger numbers are not drawn

    def offer(
        self,
        batch: HoldoutBatch,
        valid: Tensor,
        columns: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    ) -> None:
        """Draw from a batch.

        Args:
            batch: N images.
            valid: (N, R) bool, which of the R rows of each image may be drawn.
            columns: image (p,) and place 0..R-1 (p,) of some rows to what is kept of them.
        """
        images, numbers = self._numbers(batch, valid)
        groups = images
        if batch.groups is not None:
            groups = [_hash(name.encode()) for name in batch.groups]
        limit = self._limit
        if numbers.numel() > self._size:
            limit = min(limit, float(numbers.flatten().kthvalue(self._size).values))
        n, at = ((numbers < torch.inf) & (numbers <= limit)).nonzero(as_tuple=True)
        if not len(n):
            return
        device = batch.logits.device
        keys = torch.tensor([images, groups])[:, n]  # (2, p)
        rows = numbers[n, at].to(device), keys.T.to(device)
        self._rows.append((*rows, *columns(n.to(device), at.to(device))))
        if sum(len(numbers) for numbers, *_ in self._rows) > 1.25 * self._size:
            self._keep_smallest(self._size)

    def finish(self) -> tuple[Tensor, ...]:
        """(fold, *columns) of the rows of all ranks, in the order of their numbers.

        fold (rows,) is the part of the hold-out, 0..2, that a row belongs to. Rows of one group
        belong to one fold; of one image, if there is only one group; any, if only one image.
        """
        own = torch.zeros(0, dtype=torch.float64)
        if self._rows:
            self._keep_smallest(self._size)
            own = self._rows[0][0].cpu()
        least = torch.cat(self._holdout.everyone(own)).sort().values[: self._size]
        if self._rows:
            self._keep_smallest(int((own <= least[-1]).sum()))
        shares = [rows for rows in self._rows if len(rows[0])]
        if self._holdout.ranks > 1:
            device = shares[0][0].device if shares else torch.device("cpu")
            on_cpu = [[column.cpu() for column in rows] for rows in shares]
            everyone = [rows for share in self._holdout.everyone(on_cpu) for rows in share]
            shares = [tuple(column.to(device) for column in rows) for rows in everyone]
        numbers, keys, *columns = (torch.cat(column) for column in zip(*shares, strict=True))
        order = numbers.argsort(stable=True)
        place = torch.arange(len(order), device=order.device)
        for key in keys[order].T:  # of images, of groups
            kinds, found = key.unique(return_inverse=True)
            place = found if len(kinds) > 1 else place
        return place % _FOLDS, *(column[order] for column in columns)

    def _numbers(self, batch: HoldoutBatch, valid: Tensor) -> tuple[list[int], Tensor]:
        """The key of each image, and (N, R) numbers in 0..1, infinite where not valid."""
        images, numbers = [], torch.zeros(valid.shape, dtype=torch.float64)
        generator = torch.Generator()
        for labels, row in zip(batch.labels.cpu().numpy(), numbers, strict=True):
            digest = blake2b(labels.tobytes(), digest_size=16).digest()
            before, self._seen[digest] = self._seen[digest], self._seen[digest] + 1
            twin = before * self._holdout.ranks + self._holdout.rank if before else 0
            images.append(_hash(digest + str(twin).encode()))
            row.uniform_(generator=generator.manual_seed((images[-1] + self._seed) % 2**63))
        return images, numbers.masked_fill(~valid.cpu(), torch.inf)

    def _keep_smallest(self, count: int) -> None:
        numbers, *columns = (torch.cat(column) for column in zip(*self._rows, strict=True))
        order = numbers.argsort(stable=True)[:count]
        self._rows = [(numbers[order], *(column[order] for column in columns))]
        if len(order) == self._size:
            self._limit = float(numbers[order[-1]])


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big")


@dataclass(frozen=True, eq=False)
class PixelSample:
    """P pixels that were drawn from the hold-out of all ranks.

    Attributes:
        x: (C, P) float64 log-probabilities, or (K, P) logits of K sigmoid outputs.
        labels: (P,) classes; of sigmoid outputs (K, P) of 0, 1 or -1 for ignored labels.
        fold: (P,) the part of the hold-out that the pixel's image belongs to.
    """

    x: Tensor
    labels: Tensor
    fold: Tensor

    def __getitem__(self, index: Tensor) -> PixelSample:
        return PixelSample(self.x[:, index], self.labels[..., index], self.fold[index])

    @property
    def pixels(self) -> Pixels:
        """Logits and labels, flat: (1, C, P), or folded (K, 2, P)."""
        multilabel = self.labels.ndim == 2
        return flatten(self.x[None], self.labels[None], -1, multilabel=multilabel)

    def nll(self, logits: Tensor) -> float:
        """Σ over the labels of the NLL of calibrated logits (C, P) or (K, P)."""
        if self.labels.ndim == 1:
            return float(cross_entropy(logits[None], self.labels[None], reduction="sum"))
        known = self.labels >= 0
        y = self.labels[known].to(logits)
        return float(binary_cross_entropy_with_logits(logits[known], y, reduction="sum"))


class PixelSampler:
    """Draws at most `size` valid pixels, all with equal chance, from the batches it is shown.

    With K sigmoid outputs, a pixel is valid if any of its labels is, and is drawn with all.
    """

    def __init__(self, holdout: Holdout, size: int, seed: int) -> None:
        self._draw = Draw(holdout, size, seed)
        self._multilabel = holdout.multilabel

    def __call__(self, batch: HoldoutBatch) -> None:
        """Look at one batch."""
        values, labels = batch.values, batch.labels

        def columns(n: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            x = values[n, :, at].double()  # (p, C)
            return x if self._multilabel else x.log_softmax(1), labels[n, :, at]

        self._draw.offer(batch, (labels >= 0).any(1), columns)

    def finish(self) -> PixelSample:
        """The sample of all ranks."""
        fold, x, labels = self._draw.finish()
        labels = labels.T.contiguous() if self._multilabel else labels[:, 0]
        return PixelSample(x.T.contiguous(), labels, fold)
