"""Sums of a batch of pixels: compiled loops on the CPU, torch on other devices or without numba.

Both passes fill the same tables. In most pixels one or two classes have a probability past the
first bin edge: only those are sorted into bins, and the rest goes to the first bin.
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
from segcal.pixels import MOST_NLL, flatten, fold_multilabel, is_distribution, rounding_of

log = logging.getLogger(__name__)
Masks = Sequence[Tensor | None]  # bool of the labels' shape for each meter; None counts all

_MOST_MASKS = 8  # counted in one walk, as the bits of a byte
_PIECE = 2**21  # values that the torch pass works on at a time
_BLOCK = 2**17  # values that the compiled pass works on at a time: they stay in the cache
_WORTH_A_THREAD = 2**18  # values


def count(
    values: Tensor, labels: Tensor, inside: Masks, settings: Settings, *, logits: bool
) -> list[BatchSums]:
    """The sums of one batch, for each mask in `inside`; probabilities are computed once.

    `values` are (N, K, *S) logits, or probabilities if `logits` is False; `labels` are (N, *S), or
    (N, K, *S) for sigmoid outputs. Values or labels that cannot be counted are reported under
    "faults"; all other sums of the batch are then 0.
    """
    k = values.shape[1]
    if settings.multilabel:  # each class is counted as a two-class problem
        two = replace(settings, num_classes=2, class_names=None, multilabel=False)
        problems = []
        for c in range(k):
            folded = fold_multilabel(values[:, [c]], labels[:, [c]], probs=not logits)
            masks = [None if mask is None else mask[:, c] for mask in inside]
            problems.append(count(*folded, masks, two, logits=logits))
        batches = [sums.join_problems(parts) for parts in zip(*problems, strict=True)]
    else:
        one_pass, batches = counting_pass(values.device.type), []
        for first in range(0, len(inside), _MOST_MASKS):
            some = inside[first : first + _MOST_MASKS]
            batches += one_pass(values, labels, some, settings, logits)
    sparse = not settings.multilabel and k * k > sums.MOST_CELLS
    cells = torch.stack([labels.flatten().long(), values.argmax(1).flatten()]) if sparse else None
    valid = _arrayed(labels) != settings.ignore_index
    for mask, (whole, each) in zip(inside, batches, strict=True):
        counted = valid if mask is None else valid & _arrayed(mask)
        whole["images"] = torch.as_tensor(counted.reshape(len(counted), -1).any(1).sum())
        bad = whole["faults"].sum() > 0
        for name, tensor in (*whole.items(), *(each or {}).items()):
            if name != "faults":
                tensor.masked_fill_(bad, 0)
        if cells is not None:
            weights = torch.as_tensor(counted).flatten() & ~bad
            whole["confusion"] = torch.sparse_coo_tensor(
                cells.where(weights, 0), weights.long(), (k, k), check_invariants=False
            )
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
    values, labels = _flat(values, labels)
    zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
    tables = [Tables.zeros(zeros, n, settings) for _ in inside]
    faults = torch.zeros(len(inside), 3, dtype=torch.int64, device=device)

    def add(table: Tensor, slot: Tensor, weight: Tensor, p: Tensor | None = None) -> None:
        """Add weights to the slots of a table; with p, its last axis is (Σ weight, Σ p)."""
        if table.numel():  # not so for a sparse confusion matrix
            step = 1 if p is None else 2
            table.view(-1).scatter_add_(0, slot * step, weight)
            if p is not None:
                table.view(-1).scatter_add_(0, slot * step + 1, p.double())

    for images, part in _pieces(labels.shape, max(_PIECE // k, 1)):
        piece = flatten(values[images, :, part], labels[images, part], settings.ignore_index)
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
        for i, (mask, t) in enumerate(zip(inside, tables, strict=True)):
            inner = piece.valid
            if mask is not None:
                inner = inner & mask.reshape(labels.shape)[images, part]
            ok = inner.flatten() & usable
            faults[i, 0] += piece.out_of_range
            faults[i, 1 if logits else 2] += (inner.flatten() & ~usable).sum()
            weight, p = ok.double(), probs.masked_fill(~ok, 0)
            top, hit, right = p.amax(0), p.gather(0, target[None])[0], (best == target).long()
            f = torch.bucketize(top.double(), fine[1:-1])
            add(t.top, (row * b + torch.bucketize(top, edges[1:-1])) * 2 + right, weight, top)
            add(t.hits, (row * k + target) * b + torch.bucketize(hit, edges[1:-1]), weight)
            add(t.predicted, (row * k + best) * 2 + right, weight)
            add(t.fine, f * 2 + right, weight, top)
            add(t.class_fine, (best * sums.CLASS_BINS + f // CLASS_STEP) * 2 + right, weight)
            add(t.confusion, target * k + best, weight)
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
    return [t.batch_sums(found, settings) for t, found in zip(tables, faults, strict=True)]


def _flat(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K, L) values and (N, L) labels; a copy where memory has no such view."""
    return values.reshape(*values.shape[:2], -1), labels.reshape(len(labels), -1)


