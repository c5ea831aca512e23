"""The place where a batch of pixels becomes sums: one bounded pass, the same on every device.

The batch is walked in chunks, each seen as (K, P): K probabilities of P pixels. So the working
memory is a few megabytes however large the batch, and the work stays in the cache. What makes the
pass cheap: in each pixel fewer than B classes can have p_c above the first bin edge 1/B, and
mostly one or two do. Only those "entries" are sorted into bins; the first bin gets what remains.
And a hit involves the label's class alone, so hits are counted once a pixel, not once a class.

On an accelerator nothing here waits for the device: what the CPU selects by position is there
selected by sending the rest to spare slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.files import is_distribution
from segcal.metrics import device
from segcal.metrics.binning import SPARE, Binning, fine_bin, histogram
from segcal.metrics.chunks import Chunk, Plan, Scratch, chunks, in_threads
from segcal.metrics.sums import FINE_BINS, ImageSums, Sums


@dataclass(frozen=True)
class _Facts:
    """What is known of the P pixels of a chunk once their probabilities are."""

    probs: Tensor  # (K, P); 0 where ignored
    target: Tensor  # (P,) labels; 0 where ignored
    valid: Tensor  # (P,)
    confidence: Tensor  # (P,) largest probability
    predicted: Tensor  # (P,) its class; the first if there are several
    true_prob: Tensor  # (P,) probability of the label
    nll: Tensor  # (P,) -log of it
    unusable: Tensor  # () pixels whose values are not finite, or no probabilities
    group: Tensor | int  # (P,) which of the G images a pixel is of; 0 if there is one
    groups: int  # G
    scratch: Scratch


@dataclass(frozen=True)
class _Overlap:
    intersection: Tensor  # (G, K) pixels predicted right, by class
    predicted: Tensor  # (G, K) pixels predicted as the class
    truth: Tensor  # (G, K) pixels labelled as the class


@dataclass(frozen=True)
class _Table:
    count: Tensor  # (G, ..., B) int64
    hits: Tensor  # (G, ..., B) int64
    confidence: Tensor  # (G, ..., B) float64


def count(
    values: Tensor,
    labels: Tensor,
    ignore_index: int,
    num_bins: int,
    edge_rule: str,
    *,
    logits: bool,
    per_image: bool,
) -> tuple[Sums, ImageSums | None]:
    """The sums of one batch, and those of each of its images if asked.

    Values that cannot be counted (not finite, or not probabilities) are reported in
    `Sums.faults`; the other sums then mean nothing.

    Args:
        values: (N, K, *S) logits, or probabilities if `logits` is False.
        labels: (N, *S).
        ignore_index: the label that means "do not count this pixel".
        num_bins: B.
        edge_rule: see `Binning`.
        logits: whether a softmax is still to be taken.
        per_image: whether to return `ImageSums`.
    """
    n, k = values.shape[:2]
    place, given = values.device, values.dtype
    dtype = torch.promote_types(given, torch.float32)
    binning = Binning(num_bins, edge_rule, dtype if logits else given, place)
    plan = Plan.of(values, table=num_bins if per_image else 1)

    def work(worker: int) -> tuple[Sums, ImageSums | None, Tensor]:
        sums = Sums.zeros(k, num_bins, place)
        images = ImageSums.zeros(n, k, num_bins, place) if per_image else None
        pixels = torch.zeros(n, dtype=torch.int64, device=place)  # of each image
        scratch = Scratch(plan.size, dtype, place)
        share = plan.share(worker)
        for chunk in chunks(values, labels, ignore_index, share, per_image=per_image):
            facts = _look(chunk, logits, scratch)
            sums.faults[0] += chunk.out_of_range
            sums.faults[1 if logits else 2] += facts.unusable
            if device.on_cpu(values) and sums.faults.any():
                break  # the caller raises
            pixels[chunk.images] += chunk.valid.view(
                chunk.images.stop - chunk.images.start, -1
            ).sum(1)
            _tally(facts, binning, sums, images, chunk.images)
        return sums, images, pixels

    workers = range(plan.workers)
    done = in_threads(work, workers) if device.on_cpu(values) else [work(w) for w in workers]
    sums, images, pixels = done[0]
    for more in done[1:]:
        sums.add_(more[0])
        if images is not None and more[1] is not None:
            images.add_(more[1])
        pixels += more[2]
    sums.images += (pixels > 0).sum()
    if images is not None:
        images.pixels += pixels
    return sums, images


def _look(chunk: Chunk, logits: bool, scratch: Scratch) -> _Facts:
    values = scratch.take("values", chunk.values).copy_(chunk.values)  # (K, P)
    probs = scratch.take("probs", values)
    target, valid = chunk.target.unsqueeze(0), chunk.valid
    high = values.amax(0)  # (P,)
    if logits:
        torch.softmax(values, 0, out=probs)
        usable = _finite(values, high)
    else:
        torch.clamp(values, 0, 1, out=probs)
        usable = is_distribution(values, 0, rounded_to=chunk.values.dtype)
    _clear(probs, valid, usable)
    confidence = probs.amax(0)
    true_prob = probs.gather(0, target).squeeze(0)
    if logits:  # log-softmax of the label, from the largest logit: nothing underflows
        nll = high - values.gather(0, target).squeeze(0) - confidence.log()
    else:
        nll = -true_prob.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return _Facts(
        probs=probs,
        target=chunk.target,
        valid=valid,
        confidence=confidence,
        predicted=_first_equal(probs, confidence, scratch),
        true_prob=true_prob,
        nll=nll,
        unusable=(valid & ~usable).sum(),
        group=chunk.group,
        groups=chunk.groups,
        scratch=scratch,
    )


def _finite(values: Tensor, high: Tensor) -> Tensor:
    """(P,) whether the columns of (K, P) logits are finite; `high` is the largest of each."""
    if device.on_cpu(values):
        flat = values.flatten()
        if flat.dot(flat).isfinite():  # then so is every one of them: a single fast pass
            return torch.ones((), dtype=torch.bool).expand(len(high))
    return values.amin(0).isfinite() & high.isfinite()


def _clear(probs: Tensor, valid: Tensor, usable: Tensor) -> None:
    """Set the columns of ignored pixels to 0, whatever they hold."""
    if device.on_cpu(probs):
        if valid.all():
            return
        if usable.all():
            probs.mul_(valid)  # ten times as fast as masked_fill_, but 0 · NaN would be NaN
            return
    probs.masked_fill_(~valid, 0)


def _first_equal(probs: Tensor, confidence: Tensor, scratch: Scratch) -> Tensor:
    """(P,) the first class whose probability is `confidence`: argmax, with ties defined.

    Several times faster than max() with indices: K - c is largest for the first class that fits.
    """
    k = len(probs)
    equal = scratch.take("equal", probs)
    if device.on_cpu(probs):  # numpy's comparison takes a fifth of torch's time
        np.equal(probs.numpy(), confidence.numpy(), out=equal.numpy())
    else:
        torch.eq(probs, confidence, out=equal)
    rank = torch.arange(k, 0, -1, dtype=torch.int32, device=probs.device).unsqueeze(1)
    if k < 256:
        return k - equal.view(torch.uint8).mul_(rank.to(torch.uint8)).amax(0).long()
    return k - (equal * rank).amax(0).long()


def _tally(
    facts: _Facts, binning: Binning, sums: Sums, images: ImageSums | None, at: slice
) -> None:
    """Add a chunk's pixels to the sums, and to the `at` images."""
    sums.nll += facts.nll.masked_fill_(~facts.valid, 0).sum(dtype=torch.float64)
    overlap = _add_predictions(facts, sums)
    top = _top_table(facts, binning)
    classes = _class_table(facts, binning, sums)
    for name, table in (("top", top), ("class", classes)):
        for part in ("count", "hits", "confidence"):
            getattr(sums, f"{name}_{part}").add_(getattr(table, part).sum(0))
    if images is not None:
        images.top_gap[at] += top.confidence - top.hits
        images.class_gap[at] += classes.confidence - classes.hits
        for name, counts in vars(overlap).items():
            getattr(images, name)[at] += counts


