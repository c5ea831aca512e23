"""`segcal eval` on saved volumes: seconds, and peak memory for one volume and for many."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np

_HERE = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 5, 20], help="volumes to evaluate"
    )
    parser.add_argument("--side", type=int, default=128, help="voxels along each axis")
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--options", nargs="*", default=[], help="of segcal eval, without --")


def run(arguments: argparse.Namespace) -> None:
    """Write one volume, evaluate links to it, and print what each number of them took."""
    options = [f"--{option}" for option in arguments.options]
    side, classes = arguments.side, arguments.classes
    print(f"volumes of {side}³ × {classes} classes, float16: segcal eval {' '.join(options)}")
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "000.npz")
        _write(first, classes, side)
        for count in arguments.counts:
            for i in range(1, count):
                path = Path(folder, f"{i:03}.npz")
                if not path.exists():
                    path.hardlink_to(first)
            seconds, peak = _eval(Path(folder), options)
            print(f"{count:4} volumes  {seconds:7.1f} s  {peak / 2**20:7.0f} MiB at most")


def _eval(folder: Path, options: list[str]) -> tuple[float, int]:
    """Seconds and the peak of memory in bytes."""
    command = [sys.executable, "-m", "segcal", "eval", "--predictions", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(_HERE)}
    start = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"segcal eval ended with status {status}")
    return time.perf_counter() - start, 1024 * used.ru_maxrss


def _write(path: Path, classes: int, side: int) -> None:
    """Logits of noise, and labels drawn from their softmax; plane by plane."""

    def plane(c: int, z: int) -> np.ndarray:
        noise = np.random.default_rng((c, z)).standard_normal((side, side), np.float32)
        return (2 * noise).astype(np.float16)

    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("logits.npy", "w", force_zip64=True) as file:
            shape = (classes, side, side, side)
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for c in range(classes):
                for z in range(side):
                    file.write(plane(c, z).tobytes())
        labels = np.empty((side, side, side), np.uint8)
        for z in range(side):
            gumbel = np.random.default_rng(z).gumbel(size=(classes, side, side))
            labels[z] = (np.stack([plane(c, z) for c in range(classes)]) + gumbel).argmax(0)
        with archive.open("labels.npy", "w") as file:
            np.lib.format.write_array(file, labels)
