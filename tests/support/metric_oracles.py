"""Slow, literal definitions of the metrics: Python loops over pixels, sums that do not round."""

from fractions import Fraction
from math import fsum, log

import torch


def bin_of(p, num_bins, edge_rule="right", dtype=torch.float64):
    """The bin of a probability, from its definition. Edges are k/B in the dtype of p."""
    edges = [
        torch.tensor(k / num_bins, dtype=torch.float64).to(dtype).item()
        for k in range(num_bins + 1)
    ]
    for b in range(num_bins):
        lo, hi = edges[b], edges[b + 1]
        if edge_rule == "right" and (lo < p <= hi or (b == 0 and p == 0)):
            return b
        if edge_rule == "left" and (lo <= p < hi or (b == num_bins - 1 and p == 1)):
            return b
    raise AssertionError(p)


def tables(probs, labels, num_bins=15, ignore_index=255, edge_rule="right"):
    """Lists of (probability, hit) pairs of every bin: top label (B), and classes (K, B)."""
    k = probs.shape[1]
    top = [[] for _ in range(num_bins)]
    classes = [[[] for _ in range(num_bins)] for _ in range(k)]
    confusion = [[0] * k for _ in range(k)]
    for p, y in pixels(probs, labels, ignore_index):
        best = max(range(k), key=lambda c: (p[c], -c))
        confusion[y][best] += 1
        top[bin_of(p[best], num_bins, edge_rule, probs.dtype)].append((p[best], best == y))
        for c in range(k):
            classes[c][bin_of(p[c], num_bins, edge_rule, probs.dtype)].append((p[c], c == y))
    return top, classes, confusion


def pixels(probs, labels, ignore_index=255):
    """(list of K probabilities, label) of every pixel that counts."""
    k = probs.shape[1]
    rows = probs.movedim(1, -1).reshape(-1, k).tolist()
    for p, y in zip(rows, labels.reshape(-1).tolist(), strict=True):
        if y != ignore_index:
            yield p, y


def ece(bins):
    """Σ_b n_b/n |acc_b - conf_b|, in exact fractions."""
    n = sum(map(len, bins))
    total = Fraction(0)
    for b in filter(None, bins):
        confidence = sum((Fraction(p) for p, _ in b), Fraction(0)) / len(b)
        accuracy = Fraction(sum(hit for _, hit in b), len(b))
        total += Fraction(len(b), n) * abs(accuracy - confidence)
    return float(total)


def mce(bins):
    """max_b |acc_b - conf_b| over bins that are not empty."""
    return max(abs(fsum(p - hit for p, hit in b)) / len(b) for b in bins if b)


def nll(probs, labels):
    """Mean of -log p_y."""
    values = [-log(p[y]) for p, y in pixels(probs, labels)]
    return fsum(values) / len(values)


def brier(probs, labels):
    """Mean of Σ_c (p_c - 1[y = c])²."""
    values = [(q - (c == y)) ** 2 for p, y in pixels(probs, labels) for c, q in enumerate(p)]
    return fsum(values) / sum(1 for _ in pixels(probs, labels))


def miou(confusion):
    """Mean IoU over classes that occur in prediction or truth."""
    k = len(confusion)
    ious = []
    for c in range(k):
        union = sum(confusion[c]) + sum(row[c] for row in confusion) - confusion[c][c]
        if union:
            ious.append(Fraction(confusion[c][c], union))
    return float(sum(ious) / len(ious))
