"""Writes and reads checkpoints atomically, and keeps the last two of a run.

When a new `last.pt` is complete on the disk, the old one becomes `last.prev.pt`. If the newest is
lost, the one before it is still there. Reading unpickles nothing.
"""

from __future__ import annotations

import logging
import os
import random
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal.files import atomic_write

log = logging.getLogger(__name__)

LAST, PREVIOUS, BEST = "last.pt", "last.prev.pt", "best.pt"
_NEXT = "last.next.pt"
_FORMAT = 1  # to be raised when older files can no longer be read
_MARK = "segcal_checkpoint"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, tensors, numbers, strings and containers of them, whole or not at all."""
    with atomic_write(path, "wb") as file:
        try:
            torch.save({_MARK: _FORMAT, **state}, file)
        except RuntimeError as error:
            # After a failed write, say to a full disk, torch closes the file and raises about that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save_last(folder: Path, state: dict[str, Any]) -> None:
    """Write `last.pt` and keep the one before it as `last.prev.pt`."""
    save_state(folder / _NEXT, state)
    if (folder / LAST).exists():
        os.replace(folder / LAST, folder / PREVIOUS)
    os.replace(folder / _NEXT, folder / LAST)


def load_state(path: Path) -> dict[str, Any]:
    """The state in `path`, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or is not a checkpoint of segcal.
    """
    if not path.exists():
        raise FileNotFoundError(f"Expected a checkpoint at {path}, but there is none")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not verify the checksums
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile and torch raise many kinds for damaged files
        raise ValueError(
            f"Expected a checkpoint of segcal, but {path} is damaged or something else"
        ) from error
    if not isinstance(state, dict) or _MARK not in state:
        raise ValueError(f"Expected a checkpoint of segcal, but {path} is something else")
    if state[_MARK] != _FORMAT:
        raise ValueError(
            f"Expected a checkpoint of format {_FORMAT}, but {path} has format {state[_MARK]}; "
            "it was written by another version of segcal"
        )
    return state


@contextmanager
def expect_whole(path: Path) -> Iterator[None]:
    """Turn the errors that a checkpoint with wrong contents causes into one that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise ValueError(
            f"Expected a checkpoint of this run in {path}, but got {type(error).__name__}: "
            f"{detail:.200}"
        ) from error


def load_last(folder: Path) -> dict[str, Any] | None:
    """The newest readable state among `last.pt` and `last.prev.pt`; None when neither exists.

    Logs a warning when `last.pt` is damaged and `last.prev.pt` is used instead.
    """
    paths = [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]
    for path in paths:
        try:
            return load_state(path)
        except ValueError as error:
            if path == paths[-1]:
                raise
            log.warning("%s; continuing from %s", error, paths[-1].name)
    return None


def remove_leftovers(folder: Path, *names: str) -> None:
    """Delete the temporary files of checkpoints and of `names` that a killed process left."""
    for name in (_NEXT, BEST, *names):
        for path in folder.glob(f".{name}.*"):
            path.unlink(missing_ok=True)


def rng_state() -> dict[str, Any]:
    """The states of the random generators that training uses, as plain tensors and numbers."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": {
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "python": [version, torch.tensor(words), gauss],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    legacy = state["numpy"]
    key = legacy["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
