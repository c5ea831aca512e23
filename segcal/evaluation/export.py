"""Export of a network with its calibrator, as one file that gives calibrated probabilities."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from segcal.evaluation.holdout import fit
from segcal.files import atomic_write
from segcal.posthoc import Calibrator
from segcal.sources.members import Members, Pool
from segcal.sources.network import NetworkSource, eval_mode
from segcal.sources.source import Source, logits_of, resize


class Calibrated(nn.Module):
    """Images (N, channels, *) to calibrated probabilities (N, C, *S).

    Coarse logits of segmentation are first resized to the images, as they are for evaluation.
    """

    def __init__(
        self, model: nn.Module, calibrator: Calibrator | None = None, *, multilabel: bool = False
    ) -> None:
        super().__init__()
        self.model, self.multilabel = model, multilabel
        self.calibrator = calibrator

    def forward(self, images: Tensor) -> Tensor:
        """Calibrated probabilities, in float32 at least."""
        logits = logits_of(self.model(images))
        if logits.ndim == images.ndim and logits.ndim in (4, 5):
            logits = resize(logits, images.shape[2:])
        if self.calibrator is not None:
            logits = self.calibrator(logits, images)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide).sigmoid() if self.multilabel else logits.softmax(1, dtype=wide)


class Pooled(nn.Module):
    """Images (N, channels, *) to the logits (N, C, *S) of the mean of several networks."""

    def __init__(self, members: Sequence[Calibrated], pool: Pool = "probs") -> None:
        super().__init__()
        self.members, self.pool = nn.ModuleList(members), pool
        self.multilabel = members[0].multilabel

    def forward(self, images: Tensor) -> Tensor:
        """Logits whose softmax or sigmoids are the pooled probabilities."""

        def logits(probs: Tensor) -> Tensor:
            tiny, eps = torch.finfo(probs.dtype).tiny, torch.finfo(probs.dtype).eps
            return probs.logit(eps) if self.multilabel else probs.clamp_min(tiny).log()

        probs = [member(images) for member in self.members]
        if self.pool == "logits":
            return torch.stack([logits(p) for p in probs]).mean(0)
        return logits(torch.stack(probs).mean(0))


def export(
    model: nn.Module,
    calibrator: Calibrator | None,
    example: Tensor,
    path: str | os.PathLike[str],
    *,
    multilabel: bool = False,
    tolerance: float = 1e-4,
) -> float:
    """Write `Calibrated(model, calibrator)` for any batch size, and check it against PyTorch.

    Args:
        model: any module to logits, alone or as `segcal.evaluate` takes them; put in eval mode for
            this and left as it was found.
        calibrator: fitted on such logits; None leaves the probabilities as they are.
        example: (N, channels, *) images as the model takes them; their size is the file's. Real
            images test more of the network than noise does.
        path: ending in .pt2 for torch.export, or in .onnx, which needs the extra `segcal[onnx]`.
        multilabel: the logits are of C sigmoid outputs.
        tolerance: the largest difference to PyTorch's probabilities on the example.

    Returns:
        The largest difference that was found.

    Raises:
        ValueError: another ending, a missing package, a model that cannot be traced, or a
            difference above the tolerance. Nothing is written then.
    """
    path = Path(path)
    require_exportable(path)
    # Tracing takes a size of 1 for a constant, so the batch has at least 2.
    batch = example if len(example) > 1 else torch.cat([example, example])
    with eval_mode(model) as network, torch.no_grad():
        calibrated = Calibrated(network, calibrator, multilabel=multilabel).eval()
        try:
            expected = calibrated(batch)
            program = torch.export.export(
                calibrated, (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
            content, found = _WRITERS[path.suffix](program, batch)
        except ValueError:
            raise
        except Exception as error:  # whatever the model's own code makes torch stumble on
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            raise ValueError(
                f"{path}: torch.export cannot trace the model on the example of shape "
                f"{tuple(example.shape)}: {type(error).__name__}: {reason}"
            ) from error
    difference = float((found.to(expected) - expected).abs().max())
    if not difference <= tolerance:
        raise ValueError(
            f"{path}: its probabilities differ from PyTorch's by {difference:g}, which is more "
            f"than the tolerance of {tolerance:g}"
        )
    with atomic_write(path, "wb") as file:
        file.write(content)
    return difference


def export_source(
    source: Source,
    path: str | os.PathLike[str],
    *,
    posthoc: str = "",
    size: tuple[int, int] | None = None,
    tolerance: float = 1e-4,
) -> tuple[float, tuple[int, ...]]:
    """Write the network of a source, or `Members` as one that pools them, as `export` does.

    The example is the source's first image, resized to `size` (h, w). `posthoc` is the short name
    of a post-hoc method to fit on the source's hold-out. Returns the largest difference that was
    found, and the shape of the example.
    """
    networks = []
    for one in source.members if isinstance(source, Members) else (source,):
        if not isinstance(one, NetworkSource) or one.members:
            raise ValueError(f"{one.name} is no single network, which could be exported")
        networks.append(one)
    first = networks[0]
    images = first.samples[0][0][None]  # (1, 3, H, W)
    for other in networks[1:]:
        if not torch.equal(other.samples[0][0], images[0]):
            raise ValueError(
                f"{first.name} and {other.name} make different inputs of one image, so they "
                "cannot be in one file"
            )
    multilabel = source.multilabel
    network = first.logit_module()
    if isinstance(source, Members):
        members = [
            Calibrated(one.logit_module(), calibrator, multilabel=multilabel)
            for one, calibrator in zip(networks, source.calibrators, strict=True)
        ]
        network = Pooled(members, source.pool)
    calibrator = None
    if posthoc:
        if (holdout := source.holdout()) is None:
            raise ValueError("--posthoc needs images to fit on: say --holdout NAME:ROOT[:SPLIT]")
        calibrator = fit(posthoc, holdout).cpu()
    if size is not None:
        if images.ndim != 4:
            raise ValueError("--size is for images, but this network reads text")
        images = interpolate(images, size, mode="bilinear")
    checks: dict[str, Any] = {"multilabel": multilabel, "tolerance": tolerance}
    return export(network.cpu(), calibrator, images, path, **checks), tuple(images.shape)


def require_exportable(path: Path) -> None:
    """Raise if `path` has another ending than `export` writes, or its packages are missing."""
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path} must end in {' or '.join(_WRITERS)}")
    missing = [name for name in _NEEDED.get(path.suffix, ()) if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{path} needs the packages {', '.join(missing)}: pip install 'segcal[onnx]'"
        )


def _as_pt2(program: torch.export.ExportedProgram, batch: Tensor) -> tuple[bytes, Tensor]:
    """The content of the file, and what it gives for `batch`."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return buffer.getvalue(), torch.export.load(buffer).module()(batch)


def _as_onnx(program: torch.export.ExportedProgram, batch: Tensor) -> tuple[bytes, Tensor]:
    """The content of the file, and what it gives for `batch`."""
    import onnxruntime  # an extra

    converted = torch.onnx.export(
        program, dynamo=True, input_names=["images"], output_names=["probs"], verbose=False
    )
    assert converted is not None
    content = converted.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": batch.cpu().numpy()})
    return content, torch.from_numpy(found)


_WRITERS = {".pt2": _as_pt2, ".onnx": _as_onnx}
_NEEDED = {".onnx": ("onnx", "onnxruntime", "onnxscript")}