def _add_predictions(facts: _Facts, sums: Sums) -> _Overlap:
    """Add the confusion matrix and the fine histogram; return the overlap in each group."""
    g, k, ignored = facts.groups, len(facts.probs), ~facts.valid
    correct = facts.predicted == facts.target
    slot = (fine_bin(facts.confidence) * 2 + correct).masked_fill_(ignored, FINE_BINS * 2)
    fine = histogram(slot, FINE_BINS * 2).view(FINE_BINS, 2)
    sums.fine_wrong += fine[:, 0]
    sums.fine_correct += fine[:, 1]
    total = histogram(slot, FINE_BINS * 2, facts.confidence)
    sums.fine_confidence += total.view(FINE_BINS, 2).sum(1)

    slot = (facts.target * k + facts.predicted).masked_fill_(ignored, k * k)
    confusion = histogram(slot, k * k).view(k, k)
    sums.confusion += confusion
    if g == 1:
        return _Overlap(confusion.diagonal()[None], confusion.sum(0)[None], confusion.sum(1)[None])
    predicted = (facts.group * k + facts.predicted).masked_fill_(ignored, g * k)
    truth = (facts.group * k + facts.target).masked_fill_(ignored, g * k)
    right = predicted.masked_fill(~correct, g * k)
    return _Overlap(*(histogram(slot, g * k).view(g, k) for slot in (right, predicted, truth)))


