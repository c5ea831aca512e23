"""The place where a model's name becomes a network that gives (N, num_classes, *S) logits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from segcal.models.classification import CifarResNet, ConvHead, Frozen, ResNet34
from segcal.models.segmentation import PaddedToMultiple, SmallUNet
from segcal.models.text import GlobalPoolCNN, read_glove
from segcal.models.weights import from_hub, load_weights


@dataclass(frozen=True)
class ModelConfig:
    """Which network to train.

    Attributes:
        name: small_unet; deeplabv3plus, unet, fpn or another segmentation-models-pytorch
            architecture; resnet20, resnet32, resnet56 for images of 32x32, resnet34 for 64x64;
            resnet50_head, ResNet-50 with a 1x1 convolution and two layers on top; gpcnn for text;
            or timm:NAME for any classifier of timm.
        encoder: Backbone of a segmentation-models-pytorch architecture; tu-NAME takes timm's NAME.
        encoder_weights: Where the backbone starts: imagenet (from the Hugging Face hub), the path
            of a .safetensors or .pth file, or null for random weights. For gpcnn the path of a
            GloVe text file.
        freeze: Keep the encoder of resnet50_head, or the word vectors of gpcnn, as they start.
        output_stride: How many times smaller than the image the last features of deeplabv3plus
            and deeplabv3 are, 8 or 16.
        aspp_rates: Dilation rates of the ASPP of deeplabv3plus and deeplabv3; usual are 6, 12, 18
            at output stride 16 and twice that at 8.
        aspp_dropout: Dropout after the ASPP of deeplabv3plus and deeplabv3.
        width: Channels of small_unet at full resolution.
        norm: Normalisation of small_unet, batch, group or none; group gives the same result
            however a batch is shared among processes.
        embedding: Length of the word vectors of gpcnn.
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


def _small_unet(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    net = SmallUNet(
        num_classes=num_classes, in_channels=in_channels, width=config.width, norm=config.norm
    )
    return PaddedToMultiple(net, 4)


def _cifar_resnet(
    config: ModelConfig, *, num_classes: int, in_channels: int, depth: int, bottleneck: bool = False
) -> nn.Module:
    return CifarResNet(
        depth, num_classes=num_classes, in_channels=in_channels, bottleneck=bottleneck
    )


def _resnet34(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    return ResNet34(num_classes=num_classes, in_channels=in_channels)


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


# A new network is one function and one line here. Names that start with timm: go to timm.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_unet": _small_unet,
    "deeplabv3plus": _deeplab,
    "deeplabv3": _deeplab,
    "unet": _smp,
    "unetplusplus": _smp,
    "manet": _smp,
    "linknet": _smp,
    "fpn": _smp,
    "pspnet": _smp,
    "pan": _smp,
    "upernet": _smp,
    "segformer": _smp,
    "dpt": _smp,
    "resnet34": _resnet34,
    "resnet50_head": _resnet50_head,
    "resnet8": partial(_cifar_resnet, depth=8),
    "resnet14": partial(_cifar_resnet, depth=14),
    "resnet20": partial(_cifar_resnet, depth=20),
    "resnet32": partial(_cifar_resnet, depth=32),
    "resnet44": partial(_cifar_resnet, depth=44),
    "resnet56": partial(_cifar_resnet, depth=56),
    "resnet110": partial(_cifar_resnet, depth=110),
    "resnet56_bottleneck": partial(_cifar_resnet, depth=56, bottleneck=True),
}


TEXT_MODELS: dict[str, Callable[..., nn.Module]] = {"gpcnn": _gpcnn}
_PRETRAINED = (_smp, _deeplab, _resnet50_head)  # beside those of timm and of text


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
        ValueError: an unknown name or encoder, or weights that cannot be fetched or do not fit.
    """
    _check_fit(config, text=bool(words))
    if words:
        return TEXT_MODELS[config.name](config, num_classes=num_classes, words=words)
    if config.name.startswith("timm:"):
        return _timm(config, num_classes=num_classes, in_channels=in_channels)
    if config.name not in MODELS:
        raise ValueError(
            f"Expected model name to be one of {', '.join(MODELS)} or timm:NAME, "
            f"but got {config.name!r}"
        )
    build = MODELS[config.name]
    if config.encoder_weights is not None and build not in _PRETRAINED:
        raise ValueError(
            f"Expected encoder_weights to be null for {config.name}, which has no pretrained "
            f"encoder, but got {config.encoder_weights!r}"
        )
    return build(config, num_classes=num_classes, in_channels=in_channels)


def _check_fit(config: ModelConfig, *, text: bool) -> None:
    """Raise if the network is not one for this kind of data, or cannot be frozen."""
    if text and config.name not in TEXT_MODELS:
        raise ValueError(
            f"Expected model name to be {', '.join(TEXT_MODELS)} for text, but got {config.name!r}"
        )
    if not text and config.name in TEXT_MODELS:
        raise ValueError(f"Expected text, such as data name newsgroups, for model {config.name}")
    if config.freeze and config.name not in ("resnet50_head", *TEXT_MODELS):
        raise ValueError(
            f"Expected freeze to be false for {config.name}: "
            f"it is for resnet50_head, {', '.join(TEXT_MODELS)}"
        )


def _timm(config: ModelConfig, *, num_classes: int, in_channels: int) -> nn.Module:
    import timm

    name = config.name.removeprefix("timm:")
    if not timm.is_model(name):
        raise ValueError(f"Expected a model of timm, but got {name!r}{_similar(name, 'timm:')}")
    build = partial(timm.create_model, name, num_classes=num_classes, in_chans=in_channels)
    if config.encoder_weights == "imagenet":
        return from_hub(partial(build, pretrained=True), name)
    model: Any = build(pretrained=False)
    if config.encoder_weights is not None:
        head = model.pretrained_cfg["classifier"]
        prefixes = (head,) if isinstance(head, str) else tuple(head)
        load_weights(model, config.encoder_weights, except_for=prefixes)
    return model


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
