"""The state of a meter as tensors and as an npz file, and the checks of such a state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.files import BadFile, Npz, atomic_write, one_line
from segcal.metrics.sums import CLASS_BINS, ImageSums, Settings, Sums, fine_edges
from segcal.metrics.tables import FineHistogram

_SLACK = 0.01  # a pixel: half-precision probabilities may be this far out of their bin
_EARLIER_FINE_BINS = 1537  # of earlier versions, which had none by class
_FINE = ("fine_correct", "fine_wrong", "fine_confidence")
_BY_CLASS = ("class_fine_correct", "class_fine_wrong")


def encode_settings(settings: Settings) -> Tensor:
    """The settings as a uint8 tensor."""
    return _to_bytes(json.dumps(asdict(settings)))


def decode_settings(data: Tensor) -> Settings:
    """The inverse of `encode_settings`.

    Raises:
        ValueError: `data` holds no settings.
    """
    try:
        settings = json.loads(_to_text(data))
        names = settings.pop("class_names")
        return Settings(**settings, class_names=None if names is None else tuple(names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def write_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write the state of a meter as npz, completely or not at all."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in state.items()}
    with atomic_write(path, "wb") as file:
        np.savez(file, **arrays)


def read_state(path: str | os.PathLike[str]) -> tuple[Settings, dict[str, Tensor]]:
    """Read the settings and the state that `write_state` wrote; nothing is unpickled.

    Memory is taken for what the file holds alone, whatever sizes it states.

    Raises:
        ValueError: the file holds something else, or is damaged.
    """
    try:
        with Npz(Path(path), own=True) as arrays:
            settings = decode_settings(torch.from_numpy(arrays["settings"]))
            earlier = _BY_CLASS[0] not in arrays.keys
            for name, shapes in _shapes(settings, earlier=earlier).items():
                if arrays.shape(name) not in shapes:
                    raise ValueError(
                        f"the settings say {settings.num_classes} classes and "
                        f"{settings.num_bins} bins, but {name} has shape {arrays.shape(name)}"
                    )
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.keys}
            return settings, state
    except BadFile as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None


def _shapes(settings: Settings, *, earlier: bool) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that the sums over all pixels may have, by name."""
    s = settings
    sums = Sums.zeros(s.num_classes, s.num_bins, "meta", multilabel=s.multilabel).tensors()
    shapes = {name: [tuple(tensor.shape)] for name, tensor in sums.items()}
    for name in _BY_CLASS:
        shapes[name].append((0, CLASS_BINS))
    if earlier:
        shapes |= {name: [(_EARLIER_FINE_BINS,)] for name in _FINE}
        shapes = {name: shape for name, shape in shapes.items() if name not in _BY_CLASS}
    return shapes


