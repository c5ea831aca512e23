"""The place for the one question that divides the paths of the meter: may we look at values?"""

from __future__ import annotations

from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """Whether looking at a value is free; on an accelerator it waits for all queued work."""
    return tensor.device.type == "cpu"
