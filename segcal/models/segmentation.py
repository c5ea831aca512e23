"""Segmentation networks: a small U-Net, and padding for networks that need certain sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segcal.models.options import ModelConfig
from segcal.models.weights import load_weights, pretrained, similar

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
        """The pretrained part."""
        encoder = self.network.encoder
        assert isinstance(encoder, nn.Module)
        return encoder

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        right, below = -width % self.multiple, -height % self.multiple
        if right or below:
            x = F.pad(x, (0, right, 0, below))
        return self.network(x)[..., :height, :width]


class SmallUNet(nn.Module):
    """A U-Net for small images: (N, in_channels, H, W) to (N, num_classes, H, W), 4 divides H, W.

    Residual blocks at a quarter of the resolution see far enough to tell one shape from another;
    two skip connections bring the outlines back. `width` is the number of channels at full
    resolution, `norm` one of `NORMS`.
    """

    def __init__(
        self, *, num_classes: int, in_channels: int = 3, width: int = 16, norm: str = "batch"
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"Expected norm to be one of {', '.join(NORMS)}, but got {norm!r}")
        self.at_full = _conv(in_channels, width, norm)
        self.at_half = _conv(width, 2 * width, norm, stride=2)
        self.at_quarter = _conv(2 * width, 4 * width, norm, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(4 * width, 4 * width, norm), _conv(4 * width, 4 * width, norm))
            for _ in range(4)
        )
        self.to_half = _conv(4 * width + 2 * width, 2 * width, norm)
        self.to_full = _conv(2 * width + width, width, norm)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.at_full(x)
        half = self.at_half(full)
        x = self.at_quarter(half)
        for block in self.blocks:
            x = x + block(x)
        x = self.to_half(torch.cat([_double(x), half], 1))
        x = self.to_full(torch.cat([_double(x), full], 1))
        return self.head(x)


def _double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


def _conv(in_channels: int, out_channels: int, norm: str, *, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=norm == "none")
    ]
    if norm == "batch":
        layers += [nn.BatchNorm2d(out_channels)]
    elif norm == "group":
        layers += [nn.GroupNorm(8 if out_channels % 8 == 0 else 1, out_channels)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


def small_unet(config: ModelConfig, **sizes: int) -> nn.Module:
    """A small U-Net for images of any size."""
    return PaddedToMultiple(SmallUNet(width=config.width, norm=config.norm, **sizes), 4)


def smp(config: ModelConfig, *, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
    """A network of segmentation-models-pytorch."""
    import segmentation_models_pytorch as library
    import timm

    name, weights = config.encoder, config.encoder_weights
    of_timm = name.startswith("tu-")
    known = library.encoders.get_encoder_names()
    if of_timm and not timm.is_model(name.removeprefix("tu-")):
        near = similar(name.removeprefix("tu-"), "tu-")
        raise ValueError(f"Expected a model of timm after tu-, but got {name!r}{near}")
    if not of_timm and name not in known:
        raise ValueError(
            f"Expected encoder to be tu-NAME of timm or one of {', '.join(known)}, but got {name!r}"
        )

    def build(fetch: bool) -> Any:
        return library.create_model(
            config.name,
            name,
            in_channels=in_channels,
            classes=num_classes,
            encoder_weights=(True if of_timm else "imagenet") if fetch else None,
            **options,
        )

    def load(model: Any) -> None:
        load_weights(model.encoder.model if of_timm else model.encoder, str(weights))

    model = pretrained(build, weights, name, load)
    return PaddedToMultiple(model, model.encoder.output_stride)


def deeplab(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    """DeepLabV3 or DeepLabV3+ of segmentation-models-pytorch."""
    if config.output_stride not in (8, 16):
        raise ValueError(f"Expected output_stride to be 8 or 16, but got {config.output_stride}")
    return smp(
        config,
        num_classes=num_classes,
        in_channels=in_channels,
        encoder_output_stride=config.output_stride,
        decoder_atrous_rates=config.aspp_rates,
        decoder_aspp_separable=True,
        decoder_aspp_dropout=config.aspp_dropout,
    )
