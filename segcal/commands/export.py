"""Export a network that outputs calibrated probabilities, as .pt2 or .onnx."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import (
    add_data,
    add_network,
    add_posthoc,
    at_least,
    checked,
    data_options,
    size,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, with which calibrator, and where to write."""
    add = parser.add_argument
    add("run", type=Path, nargs="?", metavar="RUN", help="folder of a run")
    add("--model", metavar="SPEC", help="instead of a run: a network by name, as for segcal eval")
    add("--out", type=Path, required=True, help="file to write, ending in .pt2 or .onnx")
    add_posthoc(parser, "METHOD", "post-hoc method to fit on the hold-out")
    add(
        "--size",
        type=checked(size),
        metavar="HxW",
        help="input size of the exported network; default: that of the first test image",
    )
    add_network(parser)
    add_data(parser)
    add("--num-classes", type=at_least(1), help="of masks without a classes.txt")
    add("--ignore-index", type=int, help="mask value that is not counted")


def run(options: argparse.Namespace) -> None:
    """Fit the calibrator, and write the file."""
    from torch.nn.functional import interpolate

    from segcal.distributed import choose_device
    from segcal.evaluation import holdout
    from segcal.evaluation.export import export, require_exportable
    from segcal.evaluation.folder import require_writable
    from segcal.sources.named import open_network
    from segcal.sources.network import NetworkSource, RunSource

    if len(options.posthoc) > 1:
        raise ValueError(f"--posthoc takes one method here, but got {', '.join(options.posthoc)}")
    require_exportable(options.out)
    require_writable(options.out.parent)
    if (options.run is None) == (options.model is None):
        raise ValueError("name the folder of a run, or --model SPEC with --data NAME:ROOT")
    device = choose_device(options.device)
    source: NetworkSource
    if options.model is None:
        keys = ("weights", "batch_size", "workers")
        settings = {key: getattr(options, key) for key in keys}
        source = RunSource(options.run, device=device, **settings)
    elif not options.data:
        raise ValueError("--model needs --data NAME:ROOT: an image to trace the network with")
    else:
        stated = data_options(options)
        source = open_network(options.model, stated.pop("data"), device=device, **stated)
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
