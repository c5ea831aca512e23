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
    "--num-classes N": "of masks without a classes.txt",
    "--ignore-index LABEL": "mask value that is not counted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, with which calibrator, and where to write."""
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="folder of a run")
    about = "file to write, ending in .pt2 or .onnx"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=about)
    add_options(parser, OPTIONS)


def run(options: argparse.Namespace) -> None:
    """Fit the calibrator, and write the file."""
    import torch
    from torch.nn.functional import interpolate

    from segcal.distributed import choose_device
    from segcal.evaluation import holdout
    from segcal.evaluation.export import Calibrated, Pooled, export, require_exportable
    from segcal.evaluation.folder import require_writable
    from segcal.sources.members import Members
    from segcal.sources.named import open_network
    from segcal.sources.network import NetworkSource, RunSource

    if len(options.posthoc) > 1:
        raise ValueError(f"--posthoc takes one method here, but got {', '.join(options.posthoc)}")
    require_exportable(options.out)
    require_writable(options.out.parent)
    inputs = [*options.run, *options.model]
    if not inputs or (len(inputs) > 1 and not options.ensemble):
        raise ValueError(
            "name the folder of a run, or --model SPEC with --data NAME:ROOT; several with "
            "--ensemble"
        )
    if options.calibrate == "members" and not (options.ensemble and options.posthoc):
        raise ValueError("--calibrate members needs --ensemble, and one method in --posthoc")
    if options.model and not options.data:
        raise ValueError("--model needs --data NAME:ROOT: an image to trace the network with")
    device = choose_device(options.device)
    sources: list[NetworkSource] = []
    for path in options.run:
        sources.append(RunSource(path, **{**typed(options, RunSource), "device": device}))
    for model in options.model:
        stated = {**network_options(options), "device": device}
        sources.append(open_network(model, options.data, **stated))
    source = sources[0]
    for other in sources[1:]:
        if not torch.equal(other.samples[0][0], source.samples[0][0]):
            raise ValueError(
                f"{source.name} and {other.name} make different inputs of one image, so they "
                "cannot be in one file"
            )
    networks, multilabel = [one.logit_module() for one in sources], source.multilabel
    network = networks[0]
    ensemble = Members(sources, pool=options.pool)
    posthoc = options.posthoc
    if options.ensemble:
        if options.calibrate == "members":
            ensemble, posthoc = holdout.calibrate_members(ensemble, posthoc[0]), ()
        network = Pooled(
            [
                Calibrated(one, calibrator, multilabel=multilabel)
                for one, calibrator in zip(networks, ensemble.calibrators, strict=True)
            ],
            options.pool,
        )
    calibrator = None
    if posthoc:
        if (fit_on := ensemble.holdout()) is None:
            raise ValueError("--posthoc needs images to fit on: say --holdout NAME:ROOT[:SPLIT]")
        (calibrator,) = holdout.fit(posthoc, fit_on).values()
        calibrator.cpu()
    example = source.samples[0][0][None]  # (1, 3, H, W)
    if options.size is not None:
        if example.ndim != 4:
            raise ValueError("--size is for images, but this network reads text")
        example = interpolate(example, options.size, mode="bilinear")
    network.cpu()
    difference = export(
        network,
        calibrator,
        example,
        options.out,
        multilabel=multilabel,
        tolerance=options.tolerance,
    )
    shape = ", ".join(map(str, example.shape[1:]))
    print(f"{options.out}: images (N, {shape}) to probabilities, {difference:.1e} from PyTorch's")
