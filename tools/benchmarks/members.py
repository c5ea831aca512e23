"""Members pooled batch by batch, against their forwards alone: CPU time and memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

import torch
import torchvision

from benchmarks.measure import print_ratios, time_and_memory
from segcal import Members
from segcal.sources.network import LoaderSource

CLASSES = 21


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("--model", default="deeplabv3_resnet50", help="a segmentation network of torchvision")
    add("--counts", type=int, nargs="+", default=[2, 5, 10], help="numbers of members")
    add("--images", type=int, default=2, help="images, one at a time")
    add("--shape", type=int, nargs=2, default=[512, 512], metavar="n", help="H W")
    add("--repeats", type=int, default=3, help="measurements of each")


@torch.inference_mode()
def _read(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def run(arguments: argparse.Namespace) -> None:
    """Let members share one network, so that its weights are in memory once, and pool them."""
    build = getattr(torchvision.models.segmentation, arguments.model)
    network = build(weights=None, weights_backbone=None, num_classes=CLASSES).eval()
    loader = [
        (torch.randn(1, 3, *arguments.shape), torch.zeros(1, *arguments.shape, dtype=torch.int64))
        for _ in range(arguments.images)
    ]
    size = "×".join(map(str, arguments.shape))
    print(
        f"{arguments.model}, {arguments.images} images of {size}, {torch.get_num_threads()} threads"
    )
    for count in arguments.counts:
        members = [LoaderSource(network, loader, num_classes=CLASSES) for _ in range(count)]
        work = {
            f"{count} forwards": lambda members=members: [_read(member) for member in members],
            f"{count} members": lambda members=members: _read(Members(members)),
        }
        print()
        print_ratios(time_and_memory(work, arguments.repeats, "cpu", time.process_time))
