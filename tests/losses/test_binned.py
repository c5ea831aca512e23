"""The ACE loss of many pixels: pieces and precision leave no trace."""

import pytest
import torch

from segcal.losses import binned, build_loss


def value_and_slope(logits, labels, soft):
    logits = logits.detach().requires_grad_()
    value = build_loss("nll+ace", soft=soft).terms(logits, labels)["ace"]
    (slope,) = torch.autograd.grad(value, logits)
    return value.detach(), slope


def batch(k=5, space=(90, 130), scale=2.0):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(3, k, *space, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (3, *space), generator=generator)
    return logits, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.1, 255)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 97), (4, 1000), (100, 10**6)], ids=str)
def test_pieces_leave_no_trace(monkeypatch, rows, columns, soft):
    expected = value_and_slope(*batch(), soft)
    monkeypatch.setattr(binned, "_ROWS", rows)
    monkeypatch.setattr(binned, "_COLUMNS", columns)
    found = value_and_slope(*batch(), soft)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])
def test_float32_has_the_value_of_float64(scale, soft):
    """Of near-uniform probabilities too, all of which lie at the centre of a bin: 1/8 = 2.5/20."""
    logits, labels = batch(8, scale=scale)
    # The same logits for both, so that no probability is in another bin.
    logits = logits.float()
    single, double = (value_and_slope(z, labels, soft)[0] for z in (logits, logits.double()))
    assert single.item() == pytest.approx(double.item(), abs=2e-7, rel=1e-6)
