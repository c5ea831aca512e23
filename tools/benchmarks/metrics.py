"""The meter against one softmax, and against libraries that compute fewer scores."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import (
    new_memory_for_large_arrays,
    page_faults,
    print_ratios,
    time_and_memory,
)
from segcal import CalibrationMeter
from segcal.metrics import update_together
from segcal.metrics.regions import boundary

AS_CALLED = "softmax(1), as called"  # its result lies in memory that is new to the process
WARM = "softmax into warm memory"  # that was written to before
_IGNORE = 255
BINS = 15
TILE = 32  # side of the squares that stand for objects where regions are measured


@dataclass(frozen=True)
class Case:
    """A batch to measure: its classes, side and dtype."""

    classes: int
    side: int
    dtype: torch.dtype = torch.float32
    peers: bool = False


CASES = {
    "21": Case(21, 512, peers=True),
    "2": Case(2, 512),
    "150": Case(150, 256),
    "21-float16": Case(21, 512, torch.float16),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES], help="what to count")
    parser.add_argument("--images", type=int, default=4, help="images in a batch")
    parser.add_argument("--batches", type=int, default=1, help="batches to count")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-peers", action="store_true", help="only segcal")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print a table for each case."""
    new_memory_for_large_arrays()
    for name in arguments.cases:
        case = CASES[name]
        shape = (arguments.images, case.classes, case.side, case.side)
        generator = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(shape, generator=generator)
        labels = torch.randint(0, case.classes, (shape[0], *shape[2:]), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.05] = _IGNORE
        logits = logits.to(arguments.device, case.dtype)
        labels = labels.to(arguments.device)
        pixels = arguments.batches * labels.numel()
        dtype = str(case.dtype).removeprefix("torch.")
        print(
            f"\n{arguments.batches} × {'×'.join(map(str, shape))} {dtype} ({pixels / 1e6:.1f} M "
            f"pixels), 5 % ignored, {arguments.device}, {torch.get_num_threads()} threads, "
            f"{arguments.repeats} rounds: medians and quartiles\n"
        )
        work = _segcal(logits, labels, arguments.batches)
        faults = ", ".join(f"{page_faults(work[name]):,} of {name}" for name in (AS_CALLED, WARM))
        print(f"pages of memory touched for the first time: {faults}\n")
        if case.peers and not arguments.no_peers:
            work |= _peers(logits, labels, arguments.batches)
        rows = time_and_memory(work, arguments.repeats, arguments.device)
        print_ratios(rows, pixels=pixels, also=rows[1])


Work = dict[str, Callable[[], object]]


