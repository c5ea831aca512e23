"""Vector, matrix and Dirichlet scaling: the objective's own minimum, validated on other images."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

import segcal
from segcal.posthoc.affine import LAMBDAS, MUS, Objective, choose_penalty, minimise, odir
from segcal.posthoc.sample import PixelSampler, in_validation
from segcal.posthoc.stream import Stream
from tests.support.holdouts import draw, nll, random_holdout, whole

ALONE = Stream([], ignore_index=255, sync=False)


def rows(n=400, k=4, seed=0):
    """(K, P) x and (P,) labels that a linear map improves on."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(k, n, dtype=torch.float64, generator=generator)
    mixed = torch.eye(k) + 0.4 * torch.randn(k, k, generator=generator)
    bias = torch.randn(k, 1, generator=generator)
    return x, draw((mixed.double() @ x + bias).softmax(0)[None], generator)[0]


def everything_free(k):
    return torch.ones(k, k + 1, dtype=torch.bool)


def mapped_holdout(seed, *, n=40, k=4, size=(8, 8)):
    """Labels drawn from a Dirichlet map, softmax(W log p + b), of the predicted p."""
    generator = torch.Generator().manual_seed(100)
    weight = 0.6 * torch.eye(k) + 0.25 * torch.randn(k, k, generator=generator)
    bias = torch.randn(k, generator=generator)
    generator.manual_seed(seed)
    z = 2 * torch.randn(n, k, *size, generator=generator)
    q = (torch.einsum("kc,nc...->nk...", weight, z.log_softmax(1)) + bias[:, None, None]).softmax(1)
    return [*zip(z.split(4), draw(q, generator).split(4), strict=True)]


def test_odir_by_hand():
    # K = 3: off-diagonal squares 1 + 4 + 9, over 3·2; bias squares 0.25 + 1 + 4, over 3.
    affine = torch.tensor([[5.0, 1, 0, 0.5], [0, 6, 2, -1], [3, 0, 7, 2]], dtype=torch.float64)
    value, gradient = odir(affine, (0.6, 0.3))
    assert value.item() == pytest.approx(0.6 * 14 / 6 + 0.3 * 5.25 / 3)
    assert gradient[0].tolist() == pytest.approx([0, 0.2, 0, 0.1])
    assert gradient[2].tolist() == pytest.approx([0.6, 0, 0, 0.4])


def test_objective_and_gradient_are_those_of_autograd():
    x, y = rows()
    affine = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = affine.clone().requires_grad_()
    expected = cross_entropy((leaf[:, :4] @ x + leaf[:, 4:]).T, y)
    expected.backward()
    value, gradient = Objective(x, y, ALONE)(affine)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad)


def test_curvature_is_the_diagonal_of_the_hessian():
    x, y = rows(50, 3)
    objective = Objective(x, y, ALONE)

    def value(flat):
        affine = flat.view(3, 4)
        return cross_entropy((affine[:, :3] @ x + affine[:, 3:]).T, y)

    hessian = torch.autograd.functional.hessian(value, objective.identity.flatten())
    torch.testing.assert_close(objective.curvature, hessian.diagonal().view(3, 4))


def test_without_penalty_the_minimum_is_that_of_logistic_regression():
    x, y = rows()
    objective = Objective(x, y, ALONE)
    affine = minimise(objective, everything_free(4), (0, 0), objective.identity)
    other = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(x.T.numpy(), y.numpy())
    expected = -other.predict_log_proba(x.T.numpy())[np.arange(len(y)), y].mean()
    assert objective(affine)[0].item() == pytest.approx(expected, abs=1e-7)


def test_adam_does_not_get_below_the_minimum():
    x, y = rows(100)
    objective = Objective(x, y, ALONE)
    pair = (0.1, 0.01)
    affine = minimise(objective, everything_free(4), pair, objective.identity)
    reached = objective(affine)[0] + odir(affine, pair)[0]
    leaf = objective.identity.clone().requires_grad_()
    adam = torch.optim.Adam([leaf], lr=1e-3)
    for _ in range(300):  # of the original, from the same start
        adam.zero_grad()
        loss = cross_entropy((leaf[:, :4] @ x + leaf[:, 4:]).T, y) + odir(leaf, pair)[0]
        loss.backward()
        adam.step()
    assert reached < loss < reached + 0.5