def of_this_version(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with the fine histogram of today, if it is of an earlier version.

    Its bins were fewer; see `FineHistogram.on`. By class nothing is known.
    """
    state = dict(state)
    fine = [state[name] for name in _FINE if name in state]
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in fine]
    dtypes = torch.int64, torch.int64, torch.float64
    if _BY_CLASS[0] in state or kinds != [(dtype, (_EARLIER_FINE_BINS,)) for dtype in dtypes]:
        return state
    earlier = FineHistogram(
        np.linspace(0, 1, _EARLIER_FINE_BINS + 1), *(tensor.cpu().numpy() for tensor in fine)
    )
    for name, column in zip(_FINE, earlier.on(fine_edges().numpy()).sums, strict=True):
        state[name] = torch.from_numpy(column.copy())
    unknown = torch.zeros((0, CLASS_BINS), dtype=torch.int64)
    return state | {name: unknown for name in _BY_CLASS}


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise a ValueError unless `state` fits a meter with these settings and the state `own`."""
    if set(state) != set(own):
        odd = sorted(set(state) ^ set(own))
        raise ValueError(f"Expected the state of a CalibrationMeter, but {odd} do not match")
    settings.require_equal(decode_settings(state["settings"]))
    shapes = _shapes(settings, earlier=False)
    for name, tensor in own.items():
        # The number of images, and the length of text, may differ.
        free = 1 if name.startswith("image.") or name in ("names", "settings") else 0
        expected = shapes.get(name, [tuple(tensor.shape)])
        got = state[name]
        if got.dtype != tensor.dtype or tuple(got.shape[free:]) not in [s[free:] for s in expected]:
            raise ValueError(
                f"Expected {name} of {tensor.dtype} {expected[0]}, "
                f"but got {got.dtype} {tuple(got.shape)}"
            )


def check_sums(sums: Sums, images: ImageSums, settings: Settings) -> None:
    """Raise a ValueError unless these can be the sums of a data set, so far as they tell.

    Args:
        sums: of all pixels.
        images: of each image; none unless the settings say so.
        settings: of the meter.
    """
    pixels, softmax = sums.top_count.sum(), sums.confusion.ndim == 2
    correct, by_truth = (
        (sums.confusion.diagonal().sum(), sums.confusion.sum(1))
        if softmax
        else (sums.confusion.diagonal(dim1=1, dim2=2).sum(), sums.confusion[:, 1].sum(1))
    )
    of_classes = sums.class_count.sum(1)
    fine = sums.fine_correct + sums.fine_wrong
    # Every pixel has a probability of every class, but a sigmoid's decisions are of one class.
    totals = [sums.confusion.sum(), fine.sum()]
    totals += [of_classes.min(), of_classes.max()] if softmax else [of_classes.sum()]
    counts = [tensor for tensor in sums.tensors().values() if not tensor.is_floating_point()]
    edges = torch.arange(settings.num_bins + 1, dtype=torch.float64) / settings.num_bins
    laws: dict[str, Tensor | bool] = {
        "counts of at least 0": all((tensor >= 0).all() for tensor in counts),
        "no more hits than pixels in a bin": (sums.class_hits <= sums.class_count).all()
        and (sums.top_hits <= sums.top_count).all(),
        "mean confidences within their bins": _within(sums.top_confidence, sums.top_count, edges)
        and _within(sums.class_confidence, sums.class_count, edges)
        and _within(sums.fine_confidence, fine, fine_edges()),
        "tables of equally many pixels": all(total == pixels for total in totals),
        "tables of equally many hits": sums.top_hits.sum() == correct == sums.fine_correct.sum()
        and torch.equal(sums.class_hits.sum(1), by_truth),
        "as many predictions of a class in all tables": _adds_up(sums),
        "no more images than pixels": 0 <= sums.images <= pixels,
        "a finite NLL and Brier score": 0 <= sums.nll < torch.inf
        and 0 <= sums.brier <= (2 + _SLACK) * pixels,
    }
    if settings.per_image:
        laws |= _laws_of_images(sums, images, pixels, by_truth)
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise ValueError(f"Expected {broken[0]}, but got other sums")


def _laws_of_images(
    sums: Sums, images: ImageSums, pixels: Tensor, by_truth: Tensor
) -> dict[str, Tensor | bool]:
    counts = (images.pixels, images.intersection, images.predicted, images.truth)
    gaps = ((images.top_gap, sums.top_confidence - sums.top_hits),
            (images.class_gap, sums.class_confidence - sums.class_hits))  # fmt: skip
    return {
        "counts of at least 0 in every image": all((count >= 0).all() for count in counts),
        "images of as many pixels as the whole": images.pixels.sum() == pixels,
        "no more pixels right than predicted or labelled in an image": (
            images.intersection <= torch.minimum(images.predicted, images.truth)
        ).all(),
        "labels of all images that add up": torch.equal(images.truth.sum(0), by_truth),
        "gaps of all images that add up": all(
            ((part.sum(0) - whole).abs() <= _SLACK * (1 + pixels)).all() for part, whole in gaps
        ),
        "an ACE of at most 1": ((images.class_ace >= 0) & (images.class_ace <= 1 + _SLACK)).all(),
    }


def _adds_up(sums: Sums) -> bool:
    """Whether the fine histogram by class has the predictions of the confusion matrix, if any."""
    correct, wrong, table = sums.class_fine_correct, sums.class_fine_wrong, sums.confusion
    if not len(correct) and not len(wrong):
        return True
    softmax = table.ndim == 2
    right = table.diagonal() if softmax else table[:, 1, 1]
    predicted = table.sum(0) if softmax else table[:, :, 1].sum(1)
    return (
        correct.shape == wrong.shape
        and torch.equal(correct.sum(1), right)
        and torch.equal((correct + wrong).sum(1), predicted)
    )


def _within(total: Tensor, count: Tensor, edges: Tensor) -> Tensor:
    """Whether every total of `count` numbers lies where numbers between the edges can have it."""
    return (
        (total >= count * (edges[:-1] - _SLACK)) & (total <= count * (edges[1:] + _SLACK))
    ).all()


def encode_names(names: Sequence[str]) -> Tensor:
    """Names as a uint8 tensor, each followed by a zero, so that encodings can be concatenated."""
    return _to_bytes("".join(name.replace("\0", " ") + "\0" for name in names))


def decode_names(data: Tensor) -> list[str]:
    """The inverse of `encode_names`."""
    return _to_text(data).split("\0")[:-1]


def _to_bytes(text: str) -> Tensor:
    # Python gives file names that are not UTF-8 as surrogates; they must survive.
    return torch.tensor(list(text.encode("utf-8", "surrogateescape")), dtype=torch.uint8)


def _to_text(data: Tensor) -> str:
    return bytes(data.tolist()).decode("utf-8", "surrogateescape")
