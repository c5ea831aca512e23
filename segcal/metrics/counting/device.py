"""The counting pass in torch, for accelerators: nothing in it waits for the device.

A piece of the batch is seen as (K, P): K probabilities of P pixels. In each pixel fewer than B
classes can have a probability past the first bin edge. Only those are sorted into bins; the first
bin gets what remains, and pixels that do not count go to spare slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.metrics.sums import (
    CLASS_BINS,
    CLASS_STEP,
    FINE_BINS,
    FINE_CELLS,
    FINE_STEPS,
    OCTAVES,
    BatchSums,
    ImageSums,
    Settings,
    Sums,
    bin_edges,
)
from segcal.pixels import MOST_NLL, Pixels, as_rows, cut, flatten, is_distribution

PIECE_PROBS = 2**21  # probabilities worked on at a time
_SPARE = 1024  # slots for what is not counted; many, so that atomic additions do not queue up


@dataclass(frozen=True)
class _Predictions:
    """What is known of the P pixels of a piece once their probabilities are."""

    probs: Tensor  # (K, P); 0 where ignored
    target: Tensor  # (P,) labels; 0 where ignored
    confidence: Tensor  # (P,) largest probability
    predicted: Tensor  # (P,) class of the largest logit or probability; the first of equals
    true_prob: Tensor  # (P,) probability of the label
    nll: Tensor  # (P,) float64, -log of it
    usable: Tensor  # (P,) whether the values can be counted


@dataclass(frozen=True)
class _Table:
    """Bins of some probabilities, for each of G images."""

    count: Tensor  # (G, ..., B) int64
    hits: Tensor  # (G, ..., B) int64
    confidence: Tensor  # (G, ..., B) float64


def count_in_torch(
    values: Tensor,
    labels: Tensor,
    inside: Sequence[Tensor | None],
    settings: Settings,
    *,
    logits: bool,
) -> list[BatchSums]:
    """See `counting.count`. Where faults were met, all sums but those are 0."""
    n, k = values.shape[:2]
    num_bins, per_image = settings.num_bins, settings.per_image
    device = values.device
    compute = torch.promote_types(values.dtype, torch.float32)
    edges = bin_edges(num_bins, settings.edge_rule, compute if logits else values.dtype).to(device)
    rows, flat = as_rows(values, labels)
    masks = [None if mask is None else mask.reshape(flat.shape) for mask in inside]
    most_images = max(PIECE_PROBS // (k * num_bins), 1) if per_image else None
    found = [
        BatchSums(
            Sums.zeros(k, num_bins, device, confusion=False),
            ImageSums.zeros(n, k, num_bins, device) if per_image else None,
        )
        for _ in inside
    ]
    class_counts = [
        torch.zeros(n, k, num_bins, dtype=torch.int64, device=device) for _ in inside if per_image
    ]
    cells: list[Tensor] = []
    counted: list[list[Tensor]] = [[] for _ in inside]
    pixels = torch.zeros(len(inside), n, dtype=torch.int64, device=device)
    for images, part in cut(rows.shape, max(PIECE_PROBS // k, 1), most_images=most_images):
        piece = flatten(rows[images, :, part], flat[images, part], settings.ignore_index)
        seen = _predictions(piece, values.dtype, logits=logits)
        cells.append(seen.target * k + seen.predicted)
        for i, batch in enumerate(found):
            mask = None if (m := masks[i]) is None else m[images, part].reshape_as(piece.valid)
            valid = piece.valid if mask is None else piece.valid & mask  # (G, P / G)
            counted[i].append(valid.flatten())
            pixels[i, images] += valid.sum(1)
            batch.sums.faults[0] += piece.out_of_range
            batch.sums.faults[1 if logits else 2] += (valid.flatten() & ~seen.usable).sum()
            table = _tally(seen, valid if per_image else valid.view(1, -1), edges, batch, images)
            if per_image:
                class_counts[i][images] += table
    for i, batch in enumerate(found):
        batch.sums.images += (pixels[i] > 0).sum()
        if batch.images is not None:
            batch.images.pixels += pixels[i]
            batch.images.set_class_ace(class_counts[i])
        batch.cells = torch.cat(cells) if cells else flat.new_zeros(0, dtype=torch.int64)
        batch.counted = torch.cat(counted[i]) if cells else flat.new_zeros(0, dtype=torch.bool)
        batch.neutralise()
    return found


def _predictions(piece: Pixels, given: torch.dtype, *, logits: bool) -> _Predictions:
    wide = piece.dense.to(torch.promote_types(given, torch.float32))
    values = wide.movedim(1, 0).flatten(1)  # (K, P)
    target, valid = piece.target.flatten(), piece.valid.flatten()
    high, true = values.amax(0), values.gather(0, target.unsqueeze(0)).squeeze(0)
    if logits:
        exp = (values - high).exp_()
        norm = exp.sum(0, dtype=torch.float64)
        probs = exp.div_(norm.to(exp))
        # The log-softmax of the label, from the largest logit: nothing underflows.
        nll = high.double() - true.double() + norm.log()
        usable = nll <= MOST_NLL  # not so for NaN or +inf anywhere, and for -inf at the label
        predicted = _first_equal(values, high)
    else:
        probs = values.clamp(0, 1)
        usable = is_distribution(values, 0, rounded_to=given)
        predicted = _first_equal(probs, probs.amax(0))
        nll = -true.clamp(torch.finfo(values.dtype).tiny, 1).double().log()
    probs = probs.masked_fill(~(valid & usable), 0)
    return _Predictions(
        probs=probs,
        target=target,
        confidence=probs.amax(0),
        predicted=predicted,
        true_prob=probs.gather(0, target.unsqueeze(0)).squeeze(0),
        nll=nll,
        usable=usable,
    )


def _first_equal(values: Tensor, high: Tensor) -> Tensor:
    """(P,) the first class whose value is `high`: argmax, with ties defined; any class for NaN."""
    k = len(values)
    rank = torch.arange(k, 0, -1, device=values.device).unsqueeze(1)  # largest for the first
    return k - (rank * (values == high)).amax(0).clamp_(min=1)


def _tally(seen: _Predictions, valid: Tensor, edges: Tensor, batch: BatchSums, at: slice) -> Tensor:
    """Add the pixels that are `valid` (G, P / G) to the sums, and to the `at` images if kept.

    Returns:
        (G, K, B) pixels in the bins of each class.
    """
    flat = valid.flatten()
    sums, images = batch.sums, batch.images
    sums.nll += seen.nll.masked_fill(~flat, 0).sum()
    top = _top_table(seen, valid, edges)
    classes = _class_table(seen, valid, edges)
    squares = seen.probs.double().square().sum(0) - 2 * seen.true_prob.double() + 1
    sums.brier += squares.masked_fill(~flat, 0).sum()
    for name, table in (("top", top), ("class", classes)):
        for part in ("count", "hits", "confidence"):
            getattr(sums, f"{name}_{part}").add_(getattr(table, part).sum(0))

    correct = seen.predicted == seen.target
    bins, by_class = fine_bin(seen.confidence), sums.class_fine_wrong.numel()
    slot = (bins * 2 + correct).masked_fill(~flat, FINE_BINS * 2)
    fine = _histogram(slot, FINE_BINS * 2).view(FINE_BINS, 2)
    sums.fine_wrong += fine[:, 0]
    sums.fine_correct += fine[:, 1]
    confidence = _histogram(slot, FINE_BINS * 2, seen.confidence)
    sums.fine_confidence += confidence.view(FINE_BINS, 2).sum(1)
    if by_class:
        slot = (seen.predicted * CLASS_BINS + bins // CLASS_STEP) * 2 + correct
        slot = slot.masked_fill(~flat, by_class * 2)
        fine = _histogram(slot, by_class * 2).view(-1, CLASS_BINS, 2)
        sums.class_fine_wrong += fine[..., 0]
        sums.class_fine_correct += fine[..., 1]

    if images is not None:
        images.top_gap[at] += top.confidence - top.hits
        images.class_gap[at] += classes.confidence - classes.hits
        images.truth[at] += classes.hits.sum(2)
        g, k = len(valid), len(seen.probs)
        slot = (_group(valid) * k + seen.predicted).masked_fill(~flat, g * k)
        images.predicted[at] += _histogram(slot, g * k).view(g, k)
        slot = slot.masked_fill(~correct, g * k)
        images.intersection[at] += _histogram(slot, g * k).view(g, k)
    return classes.count


def bin_of(probs: Tensor, edges: Tensor) -> Tensor:
    """Number of each probability's bin, 0..B-1."""
    return torch.bucketize(probs, edges[1:-1])