def _pieces(shape: Sequence[int], pixels: int) -> list[tuple[slice, slice]]:
    """Cut (N, L) pixels into parts of one image, or several whole images, of at most `pixels`."""
    n, length = shape
    if length > pixels:
        starts = range(0, length, pixels)
        return [(slice(i, i + 1), slice(s, s + pixels)) for i in range(n) for s in starts]
    step = max(pixels // max(length, 1), 1)
    return [(slice(i, i + step), slice(0, length)) for i in range(0, n, step)]


def softmax(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities as they are counted, the largest logit, and Σ exp(z - max z) in float64.

    The classes of the float32 or float64 logits are along `dim`, which the last two results lack.
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
    shift, normalise, add = passes
    n, k = values.shape[:2]
    compute = torch.promote_types(values.dtype, torch.float32)
    dtype = compute if logits else values.dtype  # of the probabilities
    edges = sums.bin_edges(settings.num_bins, settings.edge_rule, dtype).numpy()
    values, labels = _flat(values, labels)
    masks = [None if mask is None else mask.reshape(labels.shape).numpy() for mask in inside]

    def work(blocks: Sequence[tuple[slice, slice]]) -> dict[int, Tables] | None:
        """Tables of the pixels that are in the same masks; bit i of a key stands for mask i.

        The result is None if some values or labels cannot be counted.
        """
        tables: dict[int, Tables] = {}
        for images, part in blocks:
            label = labels[images, part].reshape(-1).long().numpy()
            valid = label != settings.ignore_index
            inner = [valid if m is None else valid & m[images, part].reshape(-1) for m in masks]
            held = np.logical_or.reduce(inner)  # (P,) pixels that count for some mask
            label = np.where(held, label, 0)
            if label.min() < 0 or label.max() >= k:
                return None
            given = values[images, :, part].to(compute).movedim(1, 0).numpy()  # (K, n, L)
            block = np.array(given, order="C").reshape(k, -1)  # a copy, which becomes probabilities
            if logits:
                best, nll = shift(block, label)
                np.exp(block, out=block)
                nll += np.log(normalise(block, held))
                usable = nll <= MOST_NLL  # not so for NaN or +inf, and for -inf at the label
            else:
                best, nll, usable = _load_probs(block, label, dtype, settings.top_only)
                block[:, ~held] = 0
            if not usable[held].all():
                return None
            first, several = (images.start, given.shape[1]) if settings.per_image else (0, 1)
            ends = np.arange(1, several + 1) * (len(label) // several)
            code = np.zeros(len(label), np.uint8)
            for i, mask in enumerate(inner):
                code |= mask.view(np.uint8) << np.uint8(i)
            alone = len(masks) == 1
            for key in [1] if alone else (np.flatnonzero(np.bincount(code)[1:]) + 1).tolist():
                if key not in tables:
                    tables[key] = Tables.zeros(np.zeros, n, settings)
                table, counted = tables[key], code == key
                table.scores[0] += nll[counted].sum()
                if alone:
                    add(block, counted, label, best, edges, first, ends, table)
                else:  # these pixels, side by side
                    at = np.flatnonzero(counted)
                    columns = (column[at] for column in (counted, label, best))
                    last = np.searchsorted(at, ends)
                    add(np.take(block, at, 1), *columns, edges, first, last, table)
        return tables

    blocks = _pieces(labels.shape, max(_BLOCK // k, 1))
    threads = max(min(torch.get_num_threads(), values.numel() // _WORTH_A_THREAD), 1)
    with ThreadPoolExecutor(threads) as pool:
        shares = list(pool.map(work, (blocks[thread::threads] for thread in range(threads))))
    good = [share for share in shares if share is not None]
    faults = torch.tensor([0, len(shares) - len(good), 0])  # the meter looks for where
    batches = []
    for i in range(len(masks)):
        parts = [Tables.zeros(np.zeros, n, settings)]
        parts += [table for share in good for key, table in share.items() if key >> i & 1]
        total = (torch.from_numpy(sum(same)) for same in zip(*parts, strict=True))
        batches.append(Tables(*total).batch_sums(faults, settings))
    return batches


@functools.cache
def compiled() -> tuple[Callable[..., Any], ...] | None:
    """`_shift`, `_normalise` and `_add` as numba compiles them; None without numba."""
    try:
        import numba
    except ImportError as error:
        log.info("counting with torch, which is slower: numba cannot be imported (%s)", error)
        return None
    # Sums may be added in any order, so that they become vector code; NaN stays NaN.
    fast = {"contract", "reassoc", "nsz"}
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fast}
    functions = _shift, _normalise, _add
    try:  # kept beside this file or, where that cannot be written, in the user's cache
        return tuple(numba.njit(cache=True, **options)(function) for function in functions)
    except RuntimeError:  # neither can be written
        return tuple(numba.njit(**options)(function) for function in functions)


def _load_probs(block, label, given, partial):
    """As `_shift`, for (K, P) probabilities whose dtype is `given`: also (P,) which are usable."""
    below, off = rounding_of(given)
    total = block.sum(0, dtype=np.float64)
    usable = (block.min(0) >= -below) & (total >= (0 if partial else 1 - off)) & (total <= 1 + off)
    np.clip(block, 0, 1, out=block)
    true = block[label, np.arange(len(label))].astype(np.float64)
    nll = -np.log(np.maximum(true, torch.finfo(given).tiny))
    return block.argmax(0).astype(np.int32), nll, usable


def _shift(block, label):
    """Make z - max z of (K, P) logits: (P,) the first class of the largest, and max z - z_y."""
    k, w = block.shape
    high, best, distance = block[0].copy(), np.zeros(w, np.int32), np.empty(w)
    for c in range(1, k):
        row, this = block[c], np.int32(c)
        for j in range(w):
            best[j] = this if row[j] > high[j] else best[j]
            high[j] = row[j] if row[j] > high[j] else high[j]
    for j in range(w):
        distance[j] = np.float64(high[j]) - np.float64(block[label[j], j])
    for c in range(k):
        row = block[c]
        for j in range(w):
            row[j] -= high[j]
    return best, distance


def _normalise(block, held):
    """Divide a (K, P) block by its sums over classes, which are returned; 0 where not `held`."""
    k, w = block.shape
    total = np.zeros(w)
    for c in range(k):
        row = block[c]
        for j in range(w):
            total[j] += row[j]
    norm, zero = total.astype(block.dtype), block.dtype.type(0)
    for c in range(k):
        row = block[c]
        for j in range(w):
            p = row[j] / norm[j]
            row[j] = p if held[j] else zero
    return total


def _add(block, counted, label, best, edges, first, ends, tables):
    """Add (K, P) probabilities, which are 0 where a pixel is not `counted` (P,), to the tables.

    The images of the block end at the pixels `ends`; `first` is the table's row of the first.
    """
    edge, one = edges[1], np.uintp(1)
    scale = block.dtype.type(0.99 * (len(edges) - 1))  # p * scale is in no bin too high

    def bin_of(p):  # edges[b] < p <= edges[b + 1]; unsigned, as numba looks at signs of indices
        b = np.uintp(p * scale)
        while p > edges[b + one]:
            b += one
        return b

    found, start, r = np.empty(block.shape[1] + 1, np.int64), 0, first
    for end in ends:
        for c in range(len(block)):
            row, table = block[c][start:end], tables.classes[r, c]
            below, squares, n = 0.0, 0.0, 0
            for j in range(end - start):
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
            y, c = np.uintp(label[j]), np.uintp(best[j])
            right, top, true = np.uintp(y == c), block[c, j], block[y, j]
            b = bin_of(top)
            tables.top[r, b, right, 0] += 1
            tables.top[r, b, right, 1] += top
            tables.hits[r, y, bin_of(true)] += 1
            tables.predicted[r, c, right] += 1
            tables.scores[1] += 1 - 2 * np.float64(true)
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
            tables.class_fine[c, f // CLASS_STEP, right] += 1
            if tables.confusion.shape[0]:
                tables.confusion[y, c] += 1
        start, r = end, r + 1
