"""Writes and reads checkpoints atomically, and keeps the last two of a run.

When a new `last.pt` is complete on the disk, the old one becomes `last.prev.pt`. Reading unpickles
nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from segcal.files import atomic_write, read_checkpoint

log = logging.getLogger(__name__)

LAST, PREVIOUS, BEST = "last.pt", "last.prev.pt", "best.pt"
_NEXT = "last.next.pt"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, tensors, numbers, strings and containers of them, whole or not at all."""
    with atomic_write(path, "wb") as file:
        try:
            torch.save(state, file)
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


@contextmanager
def expect_whole(path: Path) -> Iterator[None]:
    """Turn the errors that a checkpoint with wrong contents causes into one that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no checkpoint of this run: {type(error).__name__}, {detail:.200}"
        ) from error


def load_last(folder: Path) -> dict[str, Any] | None:
    """The newest readable state among `last.pt` and `last.prev.pt`; None when neither exists."""
    paths = [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]
    for path in paths:
        try:
            return read_checkpoint(path)
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
    """The states of torch's generators, the only ones that a step draws from."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
