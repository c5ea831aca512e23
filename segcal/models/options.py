"""The networks to train by name, and their options. This module needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from segcal import settings

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """Which network to train. Options that a network does not take must stay unset.

    Attributes:
        name: Which network, an entry of `MODELS`.
        encoder: Backbone; tu-NAME is timm's NAME.
        encoder_weights: Initial weights of the encoder: imagenet (from the Hugging Face hub), the
            path of a .safetensors or .pth file, or null for random weights. For text, the path of
            a GloVe text file.
        freeze: Do not train the encoder, or the word vectors.
        output_stride: Size of the image divided by that of the last features, 8 or 16.
        aspp_rates: Dilation rates of the ASPP; usual are 6, 12, 18 at output stride 16 and twice
            that at 8.
        aspp_dropout: Dropout after the ASPP.
        width: Channels at full resolution.
        norm: Normalisation: batch, group or none; group does not depend on how a batch is split
            over processes.
        embedding: Length of the word vectors.
    """

    name: str = "small_unet"
    encoder: str = "tu-xception65"
    encoder_weights: str | None = None
    freeze: bool = False
    output_stride: int = 16
    aspp_rates: tuple[int, int, int] = (6, 12, 18)
    aspp_dropout: float = 0.1
    width: int = 16
    norm: str = "batch"
    embedding: int = 100


@dataclass(frozen=True)
class Network:
    """A network that can be asked for by name."""

    # MODULE.FUNCTION in `segcal.models`, called with a `ModelConfig`, num_classes, in_channels or
    # words, and what is `fixed`
    place: str
    about: str  # what it is, for the help
    options: tuple[str, ...] = ()  # the options of `ModelConfig` that it takes
    text: bool = False  # whether it reads text, and is built with the words of the vocabulary
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def build(self) -> Callable[..., nn.Module]:
        """The function at `place`."""
        module, _, function = self.place.partition(".")
        found = getattr(import_module(f"segcal.models.{module}"), function)
        return partial(found, **self.fixed)


def _resnet(depth: int, *, bottleneck: bool = False) -> Network:
    return Network(
        "classification.resnet",
        "for images of 32x32",
        fixed={"depth": depth, "bottleneck": bottleneck},
    )


_SMP = Network("segmentation.smp", "segmentation-models-pytorch", ("encoder", "encoder_weights"))
_DEEPLAB = Network(
    "segmentation.deeplab",
    "segmentation-models-pytorch with the options of its ASPP",
    (*_SMP.options, "output_stride", "aspp_rates", "aspp_dropout"),
)
TIMM = "timm:"  # what names of timm's classifiers start with

# A new network is one function and one entry here.
MODELS: dict[str, Network] = {
    "small_unet": Network(
        "segmentation.small_unet", "for small images with masks", ("width", "norm")
    ),
    "deeplabv3plus": _DEEPLAB,
    "deeplabv3": _DEEPLAB,
    **dict.fromkeys(
        ("unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "pan", "upernet")
        + ("segformer", "dpt"),
        _SMP,
    ),
    **{f"resnet{depth}": _resnet(depth) for depth in (8, 14, 20, 32, 44, 56, 110)},
    "resnet56_bottleneck": _resnet(56, bottleneck=True),
    "resnet34": Network("classification.resnet34", "for images of 64x64"),
    "resnet50_head": Network(
        "classification.resnet50_head",
        "ResNet-50, a 1x1 convolution and two linear layers",
        ("encoder_weights", "freeze"),
    ),
    "gpcnn": Network(
        "text.gpcnn", "for text", ("encoder_weights", "freeze", "embedding"), text=True
    ),
    f"{TIMM}NAME": Network(
        "classification.timm_classifier", "any classifier of timm", ("encoder_weights",)
    ),
}


def takers(option: str) -> str:
    """Which networks take an option, in words; "" if all do."""
    return ", ".join(name for name, entry in MODELS.items() if option in entry.options)


def find(config: ModelConfig) -> Network:
    """The network that `config` names; a ValueError if it does not take an option that is set."""
    name = f"{TIMM}NAME" if config.name.startswith(TIMM) else config.name
    if name not in MODELS:
        raise ValueError(f"model.name: expected one of {', '.join(MODELS)}, but got {name!r}")
    for option in settings.changed(config):
        if option not in ("name", *MODELS[name].options):
            raise ValueError(
                f"model.{option}: expected it to be unset for {config.name}; it is for "
                f"{takers(option)}"
            )
    return MODELS[name]
