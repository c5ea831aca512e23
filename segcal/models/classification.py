"""The place for networks that give one answer an image: CIFAR ResNets, and timm's by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    """Convolutions beside a shortcut: (N, inside, H, W) to (N, outside, H / stride, W / stride).

    Where the shape changes the shortcut is a 1x1 convolution (option B of the paper).
    """

    def __init__(self, inside: int, outside: int, stride: int, residual: nn.Sequential) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = _conv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions found to the shortcut."""
        return F.relu(self.residual(x) + self.shortcut(x))


def _conv(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside))


def _basic(inside: int, width: int, stride: int) -> _Block:
    first, second = _conv(inside, width, 3, stride), _conv(width, width, 3)
    return _Block(inside, width, stride, nn.Sequential(first, nn.ReLU(inplace=True), second))


def _bottleneck(inside: int, width: int, stride: int) -> _Block:
    layers = [_conv(inside, width, 1), nn.ReLU(inplace=True), _conv(width, width, 3, stride)]
    layers += [nn.ReLU(inplace=True), _conv(width, 4 * width, 1)]
    return _Block(inside, 4 * width, stride, nn.Sequential(*layers))


class CifarResNet(nn.Module):
    """ResNet for small images (He et al. 2016, section 4.2): (N, 3, H, W) to (N, num_classes).

    One convolution, three stages of n blocks with 16, 32 and 64 channels, a global average and
    one linear layer.

    Args:
        depth: 6n + 2 (20, 32, 44, 56, 110), or 9n + 2 (29, 56, 110) with bottlenecks.
        num_classes: number of logits.
        in_channels: channels of the image.
        bottleneck: blocks of 1x1, 3x3 and 1x1 convolutions with four times the channels outside,
            as some public code builds ResNet-56, instead of the paper's two 3x3.
    """

    def __init__(
        self, depth: int, *, num_classes: int, in_channels: int = 3, bottleneck: bool = False
    ) -> None:
        super().__init__()
        layers = 9 if bottleneck else 6  # of one block in each stage
        if depth < layers + 2 or (depth - 2) % layers:
            raise ValueError(f"Expected a depth of {layers}n + 2, but got {depth}")
        self.stem = nn.Sequential(_conv(in_channels, 16, 3), nn.ReLU(inplace=True))
        block, expansion = (_bottleneck, 4) if bottleneck else (_basic, 1)
        blocks, inside = [], 16
        for width, first_stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((depth - 2) // layers):
                blocks.append(block(inside, width, first_stride if i == 0 else 1))
                inside = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(N, num_classes) logits."""
        features = self.blocks(self.stem(x))  # (N, 64, H / 4, W / 4)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))
