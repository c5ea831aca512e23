"""`segcal eval` on saved predictions, against reading the files and one softmax of each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import print_ratios, time_and_memory
from segcal import CalibrationMeter
from segcal.sources.saved import PredictionFolder

_HERE = Path(__file__).resolve().parents[2]
_IGNORE = 255
COARSE = 16  # pixels between the points that logits and labels are interpolated from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--files", type=int, default=60, help="predictions to write and evaluate")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[21, 512, 512], metavar="n", help="C H W of each"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout, to evaluate the same files"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write predictions to a temporary folder, evaluate them, and print where the time goes."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "predictions")
        _write(saved, arguments.files, arguments.shape)
        shape = "×".join(map(str, arguments.shape))
        print(
            f"{arguments.files} files of {shape} float16, {torch.get_num_threads()} threads, "
            f"{arguments.repeats} rounds: medians, and memory of this process alone\n"
        )
        work = _work(saved, Path(folder, "eval"))
        if arguments.against is not None:
            other = arguments.against.resolve()
            work[f"segcal eval of {other.name}"] = lambda: _eval(
                other, saved, Path(folder, "other eval")
            )
        pixels = arguments.files * arguments.shape[1] * arguments.shape[2]
        print_ratios(time_and_memory(work, arguments.repeats, "cpu"), pixels=pixels)


def _write(folder: Path, files: int, shape: list[int]) -> None:
    """Smooth logits, as those of a network are, and labels drawn from their softmax."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    c, height, width = shape
    for i in range(files):
        coarse = 4 * torch.randn(1, c, height // COARSE, width // COARSE, generator=generator)
        logits = F.interpolate(coarse, size=(height, width), mode="bilinear")
        noise = torch.rand(coarse.shape, generator=generator).clamp_min(1e-9)
        labels = (coarse - (-noise.log()).log()).argmax(1, keepdim=True)
        labels = F.interpolate(labels.float(), size=(height, width)).to(torch.uint8)
        labels[torch.rand(labels.shape, generator=generator) < 0.02] = _IGNORE
        file = folder / f"{i:03}.npz"
        np.savez(file, logits=logits[0].half().numpy(), labels=labels[0, 0].numpy())


def _work(saved: Path, out: Path) -> dict[str, Callable[[], object]]:
    def baseline() -> None:
        for file in sorted(saved.glob("*.npz")):
            with np.load(file) as arrays:
                torch.from_numpy(arrays["logits"]).unsqueeze(0).float().softmax(1)
                arrays["labels"].sum()

    def read() -> None:
        for _ in PredictionFolder(saved):
            pass

    def count() -> None:
        source = PredictionFolder(saved)
        batch = next(iter(source))
        meter = CalibrationMeter(source.num_classes, ignore_index=_IGNORE, per_image=True)
        for _ in source.names:
            meter.update(batch.values, batch.labels)
        meter.compute()

    return {
        "reading and softmax": baseline,
        "segcal, import": lambda: _python("-c", "import segcal.evaluation.folder"),
        "segcal, read and check": read,
        "segcal, count one file as often": count,
        "segcal eval": lambda: _eval(_HERE, saved, out),
        "segcal report, the page and figures again": lambda: _python(
            "-m", "segcal", "report", str(out), "--out", str(out.parent / "page")
        ),
    }


def _eval(checkout: Path, saved: Path, out: Path) -> None:
    command = ["tools/eval_calib.py", "--predictions", str(saved), "--out", str(out)]
    _python(*command, checkout=checkout)


def _python(*arguments: str, checkout: Path = _HERE) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
