"""The place for networks that give one answer a pixel: the small U-Net, and smp's by name."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("batch", "group", "none")


class PaddedToMultiple(nn.Module):
    """Lets a network that needs sides divisible by `multiple` take images of any size.

    The image is padded right and below with 0, the mean colour, and the logits are cropped back:
    (N, C, H, W) to (N, num_classes, H, W).
    """

    def __init__(self, network: nn.Module, multiple: int) -> None:
        super().__init__()
        self.network = network
        self.multiple = multiple

    @property
    def encoder(self) -> nn.Module:
        """The pretrained part, which usually learns at a lower rate."""
        encoder = self.network.encoder
        assert isinstance(encoder, nn.Module)
        return encoder

    def forward(self, x: Tensor) -> Tensor:
        """(N, num_classes, H, W) logits."""
        height, width = x.shape[-2:]
        right, below = -width % self.multiple, -height % self.multiple
        if right or below:
            x = F.pad(x, (0, right, 0, below))
        return self.network(x)[..., :height, :width]


class SmallUNet(nn.Module):
    """A U-Net for small images: (N, in_channels, H, W) to (N, num_classes, H, W), sides of 8.

    Three halvings with `width`, 2, 4 and 8 times `width` channels, two convolutions a level, and
    skip connections added back on the way up.

    Args:
        num_classes: channels of the logits.
        in_channels: channels of the image.
        width: channels at full resolution.
        norm: batch, group or none. Group normalisation computes every image by itself, so the
            result does not depend on how a batch is shared among processes.
    """

    def __init__(
        self, *, num_classes: int, in_channels: int = 3, width: int = 16, norm: str = "batch"
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"Expected norm to be one of {', '.join(NORMS)}, but got {norm!r}")
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            _double(inside, outside, norm)
            for inside, outside in zip([in_channels, *widths], widths, strict=False)
        )
        self.narrow = nn.ModuleList(
            nn.Conv2d(below, here, 1) for here, below in zip(widths, widths[1:], strict=False)
        )
        self.up = nn.ModuleList(_double(here, here, norm) for here in widths[:-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, num_classes, H, W) logits."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = F.interpolate(self.narrow[level](x), scale_factor=2.0, mode="nearest")
            x = self.up[level](x + skips[level])
        return self.head(x)


def _double(in_channels: int, out_channels: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside in (in_channels, out_channels):
        layers += [nn.Conv2d(inside, out_channels, 3, padding=1, bias=norm == "none")]
        if norm == "batch":
            layers += [nn.BatchNorm2d(out_channels)]
        elif norm == "group":
            layers += [nn.GroupNorm(8 if out_channels % 8 == 0 else 1, out_channels)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
