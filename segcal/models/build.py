"""Builds a network by its name: images or text to (N, num_classes, *S) logits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from segcal import registry
from segcal.models.classification import CifarResNet, ConvHead, Frozen, ResNet34
from segcal.models.segmentation import PaddedToMultiple, SmallUNet
from segcal.models.text import GlobalPoolCNN, read_glove
from segcal.models.weights import from_hub, load_weights

_TIMM = "timm:"  # what names of timm's classifiers start with


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


def _small_unet(config: ModelConfig, **sizes: int) -> nn.Module:
    return PaddedToMultiple(SmallUNet(width=config.width, norm=config.norm, **sizes), 4)


def _resnet50_head(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    import timm

    name = "resnet50.tv_in1k"  # torchvision's weights, the ones that the paper had
    build = partial(timm.create_model, name, num_classes=0, global_pool="", in_chans=in_channels)
    if config.encoder_weights == "imagenet":
        encoder: Any = from_hub(partial(build, pretrained=True), name)
    else:
        encoder = build(pretrained=False)
        if config.encoder_weights is not None:
            load_weights(encoder, config.encoder_weights)
    channels = encoder.num_features
    encoder = Frozen(encoder) if config.freeze else encoder
    return ConvHead(encoder, channels=channels, num_classes=num_classes)


def _gpcnn(config: ModelConfig, *, num_classes: int, words: Sequence[str]) -> nn.Module:
    model = GlobalPoolCNN(num_classes=num_classes, words=len(words), width=config.embedding)
    if config.encoder_weights is not None:
        vectors = read_glove(Path(config.encoder_weights), words, config.embedding)
        model.encoder.weight.data.copy_(vectors)
    model.encoder.requires_grad_(not config.freeze)
    return model


def _smp(config: ModelConfig, *, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
    import segmentation_models_pytorch as smp

    _check_encoder(config.encoder)
    build = partial(
        smp.create_model,
        config.name,
        config.encoder,
        in_channels=in_channels,
        classes=num_classes,
        **options,
    )
    if config.encoder_weights == "imagenet":
        weights = True if config.encoder.startswith("tu-") else "imagenet"
        model: Any = from_hub(partial(build, encoder_weights=weights), config.encoder)
    else:
        model = build(encoder_weights=None)
        if config.encoder_weights is not None:
            inner = model.encoder.model if config.encoder.startswith("tu-") else model.encoder
            load_weights(inner, config.encoder_weights)
    return PaddedToMultiple(model, model.encoder.output_stride)


def _deeplab(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    if config.output_stride not in (8, 16):
        raise ValueError(f"Expected output_stride to be 8 or 16, but got {config.output_stride}")
    return _smp(
        config,
        num_classes=num_classes,
        in_channels=in_channels,
        encoder_output_stride=config.output_stride,
        decoder_atrous_rates=config.aspp_rates,
        decoder_aspp_separable=True,
        decoder_aspp_dropout=config.aspp_dropout,
    )


def _timm(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    import timm

    name = config.name.removeprefix(_TIMM)
    if not timm.is_model(name):
        raise ValueError(f"Expected a model of timm, but got {name!r}{_similar(name, _TIMM)}")
    build = partial(timm.create_model, name, num_classes=num_classes, in_chans=in_channels)
    if config.encoder_weights == "imagenet":
        return from_hub(partial(build, pretrained=True), name)
    model: Any = build(pretrained=False)
    if config.encoder_weights is not None:
        head = model.pretrained_cfg["classifier"]
        prefixes = (head,) if isinstance(head, str) else tuple(head)
        load_weights(model, config.encoder_weights, except_for=prefixes)
    return model


@dataclass(frozen=True)
class ModelEntry:
    """A network that can be asked for by name.

    Attributes:
        build: makes it from a `ModelConfig`, num_classes, and in_channels or words.
        about: what it is, for the help.
        options: the options of `ModelConfig` that it takes.
        text: whether it reads text, and is built with the words of the vocabulary.
    """

    build: Callable[..., nn.Module]
    about: str
    options: tuple[str, ...] = ()
    text: bool = False


def _resnet(depth: int, *, bottleneck: bool = False) -> ModelEntry:
    return ModelEntry(
        lambda config, **sizes: CifarResNet(depth, bottleneck=bottleneck, **sizes),
        "for images of 32x32",
    )


_SMP = ModelEntry(_smp, "segmentation-models-pytorch", ("encoder", "encoder_weights"))
_DEEPLAB = ModelEntry(
    _deeplab,
    "segmentation-models-pytorch with the options of its ASPP",
    (*_SMP.options, "output_stride", "aspp_rates", "aspp_dropout"),
)

# A new network is one function and one entry here.
MODELS: dict[str, ModelEntry] = {
    "small_unet": ModelEntry(_small_unet, "for small images with masks", ("width", "norm")),
    "deeplabv3plus": _DEEPLAB,
    "deeplabv3": _DEEPLAB,
    "unet": _SMP,
    "unetplusplus": _SMP,
    "manet": _SMP,
    "linknet": _SMP,
    "fpn": _SMP,
    "pspnet": _SMP,
    "pan": _SMP,
    "upernet": _SMP,
    "segformer": _SMP,
    "dpt": _SMP,
    "resnet8": _resnet(8),
    "resnet14": _resnet(14),
    "resnet20": _resnet(20),
    "resnet32": _resnet(32),
    "resnet44": _resnet(44),
    "resnet56": _resnet(56),
    "resnet110": _resnet(110),
    "resnet56_bottleneck": _resnet(56, bottleneck=True),
    "resnet34": ModelEntry(lambda config, **sizes: ResNet34(**sizes), "for images of 64x64"),
    "resnet50_head": ModelEntry(
        _resnet50_head,
        "ResNet-50, a 1x1 convolution and two linear layers",
        ("encoder_weights", "freeze"),
    ),
    "gpcnn": ModelEntry(_gpcnn, "for text", ("encoder_weights", "freeze", "embedding"), text=True),
    f"{_TIMM}NAME": ModelEntry(_timm, "any classifier of timm", ("encoder_weights",)),
}


def model_takers(option: str) -> str:
    """Which networks take an option, in words; "" if all do."""
    return ", ".join(name for name, entry in MODELS.items() if option in entry.options)


def build_model(
    config: ModelConfig, *, num_classes: int, in_channels: int = 3, words: Sequence[str] = ()
) -> nn.Module:
    """Build a network from its name.

    The network takes float (N, in_channels, H, W) of any size and gives (N, num_classes, H, W)
    logits for segmentation, (N, num_classes) for classification. A network for text, built with
    its vocabulary `words`, takes int64 (N, L). One with a pretrained part has it as the attribute
    `encoder`. DeepLab's image pooling normalises over a batch of 1x1 maps,
    so it cannot train on a batch of one image.

    Raises:
        ValueError: an unknown name or encoder, an option that the network does not take, or
            weights that cannot be fetched or do not fit.
    """
    entry = _find_model(config)
    if words and not entry.text:
        names = [name for name, other in MODELS.items() if other.text]
        raise ValueError(
            f"Expected model name to be {', '.join(names)} for text, but got {config.name!r}"
        )
    if entry.text:
        if not words:
            raise ValueError(f"Expected text for model {config.name}, but got images")
        return entry.build(config, num_classes=num_classes, words=words)
    return entry.build(config, num_classes=num_classes, in_channels=in_channels)


def _find_model(config: ModelConfig) -> ModelEntry:
    name = f"{_TIMM}NAME" if config.name.startswith(_TIMM) else config.name
    if name not in MODELS:
        raise ValueError(f"Expected model name to be one of {', '.join(MODELS)}, but got {name!r}")
    unfit = registry.unfit_option(config, ("name", *MODELS[name].options))
    if unfit is not None:
        raise ValueError(
            f"Expected {unfit} to be unset for {config.name}, but got "
            f"{getattr(config, unfit)!r}; it is for {model_takers(unfit)}"
        )
    return MODELS[name]


def _check_encoder(name: str) -> None:
    import segmentation_models_pytorch as smp
    import timm

    if name.startswith("tu-"):
        if not timm.is_model(name.removeprefix("tu-")):
            similar = _similar(name.removeprefix("tu-"), "tu-")
            raise ValueError(f"Expected a model of timm after tu-, but got {name!r}{similar}")
    elif name not in smp.encoders.get_encoder_names():
        raise ValueError(
            f"Expected encoder to be tu-NAME of timm or one of "
            f"{', '.join(smp.encoders.get_encoder_names())}, but got {name!r}"
        )


def _similar(name: str, prefix: str) -> str:
    import timm

    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f"; similar: {', '.join(prefix + other for other in close)}" if close else ""
