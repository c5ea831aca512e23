"""Vector, matrix and Dirichlet scaling: the objective's own minimum, validated on other images."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

import segcal
from segcal.posthoc import CALIBRATORS
from segcal.posthoc.affine import LAMBDAS, MUS, RIDGE, Objective, penalty
from tests.support.holdouts import draw, nll, random_holdout, whole


def rows(n=400, k=4, seed=0):
    """(K, P) x and (P,) labels that a linear map improves on."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(k, n, dtype=torch.float64, generator=generator)
    mixed = torch.eye(k) + 0.4 * torch.randn(k, k, generator=generator)
    bias = torch.randn(k, 1, generator=generator)
    return x, draw((mixed.double() @ x + bias).softmax(0)[None], generator)[0]


def fitted(x, y, pair=(0, 0)):
    k = len(x)
    return Objective(x, y, torch.arange(k + 1).expand(k, -1)).minimise(pair)


def value(affine, x, y, pair=(0, 0)):
    k = len(x)
    return (
        cross_entropy((affine[:, :k] @ x + affine[:, k:]).T, y) + penalty(affine, pair)[0]
    ).item()


def mapped_holdout(seed, *, n=40, k=4, size=(8, 8)):
    """Labels drawn from a Dirichlet map, softmax(W log p + b), of the predicted p."""
    generator = torch.Generator().manual_seed(100)
    weight = 0.6 * torch.eye(k) + 0.25 * torch.randn(k, k, generator=generator)
    bias = torch.randn(k, generator=generator)
    generator.manual_seed(seed)
    z = 2 * torch.randn(n, k, *size, generator=generator)
    q = (torch.einsum("kc,nc...->nk...", weight, z.log_softmax(1)) + bias[:, None, None]).softmax(1)
    return [*zip(z.split(4), draw(q, generator).split(4), strict=True)]


def test_the_penalty_by_hand():
    # K = 3: off-diagonal squares 1 + 4 + 9, over 3·2; bias squares 0.25 + 1 + 4, over 3; and the
    # pull to [I, 0]: squares 16 + 25 + 36 on the diagonal beside the others.
    affine = torch.tensor([[5.0, 1, 0, 0.5], [0, 6, 2, -1], [3, 0, 7, 2]], dtype=torch.float64)
    value, gradient = penalty(affine, (0.6, 0.3))
    pull = RIDGE * (14 + 5.25 + 77)
    assert value.item() == pytest.approx(0.6 * 14 / 6 + 0.3 * 5.25 / 3 + pull)
    expected = torch.tensor([0, 0.2, 0, 0.1]) + 2 * RIDGE * torch.tensor([4, 1, 0, 0.5])
    torch.testing.assert_close(gradient[0], expected.double(), atol=1e-7, rtol=0)


def test_without_penalty_the_minimum_is_that_of_logistic_regression():
    x, y = rows()
    other = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(x.T.numpy(), y.numpy())
    expected = -other.predict_log_proba(x.T.numpy())[np.arange(len(y)), y].mean()
    assert value(fitted(x, y), x, y) == pytest.approx(expected, abs=2e-3)


def test_at_the_minimum_the_slope_is_zero():
    x, y = rows(100)
    pair = (0.1, 0.01)
    affine = fitted(x, y, pair).requires_grad_()
    (cross_entropy((affine[:, :4] @ x + affine[:, 4:]).T, y) + penalty(affine, pair)[0]).backward()
    assert affine.grad.abs().max() < 1e-6


def test_adam_does_not_get_below_the_minimum():
    x, y = rows(100)
    pair = (0.1, 0.01)
    leaf = torch.eye(4, 5).double().requires_grad_()
    adam = torch.optim.Adam([leaf], lr=1e-3)
    for _ in range(300):  # of the original, from the same start
        adam.zero_grad()
        loss = cross_entropy((leaf[:, :4] @ x + leaf[:, 4:]).T, y) + penalty(leaf, pair)[0]
        loss.backward()
        adam.step()
    assert value(fitted(x, y, pair), x, y, pair) < loss < value(leaf, x, y) + 0.5


def test_the_pair_is_chosen_on_images_not_fitted_on():
    """40 images of 9 pixels: without a penalty, the 20 values learned fit them too well."""
    holdout = whole(mapped_holdout(0, n=40, size=(3, 3)))
    pairs = [*itertools.product((0, 1), (0, 1))]
    found = {
        (lam, mu): segcal.DirichletCalibration(lambdas=[lam], mus=[mu]).fit(*holdout).nll_after_
        for lam, mu in pairs
    }
    calibrator = segcal.DirichletCalibration(lambdas=[0, 1], mus=[0, 1]).fit(*holdout)
    chosen = found[calibrator.lambda_, calibrator.mu_]
    assert calibrator.nll_after_ == pytest.approx(chosen, rel=1e-4)
    assert chosen <= 1.0011 * min(found.values())
    assert (calibrator.lambda_, calibrator.mu_) != (0, 0)


