"""Export a network that outputs calibrated probabilities, as .pt2 or .onnx."""

from __future__ import annotations

import argparse
from pathlib import Path

from segcal.commands.options import (
    DATA,
    MEMBERS,
    NETWORK,
    POSTHOC,
    add_options,
    network_options,
    typed,
)

OPTIONS = {
    "--model SPEC ...": "instead of a run: a network by name, as for segcal eval",
    **MEMBERS,
    "--posthoc METHOD": f"post-hoc method to fit on the hold-out: {POSTHOC}",
    "--size HxW": "input size of the exported network; default: that of the first test image",
    "--tolerance T=1e-4": "largest difference to the probabilities of PyTorch on a test image",
    **NETWORK,
    **DATA,
    "--num-classes N": "number of classes, for masks without a classes.txt",
    "--ignore-index LABEL": "mask value that is not counted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, with which calibrator, and where to write."""
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="folder of a run")
    about = "file to write, ending in .pt2 or .onnx"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=about)
    add_options(parser, OPTIONS)


def run(options: argparse.Namespace) -> None:
    """Open the networks, and write the file."""
    from segcal.distributed import choose_device
    from segcal.evaluation.export import export_source, require_exportable
    from segcal.evaluation.folder import require_writable
    from segcal.evaluation.holdout import calibrate_members
    from segcal.sources import Source, open_source
    from segcal.sources.members import Members
    from segcal.sources.network import RunSource

    posthoc = options.posthoc
    if len(posthoc) > 1:
        raise ValueError(f"--posthoc takes one method here, but got {', '.join(posthoc)}")
    require_exportable(options.out)
    require_writable(options.out.parent)
    inputs = [*options.run, *options.model]
    if not inputs or (len(inputs) > 1 and not options.ensemble):
        raise ValueError(
            "name the folder of a run, or --model SPEC with --data NAME:ROOT; several with "
            "--ensemble"
        )
    if options.calibrate == "members" and not (options.ensemble and posthoc):
        raise ValueError("--calibrate members needs --ensemble, and one method in --posthoc")
    if options.model and not options.data:
        raise ValueError("--model needs --data NAME:ROOT: an image to trace the network with")
    device = {"device": choose_device(options.device)}
    of_run, of_model = {**typed(options, RunSource), **device}, network_options(options)
    of_model |= {"data": options.data, **device}
    sources: list[Source] = [RunSource(path, **of_run) for path in options.run]
    sources += [open_source(model, **of_model) for model in options.model]
    source: Source = sources[0]
    if options.ensemble:
        source = Members(sources, pool=options.pool)
        if options.calibrate == "members":
            source, posthoc = calibrate_members(source, posthoc[0]), ()
    difference, shape = export_source(
        source,
        options.out,
        posthoc=posthoc[0] if posthoc else "",
        size=options.size,
        tolerance=options.tolerance,
    )
    sides = ", ".join(map(str, shape[1:]))
    print(f"{options.out}: images (N, {sides}) to probabilities, {difference:.1e} from PyTorch's")
