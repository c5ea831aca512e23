"""What a run reports while it trains: running losses, progress, log.jsonl."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from segcal.files import atomic_write
from segcal.metrics.report import to_plain
from segcal.viz.tables import describe_scores

Record = dict[str, Any]  # one epoch: plain numbers by name, e.g. "train/loss", "holdout/ece"


class Diverged(ArithmeticError):
    """A loss term or a weight is no longer finite."""


class RunningLosses:
    """Running sums of the loss terms, kept on their device so that no step waits for it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._sums = torch.zeros(0)  # (T,)
        self._count = 0
        self._first_bad = torch.zeros(0)  # (T,) step of the first value that is not finite, or -1

    def add(self, terms: Mapping[str, Tensor], step: int) -> None:
        values = torch.stack([value.detach() for value in terms.values()]).float()  # (T,)
        if not self.names:
            self.names = list(terms)
            self._sums = torch.zeros_like(values)
            self._first_bad = torch.full_like(values, -1, dtype=torch.int64)
        self._sums += values
        self._count += 1
        unseen = (self._first_bad < 0) & ~values.isfinite()
        self._first_bad.masked_fill_(unseen, step)

    def check(self) -> None:
        """Raise `Diverged`, naming step and term, if any value so far was not finite."""
        steps = {n: s for n, s in zip(self.names, self._first_bad.tolist(), strict=True) if s >= 0}
        if steps:
            # The total is not finite because a part is not: name the part.
            name = min(steps, key=lambda n: (steps[n], n == "loss"))
            raise Diverged(
                f"loss term {name!r} is no longer finite at step {steps[name]}; try a lower "
                "--optim.lr, --optim.clip or a --schedule.warmup"
            )

    def means(self) -> dict[str, float]:
        """The mean of each term since the last `clear`. Waits for the device."""
        return {
            n: s / max(self._count, 1) for n, s in zip(self.names, self._sums.tolist(), strict=True)
        }

    def clear(self) -> None:
        self._sums.zero_()
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names, "sums": self._sums.cpu(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.names, self._count = list(state["names"]), state["count"]
        self._sums = state["sums"].to(device)
        self._first_bad = torch.full_like(self._sums, -1, dtype=torch.int64)


def write_jsonl(path: Path, history: list[Record]) -> None:
    """Write `log.jsonl`, one line of JSON per epoch, whole or not at all; null for NaN."""
    with atomic_write(path) as file:
        for record in history:
            file.write(json.dumps(to_plain(record), allow_nan=False) + "\n")


def describe_epoch(record: Record, epochs: int) -> str:
    """One line about an epoch, for people: losses, scores of the hold-out, rate and time."""
    terms = {k.removeprefix("train/"): v for k, v in record.items() if k.startswith("train/")}
    parts = [f"epoch {record['epoch']}/{epochs}", _losses(terms)]
    if any(name.startswith("holdout/") for name in record):
        parts.append("hold-out " + describe_scores(record, "holdout/"))
    parts += [f"lr {record['lr']:.2g}", f"{record['seconds']:.1f} s"]
    return " · ".join(parts) + (" · best" if record.get("best") else "")


def _losses(terms: Mapping[str, float]) -> str:
    """The loss, and its parts if it has more than one."""
    parts = [f"{name} {value:.4f}" for name, value in terms.items() if name != "loss"]
    return f"loss {terms['loss']:.4f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


class Progress:
    """A progress bar on a `terminal`; elsewhere a line every 30 seconds; nothing unless `shown`.

    Showing the losses waits for the device, so it is done when `due`, not at every step. `done`
    of `total` steps have been taken already.
    """

    def __init__(self, total: int, done: int, *, batch_size: int, shown: bool) -> None:
        self._bar: tqdm[Any] | None = None
        self._shown, self._total, self._batch_size = shown, total, batch_size
        self.terminal = shown and sys.stderr.isatty()
        self._every = 0.5 if self.terminal else 30.0  # seconds
        if self.terminal:
            self._bar = tqdm(
                total=total, initial=done, unit="step", dynamic_ncols=True, leave=False
            )
        self._last = time.monotonic()
        self._last_step = done

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self._every

    def show(self, step: int, epoch: str, terms: Mapping[str, float]) -> None:
        """Show the losses, the speed since the last call and the time left."""
        now = time.monotonic()
        rate = (step - self._last_step) / max(now - self._last, 1e-9)
        self._last, self._last_step = now, step
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch}", refresh=False)
            self._bar.set_postfix_str(
                f"{_losses(terms)}, {rate * self._batch_size:.0f} images/s", refresh=False
            )
            self._bar.update(step - self._bar.n)
        elif self._shown and rate > 0:
            left = tqdm.format_interval(int((self._total - step) / rate))
            self.say(
                f"step {step}/{self._total} · epoch {epoch} · {_losses(terms)} · "
                f"{rate * self._batch_size:.0f} images/s · {left} left"
            )

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