def fine_bin(confidence: Tensor) -> Tensor:
    """Number of the fine bin of each confidence p; next to 1 from the leading bits of 1 - p."""
    q = 1 - confidence
    if confidence.dtype == torch.float64:
        bits, mantissa, bias = q.view(torch.int64), 52, 1023
    else:
        bits, mantissa, bias = q.view(torch.int32), 23, 127
    step = (bits >> (mantissa - FINE_STEPS.bit_length() + 1)).long()
    step = (FINE_BINS - 2 + (bias - OCTAVES) * FINE_STEPS - step).clamp_(max=FINE_BINS - 1)
    cell = (q * FINE_CELLS).long()
    return torch.where(cell < FINE_STEPS, step, (FINE_CELLS - 1 - cell).clamp_(min=0))


def _group(valid: Tensor) -> Tensor:
    """(P,) which of the G images each pixel of (G, P / G) is of."""
    return torch.arange(len(valid), device=valid.device).repeat_interleave(valid.shape[1])


def _top_table(seen: _Predictions, valid: Tensor, edges: Tensor) -> _Table:
    """(G, B): the largest probability against whether its class is the label."""
    g, b = len(valid), len(edges) - 1
    slot = (bin_of(seen.confidence, edges) + _group(valid) * b) * 2
    slot = (slot + (seen.predicted == seen.target)).masked_fill(~valid.flatten(), g * b * 2)
    table = _histogram(slot, g * b * 2).view(g, b, 2)
    total = _histogram(slot, g * b * 2, seen.confidence).view(g, b, 2)
    return _Table(table.sum(2), table[..., 1], total.sum(2))


