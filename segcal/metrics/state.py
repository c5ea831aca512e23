"""The settings and the state of a meter, as tensors and as an npz file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.files import BadFile, Npz, atomic_write, check_num_classes, one_line
from segcal.metrics.sums import Sums

EDGE_RULES = ("right", "left")


@dataclass(frozen=True)
class Settings:
    """What two meters must have in common to be added."""

    num_classes: int
    num_bins: int
    ignore_index: int
    edge_rule: str
    per_image: bool
    class_names: tuple[str, ...] | None
    region: str
    multilabel: bool = False

    def __post_init__(self) -> None:
        classes = 1 if self.multilabel else 2
        for name, least in (("num_classes", classes), ("num_bins", 1), ("ignore_index", None)):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or (least is not None and value < least):
                bound = "" if least is None else f" >= {least}"
                raise ValueError(f"Expected {name} to be an integer{bound}, but got {value!r}")
            object.__setattr__(self, name, int(value))  # numpy's integers are not JSON's
        check_num_classes(self.num_classes, multilabel=self.multilabel)
        if not isinstance(self.multilabel, bool):
            raise ValueError(f"Expected multilabel to be a bool, but got {self.multilabel!r}")
        if self.edge_rule not in EDGE_RULES:
            raise ValueError(f"Expected edge_rule in {EDGE_RULES}, but got {self.edge_rule!r}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"Expected {self.num_classes} class_names, but got {len(self.class_names)}"
            )

    def require_equal(self, other: Settings) -> None:
        """Raise a ValueError that names the settings that differ, if any do."""
        mine, theirs = asdict(self), asdict(other)
        differing = [
            f"{name} {mine[name]!r} and {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        ]
        if differing:
            raise ValueError(f"Expected meters of equal settings, but got {', '.join(differing)}")

    def encode(self) -> Tensor:
        """The settings as a uint8 tensor."""
        return _to_bytes(json.dumps(asdict(self)))

    @classmethod
    def decode(cls, data: Tensor) -> Settings:
        """The inverse of `encode`.

        Raises:
            ValueError: `data` holds no settings.
        """
        try:
            settings = json.loads(_to_text(data))
            names = settings.pop("class_names")
            return cls(**settings, class_names=None if names is None else tuple(names))
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
            settings = Settings.decode(torch.from_numpy(arrays["settings"]))
            k, b, multilabel = settings.num_classes, settings.num_bins, settings.multilabel
            sums = Sums.zeros(k, b, "meta", multilabel=multilabel)
            for name, tensor in sums.tensors().items():
                if arrays.shape(name) != tensor.shape:
                    raise ValueError(
                        f"the settings say {k} classes and {b} bins, "
                        f"but {name} has shape {arrays.shape(name)}"
                    )
            return settings, {name: torch.from_numpy(arrays[name]) for name in arrays.keys}
    except BadFile as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise a ValueError unless `state` fits a meter with these settings and the state `own`."""
    if set(state) != set(own):
        odd = sorted(set(state) ^ set(own))
        raise ValueError(f"Expected the state of a CalibrationMeter, but {odd} do not match")
    settings.require_equal(Settings.decode(state["settings"]))
    for name, tensor in own.items():
        # The number of images, and the length of text, may differ.
        free = 1 if name.startswith("image.") or name in ("names", "settings") else 0
        got = state[name]
        if got.dtype != tensor.dtype or got.shape[free:] != tensor.shape[free:]:
            raise ValueError(
                f"Expected {name} of {tensor.dtype} {tuple(tensor.shape)}, "
                f"but got {got.dtype} {tuple(got.shape)}"
            )


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
