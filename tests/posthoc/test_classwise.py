"""A temperature for each class: the literal optimum, and what it does to the predicted class."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import segcal
from tests.support.holdouts import draw, nll, random_holdout, whole


def classwise_holdout(seed, temperatures, *, n=20, size=(16, 16)):
    """Logits that are too large by a factor that depends on the predicted class."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, len(temperatures), *size, generator=generator)
    y = draw(z.softmax(1), generator)
    y[torch.rand(y.shape, generator=generator) < 0.1] = 255
    return z * torch.tensor(temperatures)[z.argmax(1)].unsqueeze(1), y


def literal_nll(z, y, temperatures):
    """Σ over pixels of −log softmax(z / T)[y], by numpy; z (P, C), T a number or (C,)."""
    scaled = z / temperatures
    scaled = scaled - scaled.max(1, keepdims=True)
    return float((np.log(np.exp(scaled).sum(1)) - scaled[np.arange(len(y)), y]).sum())


def valid(holdout):
    z, y = whole(holdout)
    return z.movedim(1, -1)[y != 255].double().numpy(), y[y != 255].numpy()


def least(function, low=0.05, high=20):
    """x > 0 of least function(x)."""
    options = {"xatol": 1e-10}
    found = minimize_scalar(
        lambda at: function(np.exp(at)),
        bounds=np.log([low, high]),
        method="bounded",
        options=options,
    )
    return np.exp(found.x)


def test_temperatures_of_predicted_classes_are_the_literal_minimum():
    holdout = random_holdout()
    z, y = valid(holdout)
    share = 0.01
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[share]).fit(holdout)
    beta = least(lambda beta: literal_nll(z, y, 1 / beta))
    assert calibrator.temperature_.item() == pytest.approx(1 / beta, rel=1e-5)
    step = 1e-3
    around = [literal_nll(z, y, 1 / (beta + k * step)) for k in (-1, 0, 1)]
    curvature = (around[0] - 2 * around[1] + around[2]) / step**2
    for c in range(5):
        mine = z.argmax(1) == c

        def penalised(at, mine=mine):
            pull = share * curvature * (at - beta) ** 2 / 2
            return literal_nll(z[mine], y[mine], 1 / at) + pull

        assert calibrator.temperatures_[c].item() == pytest.approx(1 / least(penalised), rel=1e-4)


def test_temperatures_of_predicted_classes_are_recovered():
    planted = [1.0, 2.0, 4.0]
    z, y = classwise_holdout(0, planted)
    fresh, labels = classwise_holdout(1, planted)
    calibrator = segcal.ClasswiseTemperatureScaling().fit([(z, y)])
    assert calibrator.temperatures_.tolist() == pytest.approx(planted, rel=0.15)
    assert torch.equal(calibrator(fresh).argmax(1), fresh.argmax(1))
    one = segcal.TemperatureScaling().fit([(z, y)])
    assert nll(calibrator(fresh), labels) < nll(one(fresh), labels) - 0.01


def test_few_right_pixels_do_not_make_a_class_certain():
    z, y = whole(random_holdout(ignored=0))
    z = torch.cat([z, torch.full_like(z[:, :1], -20)], 1)  # a class that is predicted ten times
    z[0, 5, 0], z[2, 5, 0, :2] = 20, 20
    y[0, 0], y[2, 0, :2] = 5, 5
    hasty = segcal.ClasswiseTemperatureScaling(shares=[0.0]).fit([(z, y)])
    assert hasty.temperatures_[5] < 0.1
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[0.1]).fit([(z, y)])
    torch.testing.assert_close(
        calibrator.temperatures_[5], calibrator.temperature_, rtol=0.1, atol=0
    )


def test_a_class_that_is_never_predicted_takes_the_common_temperature():
    holdout = [(torch.cat([z, z[:, :1] - 50], 1), y) for z, y in random_holdout()]
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[0.0]).fit(holdout)
    assert calibrator.temperatures_[5] == calibrator.temperature_ != 1


def test_the_share_is_chosen_on_images_not_fitted_on():
    z, y = whole(random_holdout(5))
    validates = torch.arange(len(z)) % 5 == 1
    shares = [0.0, 0.01, 10.0]
    calibrator = segcal.ClasswiseTemperatureScaling(shares=shares).fit([(z, y)])
    found = {}
    for share in shares:
        alone = segcal.ClasswiseTemperatureScaling(shares=[share])
        found[share] = alone.fit([(z, y)]).nll_after_
    assert (
        calibrator.nll_after_ == min(found.values())
        and found[calibrator.share_] == calibrator.nll_after_
    )
    assert calibrator.nll_before_ == pytest.approx(nll(z[validates], y[validates]))
    with pytest.raises(ValueError, match="shares to be numbers >= 0, but got"):
        segcal.ClasswiseTemperatureScaling(shares=[-1.0])


@pytest.mark.parametrize("strength", [0.0, 0.1, 1.0])
def test_distribution_aware_is_the_literal_minimum(strength):
    holdout = random_holdout()
    z, y = valid(holdout)
    y[y == 0] = 1
    labels = torch.from_numpy(y)
    calibrator = segcal.DistributionAwareTemperatureScaling(strength=strength)
    calibrator.fit([(torch.from_numpy(z), labels)])
    counts = [(y == c).sum() for c in range(5)]
    above = np.array([strength * count / max(counts) for count in counts])
    expected = least(lambda t: literal_nll(z, y, t + above))
    assert calibrator.temperature_.item() == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(calibrator.temperatures_ - calibrator.temperature_, above, atol=1e-6)
    assert calibrator.temperatures_[0] == calibrator.temperature_  # no pixel of class 0
    if strength == 0:
        one = segcal.TemperatureScaling().fit([(torch.from_numpy(z), labels)])
        assert one.temperature_.item() == pytest.approx(expected, rel=1e-4)


def test_distribution_aware_may_change_the_predicted_class():
    calibrator = segcal.DistributionAwareTemperatureScaling(strength=1.0).fit(random_holdout())
    calibrator.temperatures_.copy_(torch.tensor([2.0, 1.5, 1.0, 1.0, 1.0]))
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0, 2.5]])
    torch.testing.assert_close(calibrator(z), torch.tensor([[1.5, 4 / 3, 1.0, 0.0, 2.5]]))
    with pytest.raises(ValueError, match="strength >= 0, but got -1"):
        segcal.DistributionAwareTemperatureScaling(strength=-1)
