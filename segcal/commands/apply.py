"""Write calibrated masks and confidence of images without labels, and what to expect of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from segcal.commands.options import (
    FORMAT,
    INPUT,
    NETWORK,
    add_options,
    network_options,
    typed,
)

if TYPE_CHECKING:
    from segcal.sources import Source

OPTIONS = {
    "--model SPEC": "instead of a run: a network by name, as for segcal eval",
    "--predictions DIR": "instead of a run: saved predictions",
    "--calibrator FILE": "calibrator.safetensors of segcal eval --posthoc; default: the network as "
    "it is",
    "--images DIR": "folder of images; --predictions may lack it",
    "--write FILES=mask,confidence": "files to write for each image, separated by commas: probs "
    "(npz), mask (PNG of class indices), confidence and uncertainty (16-bit PNG), accept (PNG of "
    "accepted pixels), sets (npz of class sets), overlay; volumes are NIfTI",
    "--profile FILE": "holdout.json of segcal eval; default: the one beside --calibrator",
    "--operate TARGET": "operating point of accept, chosen by segcal eval --operate; default: the "
    "first",
    "--miss A": "miss rate of sets, chosen by segcal eval --conformal; default: the first",
    "--fail-on-drift": "exit with status 3 if the images are unlike the hold-out",
    "--limit N": "only N images, evenly spaced",
    "--skip-bad": "leave out files that cannot be used",
    "--num-classes N": "classes of --model, where it does not know them; default: as --calibrator "
    "has",
    **NETWORK,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The network or the predictions, the calibrator, the images, and what to write."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results")
    add_options(parser, OPTIONS)
    group = parser.add_argument_group("any network", "docs/networks.md has examples.")
    add_options(group, INPUT)
    group = parser.add_argument_group("saved predictions", "docs/predictions.md has the format.")
    add_options(group, FORMAT)


def run(options: argparse.Namespace) -> int:
    """Open what was named, write the files, and print what to expect."""
    from segcal import apply, distributed, load_calibrator
    from segcal.evaluation.folder import PROFILE

    given = [each for each in (options.run, options.model, options.predictions) if each is not None]
    if len(given) != 1:
        raise ValueError("name one of: the folder of a run, --model SPEC, --predictions DIR")
    if options.images is None and options.predictions is None:
        raise ValueError("--images names the folder of images to predict")
    calibrator = None if options.calibrator is None else load_calibrator(options.calibrator)
    profile = options.profile
    if profile is None and options.calibrator is not None:
        profile = options.calibrator.with_name(PROFILE)
        if not profile.is_file():
            profile = None
    if profile is None and options.fail_on_drift:
        raise ValueError("--fail-on-drift needs the holdout.json of segcal eval: see --profile")
    device = distributed.choose_device(options.device)
    with distributed.process_group(device):
        source = _open(options, device, calibrator and calibrator.num_classes_)
        if options.limit is not None:
            source = source.limited(options.limit)
        expected = apply(
            source,
            calibrator,
            options.out,
            options.write,
            profile=profile,
            operate=options.operate,
            miss=options.miss,
        )
        status = 0
        if options.fail_on_drift:
            if expected.drift is None:
                raise ValueError("--fail-on-drift needs a hold-out of at least two images")
            status = 3 * expected.drift.alarm
        if distributed.rank() > 0:
            return status
        print(expected.describe())
        if calibrator is None:
            print("without --calibrator, networks are mostly over-confident: so are these numbers")
        if expected.skipped:
            print(f"left out {len(expected.skipped)} images: {', '.join(expected.skipped[:5])}")
        again = f", {expected.reused} of {len(expected.names)} images as before"
        print(f"wrote {options.out}{again if expected.reused else ''}")
        return status


def _open(options: argparse.Namespace, device: object, num_classes: int | None) -> Source:
    from segcal.sources import open_source
    from segcal.sources.network import RunSource
    from segcal.sources.saved import PredictionFormat

    if options.predictions is not None:
        stated = {**typed(options, PredictionFormat), "skip_bad": options.skip_bad}
        return open_source(options.predictions, format=options.format, labelled=False, **stated)
    if options.model is not None:
        stated = {"num_classes": num_classes, **network_options(options), "device": device}
        return open_source(options.model, unlabelled=options.images, **stated)
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is no folder of a run; a network by name is --model SPEC")
    stated = {**typed(options, RunSource), "device": device}
    return open_source(options.run, unlabelled=options.images, **stated)
