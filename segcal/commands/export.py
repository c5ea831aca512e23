"""Export a network that outputs calibrated probabilities, as .pt2 or .onnx."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import add_network, add_posthoc, checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, with which calibrator, and where to write."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add("--out", type=Path, required=True, help="file to write, ending in .pt2 or .onnx")
    add_posthoc(parser, "METHOD", "post-hoc method to fit on the hold-out")
    add(
        "--size",
        type=checked(_size),
        metavar="HxW",
        help="input size of the exported network; default: that of the first test image",
    )
    add_network(parser)


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ValueError(f"{text} is no size HxW such as 480x640")
    return int(height), int(width)


def run(options: argparse.Namespace) -> None:
    """Fit the calibrator, and write the file."""
    from torch.nn.functional import interpolate

    from segcal.distributed import choose_device
    from segcal.evaluation import holdout
    from segcal.evaluation.export import export, require_exportable
    from segcal.evaluation.folder import require_writable
    from segcal.sources.network import RunSource

    if len(options.posthoc) > 1:
        raise ValueError(f"--posthoc takes one method here, but got {', '.join(options.posthoc)}")
    require_exportable(options.out)
    require_writable(options.out.parent)
    source = RunSource(
        options.run,
        weights=options.weights,
        device=choose_device(options.device),
        batch_size=options.batch_size,
        workers=options.workers,
    )
    calibrator = None
    if options.posthoc and (fit_on := source.holdout()) is not None:
        (calibrator,) = holdout.fit(options.posthoc, fit_on).values()
        calibrator.cpu()
    example = source.samples[0][0][None]  # (1, 3, H, W)
    if options.size is not None:
        if example.ndim != 4:
            raise ValueError("--size is for images, but this network reads text")
        example = interpolate(example, options.size, mode="bilinear")
    model = source.model.cpu()
    difference = export(model, calibrator, example, options.out, multilabel=source.multilabel)
    shape = ", ".join(map(str, example.shape[1:]))
    print(f"{options.out}: images (N, {shape}) to probabilities, {difference:.1e} from PyTorch's")
