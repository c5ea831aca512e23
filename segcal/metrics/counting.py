"""The place where a batch of pixels becomes sums: one bounded pass, the same on every device.

The batch is walked in chunks of at most `CHUNK` numbers, each seen as (K, P): K probabilities of P
pixels. So the working memory is a few megabytes however large the batch. Two observations make
the pass cheap. In each pixel fewer than B classes can have p_c above the first bin edge 1/B, and
mostly one or two do: only those are sorted into bins, and the first bin gets what remains. And a
hit involves the label's own class only, so hits are counted once a pixel, not once a class.

On an accelerator nothing here waits for the device: what the CPU selects by position is there
selected by sending the rest to spare slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.metrics.sums import FINE_BINS, OCTAVES, STEPS, ImageSums, Sums
from segcal.pixels import Pixels

CHUNK = 2**19  # probabilities worked on at a time
SPARE = 1024  # slots for what is not counted; many, so that atomic additions do not queue up


class Binning:
    """B equal bins over [0, 1]: (lo, hi] with 0 in the first, or [lo, hi) with 1 in the last.

    Args:
        num_bins: B.
        edge_rule: "right" for (lo, hi], "left" for [lo, hi).
        dtype: of the probabilities; the edges k/B are rounded to it, so that a probability
            written as k/B lies on the edge whatever its precision.
        device: of the probabilities.
    """

    def __init__(
        self, num_bins: int, edge_rule: str, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        edges = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
        wide = torch.promote_types(dtype, torch.float32)  # what the kernel computes in
        self.num_bins = num_bins
        self._edges = edges.to(dtype).to(wide).to(device)  # (B - 1,)
        self._first = float(self._edges[0]) if num_bins > 1 else float("inf")
        self._right = edge_rule == "right"

    def bin_of(self, probs: Tensor) -> Tensor:
        """Number of each probability's bin, 0..B-1."""
        return torch.bucketize(probs, self._edges, right=not self._right)

    def above_first(self, probs: Tensor) -> Tensor:
        """Whether each probability lies past the first bin."""
        return probs > self._first if self._right else probs >= self._first


@dataclass(frozen=True)
class _Chunk:
    values: Tensor  # (K, P) logits or probabilities, as given
    target: Tensor  # (P,) labels; 0 where ignored
    valid: Tensor  # (P,) False where ignored
    first: int  # number in the batch of the chunk's first image
    groups: int  # G, images told apart in the chunk, P / G pixels each


@dataclass(frozen=True)
class _Facts:
    """What is known of the P pixels of a chunk once their probabilities are."""

    probs: Tensor  # (K, P); 0 where ignored
    target: Tensor  # (P,) labels; 0 where ignored
    valid: Tensor  # (P,)
    group: Tensor | int  # (P,) which of the G images a pixel is of; 0 if there is one
    groups: int  # G
    confidence: Tensor  # (P,) largest probability
    predicted: Tensor  # (P,) its class; the first if there are several
    true_prob: Tensor  # (P,) probability of the label


@dataclass(frozen=True)
class _Table:
    count: Tensor  # (G, ..., B) int64
    hits: Tensor  # (G, ..., B) int64
    confidence: Tensor  # (G, ..., B) float64


def count(
    pixels: Pixels, num_bins: int, edge_rule: str, *, logits: bool, per_image: bool
) -> tuple[Sums, ImageSums | None]:
    """The sums of one batch, and those of each of its images if asked.

    Values that cannot be counted (not finite, or not probabilities) are reported in
    `Sums.faults`; the other sums then mean nothing.

    Args:
        pixels: the batch; `dense` holds logits, or probabilities if `logits` is False.
        num_bins: B.
        edge_rule: see `Binning`.
        logits: whether a softmax is still to be taken.
        per_image: whether to return `ImageSums`.
    """
    n, k, _ = pixels.dense.shape
    device, given = pixels.dense.device, pixels.dense.dtype
    dtype = torch.promote_types(given, torch.float32)
    binning = Binning(num_bins, edge_rule, dtype if logits else given, device)
    sums = Sums.zeros(k, num_bins, device)
    images = ImageSums.zeros(n, k, num_bins, device) if per_image else None
    sums.images += pixels.valid.any(1).sum()
    sums.faults[0] += pixels.out_of_range
    for chunk in _chunks(pixels, num_bins, per_image):
        sums.faults[1 if logits else 2] += (
            unusable(chunk.values, logits=logits) & chunk.valid
        ).sum()
        if device.type == "cpu" and sums.faults.any():
            break  # the caller raises
        _count_chunk(chunk, binning, logits, sums, images)
    return sums, images


