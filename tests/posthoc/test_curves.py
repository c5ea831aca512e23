"""Beta calibration and isotonic regression: scikit-learn's fits, and any p from 0 to 1."""

import math

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import segcal
from segcal.posthoc import CALIBRATORS
from segcal.posthoc.curves import LIMIT, PER_UNIT, fit_beta, log_probs
from tests.support.holdouts import draw, nll, random_holdout

each = pytest.mark.parametrize("name", ["beta", "isotonic"])


def test_logarithms_of_p_and_its_rest():
    z = 30 * torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.cat([z, z[:1] * 0])  # ties too
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        log_p, log_rest = log_probs(z.to(dtype))
        for c in range(4):
            others = torch.cat([z[:, :c], z[:, c + 1 :]], 1).logsumexp(1) - z.logsumexp(1)
            torch.testing.assert_close(
                log_rest[:, c].double(), others, rtol=tolerance, atol=tolerance
            )
        torch.testing.assert_close(log_p.double(), z.log_softmax(1), rtol=1e-5, atol=1e-5)
    _, log_rest = log_probs(torch.tensor([[[80.0], [0.0], [0.0]]]))
    assert log_rest[0, 0, 0].item() == pytest.approx(math.log(2) - 80)


def beta_data(a, b, m, n=4000, seed=0):
    """(ln p, ln(1 − p), whether of the class) with P(of the class) = σ(a ln p − b ln(1−p) + m)."""
    generator = torch.Generator().manual_seed(seed)
    log_odds = 3 * torch.randn(n, dtype=torch.float64, generator=generator)
    log_p, log_rest = (torch.nn.functional.logsigmoid(s * log_odds) for s in (1, -1))
    q = (a * log_p - b * log_rest + m).sigmoid()
    return log_p, log_rest, torch.rand(n, dtype=torch.float64, generator=generator) < q


def literal_beta(log_p, log_rest, of_class, free=(True, True)):
    """Logistic regression of ln p and −ln(1 − p); Kull et al.: a negative slope is left out."""
    x = np.stack([log_p, -log_rest], 1)[:, list(free)]
    if not any(free):
        share = of_class.double().mean().item()
        return [0.0, 0.0, math.log(share / (1 - share))]
    fit = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(x, of_class)
    slopes = iter(fit.coef_[0].tolist())
    found = [next(slopes) if f else 0.0 for f in free]
    for at in (0, 1):
        if found[at] < 0:
            remaining = [f and at != other for other, f in enumerate(free)]
            return literal_beta(log_p, log_rest, of_class, remaining)
    return [*found, float(fit.intercept_[0])]


@pytest.mark.parametrize(
    "planted", [(1, 1, 0), (0.5, 2, -1), (2, 0.3, 0.7), (-0.5, 1, 0), (1, -0.5, 1), (-1, -1, 0.2)]
)
def test_beta_is_the_literal_fit(planted):
    data = beta_data(*planted)
    found = fit_beta(*data)
    assert min(found[:2]) >= 0
    assert [slope == 0 for slope in found[:2]] == [slope < 0 for slope in planted[:2]]
    assert found == pytest.approx(literal_beta(*data), abs=2e-4)


def test_beta_of_separable_data_ends_at_a_bound():
    log_p, log_rest, _ = beta_data(1, 1, 0)
    a, b, m = fit_beta(log_p, log_rest, log_p > log_rest)
    assert 0 <= a <= 100 and 0 <= b <= 100 and math.isfinite(m)
    assert max(a, b) > 10


def test_beta_recovers_its_own_map():
    """Of two classes, the curve of the first is that of the second seen from the other side."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(30, 2, 20, 20, generator=generator)
    p = z.softmax(1)
    q = (0.4 * p[:, 1].log() - 1.2 * p[:, 0].log() - 0.8).sigmoid()
    y = draw(torch.stack([1 - q, q], 1), generator)
    calibrator = segcal.BetaCalibration().fit([(z, y)])
    torch.testing.assert_close(
        calibrator.slope_, torch.tensor([[1.2, 0.4], [0.4, 1.2]]), atol=0.15, rtol=0
    )
    torch.testing.assert_close(calibrator.shift_, torch.tensor([0.8, -0.8]), atol=0.15, rtol=0)
    torch.testing.assert_close(calibrator(z).softmax(1)[:, 1], q, atol=0.03, rtol=0)


def grid_holdout(n=3000, seed=0):
    """(n, 2) logits (0, k/32), which are points of the grid, and labels that p misjudges."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-6 * PER_UNIT, 6 * PER_UNIT, (n,), generator=generator) / PER_UNIT
    q = 0.1 + 0.5 * (x > -1) + 0.2 * (x > 3) + 0.15 * torch.sin(2 * x)
    y = (torch.rand(n, generator=generator) < q).long()
    return torch.stack([torch.zeros(n), x], 1), y


