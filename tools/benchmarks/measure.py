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
    """The cost of one function: seconds of each round, peak memory above the level before it."""

    name: str
    rounds: tuple[float, ...]
    extra_bytes: float

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    def ratio(self, base: Measurement) -> str:
        """The median of the ratios to `base` in each round, with the quartiles of several."""
        ratios = [own / other for own, other in zip(self.rounds, base.rounds, strict=True)]
        text = f"{statistics.median(ratios):.2f}"
        if len(ratios) < 4 or self is base:
            return text
        low, _, high = statistics.quantiles(ratios, n=4)
        return f"{text} ({low:.2f}–{high:.2f})"


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
        Measurement(name, tuple(seconds[name]), peak_extra_bytes(function, device))
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


def print_ratios(rows: Iterable[Measurement], *, pixels: int | None = None) -> None:
    """Print a Markdown table of `rows`, each as it is measured, with ratios to the first.

    Args:
        rows: measured in the same rounds.
        pixels: that each row works on, to print pixels per second too.
    """
    base = None
    for row in rows:
        if base is None:
            base = row
            rate = "" if pixels is None else " 10⁶ pixels/s |"
            print(f"| | time (ms) | × {base.name} |{rate} extra memory (MB) | × {base.name} |")
            print("|---|---:|---:|---:|---:|" + "---:|" * (pixels is not None))
        rate = "" if pixels is None else f"| {pixels / row.seconds / 1e6:.1f} "
        print(
            f"| {row.name} | {row.seconds * 1e3:.1f} | {row.ratio(base)} {rate}"
            f"| {row.extra_bytes / 1e6:.0f} | {row.extra_bytes / max(base.extra_bytes, 1):.2f} |",
            flush=True,
        )