def test_the_pair_is_chosen_on_data_not_fitted_on():
    fitting, validation = (Objective(*rows(60, seed=seed), ALONE) for seed in (0, 1))
    pairs = [*itertools.product((0, 0.1, 1, 10), (0, 1))]
    pair, affine, value = choose_penalty(fitting, validation, everything_free(4), pairs)
    each = {p: minimise(fitting, everything_free(4), p, fitting.identity) for p in pairs}
    values = {p: validation(a)[0].item() for p, a in each.items()}
    assert pair == min(values, key=values.get)
    assert value == validation(affine)[0] == pytest.approx(values[pair], abs=1e-2)
    best_fitted = min(each, key=lambda p: fitting(each[p])[0])
    assert best_fitted == (0, 0) != pair


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
    torch.testing.assert_close(dirichlet(z).softmax(1), temperature(z).softmax(1))


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
    y = draw((scale[:, None, None] * z + shift[:, None, None]).softmax(1), generator)
    calibrator = segcal.VectorScaling().fit([(z, y)])
    torch.testing.assert_close(calibrator.weight_, scale, atol=0.05, rtol=0)
    found = calibrator.bias_ - calibrator.bias_.mean()  # softmax does not see a common shift
    torch.testing.assert_close(found, shift, atol=0.05, rtol=0)


def test_matrix_scaling_improves_where_classes_are_mixed():
    holdout, (z, y) = mapped_holdout(0), whole(mapped_holdout(1))
    matrix = segcal.MatrixScaling().fit(holdout)
    assert nll(matrix(z), y) < nll(segcal.TemperatureScaling().fit(holdout)(z), y) - 0.05


def test_a_map_that_does_not_carry_over_is_refused():
    """72 calibrated pixels: any of the 30 values learned from them is chance."""
    ((z, y),) = random_holdout(1, n=8, size=(3, 3), temperature=1, ignored=0)
    with pytest.warns(UserWarning, match="MatrixScaling: it would take the NLL"):
        calibrator = segcal.MatrixScaling().fit([(z, y)])
    assert not calibrator.improved_ and calibrator.nll_after_ > calibrator.nll_before_
    torch.testing.assert_close(calibrator(z), z)


@pytest.mark.parametrize("name", ["vs", "ms", "dc"])
def test_batches_do_not_matter_though_pixels_are_sampled(name):
    holdout = random_holdout(4, n=3)
    z, y = whole(holdout)
    make = segcal.posthoc.CALIBRATORS[name]
    one, other = (make(max_pixels=300).fit(batches) for batches in (holdout, [(z, y)]))
    torch.testing.assert_close(one.weight_, other.weight_, atol=1e-6, rtol=1e-6)
    assert one.nll_after_ == pytest.approx(other.nll_after_, rel=1e-9)
    another = make(max_pixels=300, seed=1).fit(holdout)
    assert another.nll_after_ != one.nll_after_


def test_the_sample_is_uniform_and_of_the_size_asked_for():
    y = torch.arange(100).repeat(40).reshape(4, 10, 100)  # the label says which column it is
    z = torch.zeros(4, 100, 10, 100)
    z[:, 0] = torch.arange(1000.0).view(10, 100)  # the first logit says which pixel
    y[0, 0, :50] = 255
    stream = Stream([(z[:1], y[:1]), (z[1:], y[1:])], ignore_index=255, sync=False)
    counts = torch.zeros(10)
    for seed in range(10):
        sampler = PixelSampler(790, seed)
        stream.survey(sampler)
        sample = sampler.finish(stream, 100)
        place, labels = sample.pixels.dense[0, 0].long(), sample.pixels.target[0]
        assert len(labels) == 790
        assert torch.equal(place % 100, labels)
        counts += torch.stack([(labels // 10 == d).sum() for d in range(10)])
    # Per decile 10·790 draws of 395 or 400 in 3950 pixels each: 790 ± 27, by the hypergeometric.
    assert (counts - 790).abs().max() < 120


def test_one_image_in_five_validates_and_two_are_enough():
    numbers = torch.arange(100)
    assert in_validation(numbers).sum() == 20
    assert in_validation(numbers[:2]).tolist() == [False, True]


def test_a_single_image_is_validated_with_its_own_pixels():
    (z, y), *_ = mapped_holdout(0, n=1, size=(60, 60))
    calibrator = segcal.MatrixScaling().fit([(z, y)])
    assert calibrator.improved_


def test_the_size_of_the_sample_is_checked():
    with pytest.raises(ValueError, match="max_pixels > 0, but got 0"):
        segcal.VectorScaling(max_pixels=0)


@pytest.mark.parametrize("options", [{"lambdas": []}, {"lambdas": [-1]}, {"mus": [float("nan")]}])
def test_penalties_are_checked(options):
    with pytest.raises(ValueError, match="to be numbers >= 0, but got"):
        segcal.DirichletCalibration(**options)
