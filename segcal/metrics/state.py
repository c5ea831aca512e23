"""The place for a meter's settings, and for text as tensors, so that a state is tensors alone."""

from __future__ import annotations

import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.files import atomic_write

EDGE_RULES = ("right", "left")


@dataclass(frozen=True)
class Settings:
    """What two meters must agree on to be added."""

    num_classes: int
    num_bins: int
    ignore_index: int
    edge_rule: str
    per_image: bool
    class_names: tuple[str, ...] | None
    region: str

    def __post_init__(self) -> None:
        for name, least in (("num_classes", 2), ("num_bins", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Expected {name} to be an integer >= {least}, but got {value!r}")
        if self.edge_rule not in EDGE_RULES:
            raise ValueError(f"Expected edge_rule in {EDGE_RULES}, but got {self.edge_rule!r}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"Expected {self.num_classes} class_names, but got {len(self.class_names)}"
            )

    def require_equal(self, other: Settings) -> None:
        """Raise a ValueError that names what differs, if anything does."""
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
        """The settings that `encode` gave `data`."""
        settings = json.loads(_to_text(data))
        names = settings.pop("class_names")
        return cls(**settings, class_names=None if names is None else tuple(names))


def write_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write a meter's state as npz, whole or not at all."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in state.items()}
    with atomic_write(path, "wb") as file:
        np.savez(file, **arrays)


def read_state(path: str | os.PathLike[str]) -> tuple[Settings, dict[str, Tensor]]:
    """The settings and the state of a meter that `write_state` wrote; nothing is unpickled.

    Raises:
        ValueError: the file holds something else, or is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            state = {name: torch.from_numpy(np.array(file[name])) for name in file.files}
        settings = Settings.decode(state["settings"])
        shape = tuple(state["class_count"].shape)
    except _DAMAGE as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    # Before a meter is made as large as the settings say: the file must be as large itself.
    if shape != (settings.num_classes, settings.num_bins):
        raise ValueError(f"the settings say {settings.num_classes} classes, the sums {shape}")
    return settings, state


# What numpy and zipfile raise for files that are damaged, or were made to be.
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError, SyntaxError),
    *(MemoryError, OverflowError, RecursionError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


def check_state(state: Mapping[str, Tensor], own: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise a ValueError unless `state` is one of a meter like that whose state is `own`."""
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
    """Names as a uint8 tensor, each ended by a zero: encodings can be concatenated."""
    return _to_bytes("".join(name.replace("\0", " ") + "\0" for name in names))


def decode_names(data: Tensor) -> list[str]:
    """The names that `encode_names` gave `data`."""
    return _to_text(data).split("\0")[:-1]


def _to_bytes(text: str) -> Tensor:
    # A file name that is not UTF-8 reaches Python with surrogates; let it pass through.
    return torch.tensor(list(text.encode("utf-8", "surrogateescape")), dtype=torch.uint8)


def _to_text(data: Tensor) -> str:
    return bytes(data.tolist()).decode("utf-8", "surrogateescape")
