"""The meter against one softmax, numpy and torchmetrics, which compute fewer scores."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import print_ratios, time_and_memory
from segcal import CalibrationMeter

BASELINE = "softmax"
IGNORE = 255
BINS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        default=[4, 21, 512, 512],
        metavar="n",
        help="N C H W of a batch",
    )
    parser.add_argument(
        "--pixels", type=int, nargs="*", default=[2, 16], help="pixels to stream, in 2**20"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quick", action="store_true", help="only softmax, the meter and torchmetrics' ECE"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure and print a table for each number of pixels."""
    generator = torch.Generator().manual_seed(0)
    n, c, h, w = arguments.shape
    logits = 3 * torch.randn(n, c, h, w, generator=generator)
    labels = torch.randint(0, c, (n, h, w), generator=generator)
    labels[torch.rand(n, h, w, generator=generator) < 0.05] = IGNORE
    logits, labels = logits.to(arguments.device), labels.to(arguments.device)
    threads = torch.get_num_threads()
    for pixels in arguments.pixels:
        batches = max(round(pixels * 2**20 / (n * h * w)), 1)
        print(
            f"\n{batches} batches of {n}×{c}×{h}×{w} float32 ({batches * n * h * w / 1e6:.1f} M "
            f"pixels), 5 % ignored, {arguments.device}, {threads} threads\n"
        )
        work = _work(logits, labels, batches, arguments.quick)
        print_ratios(time_and_memory(work, arguments.repeats, arguments.device))


def _work(
    logits: Tensor, labels: Tensor, batches: int, quick: bool
) -> dict[str, Callable[[], object]]:
    c = logits.shape[1]

    def softmax() -> None:
        for _ in range(batches):
            logits.softmax(1)

    def meter(per_image: bool) -> Callable[[], object]:
        def measured() -> object:
            meter = CalibrationMeter(c, BINS, IGNORE, per_image=per_image)
            for _ in range(batches):
                meter.update(logits, labels)
            return meter.compute()

        return measured

    work: dict[str, Callable[[], object]] = {
        BASELINE: softmax,
        "segcal, everything": meter(False),
        "torchmetrics, ECE": lambda: _torchmetrics_ece(logits, labels, batches),
    }
    if not quick:
        work["segcal, everything and per image"] = meter(True)
        work["numpy bincount, ECE + SCE"] = lambda: _numpy_scores(logits, labels, batches)
        name = f"torchmetrics, SCE of {c} × binary"
        work[name] = lambda: _torchmetrics_sce(logits, labels, batches)
    return work


def _torchmetrics_ece(logits: Tensor, labels: Tensor, batches: int) -> Tensor:
    from torchmetrics.classification import MulticlassCalibrationError

    metric = MulticlassCalibrationError(logits.shape[1], BINS, ignore_index=IGNORE)
    metric.to(logits.device)
    for _ in range(batches):
        metric.update(logits.softmax(1), labels)
    return metric.compute()


def _torchmetrics_sce(logits: Tensor, labels: Tensor, batches: int) -> float:
    from torchmetrics.classification import BinaryCalibrationError

    c = logits.shape[1]
    metrics = [BinaryCalibrationError(BINS).to(logits.device) for _ in range(c)]
    for _ in range(batches):
        probs, valid = logits.softmax(1), labels != IGNORE
        for k, metric in enumerate(metrics):
            metric.update(probs[:, k][valid], (labels[valid] == k).long())
    return sum(float(metric.compute()) for metric in metrics) / c


def _numpy_scores(logits: Tensor, labels: Tensor, batches: int) -> tuple[float, float]:
    """ECE and SCE written in a few lines of numpy, with bincount."""
    c = logits.shape[1]
    gap, top_gap, pixels = np.zeros(c * BINS), np.zeros(BINS), 0
    for _ in range(batches):
        valid = (labels != IGNORE).cpu().numpy()
        probs = logits.softmax(1).movedim(1, -1).cpu().numpy()[valid]  # (P, C)
        truth = labels.cpu().numpy()[valid]
        bins = np.clip(np.ceil(probs * BINS).astype(np.int64) - 1, 0, BINS - 1)
        slots = (bins + np.arange(c) * BINS).ravel()
        hits = (truth[:, None] == np.arange(c)).ravel()
        gap += np.bincount(slots, probs.ravel() - hits, minlength=c * BINS)
        best, row = probs.argmax(1), np.arange(len(probs))
        difference = probs[row, best].astype(np.float64) - (best == truth)
        top_gap += np.bincount(bins[row, best], difference, minlength=BINS)
        pixels += len(truth)
    return float(np.abs(top_gap).sum() / pixels), float(np.abs(gap).sum() / pixels / c)
