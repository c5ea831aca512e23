"""The fit of each calibrator on a stream of pixels, against L-BFGS on all logits in memory.

With --peers, the temperature and the Dirichlet map of net:cal and Fiducio too, where installed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Measurement, peak_extra_bytes, print_ratios, synchronise
from segcal.posthoc import CALIBRATORS, Calibrator, TemperatureScaling

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


def gathered(batches: Synthetic) -> tuple[Tensor, Tensor]:
    """(P, C) logits and (P,) labels of all valid pixels."""
    logits = torch.cat([z.movedim(1, -1)[y != 255] for z, y in batches])
    return logits, torch.cat([y[y != 255] for _, y in batches])


def gather_and_minimise(batches: Synthetic) -> float:
    """Temperature scaling as it is usually written: all logits in memory, L-BFGS of torch."""
    logits, labels = gathered(batches)
    temperature = torch.ones((), device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([temperature], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / temperature, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(temperature)


def peers(batches: Synthetic) -> dict[str, Callable[[], object]]:
    """What other packages fit, by name; they take all pixels at once and return a calibrator."""
    found: dict[str, Callable[[], object]] = {}
    with contextlib.suppress(ImportError):
        from netcal.scaling import TemperatureScaling as NetcalTemperature

        def of_netcal() -> object:
            logits, labels = gathered(batches)
            probs = logits.double().softmax(1).numpy()
            return NetcalTemperature().fit(probs, labels.numpy(), tensorboard=False)

        found["netcal ts"] = of_netcal
    with contextlib.suppress(ImportError):
        import fiducio

        def of_fiducio(kind: Any, optimizer: str) -> Callable[[], object]:
            return lambda: kind(optimizer=optimizer).fit(*gathered(batches))

        for optimizer in ("adam", "lbfgs"):
            found[f"fiducio ts {optimizer}"] = of_fiducio(fiducio.TS, optimizer)
            found[f"fiducio dc {optimizer}"] = of_fiducio(fiducio.DC, optimizer)
    return found


def nll(calibrator: Any, batches: Synthetic) -> float:
    """Mean NLL of a fitted calibrator of any of the packages, in float64."""
    logits, labels = gathered(batches)
    if isinstance(calibrator, Calibrator):
        probs = calibrator.predict_proba(logits)
    elif hasattr(calibrator, "predict_proba"):
        probs = torch.as_tensor(calibrator.predict_proba(logits))
    else:
        probs = torch.as_tensor(calibrator.transform(logits.double().softmax(1).numpy()))
    return float(F.nll_loss(probs.double().clamp_min(1e-300).log(), labels))


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
    parser.add_argument(
        "--peers",
        action="store_true",
        help="compare ts and dc without penalty with other packages: time, memory and NLL reached",
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
    fitted: dict[str, object] = {}
    if arguments.peers:
        own = {"ts": CALIBRATORS["ts"](), "dc": CALIBRATORS["dc"](lambdas=[0], mus=[0])}
        work = {name: lambda one=one: one.fit(batches) for name, one in own.items()}  # type: ignore[misc]
        work |= peers(batches)
        work = {
            name: lambda name=name, fit=fit: fitted.update({name: fit()})  # type: ignore[misc]
            for name, fit in work.items()
        }
    print(
        f"{batches.batches * IMAGES * _SIDE**2 / 1e6:.1f} M pixels × {arguments.classes} classes, "
        f"5 % ignored, {arguments.device}, {torch.get_num_threads()} threads\n"
    )
    print_ratios(_once(name, function, arguments.device) for name, function in work.items())
    for name, calibrator in fitted.items():
        print(f"{name}: NLL {nll(calibrator, batches):.6f}")


def _once(name: str, function: Callable[[], object], device: str) -> Measurement:
    seconds = []

    def timed() -> None:
        start = time.perf_counter()
        function()
        synchronise(device)
        seconds.append(time.perf_counter() - start)

    extra = peak_extra_bytes(timed, device)
    return Measurement(name, tuple(seconds), extra)
