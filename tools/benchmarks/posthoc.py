"""The fit of each calibrator on a stream of pixels, against L-BFGS on all logits in memory."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Measurement, peak_extra_bytes, print_ratios, synchronise
from segcal.posthoc import CALIBRATORS, TemperatureScaling

_BASELINE = "gather + L-BFGS"
_SIDE = 256
IMAGES = 4  # a batch
POOL = 8  # different batches; they are repeated until there are enough pixels


class Synthetic:
    """A hold-out of `pixels` pixels that keeps only POOL batches in memory and repeats them.

    The logits are smooth over the image, as those of a network are. The labels are sampled at
    temperature 1.5.
    """

    def __init__(self, pixels: int, classes: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = math.ceil(pixels / (IMAGES * _SIDE**2))
        self.pool = []
        for _ in range(min(POOL, self.batches)):
            coarse = 6 * torch.randn(IMAGES, classes, 33, 33, generator=generator)
            logits = F.interpolate(coarse, size=(_SIDE, _SIDE), mode="bilinear")
            noise = torch.rand(logits.shape, generator=generator).clamp_min(1e-9)
            labels = (logits / 1.5 - (-noise.log()).log()).argmax(1)  # a sample from the softmax
            labels[torch.rand(labels.shape, generator=generator) < 0.05] = 255
            self.pool.append((logits.to(device), labels.to(device)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pool[i % POOL] for i in range(self.batches))


def gather_and_minimise(batches: Synthetic) -> float:
    """Temperature scaling as it is usually written: all logits in memory, L-BFGS of torch."""
    logits = torch.cat([z.movedim(1, -1)[y != 255] for z, y in batches])
    labels = torch.cat([y[y != 255] for _, y in batches])
    temperature = torch.ones((), device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([temperature], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / temperature, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(temperature)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--pixels", type=int, default=16_000_000, help="size of the hold-out")
    parser.add_argument("--classes", type=int, default=21)
    parser.add_argument("--calibrators", nargs="*", default=["grid", *CALIBRATORS], metavar="name")
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="leave out the baseline, which needs 300 bytes per pixel",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(arguments: argparse.Namespace) -> None:
    """Fit each calibrator once and print the table, a row after each fit."""
    warnings.simplefilter("ignore")  # a calibrator may warn that it did not improve this hold-out
    batches = Synthetic(arguments.pixels, arguments.classes, arguments.device)
    work: dict[str, Callable[[], object]] = {}
    if not arguments.no_baseline:
        work[_BASELINE] = lambda: gather_and_minimise(batches)
    for name in arguments.calibrators:
        calibrator = TemperatureScaling(method="grid") if name == "grid" else CALIBRATORS[name]()
        work[name] = lambda calibrator=calibrator: calibrator.fit(batches)  # type: ignore[misc]
    print(
        f"{batches.batches * IMAGES * _SIDE**2 / 1e6:.1f} M pixels × {arguments.classes} classes, "
        f"5 % ignored, {arguments.device}, {torch.get_num_threads()} threads\n"
    )
    print_ratios(_once(name, function, arguments.device) for name, function in work.items())


def _once(name: str, function: Callable[[], object], device: str) -> Measurement:
    seconds = []

    def timed() -> None:
        start = time.perf_counter()
        function()
        synchronise(device)
        seconds.append(time.perf_counter() - start)

    extra = peak_extra_bytes(timed, device)
    return Measurement(name, tuple(seconds), extra)
