"""The place where a model meets a data set to be measured: `segcal.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from tqdm import tqdm

from segcal import distributed
from segcal.metrics import CalibrationMeter, Report
from segcal.metrics.regions import Region, restrict


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_classes: int,
    ignore_index: int = 255,
    num_bins: int = 15,
    edge_rule: str = "right",
    device: torch.device | str | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
    regions: Mapping[str, Region] | None = None,
    per_image: bool = False,
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    pad_to: int = 1,
    padded: bool | None = None,
    amp: bool = False,
    progress: bool = True,
) -> Report:
    """Measure `model` on every batch of `loader`, at the resolution of the labels.

    The model is put in eval mode and left as it was found. Under torch.distributed each rank
    evaluates its own share of the data (without repeats: shard by `indices[rank::world]`) and
    every rank returns the report of the whole.

    Args:
        model: any module from (N, ...) inputs to (N, C, *S) logits, or to a dict, tuple or object
            that holds them under "out" or "logits", or first.
        loader: gives (inputs, labels), or (inputs, labels, names of the images).
        num_classes: C.
        ignore_index: the label that means "do not count this pixel".
        num_bins: of the meter.
        edge_rule: of the meter.
        device: where to run; by default where the model's parameters are.
        transform: applied to the logits at label resolution, as a fitted scaler is.
        regions: parts of the images to measure as well, by name; see `segcal.metrics.regions`.
            Their reports are in `Report.regions`.
        per_image: keep sums per image, for intervals and for the worst images.
        names: of all images of the loader, in order; instead of names in the batches.
        class_names: for the report.
        pad_to: pad images right and below with 0 to sides of this multiple, and crop the logits.
        padded: whether the loader's images that are larger than their labels were padded right
            and below (the logits are cropped) or enlarged (they are resized).
        amp: run the model under autocast.
        progress: show a progress bar (on rank 0).

    Raises:
        ValueError: a batch that does not fit, or labels or logits that cannot be counted.
    """
    regions = {} if regions is None else regions
    if "all" in regions:
        raise ValueError("Expected other names for regions than 'all', which is the whole image")
    meters = {
        name: CalibrationMeter(
            num_classes,
            num_bins,
            ignore_index,
            edge_rule=edge_rule,
            per_image=per_image,
            class_names=class_names,
            region=name,
        )
        for name in ("all", *regions)
    }
    device = _device_of(model) if device is None else torch.device(device)
    hidden = not progress or distributed.rank() > 0
    seen = 0
    with eval_mode(model) as network, torch.inference_mode():
        for batch in tqdm(loader, desc="evaluate", disable=hidden, leave=False):
            inputs, labels, batch_names = _unpack(batch, device)
            with torch.autocast(device.type, enabled=amp):
                logits = logits_of(network(_pad(inputs, pad_to)))
            logits = _at_labels(logits, inputs, labels, pad_to, padded)
            logits = logits if transform is None else transform(logits)
            if names is not None:
                batch_names = names[seen : seen + len(labels)]
            seen += len(labels)
            meters["all"].update(logits, labels, names=batch_names)
            for name, region in regions.items():
                part = restrict(labels, region, ignore_index)
                meters[name].update(logits, part, names=batch_names)
    reports = {name: meter.sync().compute() for name, meter in meters.items()}
    return replace(reports.pop("all"), regions=reports)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """The bare network in eval mode; afterwards every submodule has its own mode back."""
    # A DDP wrapper sends buffers at each forward, so ranks with uneven shares would wait forever.
    network = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield network
    finally:
        for module in training:
            module.training = True


def _device_of(model: nn.Module) -> torch.device:
    tensor = next((t for group in (model.parameters(), model.buffers()) for t in group), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _unpack(batch: Any, device: torch.device) -> tuple[Tensor, Tensor, Sequence[str] | None]:
    if not isinstance(batch, Sequence) or len(batch) not in (2, 3):
        raise ValueError(
            f"Expected batches of (inputs, labels) or (inputs, labels, names), "
            f"but got {type(batch).__name__}"
        )
    inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batch[:2])
    return inputs, labels, batch[2] if len(batch) == 3 else None


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned, as torchvision, smp and others wrap them."""
    if isinstance(output, Mapping):
        output = output.get("out", output.get("logits"))
    elif isinstance(output, Sequence):
        output = output[0]
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    if not isinstance(output, Tensor):
        raise ValueError(
            "Expected a model that returns logits, alone, first in a tuple, or under 'out' or "
            f"'logits', but got {type(output).__name__}"
        )
    return output


def _pad(inputs: Tensor, pad_to: int) -> Tensor:
    if pad_to == 1 or inputs.ndim < 4:
        return inputs
    height, width = inputs.shape[-2:]
    return pad(inputs, (0, -width % pad_to, 0, -height % pad_to))


def _at_labels(
    logits: Tensor, inputs: Tensor, labels: Tensor, pad_to: int, padded: bool | None
) -> Tensor:
    """(N, C, *S) logits at the size of the (N, *S) labels: padding cut off, then upsampled."""
    if labels.ndim != 3 or logits.ndim != 4 or inputs.ndim != 4:
        return logits  # classification, or something whose sizes the meter checks
    size = labels.shape[-2:]
    image = inputs.shape[-2:]
    if padded is None and (image[0] > size[0] or image[1] > size[1]):
        raise ValueError(
            f"Expected images no larger than their labels {tuple(size)}, but got {tuple(image)}; "
            "say padded=True if they were padded right and below, padded=False if enlarged"
        )
    full = (image[0] + -image[0] % pad_to, image[1] + -image[1] % pad_to)
    if full != tuple(image):  # the network saw padding: undo it at the size it was added
        logits = resize(logits, full)[..., : image[0], : image[1]]
    if padded:
        logits = resize(logits, image)[..., : size[0], : size[1]]
    return resize(logits, size)


def resize(logits: Tensor, size: Sequence[int]) -> Tensor:
    """(N, C, *size) logits, by bilinear interpolation in float32 at least."""
    if logits.shape[-2:] == tuple(size):
        return logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return interpolate(logits.to(wide), size=tuple(size), mode="bilinear", align_corners=False)
