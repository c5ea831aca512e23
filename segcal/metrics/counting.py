"""Sums of a batch of pixels: compiled loops on the CPU, torch on other devices or without numba.

Both passes fill the same tables. In each pixel fewer than B classes can have a probability past
the first bin edge, and mostly one or two do: only those are sorted into bins, and the rest of a
row goes to the first bin.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.metrics import sums
from segcal.metrics.scores import Array
from segcal.metrics.sums import (
    CLASS_STEP,
    FINE_BINS,
    FINE_CELLS,
    FINE_STEPS,
    OCTAVES,
    BatchSums,
    Settings,
    Tables,
)
from segcal.pixels import (
    MOST_NLL,
    Cut,
    as_rows,
    cut,
    flatten,
    fold_multilabel,
    is_distribution,
    rounding_of,
)

log = logging.getLogger(__name__)
Masks = Sequence[Tensor | None]  # for each meter what it counts; None for all

_MOST_MASKS = 8  # counted in one walk, as the bits of a byte
_PIECE = 2**21  # values that the torch pass works on at a time
_BLOCK = 2**17  # values that the compiled pass works on at a time: they stay in the cache
_WORTH_A_THREAD = 2**18  # values


def count(
    values: Tensor, labels: Tensor, inside: Masks, settings: Settings, *, logits: bool
) -> list[BatchSums]:
    """The sums of one batch, for each mask in `inside`; probabilities are computed once.

    Values or labels that cannot be counted are reported in `Sums.faults`; all other sums of the
    batch are then 0.

    Args:
        values: (N, K, *S) logits, or probabilities if `logits` is False.
        labels: (N, *S); for sigmoid outputs (N, K, *S).
        inside: bool of the labels' shape each, what to count; None for all.
        settings: of the meter.
        logits: whether a softmax, or sigmoids, are still to be taken.
    """
    if settings.multilabel:
        two = replace(settings, num_classes=2, class_names=None, multilabel=False)
        problems = []  # each class is counted as a two-class problem
        for c in range(values.shape[1]):
            one = slice(c, c + 1)
            folded = fold_multilabel(values[:, one], labels[:, one], probs=not logits)
            masks = [None if mask is None else mask[:, c] for mask in inside]
            problems.append(count(*folded, masks, two, logits=logits))
        batches = [BatchSums.of_problems(parts) for parts in zip(*problems, strict=True)]
    else:
        one_pass = counting_pass(values.device.type)
        starts = range(0, len(inside), _MOST_MASKS)
        some = [inside[i : i + _MOST_MASKS] for i in starts]
        batches = [b for masks in some for b in one_pass(values, labels, masks, settings, logits)]
    valid = _arrayed(labels) != settings.ignore_index
    for mask, batch in zip(inside, batches, strict=True):
        counted = valid if mask is None else valid & _arrayed(mask)
        if settings.top_only:
            batch.forget_classes()
        batch.sums.images = torch.as_tensor(counted.reshape(len(counted), -1).any(1).sum())
        batch.neutralise()
    return batches


def _arrayed(tensor: Tensor) -> Any:
    """On the CPU as an array: after an operation in torch its threads wait busily."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def counting_pass(device_type: str) -> Callable[..., list[BatchSums]]:
    """The function that counts on a type of device."""
    return count_in_torch if device_type != "cpu" or compiled() is None else count_compiled