def _chunks(pixels: Pixels, num_bins: int, per_image: bool) -> Iterator[_Chunk]:
    n, k, length = pixels.dense.shape
    room = max(CHUNK // k, 1)  # pixels a chunk
    if length >= room:
        for i in range(n):
            for s in range(0, length, room):
                part = slice(s, s + room)
                values = pixels.dense[i, :, part]
                yield _Chunk(values, pixels.target[i, part], pixels.valid[i, part], i, 1)
    elif length > 0:
        # Many small images a chunk. Told apart, each takes a (K, B) table beside its pixels.
        step = max(room // max(length, num_bins if per_image else 1), 1)
        for i in range(0, n, step):
            part = slice(i, i + step)
            values = pixels.dense[part].movedim(1, 0).flatten(1)
            target, valid = pixels.target[part], pixels.valid[part]
            groups = len(target) if per_image else 1
            yield _Chunk(values, target.flatten(), valid.flatten(), i, groups)


def unusable(values: Tensor, *, logits: bool) -> Tensor:
    """(P,) whether any of the (K, P) logits is not finite, or the values are no probabilities.

    Probabilities may leave 0..1, and their sum 1, by the rounding of their dtype.
    """
    low, high = values.amin(0), values.amax(0)
    if logits:
        return ~(low.isfinite() & high.isfinite())
    slack = 8 * torch.finfo(values.dtype).eps
    total = values.sum(0, dtype=torch.promote_types(values.dtype, torch.float32))
    inside = (low >= -slack) & (high <= 1 + slack) & ((total - 1).abs() <= max(1e-4, slack))
    return ~inside


def _count_chunk(
    chunk: _Chunk, binning: Binning, logits: bool, sums: Sums, images: ImageSums | None
) -> None:
    dtype = torch.promote_types(chunk.values.dtype, torch.float32)
    values = chunk.values.to(dtype)
    valid, target = chunk.valid, chunk.target.unsqueeze(0)
    probs = values.softmax(0) if logits else values.clamp(0, 1)
    probs.masked_fill_(~valid, 0)
    confidence = probs.amax(0)  # (P,)
    true_prob = probs.gather(0, target).squeeze(0)
    if logits:  # log-softmax of the label, from the largest logit: nothing underflows
        nll = values.amax(0) - values.gather(0, target).squeeze(0) - confidence.log()
    else:
        nll = -true_prob.clamp_min(torch.finfo(dtype).tiny).log()
    sums.nll += nll.masked_fill_(~valid, 0).sum(dtype=torch.float64)
    wide = probs.flatten().double()
    sums.brier += wide.dot(wide) - 2 * true_prob.sum(dtype=torch.float64) + valid.sum()

    group: Tensor | int = 0
    if chunk.groups > 1:
        per_group = valid.numel() // chunk.groups
        group = torch.arange(chunk.groups, device=valid.device).repeat_interleave(per_group)
    predicted = _first_equal(probs, confidence)
    facts = _Facts(
        probs, chunk.target, valid, group, chunk.groups, confidence, predicted, true_prob
    )
    _count_predictions(facts, sums)
    top = _top_table(facts, binning)
    classes = _class_table(facts, binning)
    for name, table in (("top", top), ("class", classes)):
        for part in ("count", "hits", "confidence"):
            getattr(sums, f"{name}_{part}").add_(getattr(table, part).sum(0))
    if images is not None:
        at = slice(chunk.first, chunk.first + chunk.groups)
        _count_images(facts, top, classes, images, at)


def _count_predictions(facts: _Facts, sums: Sums) -> None:
    """Count the confusion matrix and the fine histogram."""
    k, ignored = len(facts.probs), ~facts.valid
    slot = (facts.target * k + facts.predicted).masked_fill_(ignored, k * k)
    sums.confusion += _histogram(slot, k * k).view(k, k)
    correct = facts.predicted == facts.target
    slot = (_fine_bin(facts.confidence) * 2 + correct).masked_fill_(ignored, FINE_BINS * 2)
    fine = _histogram(slot, FINE_BINS * 2).view(FINE_BINS, 2)
    total = _histogram(slot, FINE_BINS * 2, facts.confidence).view(FINE_BINS, 2)
    sums.fine_wrong += fine[:, 0]
    sums.fine_correct += fine[:, 1]
    sums.fine_confidence += total.sum(1)


def _top_table(facts: _Facts, binning: Binning) -> _Table:
    """(G, B): the largest probability against whether its class is the label."""
    g, b = facts.groups, binning.num_bins
    slot = (facts.group * b + binning.bin_of(facts.confidence)) * 2
    slot = (slot + (facts.predicted == facts.target)).masked_fill_(~facts.valid, g * b * 2)
    table = _histogram(slot, g * b * 2).view(g, b, 2)
    total = _histogram(slot, g * b * 2, facts.confidence).view(g, b, 2)
    return _Table(table.sum(2), table[..., 1], total.sum(2))


def _class_table(facts: _Facts, binning: Binning) -> _Table:
    """(G, K, B): every class's probability against whether it is the label. Overwrites probs."""
    g, k, b = facts.groups, len(facts.probs), binning.num_bins
    slot = (facts.group * k + facts.target) * b + binning.bin_of(facts.true_prob)
    hits = _histogram(slot.masked_fill_(~facts.valid, g * k * b), g * k * b).view(g, k, b)

    above = binning.above_first(facts.probs)  # (K, P); ignored pixels are all 0, so not above
    value, slot = _entries(facts, above, binning)
    counts = _histogram(slot, g * k * b).view(g, k, b)
    totals = _histogram(slot, g * k * b, value).view(g, k, b)
    rest = facts.probs.masked_fill_(above, 0).view(k, g, -1)
    counts[..., 0] = facts.valid.view(g, 1, -1).sum(2) - counts.sum(2)
    totals[..., 0] = rest.sum(2, dtype=torch.float64).T
    return _Table(counts, hits, totals)


def _entries(facts: _Facts, above: Tensor, binning: Binning) -> tuple[Tensor, Tensor]:
    """The probabilities to sort into bins, and the slot (group, class, bin) each goes to."""
    g, k, b = facts.groups, len(facts.probs), binning.num_bins
    p = above.shape[1]
    if above.device.type == "cpu":
        at = above.flatten().nonzero().squeeze(1)
        value = facts.probs.flatten()[at]
        row = at.div(p, rounding_mode="floor")  # the class
        if isinstance(facts.group, Tensor):
            row = row + k * facts.group[at - row * p]
        return value, row * b + binning.bin_of(value)
    row = torch.arange(k, device=above.device).unsqueeze(1) + k * facts.group  # (K, 1) or (K, P)
    spare = g * k * b + torch.arange(p, device=above.device) % SPARE
    slot = torch.where(above, row * b + binning.bin_of(facts.probs), spare)
    return facts.probs.flatten(), slot.flatten()


def _count_images(
    facts: _Facts, top: _Table, classes: _Table, images: ImageSums, at: slice
) -> None:
    g, k = facts.groups, len(facts.probs)
    slot = (facts.group * k + facts.predicted).masked_fill_(~facts.valid, g * k)
    images.predicted[at] += _histogram(slot, g * k).view(g, k)
    slot = slot.masked_fill_(facts.predicted != facts.target, g * k)
    images.intersection[at] += _histogram(slot, g * k).view(g, k)
    images.truth[at] += classes.hits.sum(2)
    images.pixels[at] += facts.valid.view(g, -1).sum(1)
    images.top_gap[at] += top.confidence - top.hits
    images.class_gap[at] += classes.confidence - classes.hits


def _first_equal(probs: Tensor, confidence: Tensor) -> Tensor:
    """(P,) the first class whose probability is `confidence`: argmax, with ties defined.

    Several times faster than max() with indices: K - c is largest for the first class that fits.
    """
    k = len(probs)
    dtype = torch.uint8 if k < 256 else torch.int32
    rank = torch.arange(k, 0, -1, dtype=dtype, device=probs.device).unsqueeze(1)
    return k - ((probs == confidence) * rank).amax(0).long()


def _fine_bin(confidence: Tensor) -> Tensor:
    """(P,) number of the fine bin, from the leading bits of q = 1 - p."""
    if confidence.dtype == torch.float64:
        bits, mantissa, bias = (1 - confidence).view(torch.int64), 52, 1023
    else:
        bits, mantissa, bias = (1 - confidence).view(torch.int32).long(), 23, 127
    step = (bits >> (mantissa - STEPS.bit_length() + 1)) - (bias - OCTAVES) * STEPS
    return FINE_BINS - 1 - (step + 1).clamp(0, FINE_BINS - 1)


def _histogram(slot: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
    """(size,) how often each slot occurs, or the sum of its weights. Others are not counted."""
    dtype = torch.int64 if weight is None else torch.float64
    weight = None if weight is None else weight.double()
    if slot.device.type == "cpu":
        # The conversion matters without any slots: bincount then ignores the weight's dtype.
        return torch.bincount(slot, weight, minlength=size)[:size].to(dtype)
    out = torch.zeros(size + SPARE, dtype=dtype, device=slot.device)  # bincount waits for a GPU
    return out.scatter_add_(0, slot, torch.ones_like(slot) if weight is None else weight)[:size]
