"""Networks by name: small ones for the embedded data, DeepLabV3+ and any other of smp and timm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segcal.models.options import MODELS, ModelConfig, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "ModelConfig", "build"]


def build(
    config: ModelConfig, num_classes: int, *, in_channels: int = 3, words: Sequence[str] = ()
) -> nn.Module:
    """Build a network from its name.

    The network takes float (N, in_channels, H, W) of any size and gives (N, num_classes, H, W)
    logits for segmentation, (N, num_classes) for classification. A network for text, built with
    its vocabulary `words`, takes int64 (N, L). The attribute `encoder` is a pretrained part.
    """
    entry = find(config)
    if words and not entry.text:
        names = [name for name, other in MODELS.items() if other.text]
        raise ValueError(f"model.name: {config.name} does not read text; use {', '.join(names)}")
    if entry.text and not words:
        raise ValueError(f"model.name: {config.name} reads text, but the data are images")
    shape = {"words": words} if entry.text else {"in_channels": in_channels}
    try:
        return entry.build(config, num_classes=num_classes, **shape)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise ValueError(
            f"{config.name} needs {missing}, which is not installed: pip install 'segcal[train]'"
        ) from None
