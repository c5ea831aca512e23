"""The compiled passes over a batch: its pieces are shared among threads, and their sums added."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.counting.compiled import (
    BAD_LABELS,
    BAD_VALUES,
    Tables,
    count_pixels,
    sum_tempered,
)
from segcal.metrics.sums import (
    CLASS_BINS,
    FINE_BINS,
    MOST_CLASSES,
    BatchSums,
    ImageSums,
    Settings,
    Sums,
    bin_edges,
)
from segcal.pixels import Cut, Pixels, as_rows, cut, flatten, rounding_of

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PIECE_PIXELS = 2**17  # pixels
_WORTH_A_THREAD = 2**18  # values
_IMAGE_BINS = 2**20  # of the images of a piece together
_CONFUSION = 2**18  # cells; with more, the cell of every pixel is listed
_ANNOUNCED_AFTER = 1.0  # seconds of compiling
_FARTHEST = 2**31 - 1  # a step from one pixel to another that compiled code can take

# The dtypes that compiled code reads, and as what.
_READ_AS = {
    torch.float16: torch.uint16,
    torch.bfloat16: torch.uint16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def count_compiled(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None],
    settings: Settings,
    *,
    logits: bool,
) -> list[BatchSums]:
    """See `counting.count`."""
    num_bins, per_image = settings.num_bins, settings.per_image
    values = values if values.dtype in _READ_AS else values.float()
    _load_counting(values.dtype)
    n, k = values.shape[:2]
    rows, flat = as_rows(values, labels)
    masks = _Masks(inside, flat)
    compute = torch.promote_types(values.dtype, torch.float32)
    edges = bin_edges(num_bins, settings.edge_rule, compute if logits else values.dtype).numpy()
    rounding = rounding_of(values.dtype)
    largest = float(k) if logits else 1 / torch.finfo(compute).tiny

    def work(cuts: Sequence[Cut]) -> _Share:
        share = _Share(masks, n, k, num_bins, per_image=per_image)
        for images, part in cuts:
            target = flat[images, part].flatten(1).numpy().astype(np.int64, copy=False)  # (n, l)
            code = masks.code(target != settings.ignore_index, images, part)
            tables = share.tables(len(code))
            cells = np.empty(0 if tables.confusion.size else code.size, dtype=np.int64)
            counted = count_pixels(
                *_memory(rows[images, :, part].reshape(len(code), k, -1)),
                code.shape[1],
                values.dtype == torch.bfloat16,
                target.reshape(-1),
                code.reshape(-1),
                masks.groups,
                logits,
                rounding,
                largest,
                edges,
                per_image,
                tables,
                cells,
                share.seen[images],
            )
            if counted == BAD_LABELS:
                flatten(rows[images, :, part], flat[images, part], settings.ignore_index)  # raises
            if counted == BAD_VALUES:
                share.refused = True
                break
            share.add(tables, cells[:counted], images)
        return share

    most_images = max(_IMAGE_BINS // (k * num_bins * masks.num_groups), 1) if per_image else None
    share, *others = _in_threads(work, rows, most_images)
    for other in others:
        share.merge(other)
    return share.finish(logits=logits)


def sum_tempered_nll(pixels: Pixels, betas: Sequence[float]) -> Tensor:
    """(len(betas), 3) Σ over valid pixels of the NLL of softmax(β z), and its two derivatives in β.

    Args:
        pixels: on the CPU, with finite logits.
        betas: each the inverse of a temperature.
    """
    dense = pixels.dense if pixels.dense.dtype in _READ_AS else pixels.dense.float()
    _load_tempering(dense.dtype)
    series: list[list[float]] = []  # each β twice the one before
    for beta in sorted(betas):
        chain = next((chain for chain in series if chain[-1] * 2 == beta), None)
        if chain is None:
            series.append([beta])
        else:
            chain.append(beta)
    order = {beta: row for row, beta in enumerate(beta for chain in series for beta in chain)}
    starts = np.array([chain[0] for chain in series])
    squarings = np.array([len(chain) - 1 for chain in series])
    groups = np.array([-1, 0], dtype=np.int32)  # valid pixels are the group

    def work(cuts: Sequence[Cut]) -> NDArray[np.float64]:
        sums = np.zeros((len(order), 3))
        for images, part in cuts:
            piece = dense[images, :, part]
            sum_tempered(
                *_memory(piece),
                piece.shape[1],
                piece.shape[2],
                dense.dtype == torch.bfloat16,
                pixels.target[images, part].flatten().numpy(),
                pixels.valid[images, part].flatten().view(torch.uint8).numpy(),
                groups,
                starts,
                squarings,
                sums,
            )
        return sums

    sums = np.sum(_in_threads(work, dense), axis=0)
    return torch.from_numpy(sums[[order[beta] for beta in betas]])


def _in_threads(
    work: Callable[[Sequence[Cut]], _Result], rows: Tensor, most_images: int | None = None
) -> list[_Result]:
    """Cut an (N, K, rows, *) batch into pieces, and let each thread work on a share of them."""
    k = rows.shape[1]
    threads = max(min(torch.get_num_threads(), rows.numel() // _WORTH_A_THREAD), 1)
    pixels = min(PIECE_PIXELS, _FARTHEST // k, rows.numel() // (k * threads) + 1)
    cuts = cut(rows.shape, pixels, most_images=most_images)
    if threads == 1:
        return [work(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, (cuts[thread::threads] for thread in range(threads))))


@contextmanager
def _announced(dtype: torch.dtype) -> Iterator[None]:
    """Say so if what is done takes long; then it is compiling."""
    message = "compiling a pass over %s pixels: once on this machine"
    name = str(dtype).removeprefix("torch.")
    timer = threading.Timer(_ANNOUNCED_AFTER, log.info, (message, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_NONE = np.zeros(0, dtype=np.int64)
_NOWHERE = (_NONE, _NONE.astype(np.uint8), _NONE.astype(np.int32))  # target, code, groups


@functools.cache
def _load_counting(dtype: torch.dtype) -> None:
    """Have `count_pixels` ready for a dtype: from the disk, or compiled and written there."""
    memory = torch.zeros(0, dtype=dtype).view(_READ_AS[dtype]).numpy()
    edges = bin_edges(1, "right", torch.promote_types(dtype, torch.float32)).numpy()
    tables, seen = _new_tables(1, 1, 1, 1), np.zeros((0, 2), dtype=np.bool_)
    with _announced(dtype):
        count_pixels(
            *(memory, (0, 0, 0), 0, False, *_NOWHERE, True, (0.0, 0.0), 2.0, edges, False),
            *(tables, _NONE, seen),
        )


@functools.cache
def _load_tempering(dtype: torch.dtype) -> None:
    """Have `sum_tempered` ready for a dtype: from the disk, or compiled and written there."""
    memory = torch.zeros(0, dtype=dtype).view(_READ_AS[dtype]).numpy()
    with _announced(dtype):
        sum_tempered(
            *(memory, (0, 0, 0), 2, 0, False, *_NOWHERE), *(np.zeros(0), _NONE, np.zeros((0, 3)))
        )


def _memory(dense: Tensor) -> tuple[NDArray[np.generic], tuple[int, ...]]:
    """The memory from an (n, K, l) tensor's first number to its last, and the tensor's strides."""
    steps = [(n - 1) * step for n, step in zip(dense.shape, dense.stride(), strict=True)]
    if steps[0] + steps[2] > _FARTHEST:
        return _memory(dense.contiguous())
    line = dense.as_strided((1 + sum(steps),), (1,))
    return line.view(_READ_AS[dense.dtype]).numpy(), dense.stride()


class _Masks:
    """Several masks over the same pixels as disjoint groups, so that each pixel counts once.

    A code of one bit per mask says which masks hold a pixel, and pixels of equal code are a group.

    Args:
        inside: masks that can be reshaped like `labels`; None holds all pixels.
        labels: (N, rows, *).

    Attributes:
        num_groups: A, at least 1.
        groups: (256,) the group that a code means; -1 for code 0.
        members: which groups each mask has.
    """

    def __init__(self, inside: Sequence[Tensor | None], labels: Tensor) -> None:
        self._codes: NDArray[np.uint8] | None = None
        seen = np.ones(1, dtype=np.int64)
        if len(inside) > 1 or inside[0] is not None:
            codes = np.zeros(labels.shape, dtype=np.uint8)
            for i, mask in enumerate(inside):
                whole = np.uint8(1) if mask is None else mask.reshape(labels.shape).numpy()
                codes |= whole.view(np.uint8) << np.uint8(i)
            self._codes = codes
            seen = torch.from_numpy(codes).flatten().bincount(minlength=2).numpy()
            seen = np.flatnonzero(seen[1:]) + 1
        self.num_groups = max(len(seen), 1)
        self.groups = np.full(256, -1, dtype=np.int32)
        self.groups[seen] = np.arange(len(seen))
        self.members = [np.flatnonzero(seen >> i & 1) for i in range(len(inside))]

    def code(self, valid: NDArray[np.bool_], images: slice, part: slice) -> NDArray[np.uint8]:
        """(n, l) of a piece's pixels; 0 if no mask counts them, or if they are not `valid`."""
        code = valid.view(np.uint8)
        if self._codes is not None:
            code = code * self._codes[images, part].reshape(code.shape)
        return code


