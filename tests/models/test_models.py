"""Networks by name: shapes at any size, strides, parameter counts, and where weights come from."""

import socket

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from segcal.models import MODELS, ModelConfig
from segcal.models import build as build_model
from segcal.models.segmentation import PaddedToMultiple
from segcal.models.weights import load_weights

LITE = {"name": "deeplabv3plus", "encoder": "tu-tf_efficientnet_lite0"}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [(64, 64), (61, 70), (1, 5), (8, 24)])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_small_unet_gives_logits_at_the_size_of_the_image(size, norm):
    model = build_model(ModelConfig(norm=norm, width=8), num_classes=11)
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 11, *size)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_group_norm_treats_every_image_by_itself():
    model = build_model(ModelConfig(norm="group"), num_classes=5)
    images = torch.randn(3, 3, 16, 16)
    together, alone = model(images), torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def test_padding_is_right_and_below_and_undone():
    """An inner network that returns its input shows exactly what was padded."""
    seen = []

    class Record(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x

    image = torch.randn(1, 3, 13, 16)
    out = PaddedToMultiple(Record(), 16)(image)
    assert torch.equal(out, image)
    assert seen[0].shape == (1, 3, 16, 16) and (seen[0][:, :, 13:] == 0).all()


@pytest.mark.parametrize("depth", [20, 32, 44, 56, 110])
def test_cifar_resnet_counts_its_parameters(depth):
    """Convolutions, two numbers a BatchNorm channel, two 1x1 shortcuts, and the linear layer."""
    n = (depth - 2) // 6
    count = 9 * 3 * 16 + 2 * 16
    inside = 16
    for width in (16, 32, 64):
        if inside != width:
            count += inside * width + 2 * width
        count += 9 * inside * width + (2 * n - 1) * 9 * width * width + 2 * n * 2 * width
        inside = width
    model = build_model(ModelConfig(f"resnet{depth}"), num_classes=10)
    assert parameters(model) == count + 64 * 10 + 10


def test_cifar_resnet_has_as_many_layers_as_its_name_says():
    for name, depth in (("resnet20", 20), ("resnet56", 56), ("resnet56_bottleneck", 56)):
        model = build_model(ModelConfig(name), num_classes=10)
        shortcuts = {
            m for b in model.modules() if hasattr(b, "shortcut") for m in b.shortcut.modules()
        }
        layers = [
            m
            for m in model.modules()
            if isinstance(m, nn.Conv2d | nn.Linear) and m not in shortcuts
        ]
        assert len(layers) == depth


@pytest.mark.parametrize("side", [8, 28, 32, 33])
def test_classifiers_take_any_size(side):
    for name in ("resnet20", "resnet56_bottleneck", "timm:resnet10t"):
        model = build_model(ModelConfig(name), num_classes=7).eval()
        assert model(torch.randn(2, 3, side, side)).shape == (2, 7)


@pytest.fixture(scope="module")
def xception():
    return build_model(ModelConfig("deeplabv3plus"), num_classes=21).eval()


def test_deeplab_on_xception65_is_the_recipe(xception):
    features = xception.encoder(torch.zeros(1, 3, 64, 96))
    assert features[-1].shape == (1, 2048, 4, 6)  # output stride 16
    assert features[2].shape[2:] == (16, 24)  # the low-level feature, at stride 4
    decoder = xception.network.decoder
    rates = [
        m.dilation[0]
        for m in decoder.aspp.modules()
        if isinstance(m, nn.Conv2d) and m.dilation[0] > 1
    ]
    assert rates == [6, 12, 18]
    assert decoder.block1[0].out_channels == 48
    depthwise = [m for m in decoder.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 5  # the three ASPP branches and both decoder convolutions
    assert 40e6 < parameters(xception) < 42e6


def test_deeplab_takes_any_size(xception):
    with torch.no_grad():
        assert xception(torch.randn(1, 3, 37, 50)).shape == (1, 21, 37, 50)


def test_output_stride_8_keeps_more_resolution():
    model = build_model(ModelConfig(**LITE, output_stride=8), num_classes=3).eval()
    assert model.encoder(torch.zeros(1, 3, 64, 64))[-1].shape[2:] == (8, 8)
    with pytest.raises(ValueError, match=r"output_stride to be 8 or 16, but got 32"):
        build_model(ModelConfig(**LITE, output_stride=32), num_classes=3)


@pytest.mark.parametrize("name", ["unet", "fpn", "segformer", "pspnet"])
def test_other_architectures_by_name(name):
    model = build_model(ModelConfig(name, encoder="resnet18"), num_classes=4).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 45, 70)).shape == (1, 4, 45, 70)
    assert isinstance(model.encoder, nn.Module)


