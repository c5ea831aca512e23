"""The formulas of the losses written out as slow literal loops over Python floats.

Each takes images: a list with, for every image, its pixels by coordinate. A pixel is its row of
logits and its label, which is None where it is ignored.
"""

from __future__ import annotations

import itertools
import math

Row = list[float]
Image = dict[tuple[int, ...], tuple[Row, "int | None"]]


def images_of(logits, labels, ignore_index: int = 255) -> list[Image]:
    """(N, C, *S) logits and (N, *S) labels as images."""
    return [
        {
            tuple(at): (
                z[(slice(None), *at)].tolist(),
                None if y[tuple(at)] == ignore_index else int(y[tuple(at)]),
            )
            for at in itertools.product(*map(range, y.shape))
        }
        for z, y in zip(logits, labels, strict=True)
    ]


def problems_of(logits, labels, ignore_index: int = 255) -> list[list[Image]]:
    """The images of each of the K two-class problems of (N, K, *S) logits and labels."""
    return [
        [
            {at: ([0.0, *row], label) for at, (row, label) in image.items()}
            for image in images_of(logits[:, k : k + 1], labels[:, k], ignore_index)
        ]
        for k in range(logits.shape[1])
    ]


def softmax(row: Row) -> Row:
    top = max(row)
    powers = [math.exp(z - top) for z in row]
    return [power / sum(powers) for power in powers]


def valid(images: list[Image]) -> tuple[list[Row], list[int]]:
    pixels = [pixel for image in images for pixel in image.values() if pixel[1] is not None]
    return [row for row, _ in pixels], [label for _, label in pixels]


def pixel_mean(images: list[Image], loss) -> float:
    rows, labels = valid(images)
    return sum(loss(softmax(row), y) for row, y in zip(rows, labels, strict=True)) / len(rows)


def cross_entropy(p: Row, q: Row) -> float:
    return -sum(share * math.log(p[c]) for c, share in enumerate(q))


def nll(images: list[Image]) -> float:
    return pixel_mean(images, lambda p, y: -math.log(p[y]))


def ls(images: list[Image], alpha: float = 0.1, slope: float = 0.0) -> float:
    _, labels = valid(images)
    most = max(labels.count(y) for y in labels)

    def loss(p: Row, y: int) -> float:
        a = alpha + slope * labels.count(y) / most
        return cross_entropy(p, [1 - a if c == y else a / (len(p) - 1) for c in range(len(p))])

    return pixel_mean(images, loss)


def fl(images: list[Image], gamma: float = 3.0) -> float:
    return pixel_mean(images, lambda p, y: -((1 - p[y]) ** gamma) * math.log(p[y]))


def flsd(images: list[Image], gamma: float = 3.0) -> float:
    def loss(p: Row, y: int) -> float:
        return -((1 - p[y]) ** (5 if p[y] < 0.2 else gamma)) * math.log(p[y])

    return pixel_mean(images, loss)


def dual(images: list[Image], gamma: float = 5.0) -> float:
    def loss(p: Row, y: int) -> float:
        below = max([other for other in p if other < p[y]], default=0.0)
        return -((1 - p[y] + below) ** gamma) * math.log(p[y])

    return pixel_mean(images, loss)


def brier(images: list[Image]) -> float:
    return pixel_mean(
        images, lambda p, y: sum((p[c] - (1 if c == y else 0)) ** 2 for c in range(len(p)))
    )


def svls(images: list[Image], sigma: float = 1.0) -> float:
    total, count = 0.0, 0
    for image in images:
        sides = [1 + max(side) for side in zip(*image, strict=True)]
        offsets = list(itertools.product((-1, 0, 1), repeat=len(sides)))
        weights = {o: math.exp(-sum(d * d for d in o) / (2 * sigma**2)) for o in offsets}
        middle = (0,) * len(sides)
        weights[middle] = sum(w for o, w in weights.items() if o != middle) or 1.0
        for at, (row, y) in image.items():
            if y is None:
                continue
            q = [0.0] * len(row)
            for offset, weight in weights.items():
                # Beyond the border lies the border's pixel again.
                moved = (x + d for x, d in zip(at, offset, strict=True))
                near = tuple(min(max(x, 0), s - 1) for x, s in zip(moved, sides, strict=True))
                if image[near][1] is not None:
                    q[image[near][1]] += weight
            total += cross_entropy(softmax(row), [share / sum(q) for share in q])
            count += 1
    return total / count