def _top_table(facts: _Facts, binning: Binning) -> _Table:
    """(G, B): the largest probability against whether its class is the label."""
    g, b = facts.groups, binning.num_bins
    slot = (binning.bin_of(facts.confidence) + facts.group * b) * 2
    slot += facts.predicted == facts.target
    slot.masked_fill_(~facts.valid, g * b * 2)
    table = histogram(slot, g * b * 2).view(g, b, 2)
    total = histogram(slot, g * b * 2, facts.confidence).view(g, b, 2)
    return _Table(table.sum(2), table[..., 1], total.sum(2))


def _class_table(facts: _Facts, binning: Binning, sums: Sums) -> _Table:
    """(G, K, B): each class's probability against whether it is the label; adds Brier's sum."""
    g, k, b = facts.groups, len(facts.probs), binning.num_bins
    slot = binning.bin_of(facts.true_prob) + (facts.target + facts.group * k) * b
    hits = histogram(slot.masked_fill_(~facts.valid, g * k * b), g * k * b).view(g, k, b)

    above = facts.scratch.take("above", facts.probs)  # (K, P)
    binning.above_first(facts.probs, out=above)  # never so at ignored pixels, which are 0
    value, slot, at = _entries(facts, above, binning)
    counts = histogram(slot, g * k * b).view(g, k, b)
    totals = histogram(slot, g * k * b, value).view(g, k, b)
    counts[..., 0] = facts.valid.view(g, 1, -1).sum(2) - counts.sum(2)

    wide = facts.scratch.take("wide", facts.probs).copy_(facts.probs).flatten()
    sums.brier += wide.dot(wide) - 2 * facts.true_prob.sum(dtype=torch.float64) + facts.valid.sum()
    if at is None:
        wide.masked_fill_(above.flatten(), 0)
    else:
        wide.numpy()[at] = 0  # half the time of torch's index_fill_
    totals[..., 0] = wide.view(k, g, -1).sum(2).T
    return _Table(counts, hits, totals)


def _entries(
    facts: _Facts, above: Tensor, binning: Binning
) -> tuple[Tensor, Tensor, NDArray[np.int64] | None]:
    """The probabilities past the first bin: their values, slots (G, K, B), and positions.

    On an accelerator all probabilities are returned, without positions; those in the first bin
    have spare slots.
    """
    g, (k, p), b = facts.groups, above.shape, binning.num_bins
    if device.on_cpu(above):
        at = np.flatnonzero(above.numpy())  # a fifth of torch's time
        value = facts.probs.flatten().index_select(0, torch.from_numpy(at))
        ends = np.searchsorted(at, np.arange(k + 1) * p)  # `at` is sorted, class by class
        row = torch.from_numpy(np.repeat(np.arange(k), np.diff(ends)))
        if isinstance(facts.group, Tensor):
            row += k * facts.group.index_select(0, torch.from_numpy(at) - row * p)
        return value, binning.bin_of(value).add_(row, alpha=b), at
    row = torch.arange(k, device=above.device).unsqueeze(1) + k * facts.group  # (K, 1) or (K, P)
    spare = g * k * b + torch.arange(p, device=above.device) % SPARE
    slot = torch.where(above, row * b + binning.bin_of(facts.probs), spare)
    return facts.probs.flatten(), slot.flatten(), None