def test_only_networks_with_a_pretrained_part_have_an_encoder(xception):
    inside = {id(p) for p in xception.encoder.parameters()}
    assert 0 < len(inside) < len(list(xception.parameters()))
    assert not hasattr(build_model(ModelConfig(), num_classes=3), "encoder")
    assert not hasattr(build_model(ModelConfig("resnet20"), num_classes=3), "encoder")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_encoder_weights_from_a_file(suffix, tmp_path):
    torch.manual_seed(0)
    source = build_model(ModelConfig(**LITE), num_classes=3)
    weights = {k: v.contiguous() for k, v in source.encoder.model.state_dict().items()}
    weights["classifier.weight"] = torch.zeros(10, 4)  # what a whole classifier has besides
    path = tmp_path / f"w{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    torch.manual_seed(1)
    model = build_model(ModelConfig(**LITE, encoder_weights=str(path)), num_classes=3)
    for a, b in zip(source.encoder.parameters(), model.encoder.parameters(), strict=True):
        assert torch.equal(a, b)
    heads = (source.network.segmentation_head, model.network.segmentation_head)
    assert not torch.equal(*(next(head.parameters()) for head in heads))


def test_timm_renames_of_a_feature_extractor_are_undone(tmp_path):
    """timm calls a stage stages.0 in a classifier and stages_0 in its feature extractor."""
    import timm

    classifier = timm.create_model("convnext_atto")
    torch.save(classifier.state_dict(), tmp_path / "w.pth")
    features = timm.create_model("convnext_atto", features_only=True)
    load_weights(features, tmp_path / "w.pth")
    assert torch.equal(
        features.state_dict()["stages_0.blocks.0.conv_dw.weight"],
        classifier.state_dict()["stages.0.blocks.0.conv_dw.weight"],
    )


def test_classifier_weights_from_a_file_but_for_the_head(tmp_path):
    source = build_model(ModelConfig("timm:resnet10t"), num_classes=1000)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "w.pth")
    config = ModelConfig("timm:resnet10t", encoder_weights=str(tmp_path / "w.pth"))
    model = build_model(config, num_classes=5)
    assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert model.fc.weight.shape[0] == 5


def test_weights_that_do_not_fit_are_refused(tmp_path):
    def build(path):
        return build_model(ModelConfig(**LITE, encoder_weights=str(path)), num_classes=3)

    with pytest.raises(ValueError, match=r"weights file at .*none.pth, but there is none"):
        build(tmp_path / "none.pth")
    torch.save({"a.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"all (\d+) weights of the encoder, but \1 are missing"):
        build(tmp_path / "other.pth")
    weights = build_model(ModelConfig(**LITE), num_classes=3).encoder.model.state_dict()
    weights["conv_stem.weight"] = torch.zeros(32, 1, 3, 3)
    torch.save(weights, tmp_path / "grey.pth")
    with pytest.raises(ValueError, match=r"1 are missing or of another shape: conv_stem.weight"):
        build(tmp_path / "grey.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "pickle.pth")
    with pytest.raises(ValueError, match=r"without running code") as caught:
        build(tmp_path / "pickle.pth")
    assert "\n" not in str(caught.value)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match=r"reading it failed"):
        build(tmp_path / "cut.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"state dict of tensors"):
        build(tmp_path / "list.pth")


def test_real_imagenet_weights(shared_data):
    path = shared_data / "weights" / "tf_efficientnet_lite0_in1k_features.pth"
    model = build_model(ModelConfig(**LITE, encoder_weights=str(path)), num_classes=21)
    given = torch.load(path, weights_only=True)
    assert torch.equal(model.encoder.model.conv_stem.weight, given["conv_stem.weight"])
    assert torch.equal(
        model.encoder.model.blocks[6][0].bn3.running_var, given["blocks.6.0.bn3.running_var"]
    )


@pytest.mark.parametrize(
    "config", [ModelConfig(**LITE, encoder_weights="imagenet"),
               ModelConfig("timm:resnet10t", encoder_weights="imagenet"),
               ModelConfig("unet", encoder="resnet18", encoder_weights="imagenet")]
)  # fmt: skip
def test_unreachable_hub_names_the_local_way(config, monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("time.sleep", lambda _: None)  # the hub's client waits between retries
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"hub.*cannot be reached.*path as encoder_weights") as e:
        build_model(config, num_classes=3)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "config, message",
    [
        (ModelConfig("resnet21"), f"one of {', '.join(MODELS)}, but got 'resnet21'"),
        (ModelConfig("timm:resnet_18"), "similar: timm:resnet18"),
        (ModelConfig("unet", encoder="tu-xception_65"), "similar: tu-xception65"),
        (ModelConfig("unet", encoder="resnet19"), "resnet18.*but got 'resnet19'"),
        (
            ModelConfig("resnet20", encoder_weights="imagenet"),
            "model.encoder_weights",
        ),
        (ModelConfig(norm="layer"), "one of batch, group, none, but got 'layer'"),
    ],
)
def test_unknown_names_list_what_there_is(config, message):
    with pytest.raises(ValueError, match=message):
        build_model(config, num_classes=3)


def test_same_seed_same_network():
    def state():
        torch.manual_seed(3)
        return build_model(ModelConfig(), num_classes=3).state_dict().values()

    assert all(torch.equal(a, b) for a, b in zip(state(), state(), strict=True))
