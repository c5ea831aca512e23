"""The examples of docs/predictions.md run, and what they write can be read."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from torchvision import models

from segcal.sources.saved import PredictionFolder, PredictionFormat
from tests.support import ROOT

TEXT = (ROOT / "docs" / "predictions.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
CLASSES, H, W = 21, 40, 52


@pytest.fixture
def samples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predictions").mkdir()
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (H, W, 3), dtype=np.uint8)
    return [("one", image, rng.integers(0, CLASSES, (H, W), dtype=np.uint8))]


def check(samples):
    folder = PredictionFolder("predictions")
    (prediction,) = folder
    assert prediction.kind == "logits"
    assert prediction.values.shape == (1, CLASSES, H, W)
    np.testing.assert_array_equal(folder.image(0), samples[0][1])


def test_torchvision(samples, monkeypatch):
    network = models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None)
    monkeypatch.setattr(models, "get_model", lambda name, weights: network)  # downloads nothing
    exec(EXAMPLES[0], {"samples": samples})
    check(samples)


def test_smp(samples, monkeypatch):
    network = smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, classes=CLASSES)
    monkeypatch.setattr(smp, "from_pretrained", lambda name: network)
    exec(EXAMPLES[1], {"samples": samples})
    check(samples)


class StandIn:
    """What transformers' processor and network do to shapes: resize to a square, give 1/4 of it."""

    def from_pretrained(self, name):
        return self

    def eval(self):
        return self

    def __call__(self, images=None, return_tensors=None, pixel_values=None):
        if pixel_values is None:
            assert images.shape == (H, W, 3)
            return {"pixel_values": torch.zeros(1, 3, 32, 32)}
        return SimpleNamespace(logits=torch.randn(1, CLASSES, 8, 8))


def test_hugging_face(samples, monkeypatch):
    names = ("AutoImageProcessor", "AutoModelForSemanticSegmentation")
    stand_in = SimpleNamespace(**{name: StandIn() for name in names})
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    exec(EXAMPLES[2], {"samples": samples})
    check(samples)


def test_the_manifest_shown_has_every_key_and_its_default():
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S)
    keys = dict(re.findall(r"^(\w+): +(?:(\w+) )?", shown, flags=re.M))
    for name, default in vars(PredictionFormat()).items():
        assert keys.pop(name) == ("" if default is None else str(default).lower()), name
    assert not keys


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_are_short(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
