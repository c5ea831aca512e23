"""Each loss, forward and backward, against F.cross_entropy on the same logits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measure import print_ratios, time_and_memory
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss

_BASELINE = "F.cross_entropy"
# Hyper-parameters that choose another formula are measured too.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ls, slope 0.01": ("ls", {"slope": 0.01}),
    "nll+ace, soft": ("nll+ace", {"soft": True}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        default=[4, 21, 512, 512],
        metavar="n",
        help="N C H W of the logits",
    )
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each loss")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--specs", nargs="*", help="losses to measure; default: all")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the table."""
    generator = torch.Generator().manual_seed(0)
    n, c, h, w = arguments.shape
    logits = 3 * torch.randn(n, c, h, w, generator=generator)
    labels = torch.randint(0, c, (n, h, w), generator=generator)
    labels[torch.rand(n, h, w, generator=generator) < 0.05] = 255
    logits, labels = logits.to(arguments.device).requires_grad_(), labels.to(arguments.device)

    def step(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def once() -> None:
            loss(logits, labels).backward()
            logits.grad = None  # so that the next measurement of memory starts equal

        return once

    every = [*BASE_LOSSES, *(f"nll+{name}" for name in AUXILIARY_LOSSES), *VARIANTS]
    work = {_BASELINE: step(lambda z, y: F.cross_entropy(z, y, ignore_index=255))}
    for name in arguments.specs or every:
        spec, hyper = VARIANTS.get(name, (name, {}))
        work[name] = step(build_loss(spec, **hyper))
    threads = torch.get_num_threads()
    print(f"logits {n}×{c}×{h}×{w} float32, 5 % ignored, {arguments.device}, {threads} threads\n")
    print_ratios(time_and_memory(work, arguments.repeats, arguments.device))