def test_the_grid_is_the_papers():
    calibrator = segcal.DirichletCalibration()
    assert len(set(itertools.product(calibrator.lambdas, calibrator.mus))) == 65
    assert set(LAMBDAS) == {0, 0.01, 0.1, 1, 10, 0.005, 0.05, 0.5, 5, 0.0025, 0.025, 0.25, 2.5}
    assert set(MUS) == {0, 0.01, 0.1, 1, 10}


def test_dirichlet_contains_temperature_scaling():
    holdout = random_holdout()
    z, _ = whole(holdout)
    temperature = segcal.TemperatureScaling().fit(holdout)
    dirichlet = segcal.DirichletCalibration(lambdas=[1], mus=[1]).fit(holdout)
    dirichlet.weight_ = torch.eye(5) / temperature.temperature_
    dirichlet.bias_ = torch.zeros(5)
    torch.testing.assert_close(dirichlet.predict_proba(z), temperature.predict_proba(z))


def test_dirichlet_beats_temperature_on_a_dirichlet_map():
    holdout, fresh = mapped_holdout(0), whole(mapped_holdout(1))
    temperature = segcal.TemperatureScaling().fit(holdout)
    dirichlet = segcal.DirichletCalibration().fit(holdout)
    z, y = fresh
    assert nll(dirichlet(z), y) < nll(temperature(z), y) - 0.05
    assert dirichlet.improved_ and dirichlet.passes_ == 1
    assert (dirichlet.lambda_, dirichlet.mu_) in itertools.product(LAMBDAS, MUS)


def test_vector_scaling_finds_the_scales_and_shifts():
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(50, 3, 20, 20, generator=generator)
    scale, shift = torch.tensor([0.5, 1.5, 1.0]), torch.tensor([0.3, -0.7, 0.4])
    log_p = z.log_softmax(1)
    y = draw((scale[:, None, None] * log_p + shift[:, None, None]).softmax(1), generator)
    calibrator = segcal.VectorScaling().fit([(z, y)])
    torch.testing.assert_close(calibrator.weight_, scale, atol=0.1, rtol=0)
    found = calibrator.bias_ - calibrator.bias_.mean()  # softmax does not see a common shift
    torch.testing.assert_close(found, shift, atol=0.1, rtol=0)


def test_the_effective_matrix_of_matrix_scaling_has_rows_of_one_sum():
    """As a map of the logits themselves: else a constant on all of them would be seen."""
    calibrator = segcal.MatrixScaling().fit(mapped_holdout(0))
    centre = torch.eye(4) - 1 / 4
    torch.testing.assert_close(
        (calibrator.weight_ @ centre).sum(1), torch.zeros(4), atol=1e-5, rtol=0
    )
    z, _ = whole(mapped_holdout(1))
    expected = torch.einsum("kc,nc...->nk...", calibrator.weight_ @ centre, z)
    expected = expected + calibrator.bias_[:, None, None]
    torch.testing.assert_close(calibrator.predict_proba(z), expected.softmax(1))


def test_matrix_scaling_improves_where_classes_are_mixed():
    holdout, (z, y) = mapped_holdout(0), whole(mapped_holdout(1))
    matrix = segcal.MatrixScaling().fit(holdout)
    assert nll(matrix(z), y) < nll(segcal.TemperatureScaling().fit(holdout)(z), y) - 0.05


def test_a_map_that_does_not_carry_over_is_refused():
    """72 calibrated pixels: any of the 30 values learned from them is chance."""
    ((z, y),) = random_holdout(1, n=8, size=(3, 3), temperature=1, ignored=0)
    with pytest.warns(UserWarning, match="MatrixScaling: the fit takes the NLL"):
        calibrator = segcal.MatrixScaling().fit([(z, y)])
    assert not calibrator.improved_ and calibrator.nll_after_ > calibrator.nll_before_
    torch.testing.assert_close(calibrator(z), z)


@pytest.mark.parametrize("name", ["vs", "ms", "dc"])
def test_batches_do_not_matter_though_pixels_are_sampled(name):
    holdout = random_holdout(4, n=3)
    z, y = whole(holdout)
    make = CALIBRATORS[name]
    one, other = (make(max_pixels=300).fit(batches) for batches in (holdout, [(z, y)]))
    torch.testing.assert_close(one.weight_, other.weight_, atol=1e-6, rtol=1e-6)
    assert one.nll_after_ == pytest.approx(other.nll_after_, rel=1e-9)
    another = make(max_pixels=300, seed=1).fit(holdout)
    assert another.nll_after_ != one.nll_after_


def test_a_single_image_is_validated_with_its_own_pixels():
    (z, y), *_ = mapped_holdout(0, n=1, size=(60, 60))
    calibrator = segcal.MatrixScaling().fit([(z, y)])
    assert calibrator.improved_


@pytest.mark.parametrize("options", [{"lambdas": []}, {"lambdas": [-1]}, {"mus": [float("nan")]}])
def test_penalties_are_checked(options):
    with pytest.raises(ValueError, match="must be numbers >= 0, but got"):
        segcal.DirichletCalibration(**options)
