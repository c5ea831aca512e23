"""`segcal export`: writes a run as one file that gives calibrated probabilities."""

from __future__ import annotations

import argparse

from torch import Tensor
from torch.nn.functional import interpolate

from segcal.distributed import choose_device
from segcal.evaluation import export as exporting
from segcal.evaluation.folder import require_writable
from segcal.evaluation.holdout import fit
from segcal.sources.network import RunSource


def export_run(options: argparse.Namespace) -> None:
    """Write a run's network, with a post-hoc method if asked, as .pt2 or .onnx."""
    exporting.require_exportable(options.out)
    require_writable(options.out.parent)
    device = choose_device(options.device)
    run = RunSource(
        options.run,
        split="holdout",
        weights=options.weights,
        device=device,
        batch_size=options.batch_size,
        workers=options.workers,
    )
    calibrator = fit(options.posthoc, run)[options.posthoc[0]] if options.posthoc else None
    if calibrator is not None:
        calibrator.cpu()
    example = _example(run.splits.test[0][0], options.size)  # (1, 3, H, W)
    difference = exporting.export(
        run.model.cpu(), calibrator, example, options.out, multilabel=run.multilabel
    )
    shape = ", ".join(map(str, example.shape[1:]))
    print(f"{options.out}: images (N, {shape}) to probabilities, {difference:.1e} from PyTorch's")


def _example(image: Tensor, size: tuple[int, int] | None) -> Tensor:
    batch = image[None]
    if size is not None and batch.ndim != 4:
        raise ValueError("Expected no --size for a network that reads text, but got one")
    return batch if size is None else interpolate(batch, size, mode="bilinear")