def count_in_torch(
    values: Tensor, labels: Tensor, inside: Masks, settings: Settings, logits: bool
) -> list[BatchSums]:
    """See `count`. Nothing here waits for the device."""
    (n, k), b, device = values.shape[:2], settings.num_bins, values.device
    compute = torch.promote_types(values.dtype, torch.float32)
    edges = sums.bin_edges(b, settings.edge_rule, compute if logits else values.dtype).to(device)
    fine = sums.fine_edges().to(device)
    rows, flat = as_rows(values, labels)
    zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)

    def add(table: Tensor, slot: Tensor, weight: Tensor, p: Tensor | None = None) -> None:
        """Add weights to the slots of a table; with p, its last axis is (Σ weight, Σ p)."""
        if table.numel():
            step = 1 if p is None else 2
            table.view(-1).scatter_add_(0, slot * step, weight)
            if p is not None:
                table.view(-1).scatter_add_(0, slot * step + 1, p.double())

    size = (n if settings.per_image else 1, k, b)
    tables = [Tables.zeros(zeros, *size) for _ in inside]
    faults = torch.zeros(len(inside), 3, dtype=torch.int64, device=device)
    cells: list[Tensor] = []
    counted: list[list[Tensor]] = [[] for _ in inside]
    for images, part in cut(rows.shape, max(_PIECE // k, 1)):
        piece = flatten(rows[images, :, part], flat[images, part], settings.ignore_index)
        wide, target = piece.dense.to(compute).movedim(1, 0).flatten(1), piece.target.flatten()
        if logits:
            probs, high, norm = softmax(wide, 0)
            best, true = wide.argmax(0), wide.gather(0, target[None])[0]
            # The log-softmax of the label, from the largest logit: nothing underflows.
            nll = high.double() - true.double() + norm.log()
            usable = nll <= MOST_NLL  # not so for NaN or +inf anywhere, and for -inf at the label
        else:
            probs = wide.clamp(0, 1)
            usable = is_distribution(wide, 0, rounded_to=values.dtype, partial=settings.top_only)
            best, true = probs.argmax(0), probs.gather(0, target[None])[0]
            nll = -true.clamp(min=torch.finfo(values.dtype).tiny).double().log()
        row = torch.arange(n, device=device)[images].repeat_interleave(piece.valid.shape[1])
        row = row if settings.per_image else torch.zeros_like(row)
        cells.append(target * k + best)
        for i, mask in enumerate(inside):
            inner = piece.valid
            if mask is not None:
                inner = inner & mask.reshape(flat.shape)[images, part].reshape(inner.shape)
            ok = inner.flatten() & usable
            counted[i].append(ok)
            faults[i, 0] += piece.out_of_range
            faults[i, 1 if logits else 2] += (inner.flatten() & ~usable).sum()
            t, weight, p = tables[i], ok.double(), probs.masked_fill(~ok, 0)
            top, hit, right = p.amax(0), p.gather(0, target[None])[0], (best == target).long()
            f = torch.bucketize(top.double(), fine[1:-1])
            add(t.top, (row * b + torch.bucketize(top, edges[1:-1])) * 2 + right, weight, top)
            add(t.hits, (row * k + target) * b + torch.bucketize(hit, edges[1:-1]), weight)
            add(t.predicted, (row * k + best) * 2 + right, weight)
            add(t.fine, f * 2 + right, weight, top)
            add(t.class_fine, (best * sums.CLASS_BINS + f // CLASS_STEP) * 2 + right, weight)
            add(t.confusion, cells[-1], weight)
            squares = p.double().square().sum(0) - 2 * hit.double() + 1
            t.scores[0] += nll.masked_fill(~ok, 0).sum()
            t.scores[1] += squares.masked_fill(~ok, 0).sum()

            above = p > edges[1]  # (K, P)
            slot = (row * k + torch.arange(k, device=device)[:, None]) * b
            slot = slot + torch.bucketize(p, edges[1:-1])
            # Zeros go anywhere: atomic additions to a few slots would queue up.
            anywhere = torch.arange(slot.numel(), device=device) % max(t.hits.numel(), 1)
            slot = torch.where(above, slot, anywhere.view_as(slot)).flatten()
            add(t.classes, slot, above.double().flatten(), p.masked_fill(~above, 0).flatten())
            below = p.double().masked_fill(above, 0).view(k, len(inner), -1).sum(2).T  # (n, K)
            at = images if settings.per_image else slice(0, 1)
            t.classes[at, :, 0, 1] += below if settings.per_image else below.sum(0)
    found = []
    for i in range(len(inside)):
        batch = tables[i].batch_sums(faults[i], per_image=settings.per_image)
        if cells and not tables[i].confusion.numel():
            batch.cells, batch.counted = torch.cat(cells), torch.cat(counted[i])
        found.append(batch)
    return found


def softmax(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities as they are counted, the largest logit, and Σ exp(z - max z) in float64.

    Args:
        values: logits in float32 or float64.
        dim: the classes; the second and third result are without this dimension.
    """
    high = values.amax(dim, keepdim=True)
    exp = values - high
    # That of numpy is also in the compiled pass: both have the same probabilities.
    exp = torch.from_numpy(np.exp(exp.numpy())) if exp.device.type == "cpu" else exp.exp_()
    norm = exp.sum(dim, keepdim=True, dtype=torch.float64)
    return exp.div_(norm.to(exp)), high.squeeze(dim), norm.squeeze(dim)


def count_compiled(
    values: Tensor, labels: Tensor, inside: Masks, settings: Settings, logits: bool
) -> list[BatchSums]:
    """See `count`. Threads share the blocks of pixels; at the end their tables are added."""
    passes = compiled()
    assert passes is not None
    load_logits, add = passes
    (n, k), b, per_image = values.shape[:2], settings.num_bins, settings.per_image
    compute = torch.promote_types(values.dtype, torch.float32)
    dtype = compute if logits else values.dtype  # of the probabilities
    edges = sums.bin_edges(b, settings.edge_rule, dtype).numpy()
    rows, flat = as_rows(values, labels)
    groups, members = _groups(inside, flat)
    num_groups = 1 + max((group for several in members for group in several), default=0)

    def work(blocks: Sequence[Cut]) -> tuple[list[Tables], list[Array], bool]:
        """Tables of each group, cells of the pixels if listed, and whether all blocks are fine."""
        size = (n if per_image else 1, k, b)
        tables = [Tables.zeros(np.zeros, *size) for _ in range(num_groups)]
        cells: list[Array] = []
        memory = np.empty(0, edges.dtype)
        for images, part in blocks:
            target = flat[images, part].reshape(-1).long().numpy()
            group, w = groups[images, part].reshape(-1).copy(), len(target)
            piece = np.moveaxis(rows[images, :, part].to(compute).numpy(), 1, 0)  # (K, n, rows, *)
            memory = memory if len(memory) >= k * w else np.empty(k * w, edges.dtype)
            shaped = memory[: k * w].reshape(piece.shape)
            shaped[...] = piece
            block = shaped.reshape(k, w)
            given = block, target, settings.ignore_index, group
            fine, best, distance = (
                load_logits(*given) if logits else _load_probs(*given, dtype, settings.top_only)
            )
            if logits:
                np.exp(block, out=block)
            first, images_here = (images.start, images.stop - images.start) if per_image else (0, 1)
            ends = np.arange(1, images_here + 1) * (w // images_here)
            columns: tuple[Array, ...]
            for number, of_group in enumerate(tables):
                pixels, columns, last = block, (group == number, target, best, distance), ends
                if num_groups > 1:  # the pixels of a group, side by side
                    at = np.flatnonzero(group == number)
                    pixels, last = np.take(block, at, 1), np.searchsorted(at, ends)
                    columns = tuple(column[at] for column in columns)
                if not fine or not add(pixels, *columns, edges, logits, first, last, of_group):
                    return tables, cells, False
            if not tables[0].confusion.size:
                kept = group >= 0
                cells.append(np.stack([group[kept], (target * k + best)[kept]]))
        return tables, cells, True

    blocks = cut(rows.shape, max(_BLOCK // k, 1))
    threads = max(min(torch.get_num_threads(), values.numel() // _WORTH_A_THREAD), 1)
    with ThreadPoolExecutor(threads) as pool:
        shares = list(pool.map(work, (blocks[thread::threads] for thread in range(threads))))
    listed = [cells for _, some, _ in shares for cells in some]
    group, cells = np.concatenate([np.zeros((2, 0), np.int64), *listed], 1)
    bad = sum(not fine for _, _, fine in shares)  # the meter looks for where
    found = []
    for member in members:
        parts = [tables[number] for tables, _, _ in shares for number in member]
        parts = parts or [Tables.zeros(np.zeros, n if per_image else 1, k, b)]
        one = Tables(*(torch.from_numpy(sum(same)) for same in zip(*parts, strict=True)))
        batch = one.batch_sums(torch.tensor([0, bad, 0]), per_image=per_image)
        if not one.confusion.numel():
            batch.cells = torch.from_numpy(cells)
            batch.counted = torch.from_numpy(np.isin(group, member))
        found.append(batch)
    return found


def _groups(inside: Masks, labels: Tensor) -> tuple[Array, list[list[int]]]:
    """Masks as disjoint groups of pixels, so that each pixel is counted once.

    Returns:
        The group of each pixel, -1 for none, in the labels' shape; and the groups of each mask.
    """
    if all(mask is None for mask in inside):
        return np.broadcast_to(np.int32(0), labels.shape), [[0]] * len(inside)
    code = np.zeros(labels.shape, np.uint8)
    for i, mask in enumerate(inside):
        held = True if mask is None else mask.reshape(labels.shape).numpy()
        code |= np.uint8(1 << i) * np.asarray(held, np.uint8)
    codes = np.flatnonzero(np.bincount(code.reshape(-1), minlength=256)[1:]) + 1
    group = np.full(256, -1, np.int32)
    group[codes] = np.arange(len(codes))
    members = [[g for g, c in enumerate(codes) if c >> i & 1] for i in range(len(inside))]
    return group[code], members


@functools.cache
def compiled() -> tuple[Callable[..., Any], Callable[..., bool]] | None:
    """`_load_logits` and `_add`, which numba compiles at their first call; None without numba."""
    try:
        import numba
    except ImportError as error:
        log.info("counting with torch, which is slower: numba cannot be imported (%s)", error)
        return None
    # Sums may be added in any order, so that they become vector code; NaN stays NaN.
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "nsz"},
    }

    try:  # kept beside this file or, where that cannot be written, in the user's cache
        njit = numba.njit(cache=True, **options)
        return njit(_load_logits), njit(_add)
    except RuntimeError:  # neither can be written
        njit = numba.njit(**options)
        return njit(_load_logits), njit(_add)


def _load_probs(block, target, ignored, group, given, partial):
    """As `_load_logits`, for probabilities whose dtype is `given`; the distance is -log p_y.

    See `is_distribution` for `partial`.
    """
    k, w = block.shape
    group[target == ignored] = -1
    y = np.where((group < 0) | (target < 0) | (target >= k), 0, target)
    below, off = rounding_of(given)
    total = block.sum(0, dtype=np.float64)
    fine = (block.min(0) >= -below) & (total >= (0 if partial else 1 - off)) & (total <= 1 + off)
    np.clip(block, 0, 1, out=block)
    true = block[y, np.arange(w)].astype(np.float64)
    distance = -np.log(np.maximum(true, torch.finfo(given).tiny))
    return ((fine & (y == target)) | (group < 0)).all(), block.argmax(0).astype(np.int32), distance


def _load_logits(block, target, ignored, group):
    """Make z - max z of a (K, P) block of logits.

    `group` (P,) gets -1 where the (P,) labels `target` are `ignored`.

    Returns:
        Whether all other labels are classes; (P,) the first class of the largest logit; and (P,)
        the distance max z - z_y.
    """
    k, w = block.shape
    none = np.int32(k)
    high = block[0].copy()
    best, distance = np.full(w, none), np.zeros(w)
    for c in range(1, k):
        row = block[c]
        for j in range(w):
            high[j] = row[j] if row[j] > high[j] else high[j]
    for j in range(w):
        if target[j] == ignored:
            group[j] = -1
        elif group[j] >= 0:
            if not 0 <= target[j] < k:
                return False, best, distance
            distance[j] = np.float64(high[j]) - np.float64(block[target[j], j])
    for c in range(k):
        row, this = block[c], np.int32(c)
        for j in range(w):
            tie = this if row[j] == high[j] else none
            best[j] = tie if tie < best[j] else best[j]
            row[j] -= high[j]
    return True, best, distance


def _add(block, counted, target, best, distance, edges, logits, first, ends, tables):
    """Add a (K, P) block of probabilities, or of exp(z - max z) if `logits`, to the tables.

    The block becomes probabilities, 0 where a pixel is not `counted` (P,). Its images end at the
    pixels `ends`; `first` is the row of the tables for the first of them. Returns whether all
    values that count can be used.
    """
    k, w = block.shape
    edge, one, zero = edges[1], np.uintp(1), block.dtype.type(0)
    scale = block.dtype.type(0.99 * (len(edges) - 1))  # p * scale is in no bin too high

    def bin_of(p):  # edges[b] < p <= edges[b + 1]; unsigned, as numba looks at signs of indices
        b = np.uintp(p * scale)
        while p > edges[b + one]:
            b += one
        return b

    total, norm, product = np.zeros(w), np.ones(w, block.dtype), 1.0
    if logits:
        for c in range(k):
            row = block[c]
            for j in range(w):
                total[j] += row[j]
        for j in range(w):  # not so for NaN or +inf anywhere, and for -inf at the label
            norm[j] = total[j]
            if counted[j] and not (total[j] >= 1 and distance[j] <= MOST_NLL):
                return False
    found, start, r = np.empty(w + 1, np.int64), 0, first
    for end in ends:
        here = counted[start:end]
        for c in range(k):
            row, table = block[c][start:end], tables.classes[r, c]
            below, squares, n = 0.0, 0.0, 0
            for j in range(end - start):
                p = row[j] / norm[start + j]
                row[j] = p if here[j] else zero
                wide = np.float64(row[j])
                squares += wide * wide
                below += wide if row[j] <= edge else 0.0
            for j in range(end - start):  # a branch takes twice as long
                found[n] = j
                n += row[j] > edge
            for i in range(n):
                b = bin_of(row[found[i]])
                table[b, 0] += 1
                table[b, 1] += row[found[i]]
            table[0, 1] += below
            tables.scores[1] += squares
        for j in range(start, end):
            if not counted[j]:
                continue
            y, c = np.uintp(target[j]), np.uintp(best[j])
            right, top, true = np.uintp(y == c), block[c, j], block[y, j]
            b = bin_of(top)
            tables.top[r, b, right, 0] += 1
            tables.top[r, b, right, 1] += top
            tables.hits[r, y, bin_of(true)] += 1
            tables.predicted[r, c, right] += 1
            p = np.float64(top)
            if p <= 1 - FINE_STEPS / FINE_CELLS:
                f = max(math.ceil(p * FINE_CELLS) - 1, 0)
            elif p > 1 - 2.0**-OCTAVES:
                f = FINE_BINS - 1
            else:  # FINE_STEPS bins to each halving of 1 - p
                part, power = math.frexp(1 - p)
                step = int(part * 2 * FINE_STEPS) - FINE_STEPS
                f = FINE_BINS - 2 - (power - 1 + OCTAVES) * FINE_STEPS - step
            tables.fine[f, right, 0] += 1
            tables.fine[f, right, 1] += top
            if tables.class_fine.shape[0]:
                tables.class_fine[c, f // CLASS_STEP, right] += 1
            if tables.confusion.shape[0]:
                tables.confusion[y, c] += 1
            tables.scores[0] += distance[j]
            tables.scores[1] += 1 - 2 * np.float64(true)
            if logits:
                product *= total[j]  # one logarithm for many pixels
                if product > 1e250:
                    tables.scores[0] += math.log(product)
                    product = 1.0
        start, r = end, r + 1
    tables.scores[0] += math.log(product)
    return True
