"""On the logits of a real network: fitted on training images, evaluated on validation."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

import segcal

STRIDE = 4  # one pixel in 16, so that the test is short; 257 = 64 · 4 + 1 keeps the corners


class Saved:
    """Coarse logits of a file, upsampled to its labels some images at a time."""

    def __init__(self, path):
        with np.load(path, allow_pickle=False) as file:
            self.logits = torch.from_numpy(file["logits33"]).movedim(-1, 1).float()
            self.labels = torch.from_numpy(file["labels"])[:, ::STRIDE, ::STRIDE]

    def __iter__(self):
        for z, y in zip(self.logits.split(8), self.labels.split(8), strict=True):
            yield interpolate(z, size=y.shape[1:], mode="bilinear", align_corners=True), y


def report(batches, calibrator):
    meter = segcal.CalibrationMeter(21)
    for z, y in batches:
        meter.update(calibrator(z), y)
    return meter.compute()


def test_one_temperature_calibrates_a_real_network(shared_data):
    folder = shared_data / "deeplabv3_voc_logits"
    val = Saved(folder / "val.npz")
    calibrator = segcal.TemperatureScaling().fit(Saved(folder / "train.npz"))
    assert 1.1 < calibrator.temperature_.item() < 1.8
    assert calibrator.passes_ <= 5
    before, after = report(val, lambda z: z), report(val, calibrator)
    assert after.nll < before.nll and after.ece < before.ece
    assert after.accuracy == pytest.approx(before.accuracy, abs=1e-6)
