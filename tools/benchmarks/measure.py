"""Measures median seconds and peak extra memory, and prints a table of ratios."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measurement:
    """The cost of one function: median seconds, and peak memory above the level before it."""

    name: str
    seconds: float
    extra_bytes: float


def time_and_memory(
    work: Mapping[str, Callable[[], object]], repeats: int, device: str
) -> list[Measurement]:
    """Time all functions in turn, `repeats` times, so that noise affects them alike."""
    for function in work.values():
        function()  # warm up: allocator, threads, lazy imports
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, function in work.items():
            synchronise(device)
            start = time.perf_counter()
            function()
            synchronise(device)
            seconds[name].append(time.perf_counter() - start)
    return [
        Measurement(name, statistics.median(seconds[name]), peak_extra_bytes(function, device))
        for name, function in work.items()
    ]


def synchronise(device: str) -> None:
    """Wait for a GPU to finish its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_extra_bytes(function: Callable[[], object], device: str) -> float:
    """Peak memory during `function` above the level before it: CUDA allocator, or Linux RSS."""
    gc.collect()
    _return_free_memory()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
        function()
        synchronise(device)
        return torch.cuda.max_memory_allocated() - level
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM, the peak resident size, to the present one
    except OSError:
        return float("nan")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def _return_free_memory() -> None:
    """Return freed memory to the system where libc can, or its reuse would not be measured."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(key: str) -> float:
    """Bytes of memory in use (`VmRSS`) or at the peak (`VmHWM`); on Linux only."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key + ":"))
    return float(line.split()[1]) * 1024


def print_ratios(rows: Iterable[Measurement]) -> None:
    """Print a Markdown table of `rows`, each as it is measured, with ratios to the first."""
    base = None
    for row in rows:
        if base is None:
            base = row
            print(f"| | time (ms) | × {base.name} | extra memory (MB) | × {base.name} |")
            print("|---|---:|---:|---:|---:|")
        print(
            f"| {row.name} | {row.seconds * 1e3:.1f} | {row.seconds / base.seconds:.2f} "
            f"| {row.extra_bytes / 1e6:.0f} | {row.extra_bytes / max(base.extra_bytes, 1):.2f} |",
            flush=True,
        )
