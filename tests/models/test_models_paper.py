"""The networks of the paper beside the CIFAR ResNets: shapes, sizes, gradients, frozen parts."""

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from segcal.models import ModelConfig
from segcal.models import build as build_model
from segcal.training.config import parse_train

WORDS = ("", "the", "moon", "of")


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def gradients(model, x):
    """The names of the parameters that a step would change."""
    model(x).square().sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def test_resnet34_of_tiny_imagenet():
    model = build_model(ModelConfig("resnet34"), num_classes=200)
    counts, inside = {64: 3, 128: 4, 256: 6, 512: 3}, 64
    expected = 27 * 64 + 2 * 64 + (4 * 512 + 1) * 200
    for width, blocks in counts.items():
        if inside != width:
            expected += inside * width + 2 * width  # the shortcut
        expected += 9 * inside * width + (2 * blocks - 1) * 9 * width**2 + 2 * blocks * 2 * width
        inside = width
    assert parameters(model) == expected
    x = torch.randn(2, 3, 16, 16)
    assert model.blocks(model.stem(x)).shape == (2, 512, 2, 2)  # an eighth of the image
    assert model(x).shape == (2, 200)
    assert gradients(model, x) == {name for name, _ in model.named_parameters()}


def test_resnet18_with_weights_from_a_file(tmp_path):
    """torchvision's file: the head is for 1000 classes and stays out."""
    source = torchvision.models.resnet18()
    torch.save(source.state_dict(), tmp_path / "resnet18.pth")
    config = ModelConfig("timm:resnet18.tv_in1k", encoder_weights=str(tmp_path / "resnet18.pth"))
    model = build_model(config, num_classes=7).eval()
    x = torch.randn(2, 3, 64, 64)
    source.fc = nn.Identity()
    features = source.eval()(x)
    assert model(x).shape == (2, 7)
    torch.testing.assert_close(model(x), model.fc(features))


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    return build_model(ModelConfig("resnet50_head", freeze=True), num_classes=2)


def test_frozen_resnet50_trains_its_head_alone(head):
    x = torch.randn(2, 3, 32, 32)
    before = {name: value.clone() for name, value in head.encoder.state_dict().items()}
    head.train()
    assert not any(module.training for module in head.encoder.modules()) and head.training
    trained = gradients(head, x)
    assert trained == {
        f"{layer}.{kind}" for layer in ("conv", "hidden", "head") for kind in ("weight", "bias")
    }
    assert all(p.requires_grad == (not n.startswith("encoder")) for n, p in head.named_parameters())
    after = head.encoder.state_dict()  # running means among it
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_shapes_of_the_head(head):
    assert head.conv.weight.shape == (256, 2048, 1, 1)
    assert head.hidden.weight.shape == (128, 256) and head.head.weight.shape == (2, 128)
    assert head.encoder(torch.randn(1, 3, 64, 64)).shape == (1, 2048, 2, 2)
    assert head(torch.randn(3, 3, 40, 56)).shape == (3, 2)


def test_resnet50_takes_torchvisions_weights(tmp_path):
    source = torchvision.models.resnet50()
    torch.save(source.state_dict(), tmp_path / "resnet50.pth")
    config = ModelConfig("resnet50_head", encoder_weights=str(tmp_path / "resnet50.pth"))
    model = build_model(config, num_classes=2)
    assert torch.equal(model.encoder.layer4[2].conv3.weight, source.layer4[2].conv3.weight)
    assert all(p.requires_grad for p in model.parameters())  # frozen only when asked for


def test_global_pool_cnn():
    model = build_model(ModelConfig("gpcnn"), num_classes=20, words=WORDS)
    expected = 4 * 100 + (5 * 100 + 1) * 128 + 2 * (5 * 128 + 1) * 128 + 129 * 128 + 129 * 20
    assert parameters(model) == expected
    tokens = torch.randint(0, 4, (3, 40))
    assert model(tokens).shape == (3, 20)
    assert gradients(model, tokens) == {name for name, _ in model.named_parameters()}
    assert not model.encoder.weight.grad[0].any()  # the padding
    with pytest.raises(ValueError, match=r"Expected 21 words or more, but got 20"):
        model(tokens[:, :20])
    assert model(tokens[:, :21]).shape == (3, 20)


def test_global_pool_cnn_is_what_the_formula_says():
    """Written out on one text, place by place."""
    torch.manual_seed(0)
    model = build_model(ModelConfig("gpcnn", embedding=6), num_classes=3, words=WORDS).eval()
    tokens = torch.randint(0, 4, (1, 25))

    def convolved(x, conv):  # (places, channels) to (places - 4, 128)
        weight = conv.weight.detach().numpy().transpose(2, 1, 0).reshape(-1, 128)
        windows = [x[i : i + 5].reshape(-1) for i in range(len(x) - 4)]
        return np.maximum(np.stack(windows) @ weight + conv.bias.detach().numpy(), 0)

    x = model.encoder.weight.detach().numpy()[tokens[0]]
    for conv in model.convs[:2]:
        x = convolved(x, conv)
        x = np.stack([x[i : i + 5].max(0) for i in range(len(x) - 4)])
    x = torch.from_numpy(convolved(x, model.convs[2]).max(0))
    expected = model.head(torch.relu(model.hidden(x)))
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-4, atol=1e-5)


def test_glove_vectors(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2 3\nsun 4 5 6\nof -0.5 1e-2 7\n", encoding="utf-8")

    def build(width=3, words=WORDS, **options):
        config = ModelConfig("gpcnn", embedding=width, encoder_weights=str(path), **options)
        return build_model(config, num_classes=2, words=words)

    model = build(freeze=True)
    expected = torch.tensor([[0, 0, 0], [1, 2, 3], [0, 0, 0], [-0.5, 0.01, 7]])
    assert torch.equal(model.encoder.weight, expected)
    assert "encoder.weight" not in gradients(model, torch.randint(0, 4, (2, 30)))
    assert build().encoder.weight.requires_grad
    with pytest.raises(ValueError, match=r"Expected 100 numbers .*glove.txt, line 1, but got '1 2"):
        build(100)
    with pytest.raises(ValueError, match=r"it has none of the vocabulary"):
        build(words=("", "x"))
    path.write_text("the 1 two 3\n")
    with pytest.raises(ValueError, match=r"Expected 3 numbers .* line 1, but got '1 two 3'"):
        build()
    path.unlink()
    with pytest.raises(ValueError, match=r"Expected a GloVe text file at .*glove.txt"):
        build()


def test_networks_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"gpcnn"):
        build_model(ModelConfig("resnet20"), num_classes=2, words=WORDS)
    with pytest.raises(ValueError, match=r"reads text"):
        build_model(ModelConfig("gpcnn"), num_classes=2)
    with pytest.raises(
        ValueError,
        match=r"model.freeze",
    ):
        build_model(ModelConfig("unet", freeze=True), num_classes=2)


def test_nothing_random_is_frozen():
    with pytest.raises(ValueError, match=r"model.freeze"):
        parse_train(["--model.name", "resnet50_head", "--model.freeze", "true"])
