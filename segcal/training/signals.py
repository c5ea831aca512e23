"""Signals that stop a training after the step it is in."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

from segcal import distributed


class Interrupted(KeyboardInterrupt):
    """The signal of this number stopped the run, which has saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class StopSignals:
    """Inside the block, the first SIGINT or SIGTERM is only remembered; a second one acts as usual.

    `received` is the number of the signal that came, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._usual: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._usual[number])  # type: ignore[arg-type]
        os.write(2, b"\nstopping after this step; a second signal stops at once\n")

    def agreed(self) -> int:
        """The signal that any process received, or 0. All processes must call this together."""
        if not distributed.is_distributed():
            return self.received
        flag = torch.tensor(self.received, device=distributed.communication_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag.item())
