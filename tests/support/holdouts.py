"""Hold-outs whose right answer is known, and calibrators that are quick to fit on them."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.posthoc import CALIBRATORS, Calibrator

Batch = tuple[Tensor, Tensor]
_QUICK = {
    "dc": {"lambdas": [0.1, 1], "mus": [0.1]},
    "lts": {"epochs": 2, "width": 4},
    "capm": {"pulls": [1e-3, 1e-2]},
    "copm": {"pulls": [1e-3, 1e-2]},
    "selective": {"epochs": 3, "lr": 1e-2},
}


def make_calibrator(name: str, **options: object) -> Calibrator:
    """The calibrator of a short name, with options that make its fit quick."""
    return CALIBRATORS[name](**_QUICK.get(name, {}), **options)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """(N, *S) labels drawn from probs (N, C, *S)."""
    rows = probs.movedim(1, -1)
    flat = torch.multinomial(rows.reshape(-1, rows.shape[-1]), 1, generator=generator)
    return flat.reshape(rows.shape[:-1])


def random_holdout(
    batches: int = 4,
    n: int = 2,
    k: int = 5,
    size: tuple[int, ...] = (8, 8),
    *,
    temperature: float = 2.0,
    ignored: float = 0.1,
    seed: int = 0,
) -> list[Batch]:
    """Logits that are `temperature` times too large for the labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(batches):
        z = 2 * torch.randn(n, k, *size, generator=generator)
        y = draw(z.softmax(1), generator)
        y[torch.rand(y.shape, generator=generator) < ignored] = 255
        out.append((temperature * z, y))
    return out


def exact_holdout(temperature: float, *, copies: int = 1) -> list[Batch]:
    """Labels exactly as frequent as softmax(logits / temperature) says, so that T is the optimum.

    Rows of probabilities in twentieths, each repeated twenty times with its labels in proportion.
    """
    twentieths = torch.tensor([[1, 3, 16], [10, 9, 1], [5, 13, 2], [18, 1, 1], [2, 4, 14]])
    logits, labels = [], []
    for row in twentieths:
        logits += [temperature * (row / 20).double().log()] * 20
        labels += [c for c, times in enumerate(row.tolist()) for _ in range(times)]
    z = torch.stack(logits).repeat(copies, 1)  # (100 * copies, 3)
    y = torch.tensor(labels).repeat(copies)
    shift = torch.linspace(-5, 5, len(z), dtype=z.dtype)  # softmax does not see it
    return [(z + shift[:, None], y)]


def nll(logits: Tensor, labels: Tensor) -> float:
    """Mean NLL in float64."""
    return torch.nn.functional.cross_entropy(logits.double(), labels, ignore_index=255).item()


def whole(holdout: list[Batch]) -> Batch:
    """All batches as one."""
    return torch.cat([z for z, _ in holdout]), torch.cat([y for _, y in holdout])
