"""On the logits of a real network: fitted on training images, evaluated on validation."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

import segcal
from segcal.posthoc import CALIBRATORS
from tests.support.holdouts import make_calibrator

STRIDE = 4  # one pixel in 16, so that the test is short; 257 = 64 · 4 + 1 keeps the corners


class Saved:
    """Coarse logits of a file, upsampled to its labels some images at a time."""

    def __init__(self, path, change=lambda z: z, stride=STRIDE):
        with np.load(path, allow_pickle=False) as file:
            self.logits = torch.from_numpy(file["logits33"]).movedim(-1, 1).float()
            self.labels = torch.from_numpy(file["labels"])[:, ::stride, ::stride]
        self.change = change

    def __iter__(self):
        for z, y in zip(self.logits.split(8), self.labels.split(8), strict=True):
            z = interpolate(z, size=y.shape[1:], mode="bilinear", align_corners=True)
            yield self.change(z), y


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


def shifted(z):
    """The logits with a constant of its own for each pixel."""
    generator = torch.Generator().manual_seed(0)
    return z + 10 * torch.randn(z[:, :1].shape, generator=generator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALIBRATORS)
def test_a_constant_changes_nothing_and_masks_and_orders_stay(name, shared_data):
    path = shared_data / "deeplabv3_voc_logits" / "val.npz"
    changes = {"z": lambda z: z, "z + c": shifted, "log p": lambda z: z.log_softmax(1)}
    found = {}
    for kind, change in changes.items():
        batches = Saved(path, change, stride=8)
        calibrator = make_calibrator(name).fit(batches)
        found[kind] = torch.cat([calibrator.predict_proba(z) for z, _ in batches])
        if kind == "z":
            for z, _ in batches:
                out = calibrator(z)
                if calibrator.keeps_mask:
                    assert torch.equal(out.argmax(1), z.argmax(1))
                if name in ("ts", "ets", "lts", "copm"):  # the order of classes, but of equal ones
                    order = z.argsort(1)
                    apart = z.gather(1, order).diff(dim=1) > 0
                    assert out.gather(1, order).diff(dim=1)[apart].min() >= -1e-5
    for kind in ("z + c", "log p"):
        torch.testing.assert_close(found[kind], found["z"], atol=1e-5, rtol=0)
