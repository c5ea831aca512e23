"""The paper's formulas written out as slow literal loops over Python floats."""

from __future__ import annotations

import math

Row = list[float]


def softmax(row: Row) -> Row:
    top = max(row)
    powers = [math.exp(z - top) for z in row]
    return [power / sum(powers) for power in powers]


def nll(rows: list[Row], labels: list[int]) -> float:
    return sum(-math.log(softmax(row)[y]) for row, y in zip(rows, labels, strict=True)) / len(rows)


def ls(rows: list[Row], labels: list[int], alpha: float = 0.1) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        p = softmax(row)
        for j in range(len(p)):
            q = 1 - alpha if j == y else alpha / (len(p) - 1)
            total -= q * math.log(p[j])
    return total / len(rows)


def fl(rows: list[Row], labels: list[int], gamma: float = 3.0) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        p = softmax(row)[y]
        total -= (1 - p) ** gamma * math.log(p)
    return total / len(rows)


def flsd(rows: list[Row], labels: list[int], gamma: float = 3.0) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        p = softmax(row)[y]
        total -= (1 - p) ** (5 if p < 0.2 else gamma) * math.log(p)
    return total / len(rows)


def brier(rows: list[Row], labels: list[int]) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        for j, p in enumerate(softmax(row)):
            total += (p - (1 if j == y else 0)) ** 2
    return total / len(rows)


def mdca(rows: list[Row], labels: list[int]) -> float:
    probs = [softmax(row) for row in rows]
    k, total = len(rows[0]), 0.0
    for j in range(k):
        confidence = sum(p[j] for p in probs) / len(probs)
        frequency = sum(1 for y in labels if y == j) / len(labels)
        total += abs(confidence - frequency)
    return total / k


def _predictions(rows: list[Row], labels: list[int]) -> list[tuple[float, bool]]:
    out = []
    for row, y in zip(rows, labels, strict=True):
        p = softmax(row)
        out.append((max(p), p.index(max(p)) == y))
    return out


def dca(rows: list[Row], labels: list[int]) -> float:
    predictions = _predictions(rows, labels)
    confidence = sum(r for r, _ in predictions) / len(rows)
    return abs(confidence - sum(hit for _, hit in predictions) / len(rows))


def mmce(rows: list[Row], labels: list[int], bandwidth: float = 0.4) -> float:
    predictions = _predictions(rows, labels)
    right = [r for r, hit in predictions if hit]
    wrong = [r for r, hit in predictions if not hit]
    m, n = len(right), len(wrong)
    if m == 0 or n == 0:
        return 0.0

    def kernel(a: float, b: float) -> float:
        return math.exp(-abs(a - b) / bandwidth)

    square = sum((1 - a) * (1 - b) * kernel(a, b) for a in right for b in right) / m**2
    square += sum(a * b * kernel(a, b) for a in wrong for b in wrong) / n**2
    square -= 2 * sum((1 - a) * b * kernel(a, b) for a in right for b in wrong) / (m * n)
    return math.sqrt(square + 1e-10)


ORACLES = {
    "nll": nll,
    "ls": ls,
    "fl": fl,
    "flsd": flsd,
    "brier": brier,
    "mdca": mdca,
    "dca": dca,
    "mmce": mmce,
}
