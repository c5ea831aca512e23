"""Measures median seconds and peak extra memory, and prints a table of ratios."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    @property
    def milliseconds(self) -> str:
        """The median of the rounds, with the quartiles of several."""
        return _with_quartiles([1e3 * seconds for seconds in self.rounds], 1)

    def ratio(self, base: Measurement) -> str:
        """The median of the ratios to `base` in each round, with the quartiles of several."""
        ratios = [own / other for own, other in zip(self.rounds, base.rounds, strict=True)]
        return "1.00" if self is base else _with_quartiles(ratios, 2)


def _with_quartiles(values: Sequence[float], digits: int) -> str:
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) < 4:
        return text
    low, _, high = statistics.quantiles(values, n=4)
    return f"{text} ({low:.{digits}f}–{high:.{digits}f})"


def time_and_memory(
    work: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measurement]:
    """Time all functions in turn, `repeats` times, so that noise affects them alike."""
    for function in work.values():
        function()  # warm up: allocator, threads, lazy imports
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, function in work.items():
            synchronise(device)
            start = clock()
            function()
            synchronise(device)
            seconds[name].append(clock() - start)
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


_MMAP_THRESHOLD = -3  # of mallopt
_LARGE = 1 << 22  # bytes


def new_memory_for_large_arrays() -> None:
    """Have libc take memory for large arrays from the system, and return it, each time.

    Else it may keep what was freed, and whether an array lies in new memory, whose first touch
    takes longer than a softmax, depends on what ran before.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def page_faults(function: Callable[[], object]) -> int:
    """Pages of memory that a second call of the function touches for the first time."""
    function()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident(key: str) -> float:
    """Bytes of memory in use (`VmRSS`) or at the peak (`VmHWM`); on Linux only."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key + ":"))
    return float(line.split()[1]) * 1024


def print_ratios(
    rows: Iterable[Measurement], *, pixels: int | None = None, also: Measurement | None = None
) -> None:
    """Print a Markdown table of `rows`, each as it is measured, with ratios to the first.

    Args:
        rows: measured in the same rounds.
        pixels: that each row works on, to print pixels per second too.
        also: another row to print the ratios of time to.
    """
    base = None
    for row in rows:
        if base is None:
            base = row
            headings = ["time (ms)", f"× {base.name}", *([f"× {also.name}"] if also else [])]
            headings += ["10⁶ pixels/s"] if pixels else []
            headings += ["extra memory (MB)", f"× {base.name}"]
            print(f"| | {' | '.join(headings)} |")
            print("|---|" + "---:|" * len(headings))
        cells = [row.milliseconds, row.ratio(base), *([row.ratio(also)] if also else [])]
        cells += [f"{pixels / row.seconds / 1e6:.1f}"] if pixels else []
        cells += [f"{row.extra_bytes / 1e6:.0f}"]
        cells += [f"{row.extra_bytes / max(base.extra_bytes, 1):.2f}"]
        print(f"| {row.name} | {' | '.join(cells)} |", flush=True)
