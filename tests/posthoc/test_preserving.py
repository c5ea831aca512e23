"""What keeps the mask or the order: the literal optimum, and what it does to every pixel."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

import segcal
from segcal.posthoc import CALIBRATORS
from tests.support.holdouts import draw, nll, random_holdout, whole


def order(z):
    return z.argsort(dim=1, stable=True)


@pytest.mark.parametrize("name", ["ets", "capm", "copm"])
def test_the_mask_stays_and_the_order_where_promised(name):
    """On logits of any size, with near ties that rounding could turn around."""
    calibrator = CALIBRATORS[name]().fit(random_holdout())
    generator = torch.Generator().manual_seed(1)
    for size in (0.01, 1.0, 30.0):
        z = size * torch.randn(2000, 5, 4, generator=generator)
        out = calibrator(z)
        assert torch.equal(out.argmax(1), z.argmax(1))
        if name != "capm":
            apart = z.sort(1).values.diff(dim=1).amin(1) > 1e-3 * size
            kept = (order(out) == order(z)).all(1)
            assert kept[apart & (out.sort(1).values.diff(dim=1).amin(1) > 1e-5)].all()
    z = torch.randn(5000, 5, generator=generator)
    z[:, 1] = torch.nextafter(z.amax(1), torch.tensor(torch.inf))  # larger by the last bit
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(calibrator(z.to(dtype)).argmax(1), z.to(dtype).argmax(1))


def test_ensemble_weights_are_the_literal_minimum():
    z, y = whole(random_holdout(8, n=10, ignored=0))
    y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.1, 0, y)
    calibrator = segcal.EnsembleTemperatureScaling().fit(z, y)
    assert calibrator.weights_.sum() == pytest.approx(1) and (calibrator.weights_ >= 0).all()
    one = segcal.TemperatureScaling().fit(z, y)
    assert calibrator.temperature_.item() == pytest.approx(one.temperature_.item(), rel=1e-5)
    z = z.double()
    parts = [(z / calibrator.temperature_).softmax(1), z.softmax(1), torch.full_like(z, 1 / 5)]
    p = torch.stack([part.gather(1, y[:, None]).flatten() for part in parts]).numpy()
    found = -np.log(calibrator.weights_.double().numpy() @ p).mean()
    for weights in np.random.default_rng(0).dirichlet([1, 1, 1], 2000):
        assert found <= -np.log(weights @ p).mean() + 1e-7
    mixed = sum(w * part for w, part in zip(calibrator.weights_, parts, strict=True))
    torch.testing.assert_close(calibrator.predict_proba(z), mixed, rtol=1e-5, atol=1e-9)
    assert nll(calibrator(z), y) < nll(one(z), y)


@pytest.mark.parametrize("name", ["capm", "copm"])
def test_the_map_is_the_literal_minimum(name):
    """Σ NLL + s · P · Σ ‖θ_k − θ‖² with θ ≥ 0, by scipy on a literal function of z."""
    z, y = whole(random_holdout(2, n=3, k=3, size=(6, 6), ignored=0))
    pull = 0.01
    calibrator = CALIBRATORS[name](pulls=[pull]).fit(z, y)
    rows, labels = z.double().movedim(1, -1).reshape(-1, 3), y.flatten()
    beta = 1 / segcal.TemperatureScaling().fit(z, y).temperature_.item()
    centre = calibrator._dividing(3, beta).double()
    predicted = rows.argmax(1)
    margins = rows.amax(1, keepdim=True) - rows

    def objective(flat):
        theta = torch.from_numpy(flat).view(centre.shape)
        out = torch.zeros_like(rows)
        for p in range(len(rows)):
            row, k = theta[predicted[p]], predicted[p]
            for j in range(3):
                if j != k and name == "capm":
                    out[p, j] = -(row[j] * margins[p, j] + row[3 + j])
                elif j != k:
                    out[p, j] = -(row[0] * margins[p, j] + row[1:4] @ margins[p] + row[4])
        pulled = pull * (theta - centre).square().sum()
        return (cross_entropy(out, labels) + pulled).item()

    ours = calibrator.theta_.double()
    assert (ours >= 0).all()
    value = objective(ours.flatten().numpy())
    generator = np.random.default_rng(0)
    for step in (0.1, 0.01):
        for _ in range(15):
            moved = ours.flatten().numpy() + step * generator.normal(size=ours.numel())
            assert value <= objective(moved.clip(0)) + 1e-9
    found = minimize(
        objective,
        ours.flatten().numpy(),
        method="L-BFGS-B",
        bounds=[(0, None)] * ours.numel(),
        options={"maxiter": 2},
    )
    assert found.fun >= value - 1e-6


@pytest.mark.parametrize("name", ["capm", "copm"])
def test_a_shift_between_the_classes_is_found(name):
    """Predictions of class 0 are overrated, others are as sure as they say."""

    def holdout(seed):
        generator = torch.Generator().manual_seed(seed)
        z = 2 * torch.randn(30, 3, 16, 16, generator=generator)
        true = torch.where((z.argmax(1) == 0)[:, None], 0.4 * z, z)
        return z, draw(true.softmax(1), generator)

    (z, y), (fresh, labels) = holdout(0), holdout(1)
    one = segcal.TemperatureScaling().fit(z, y)
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert nll(calibrator(fresh), labels) < nll(one(fresh), labels) - 0.01
    assert torch.equal(calibrator(fresh).argmax(1), fresh.argmax(1))


def test_pulls_are_checked():
    with pytest.raises(ValueError, match="pulls must be numbers > 0"):
        CALIBRATORS["capm"](pulls=[0])
