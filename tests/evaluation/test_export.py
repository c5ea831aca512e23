"""A network and its calibrator in one file give the probabilities PyTorch gives."""

import pytest
import torch
from torch import nn

from segcal.evaluation.export import Calibrated, Pooled, export
from segcal.posthoc import CALIBRATORS
from segcal.sources.members import pooled
from segcal.sources.source import Batch
from tests.support.holdouts import make_calibrator, random_holdout

CASES = [(None, ".pt2"), ("dc", ".pt2"), ("isotonic", ".pt2"), ("lts", ".pt2"), ("ts", ".onnx")]
CASES += [
    pytest.param(name, suffix, marks=pytest.mark.slow)
    for suffix in (".pt2", ".onnx")
    for name in CALIBRATORS
    if (name, suffix) not in CASES
]


class Coarse(nn.Module):
    """A network with batch norm and dropout, whose logits are at half the size, in a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.BatchNorm2d(5), nn.Dropout(0.5)
        )

    def forward(self, images):
        return {"out": 5 * self.body(images)}


def run(path, images):
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(images)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["probs"], {"images": images.numpy()})[0])


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_the_file_gives_calibrated_probabilities(name, suffix, tmp_path):
    model = Coarse().train()
    calibrator = None if name is None else make_calibrator(name).fit(random_holdout())
    path = tmp_path / f"model{suffix}"
    assert export(model, calibrator, torch.randn(1, 3, 12, 10), path) <= 1e-4
    assert model.training and model.body[1].num_batches_tracked == 0
    images = torch.randn(3, 3, 12, 10)  # another batch size than the example's
    logits = nn.functional.interpolate(model.eval()(images)["out"], (12, 10), mode="bilinear")
    expected = (logits if calibrator is None else calibrator(logits)).softmax(1)
    found = run(path, images)
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.sum(1), torch.ones(3, 12, 10))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_network_for_volumes(suffix, tmp_path):
    torch.manual_seed(0)
    model = nn.Conv3d(1, 5, 3, stride=2, padding=1)  # logits at half the size
    calibrator = make_calibrator("ts").fit(random_holdout())
    path, volumes = tmp_path / f"model{suffix}", torch.randn(3, 1, 6, 8, 10)
    assert export(model, calibrator, volumes[:1], path) <= 1e-4
    logits = nn.functional.interpolate(model(volumes), (6, 8, 10), mode="trilinear")
    torch.testing.assert_close(
        run(path, volumes), calibrator(logits).softmax(1).detach(), atol=1e-4, rtol=0
    )


def test_a_local_temperature_sees_the_images(tmp_path):
    generator = torch.Generator().manual_seed(0)
    holdout = [(z, y, torch.randn(2, 3, 8, 8, generator=generator)) for z, y in random_holdout()]
    calibrator = make_calibrator("lts").fit(holdout)
    nn.init.normal_(calibrator.network_[-1].weight, generator=generator)
    model, path = Coarse().eval(), tmp_path / "model.pt2"
    images = torch.randn(2, 3, 8, 8)
    export(model, calibrator, images, path)
    torch.testing.assert_close(run(path, images), Calibrated(model, calibrator)(images).detach())
    assert not torch.allclose(run(path, images), Calibrated(model)(images))


def test_classification(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    calibrator = make_calibrator("dc").fit(random_holdout(n=64, size=()))
    export(model, calibrator, torch.randn(4, 3, 2, 2), tmp_path / "model.pt2")
    images = torch.randn(7, 3, 2, 2)
    expected = calibrator(model(images)).softmax(1).detach()
    torch.testing.assert_close(run(tmp_path / "model.pt2", images), expected)


class TwoInputs(nn.Module):
    def forward(self, images, depths):
        return images + depths


class Branching(Coarse):
    def forward(self, images):
        return super().forward(images if images.sum() > 0 else -images)


def test_nothing_is_written_when_it_fails(tmp_path, monkeypatch):
    example, path = torch.randn(1, 3, 8, 8), tmp_path / "model.pt2"
    with pytest.raises(ValueError, match=r"\.onnx"):
        export(Coarse(), None, example, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="not fitted"):
        export(Coarse(), make_calibrator("ts"), example, path)
    for model in (Branching(), TwoInputs()):
        with pytest.raises(ValueError, match="cannot trace"):
            export(model, None, example, path)
    with pytest.raises(ValueError, match="tolerance"):
        export(Coarse(), None, example, path, tolerance=-1.0)
    monkeypatch.setattr("segcal.evaluation.export.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"segcal\[onnx\]"):
        export(Coarse(), None, example, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("pool", ["probs", "logits"])
@pytest.mark.parametrize("multilabel", [False, True])
def test_an_ensemble_pools_as_members_do(pool, multilabel):
    torch.manual_seed(0)
    networks, images = [nn.Conv2d(3, 4, 1) for _ in range(3)], torch.randn(2, 3, 5, 6)
    kind = "sigmoid_logits" if multilabel else "logits"
    with torch.no_grad():
        expected = pooled([Batch(None, kind, net(images), None) for net in networks], pool).probs
        members = [Calibrated(net, multilabel=multilabel) for net in networks]
        found = Calibrated(Pooled(members, pool), multilabel=multilabel)(images)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