def _segcal(logits: Tensor, labels: Tensor, batches: int) -> Work:
    c = logits.shape[1]
    tiles = torch.randint(0, c, (len(labels), *(-(-side // TILE) for side in labels.shape[1:])))
    tiles = tiles.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2).to(labels)
    edge = boundary(3)(tiles[:, : labels.shape[1], : labels.shape[2]])
    inside = [None, edge, ~edge]

    out = torch.zeros_like(logits, dtype=torch.float32)

    def softmax() -> None:
        for _ in range(batches):
            logits.softmax(1, dtype=torch.float32)

    def softmax_warm() -> None:
        for _ in range(batches):
            torch.softmax(logits, 1, dtype=torch.float32, out=out)

    def update(*, per_image: bool = False) -> CalibrationMeter:
        meter = CalibrationMeter(c, BINS, _IGNORE, per_image=per_image)
        for _ in range(batches):
            meter.update(logits, labels)
        return meter

    def update_regions() -> None:
        meters = [CalibrationMeter(c, BINS, _IGNORE, region=str(i)) for i in range(len(inside))]
        for _ in range(batches):
            update_together(meters, logits, labels, inside=inside)

    return {
        AS_CALLED: softmax,
        WARM: softmax_warm,
        "segcal, update": update,
        "segcal, update with sums per image": lambda: update(per_image=True),
        "segcal, update of three regions": update_regions,
        "segcal, update and compute": lambda: update().compute(),
    }


def _peers(logits: Tensor, labels: Tensor, batches: int) -> Work:
    c = logits.shape[1]
    work: Work = {
        "torchmetrics, ECE": lambda: _torchmetrics_ece(logits, labels, batches),
        f"torchmetrics, SCE of {c} × binary": lambda: _torchmetrics_sce(logits, labels, batches),
        "numpy bincount, ECE + SCE": lambda: _numpy_scores(logits, labels, batches),
    }
    if importlib.util.find_spec("netcal"):
        work["net:cal, ECE"] = lambda: _netcal_ece(logits, labels, batches)
    if importlib.util.find_spec("torch_uncertainty"):
        work["torch-uncertainty, ECE"] = lambda: _torch_uncertainty_ece(logits, labels, batches)
    return work


def _torchmetrics_ece(logits: Tensor, labels: Tensor, batches: int) -> Tensor:
    from torchmetrics.classification import MulticlassCalibrationError

    metric = MulticlassCalibrationError(logits.shape[1], BINS, ignore_index=_IGNORE)
    metric.to(logits.device)
    for _ in range(batches):
        metric.update(logits.softmax(1), labels)
    return metric.compute()


def _torchmetrics_sce(logits: Tensor, labels: Tensor, batches: int) -> float:
    from torchmetrics.classification import BinaryCalibrationError

    c = logits.shape[1]
    metrics = [BinaryCalibrationError(BINS).to(logits.device) for _ in range(c)]
    for _ in range(batches):
        probs, valid = logits.softmax(1), labels != _IGNORE
        for k, metric in enumerate(metrics):
            metric.update(probs[:, k][valid], (labels[valid] == k).long())
    return sum(float(metric.compute()) for metric in metrics) / c


def _rows(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(P, C) probabilities and (P,) labels of the valid pixels."""
    valid = (labels != _IGNORE).cpu().numpy()
    probs = logits.softmax(1).movedim(1, -1).cpu().numpy()[valid]
    return probs, labels.cpu().numpy()[valid]


def _numpy_scores(logits: Tensor, labels: Tensor, batches: int) -> tuple[float, float]:
    """ECE and SCE as one would write them: a table of bins by numpy.bincount."""
    c = logits.shape[1]
    gap, top_gap, pixels = np.zeros(c * BINS), np.zeros(BINS), 0
    for _ in range(batches):
        probs, truth = _rows(logits, labels)
        bins = np.clip(np.ceil(probs * BINS).astype(np.int64) - 1, 0, BINS - 1)
        slots = (bins + np.arange(c) * BINS).ravel()
        hits = (truth[:, None] == np.arange(c)).ravel()
        gap += np.bincount(slots, probs.ravel() - hits, minlength=c * BINS)
        best, row = probs.argmax(1), np.arange(len(probs))
        difference = probs[row, best].astype(np.float64) - (best == truth)
        top_gap += np.bincount(bins[row, best], difference, minlength=BINS)
        pixels += len(truth)
    return float(np.abs(top_gap).sum() / pixels), float(np.abs(gap).sum() / pixels / c)


def _netcal_ece(logits: Tensor, labels: Tensor, batches: int) -> float:
    from netcal.metrics import ECE

    rows = [_rows(logits, labels) for _ in range(batches)]  # it takes all pixels at once
    probs, truth = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return float(ECE(BINS).measure(probs, truth))


def _torch_uncertainty_ece(logits: Tensor, labels: Tensor, batches: int) -> Tensor:
    from torch_uncertainty.metrics import CalibrationError

    metric = CalibrationError(
        task="multiclass", num_bins=BINS, num_classes=logits.shape[1], ignore_index=_IGNORE
    )
    for _ in range(batches):
        metric.update(logits.softmax(1), labels)
    return metric.compute()
