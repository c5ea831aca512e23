"""One answer to "are these probabilities?", the same for everyone who asks."""

import numpy as np
import pytest
import torch

import segcal
from segcal.sources.saved import PredictionFolder
from segcal.pixels import is_distribution

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2, 21, 1000])
def test_a_rounded_softmax_is_one(dtype, k):
    torch.manual_seed(k)
    probs = (3 * torch.randn(500, k, dtype=torch.float64)).softmax(1)
    assert is_distribution(probs.to(dtype), 1).all()
    assert is_distribution(probs.to(dtype).double(), 1, rounded_to=dtype).all()
    assert is_distribution(probs.to(dtype).T, 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    off = {torch.float16: 8 / 1024, torch.bfloat16: 8 / 128}.get(dtype, 1e-4)
    values = [[0.5, 0.5], [1.0, 0.0], [1.2, -0.2], [0.5, 0.5 + 2 * off], [0.5, 0.5 + off / 2]]
    values += [[0.5, float("nan")], [float("inf"), 0.0], [0.2, 0.2], [2.0, 1.0]]
    expected = [True, True, False, False, True, False, False, False, False]
    assert is_distribution(torch.tensor(values, dtype=dtype), 1).tolist() == expected


def asked(probs, folder):
    """Who takes two pixels of these (C,) probabilities: meter, file, overlay."""
    image = torch.stack([probs, probs], 1)[:, :, None]  # (C, 2, 1)
    labels = torch.tensor([[0], [1]])
    np.savez(folder / "a.npz", probs=image.numpy(), labels=labels.numpy())
    takers = {
        "meter": lambda: segcal.CalibrationMeter(len(probs)).update_probs(
            image[None], labels[None]
        ),
        "file": lambda: PredictionFolder(folder)[0],
        "overlay": lambda: segcal.viz.calibration_overlay(None, image, labels),
    }
    found = {}
    for name, take in takers.items():
        try:
            take()
            found[name] = True
        except ValueError as error:
            assert "probabilities" in str(error)
            found[name] = False
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "values", [[0.7, 0.3], [1.0, 0.0], [1.2, -0.2], [0.8, 0.3], [0.4, 0.4], [3.0, -2.0]]
)
def test_meter_files_and_overlays_agree(tmp_path, values, dtype):
    probs = torch.tensor(values, dtype=dtype)
    expected = bool(is_distribution(probs, 0))
    assert asked(probs, tmp_path) == dict.fromkeys(("meter", "file", "overlay"), expected)
    batches = [(probs.expand(4, 2), torch.tensor([0, 1, 0, 1]))]
    if expected:
        with pytest.raises(ValueError, match="Expected logits, but got probabilities"):
            segcal.TemperatureScaling().fit(batches)
