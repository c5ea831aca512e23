"""The classes of all calibrators, and the reading of saved ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from segcal.posthoc.calibrator import CALIBRATOR_FORMAT, Calibrator
from segcal.posthoc.registry import ENTRIES

CALIBRATORS: dict[str, type[Calibrator]] = {
    name: getattr(import_module(f"segcal.posthoc.{entry.module}"), entry.calibrator)
    for name, entry in ENTRIES.items()
}

# What every fit is far within, and what arithmetic needs to stay finite.
_POSITIVE = ("temperature_", "temperatures_", "logit_scale_", "image_scale_")
_LEAST, _MOST = 1e-12, 1e6


def load(path: str | os.PathLike[str]) -> Calibrator:
    """The fitted calibrator that `Calibrator.save` wrote, on the CPU.

    Nothing in the file is run: it holds tensors, and the name of one of `CALIBRATORS`.

    Raises:
        ValueError: the file is no saved calibrator; the message names it.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _build(metadata, tensors)
    except (SafetensorError, ValueError, TypeError, RuntimeError) as error:  # torch's own, too
        reason = str(error).splitlines()[0]
        raise ValueError(f"{os.fspath(path)}: expected a saved calibrator, but {reason}") from None


def _build(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Calibrator:
    if metadata.get("format") != CALIBRATOR_FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, not {CALIBRATOR_FORMAT!r}")
    name = metadata.get("calibrator", "")
    if name not in CALIBRATORS:
        raise ValueError(f"its calibrator {name!r} is none of {', '.join(CALIBRATORS)}")
    calibrator = CALIBRATORS[name](**json.loads(metadata.get("options", "null")))
    numbers = _numbers(type(calibrator), json.loads(metadata.get("learned", "null")))
    with torch.device("meta"):  # takes no memory, whatever sizes the file states
        calibrator._start(numbers["num_classes_"], numbers.get("image_channels_", 0))
    expected = calibrator.state_dict()
    for key in sorted(expected.keys() | tensors.keys()):
        wanted, got = (
            (None if t is None else f"{t.dtype} {tuple(t.shape)}")
            for t in (expected.get(key), tensors.get(key))
        )
        if wanted != got:
            raise ValueError(f"its {key} is {got}, not {wanted}")
        if not tensors[key].isfinite().all():
            raise ValueError(f"its {key} is not finite")
        if key in _POSITIVE and not ((tensors[key] >= _LEAST) & (tensors[key] <= _MOST)).all():
            raise ValueError(f"its {key} is not within {_LEAST:g}..{_MOST:g}")
        if (tensors[key].abs() > _MOST).any():
            raise ValueError(f"its {key} is past {_MOST:g}")
    calibrator.load_state_dict(tensors, assign=True)
    for key, value in numbers.items():
        setattr(calibrator, key, value)
    return calibrator


def _numbers(kind: type[Calibrator], learned: Any) -> dict[str, Any]:
    """The plain numbers a calibrator of this kind has learned, checked."""
    known = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    if not isinstance(learned, dict) or "num_classes_" not in learned:
        raise ValueError(f"what it learned is {learned!r}")
    for name, value in learned.items():
        if name not in known or not name.endswith("_") or not isinstance(value, int | float):
            raise ValueError(f"it learned {name} = {value!r}")
    for name in ("num_classes_", "image_channels_"):
        if not isinstance(value := learned.get(name, 0), int) or not 0 <= value < 2**16:
            raise ValueError(f"it learned {name} = {value!r}")
    return learned