def _new_tables(images: int, groups: int, k: int, b: int, *, dense: bool = True) -> Tables:
    """Empty tables of K classes and B bins, with a confusion matrix if `dense`."""
    r, f = images * groups, FINE_BINS
    return Tables(
        classes=np.zeros((r, k, b, 2)),
        hits=np.zeros((r, k, b)),
        top=np.zeros((r, b, 2, 2)),
        predicted=np.zeros((r, k, 2)),
        fine=np.zeros((groups, f, 2, 2)),
        class_fine=np.zeros((groups, k if k <= MOST_CLASSES else 0, CLASS_BINS, 2)),
        confusion=np.zeros((groups, k * k if dense else 0), dtype=np.int64),
        scores=np.zeros((groups, 2)),
    )


_BY_IMAGE = ("classes", "hits", "top", "predicted")  # tables that tell images apart


class _Share:
    """What one thread counts.

    Args:
        masks: that pixels are counted for.
        images: N, of the batch.
        k: classes.
        b: bins.
        per_image: whether to keep sums of each image.

    Attributes:
        refused: whether pixels were met that cannot be counted.
        seen: (N, 1 + A) bool, whether an image has pixels that do not count, and of each group.
    """

    def __init__(self, masks: _Masks, images: int, k: int, b: int, *, per_image: bool) -> None:
        self.refused = False
        self.seen = np.zeros((images, 1 + masks.num_groups), dtype=np.bool_)
        self._masks, self._k, self._b = masks, k, b
        dense = masks.num_groups * k * k <= _CONFUSION
        self._total = _new_tables(1, masks.num_groups, k, b, dense=dense)
        self._cells = [np.zeros(0, dtype=np.int64)]
        self._images = [ImageSums.zeros(images, k, b) for _ in masks.members] if per_image else []
        self._class_counts = [torch.zeros_like(kept.class_gap) for kept in self._images]

    def tables(self, images: int) -> Tables:
        """Where to count a piece that has some of the images."""
        if not self._images:
            return self._total
        fresh = _new_tables(images, self._masks.num_groups, self._k, self._b, dense=False)
        return self._total._replace(**{name: getattr(fresh, name) for name in _BY_IMAGE})

    def add(self, tables: Tables, cells: NDArray[np.int64], at: slice) -> None:
        """Take in a piece that was counted: its tables, its cells, and the images it has."""
        self._cells.append(cells)
        if not self._images:
            return
        by_image = {}  # (n, A, ...)
        for name in _BY_IMAGE:
            table = getattr(tables, name)
            by_image[name] = table.reshape(-1, self._masks.num_groups, *table.shape[1:])
            getattr(self._total, name)[...] += by_image[name].sum(0)
        for i, (sums, groups) in enumerate(zip(self._images, self._masks.members, strict=True)):
            part = {name: torch.from_numpy(t[:, groups].sum(1)) for name, t in by_image.items()}
            top, classes, predicted = part["top"], part["classes"], part["predicted"]
            sums.pixels[at] += top[..., 0].sum((1, 2)).long()
            sums.top_gap[at] += top[..., 1].sum(2) - top[..., 1, 0]
            sums.class_gap[at] += classes[..., 1] - part["hits"]
            self._class_counts[i][at] += classes[..., 0]
            sums.truth[at] += part["hits"].sum(2).int()
            sums.predicted[at] += predicted.sum(2).int()
            sums.intersection[at] += predicted[..., 1].int()

    def merge(self, other: _Share) -> None:
        """Add what another thread counted."""
        self.refused |= other.refused
        self.seen |= other.seen
        self._cells += other._cells
        for name in Tables._fields:
            getattr(self._total, name)[...] += getattr(other._total, name)
        for images, more in zip(self._images, other._images, strict=True):
            for name, tensor in images.tensors().items():
                tensor += getattr(more, name)
        for count, more_count in zip(self._class_counts, other._class_counts, strict=True):
            count += more_count

    def finish(self, *, logits: bool) -> list[BatchSums]:
        """What to add to the meter of each mask."""
        return [self._batch_sums(i, logits) for i in range(len(self._masks.members))]

    def _batch_sums(self, mask: int, logits: bool) -> BatchSums:
        k, groups = self._k, self._masks.members[mask]
        tables = [torch.as_tensor(table[groups].sum(0)) for table in self._total]
        classes, hits, top, _, fine, class_fine, confusion, scores = tables
        class_count, top_count = classes[..., 0].long(), top[..., 0].sum(1).long()
        class_count[:, 0] = top_count.sum() - class_count.sum(1)
        faults = torch.zeros(3, dtype=torch.int64)
        faults[1 if logits else 2] = self.refused
        sums = Sums(
            class_count=class_count,
            class_hits=hits.long(),
            class_confidence=classes[..., 1],
            top_count=top_count,
            top_hits=top[:, 1, 0].long(),
            top_confidence=top[..., 1].sum(1),
            confusion=confusion.view(-1, k),  # no rows if cells are listed
            fine_correct=fine[:, 1, 0].long(),
            fine_wrong=fine[:, 0, 0].long(),
            fine_confidence=fine[..., 1].sum(1),
            class_fine_correct=class_fine[..., 1].long(),
            class_fine_wrong=class_fine[..., 0].long(),
            nll=scores[0],
            brier=scores[1],
            images=torch.tensor(self.seen[:, 1 + groups].any(1).sum()),
            faults=faults,
        )
        images = self._images[mask] if self._images else None
        if images is not None:
            images.set_class_ace(self._class_counts[mask])
        if confusion.numel():
            return BatchSums(sums, images)
        group, cells = np.divmod(np.concatenate(self._cells), k * k)
        counted = np.isin(group, groups)
        return BatchSums(sums, images, torch.from_numpy(cells), torch.from_numpy(counted))
