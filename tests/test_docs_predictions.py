"""The example of docs/predictions.md runs, and what it writes can be read."""

import re

import numpy as np
import torch

from segcal.sources.saved import PredictionFolder, PredictionFormat
from tests.support import ROOT

TEXT = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")
CLASSES, H, W = 21, 40, 52


def test_the_example_writes_what_can_be_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predictions").mkdir()
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (H, W, 3), dtype=np.uint8)
    samples = [("one", image, rng.integers(0, CLASSES, (H, W), dtype=np.uint8))]

    def prepare(image):
        return torch.from_numpy(image).movedim(2, 0).float()

    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    (example,) = [text for text in examples if "np.savez" in text]
    model = torch.nn.Conv2d(3, CLASSES, 1, stride=4)
    exec(example, {"samples": samples, "model": model, "prepare": prepare})
    folder = PredictionFolder("predictions")
    (prediction,) = folder
    assert prediction.kind == "logits"
    assert prediction.values.shape == (1, CLASSES, H, W)
    np.testing.assert_array_equal(folder.image(0), image)


def test_the_manifest_shown_has_every_key_and_its_default():
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S)
    keys = dict(re.findall(r"^(\w+): +(?:(\w+) )?", shown, flags=re.M))
    for name, default in vars(PredictionFormat()).items():
        assert keys.pop(name) == ("" if default is None else str(default).lower()), name
    assert not keys
