"""The objects of an image of 512 x 512 pixels, against scipy.ndimage.label of both its maps."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from scipy import ndimage

from benchmarks.measure import print_ratios, time_and_memory
from segcal.metrics.objects import ObjectCounter, ObjectRule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--side", type=int, default=512, help="rows and columns of the image")
    parser.add_argument("--repeats", type=int, default=31, help="measurements of each")


def run(arguments: argparse.Namespace) -> None:
    """Print a table for a few large objects, and for many small ones."""
    rng = np.random.default_rng(0)
    for width in (12, 6, 2):
        noise = rng.standard_normal((2, arguments.side, arguments.side))
        seen, other = (ndimage.gaussian_filter(x, width) * 3.5 * width for x in noise)
        truth = seen + other / 3 > 0.3
        z = torch.from_numpy(4 * (seen - 0.3)).float()
        probs, labels = torch.stack([-z, z])[None].softmax(1), torch.from_numpy(truth)[None].long()
        counter = ObjectCounter(ObjectRule((1,)), 2)
        found = ndimage.label(seen > 0.3)[1], ndimage.label(truth)[1]
        print(f"\n{found[0]} predicted and {found[1]} true objects in {arguments.side}²\n")
        print_ratios(time_and_memory(_work(counter, probs, labels), arguments.repeats, "cpu"))


def _work(
    counter: ObjectCounter, probs: torch.Tensor, labels: torch.Tensor
) -> dict[str, Callable[[], object]]:
    masks = (probs[0, 1] > 0.5).numpy(), (labels[0] == 1).numpy()
    return {
        "scipy.ndimage.label of both": lambda: [ndimage.label(mask) for mask in masks],
        "segcal, objects": lambda: counter.update(probs, labels),
    }
