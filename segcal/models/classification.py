"""Classification networks: ResNets for small images, and a head on a frozen encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segcal.models.options import TIMM, ModelConfig
from segcal.models.weights import load_weights, pretrained, similar


class _Block(nn.Module):
    """Convolutions beside a shortcut: (N, inside, H, W) to (N, outside, H / stride, W / stride).

    Where the shape changes the shortcut is a 1x1 convolution (option B of the paper).
    """

    def __init__(self, inside: int, outside: int, stride: int, residual: nn.Sequential) -> None:
        super().__init__()
        self.channels = outside
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = _conv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
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


class ResNet(nn.Module):
    """ResNet for small images (He et al. 2016, section 4.2): (N, 3, H, W) to (N, num_classes).

    One 3x3 convolution, stages of `counts` blocks with `widths` channels, each but the first at
    half the resolution of the one before, an average over each cell of a `grid`, and one linear
    layer. Bottlenecks are 1x1, 3x3 and 1x1 convolutions with four times the channels outside.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 3,
        widths: Sequence[int],
        counts: Sequence[int],
        bottleneck: bool = False,
        grid: int = 1,
    ) -> None:
        super().__init__()
        block = _bottleneck if bottleneck else _basic
        inside = widths[0]
        self.stem = nn.Sequential(_conv(in_channels, inside, 3), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
            for i in range(count):
                made = block(inside, width, 2 if stage and i == 0 else 1)
                blocks.append(made)
                inside = made.channels
        self.blocks = nn.Sequential(*blocks)
        self.grid = grid
        self.head = nn.Linear(grid * grid * inside, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x))  # (N, C, h, w)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(features, self.grid), 1))


class Frozen(nn.Module):
    """A network that does not change: no gradients, and batch normalisation never trains."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class ConvHead(nn.Module):
    """A classifier on an encoder's (N, channels, h, w) features: (N, 3, H, W) to (N, num_classes).

    A 1x1 convolution, a global average and two fully connected layers, as the paper has on a
    frozen ResNet-50 for chest X-rays. It gives no widths: 256 and 128 are our choice.
    """

    def __init__(self, encoder: nn.Module, *, channels: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.conv = nn.Conv2d(channels, 256, 1)
        self.hidden = nn.Linear(256, 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.conv(self.encoder(x)))  # (N, 256, h, w)
        return self.head(F.relu(self.hidden(features.mean((2, 3)))))


def resnet(config: ModelConfig, *, depth: int, bottleneck: bool, **sizes: Any) -> nn.Module:
    """A ResNet for images of 32x32 with 6n + 2 layers, or 9n + 2 with bottlenecks.

    Some public code builds ResNet-56 with bottlenecks, instead of the paper's two 3x3 convolutions.
    """
    layers = 9 if bottleneck else 6  # of one block in each stage
    count, rest = divmod(depth - 2, layers)
    if rest or count < 1:
        raise ValueError(f"Expected a depth of {layers}n + 2, but got {depth}")
    return ResNet(widths=(16, 32, 64), counts=(count,) * 3, bottleneck=bottleneck, **sizes)


def resnet34(config: ModelConfig, **sizes: Any) -> nn.Module:
    """ResNet-34 for images of 64x64.

    As the public code of Mukhoti et al. (2020), whose training the paper follows, builds it: a 3x3
    convolution in place of the 7x7 one and the pooling, and an average over the four quarters.
    """
    return ResNet(widths=(64, 128, 256, 512), counts=(3, 4, 6, 3), grid=2, **sizes)


def resnet50_head(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    """ResNet-50, frozen or not, and the head of the paper's chest X-rays."""
    import timm

    name = "resnet50.tv_in1k"  # torchvision's weights, the ones that the paper had
    build = partial(timm.create_model, name, num_classes=0, global_pool="", in_chans=in_channels)
    weights = config.encoder_weights
    encoder = pretrained(build, weights, name, lambda model: load_weights(model, str(weights)))
    channels = encoder.num_features
    encoder = Frozen(encoder) if config.freeze else encoder
    return ConvHead(encoder, channels=channels, num_classes=num_classes)


def timm_classifier(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    """A classifier of timm."""
    import timm

    name, weights = config.name.removeprefix(TIMM), config.encoder_weights
    if not timm.is_model(name):
        raise ValueError(f"Expected a model of timm, but got {name!r}{similar(name, TIMM)}")

    def load(model: Any) -> None:
        head = model.pretrained_cfg["classifier"]
        load_weights(model, str(weights), except_for=[head] if isinstance(head, str) else head)

    build = partial(timm.create_model, name, num_classes=num_classes, in_chans=in_channels)
    return pretrained(build, weights, name, load)
