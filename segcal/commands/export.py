"""`segcal export`: writes a run as one file that gives calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.functional import interpolate

from segcal.commands.evaluate import add_run_arguments
from segcal.commands.parser import Parser, checked
from segcal.evaluation import export as exporting
from segcal.evaluation.calibrate import fit_scalers, method_names
from segcal.evaluation.evaluate import NONE
from segcal.evaluation.results import require_writable
from segcal.evaluation.sources import SplitPredictions
from segcal.run import open_run
from segcal.runtime import choose_device


def export(arguments: Sequence[str], prog: str) -> None:
    """Write a run's network, with a post-hoc method if asked, as .pt2 or .onnx."""
    parser = Parser(prog, export.__doc__ or "")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, ending in .pt2 or .onnx"
    )
    parser.add_argument(
        "--posthoc",
        type=checked(method_names),
        default=(),
        metavar="METHOD",
        help="post-hoc method to fit on the hold-out: none, ts, vs, ms, dc or lts",
    )
    parser.add_argument(
        "--size",
        type=checked(_size),
        metavar="HxW",
        help="of the images the file takes; default: of the first test image",
    )
    add_run_arguments(parser)
    options = parser.parse(arguments)
    if len(options.posthoc) > 1:
        parser.error(f"Expected one post-hoc method, but got {', '.join(options.posthoc)}")
    exporting.require_exportable(options.out)
    require_writable(options.out.parent)
    device = choose_device(options.device)
    run = open_run(options.run, weights=f"{options.weights}.pt")

    def holdout() -> SplitPredictions:
        return run.predictions(
            "holdout", device=device, batch_size=options.batch_size, workers=options.workers
        )

    scalers = fit_scalers(options.posthoc, holdout, title=f"{options.run.name}: hold-out")
    scaler = scalers[options.posthoc[0] if options.posthoc else NONE]
    if scaler is not None:
        scaler.cpu()
    example = _example(run.data.test[0][0], options.size)  # (1, 3, H, W)
    difference = exporting.export(run.model.cpu(), scaler, example, options.out)
    shape = ", ".join(map(str, example.shape[1:]))
    print(f"{options.out}: images (N, {shape}) to probabilities, {difference:.1e} from PyTorch's")


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise ValueError(f"expected HxW such as 480x640, but got {text}")
    return int(height), int(width)


def _example(image: Tensor, size: tuple[int, int] | None) -> Tensor:
    batch = image[None]
    if size is not None and batch.ndim != 4:
        raise ValueError("Expected no --size for a network that reads text, but got one")
    return batch if size is None else interpolate(batch, size, mode="bilinear")