def _class_table(seen: _Predictions, valid: Tensor, edges: Tensor) -> _Table:
    """(G, K, B): each class's probability against whether it is the label."""
    (k, p), g, b = seen.probs.shape, len(valid), len(edges) - 1
    group, flat = _group(valid), valid.flatten()
    slot = bin_of(seen.true_prob, edges) + (seen.target + group * k) * b
    hits = _histogram(slot.masked_fill(~flat, g * k * b), g * k * b).view(g, k, b)

    above = (seen.probs > edges[1]) & flat  # (K, P)
    row = torch.arange(k, device=flat.device).unsqueeze(1) + k * group
    spare = g * k * b + torch.arange(p, device=flat.device) % _SPARE
    slot = torch.where(above, row * b + bin_of(seen.probs, edges), spare).flatten()
    count = _histogram(slot, g * k * b).view(g, k, b)
    total = _histogram(slot, g * k * b, seen.probs.flatten()).view(g, k, b)
    count[..., 0] = valid.sum(1, keepdim=True) - count.sum(2)
    below = seen.probs.double().masked_fill(above | ~flat, 0)
    total[..., 0] = below.view(k, g, -1).sum(2).T
    return _Table(count, hits, total)


def _histogram(slot: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
    """(size,) how often each slot occurs, or the sum of its weights, in float64.

    Slots from `size` to `size + _SPARE - 1` are not counted. torch.bincount would wait for the
    device.
    """
    dtype = torch.int64 if weight is None else torch.float64
    out = torch.zeros(size + _SPARE, dtype=dtype, device=slot.device)
    weight = torch.ones_like(slot) if weight is None else weight.to(dtype)
    return out.scatter_add_(0, slot, weight)[:size]