def test_isotonic_is_scikit_learns():
    z, y = grid_holdout()
    calibrator = segcal.IsotonicCalibration().fit([(z, y)])
    assert calibrator.improved_
    p = z.softmax(1)[:, 1].numpy()
    expected = IsotonicRegression(out_of_bounds="clip").fit(p, y.numpy()).predict(p)
    least = 0.5 / len(y)
    found = calibrator(z.double()).softmax(1)[:, 1]
    np.testing.assert_allclose(found, expected.clip(least, 1 - least), atol=2e-6)
    order = z[:, 1].argsort()
    assert (found[order].diff() >= -1e-6).all()
    assert len(np.unique(found.numpy().round(5))) > 10  # it is a curve, not a constant


def test_isotonic_is_between_its_neighbours_off_the_grid():
    z, y = grid_holdout()
    calibrator = segcal.IsotonicCalibration().fit([(z, y)])
    x = torch.rand(500, generator=torch.Generator().manual_seed(1)) * 44 - 22

    def at(x):
        return calibrator(torch.stack([x * 0, x], 1).double()).softmax(1)[:, 1]

    below, above = (x * PER_UNIT).floor() / PER_UNIT, (x * PER_UNIT).ceil() / PER_UNIT
    assert (at(below) <= at(x) + 1e-6).all() and (at(x) <= at(above) + 1e-6).all()
    for end in (-LIMIT, LIMIT):
        beyond = at(torch.tensor([1.0, 1.5, 100.0]) * end)
        assert (beyond == beyond[0]).all()


@each
def test_a_class_without_pixels_keeps_its_probability(name):
    z, y = grid_holdout()
    z = torch.cat([z, z[:, :1] - 3], 1)  # a third class, never labelled
    calibrator = CALIBRATORS[name]().fit([(z, y)])
    identity = CALIBRATORS[name]()
    identity._start(3, 0)
    for key, tensor in calibrator.state_dict().items():
        assert torch.equal(tensor[2], identity.state_dict()[key][2])
        assert not torch.equal(tensor[1], identity.state_dict()[key][1])
    log_p = z.log_softmax(1)[..., None]
    torch.testing.assert_close(identity._map(log_p).softmax(1), log_p.exp())


@each
def test_one_vs_rest_beats_one_temperature_where_classes_differ(name):
    def holdout(seed):
        generator = torch.Generator().manual_seed(seed)
        z = 2 * torch.randn(40, 3, 16, 16, generator=generator)
        q = (z * torch.tensor([0.3, 1.0, 2.0])[:, None, None]).softmax(1)
        return z, draw(q, generator)

    (z, y), (fresh, labels) = holdout(0), holdout(1)
    calibrator = CALIBRATORS[name]().fit([(z, y)])
    one = segcal.TemperatureScaling().fit([(z, y)])
    assert nll(calibrator(fresh), labels) < nll(one(fresh), labels) - 0.01


@each
def test_certain_predictions_give_finite_logits(name):
    """Every prediction of the hold-out is right, so that regression alone would say p = 0."""
    z = torch.cat([z for z, _ in random_holdout(ignored=0)])
    calibrator = CALIBRATORS[name]().fit([(z, z.argmax(1))])
    assert calibrator.improved_
    assert calibrator(z).isfinite().all()
    torch.testing.assert_close(calibrator(z).softmax(1).sum(1), torch.ones(8, 8, 8))


def test_no_isotonic_probability_is_zero():
    z = torch.cat([z for z, _ in random_holdout(ignored=0)])
    calibrator = segcal.IsotonicCalibration().fit([(z, z.argmax(1))])
    q = calibrator(z).exp()  # before they are normalised; 1/(2P) at least, with P = 512
    assert q.min().item() == pytest.approx(1 / 1024, rel=1e-4)
    assert q.max().item() == pytest.approx(1 - 1 / 1024, rel=1e-4)