def dice(images: list[Image]) -> float:
    rows, labels = valid(images)
    probs = [softmax(row) for row in rows]
    losses = []
    for c in sorted(set(labels)):
        both = sum(p[c] for p, y in zip(probs, labels, strict=True) if y == c)
        losses.append(1 - 2 * both / (sum(p[c] for p in probs) + labels.count(c)))
    return sum(losses) / len(losses)


def dicece(images: list[Image]) -> float:
    return dice(images) + nll(images)


def mdca(images: list[Image]) -> float:
    rows, labels = valid(images)
    probs = [softmax(row) for row in rows]
    k, total = len(rows[0]), 0.0
    for j in range(k):
        confidence = sum(p[j] for p in probs) / len(probs)
        total += abs(confidence - labels.count(j) / len(labels))
    return total / k


def _predictions(images: list[Image]) -> list[tuple[float, bool]]:
    rows, labels = valid(images)
    probs = [softmax(row) for row in rows]
    return [(max(p), p.index(max(p)) == y) for p, y in zip(probs, labels, strict=True)]


def dca(images: list[Image]) -> float:
    predictions = _predictions(images)
    confidence = sum(r for r, _ in predictions) / len(predictions)
    return abs(confidence - sum(hit for _, hit in predictions) / len(predictions))


def mmce(images: list[Image], bandwidth: float = 0.4) -> float:
    predictions = _predictions(images)
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


def cp(images: list[Image]) -> float:
    return pixel_mean(images, lambda p, y: sum(q * math.log(q) for q in p))


def mbls(images: list[Image], margin: float = 10.0) -> float:
    rows, _ = valid(images)
    return sum(max(0.0, max(row) - z - margin) for row in rows for z in row) / (
        len(rows) * len(rows[0])
    )


def nacl(images: list[Image]) -> float:
    total, count = 0.0, 0
    for image in images:
        for at, (row, y) in image.items():
            if y is None:
                continue
            near = [
                image.get(tuple(x + d for x, d in zip(at, offset, strict=True)), (row, None))[1]
                for offset in itertools.product((-1, 0, 1), repeat=len(at))
            ]
            near = [label for label in near if label is not None]
            for c, z in enumerate(row):
                total += abs(near.count(c) / len(near) - z)
                count += 1
    return total / count


def ace(images: list[Image], bins: int = 20, soft: bool = False) -> float:
    errors = []
    for image in images:
        rows, labels = valid([image])
        for c in sorted(set(labels)):
            weight, mass, hits = [0.0] * bins, [0.0] * bins, [0.0] * bins
            for row, y in zip(rows, labels, strict=True):
                p = softmax(row)[c]
                for b in range(bins):
                    if soft:
                        # Linear between bin centres, all of it beyond the first and the last.
                        place = min(max(p * bins - 0.5, 0), bins - 1)
                        share = max(0.0, 1 - abs(place - b))
                    else:
                        share = float(b / bins < p <= (b + 1) / bins or (b == 0 and p == 0))
                    weight[b] += share
                    mass[b] += share * p
                    hits[b] += share * (y == c)
            gaps = [
                abs(mass[b] / weight[b] - hits[b] / weight[b])
                for b in range(bins)
                if weight[b] >= (0.01 if soft else 1)
            ]
            errors.append(sum(gaps) / len(gaps))
    return sum(errors) / len(errors)


def dece(images: list[Image], bins: int = 15, t_a: float = 100.0, t_b: float = 0.01) -> float:
    rows, labels = valid(images)
    gaps = [0.0] * bins
    for row, y in zip(rows, labels, strict=True):
        p = softmax(row)
        rank = 1 + sum(1 / (1 + math.exp(-t_a * (q - p[y]))) for c, q in enumerate(p) if c != y)
        r = max(p)
        w = softmax([(b * r - sum(j / bins for j in range(b))) / t_b for b in range(1, bins + 1)])
        for b in range(bins):
            gaps[b] += w[b] * (max(0.0, 2 - rank) - r)
    return sum(map(abs, gaps)) / len(rows)


ORACLES = {
    "nll": nll,
    "ls": ls,
    "fl": fl,
    "flsd": flsd,
    "dual": dual,
    "brier": brier,
    "svls": svls,
    "dice": dice,
    "dicece": dicece,
    "mdca": mdca,
    "dca": dca,
    "mmce": mmce,
    "cp": cp,
    "mbls": mbls,
    "nacl": nacl,
    "ace": ace,
    "dece": dece,
}
# Of these a multi-label batch has one for each class, and their mean is the loss.
PER_CLASS = {"dice", "mdca", "dca", "mmce", "dece"}
