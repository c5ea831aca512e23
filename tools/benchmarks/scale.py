"""A long stream of large images through one meter: pixels per second and resident memory."""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.measure import resident
from segcal import CalibrationMeter

_IGNORE = 255
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--images", type=int, default=1000, help="images to count")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[19, 1024, 2048], metavar="n", help="C H W"
    )
    parser.add_argument(
        "--blocks", type=int, default=2, help="different images, made before the measurement"
    )
    parser.add_argument("--per-image", action="store_true", help="also keep sums for each image")
    parser.add_argument("--every", type=int, default=50, help="images per line of output")


def run(arguments: argparse.Namespace) -> None:
    """Count all images, then print the time and memory that this took."""
    c, h, w = arguments.shape
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(arguments.blocks):
        logits = torch.randn(1, c, h, w, generator=generator).mul_(3)
        labels = torch.randint(0, c, (1, h, w), generator=generator)
        labels[torch.rand(1, h, w, generator=generator) < 0.05] = _IGNORE
        blocks.append((logits, labels))
    print(
        f"{arguments.images} images of {c}×{h}×{w} float32, 5 % ignored, one process, "
        f"{torch.get_num_threads()} threads\n\n"
        "| images | pixels (10⁶) | pixels/s (10⁶) | resident memory (MiB) |\n"
        "|---:|---:|---:|---:|\n"
        f"| 0 | 0 | | {resident('VmRSS') / MIB:.0f} |",
        flush=True,
    )
    meter = CalibrationMeter(c, ignore_index=_IGNORE, per_image=arguments.per_image)
    levels: list[float] = []
    started = last = time.perf_counter()
    for number in range(1, arguments.images + 1):
        meter.update(*blocks[number % len(blocks)])
        if number % arguments.every == 0 or number == arguments.images:
            done = (number - 1) % arguments.every + 1
            now = time.perf_counter()
            levels.append(resident("VmRSS") / MIB)
            print(
                f"| {number} | {number * h * w / 1e6:.0f} | "
                f"{done * h * w / (now - last) / 1e6:.2f} | {levels[-1]:.0f} |",
                flush=True,
            )
            last = now
    seconds = time.perf_counter() - started
    report = meter.compute()
    print(
        f"\n{report.protocol.pixels} counted pixels, {seconds:.0f} s, "
        f"{arguments.images * h * w / seconds / 1e6:.2f}·10⁶ pixels/s; resident memory "
        f"{levels[0]:.0f} MiB after {min(arguments.every, arguments.images)} images, "
        f"{levels[-1]:.0f} MiB at the end, {resident('VmHWM') / MIB:.0f} MiB at its peak; "
        f"ECE {report.ece:.6f}, SCE {report.sce:.6f}"
    )
