"""One temperature, or one for each predicted class: the known ones are found, and do no harm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

import segcal
from segcal.pixels import flatten
from segcal.posthoc import temperature as module
from segcal.posthoc.minimise import T_MAX, T_MIN, blocks, nll_derivatives
from tests.support.holdouts import draw, exact_holdout, nll, random_holdout, whole

pytestmark = pytest.mark.filterwarnings("ignore:TemperatureScaling")


def valid(holdout):
    """(P, C) logits and (P,) labels of the valid pixels, in numpy."""
    z, y = whole(holdout)
    return z.movedim(1, -1)[y != 255].double().numpy(), y[y != 255].numpy()


def nll_at(z, y, temperature):
    """Σ over pixels of −log softmax(z / T)[y], by numpy."""
    z = z / temperature
    return float(np.sum(logsumexp(z, 1) - z[np.arange(len(y)), y]))


def least(function, low=0.05, high=20):
    """x > 0 of least function(x)."""
    found = minimize_scalar(
        lambda at: function(math.exp(at)),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x)


@pytest.mark.parametrize("sampled", [False, True], ids=["one pass", "streamed"])
@pytest.mark.parametrize("temperature", [0.05, 1.7, 30.0])
def test_newton_recovers_a_known_temperature(temperature, sampled, monkeypatch):
    if sampled:  # the first guess comes from a tenth of the pixels
        monkeypatch.setattr(module, "_GUESS_PIXELS", 40)
    calibrator = segcal.TemperatureScaling().fit(exact_holdout(temperature, copies=4))
    assert calibrator.temperature_.item() == pytest.approx(temperature, rel=1e-6)
    assert calibrator.improved_
    assert (1 < calibrator.passes_ <= 6) if sampled else calibrator.passes_ == 1
    assert f"temperature_={temperature:.6g}" in repr(calibrator)


@pytest.mark.parametrize("temperature", [0.3, 1.74, 9.96])
def test_grid_recovers_a_known_temperature_to_its_step(temperature):
    calibrator = segcal.TemperatureScaling(method="grid").fit(exact_holdout(temperature))
    assert calibrator.temperature_.item() == pytest.approx(round(temperature, 1))


@pytest.mark.parametrize("sampled", [False, True], ids=["one pass", "streamed"])
def test_both_methods_agree_with_scipy(sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(module, "_GUESS_PIXELS", 100)
    for seed in range(3):
        holdout = random_holdout(temperature=0.5 + seed, seed=seed)
        z, y = valid(holdout)
        newton = segcal.TemperatureScaling().fit(holdout)
        expected = least(lambda t, z=z, y=y: nll_at(z, y, t))
        assert newton.temperature_.item() == pytest.approx(expected, rel=1e-4)
        assert newton.nll_after_ == pytest.approx(nll_at(z, y, expected) / len(y), rel=1e-6)
        grid = segcal.TemperatureScaling(method="grid").fit(holdout)
        literal = min((i / 10 for i in range(1, 101)), key=lambda t, z=z, y=y: nll_at(z, y, t))
        assert grid.temperature_.item() == pytest.approx(literal)
        assert grid.nll_before_ == pytest.approx(nll_at(z, y, 1) / len(y), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_derivatives_are_those_of_autograd(dtype):
    for size in ((), (40, 50)):
        (z, y), *_ = random_holdout(1, n=7, size=size)
        for dense in (z.to(dtype), z.to(dtype).movedim(1, -1).contiguous().movedim(-1, 1)):
            pixels = flatten(dense, y)
            beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            value = torch.nn.functional.cross_entropy(
                beta * pixels.dense.movedim(1, 2)[pixels.valid].double(),
                pixels.target[pixels.valid],
                reduction="sum",
            )
            (first,) = torch.autograd.grad(value, beta, create_graph=True)
            (second,) = torch.autograd.grad(first, beta)
            found = nll_derivatives(pixels, 0.7)
            expected = torch.stack([value, first, second]).detach()
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_blocks_cover_every_pixel_once(monkeypatch):
    monkeypatch.setattr("segcal.posthoc.minimise._BLOCK_VALUES", 64)
    for size in [(), (3,), (5, 7), (2, 3, 4)]:
        (z, y), *_ = random_holdout(1, n=9, size=size)
        pixels = flatten(z, y)
        found = [*blocks(pixels)]
        assert max(dense.numel() for dense, *_ in found) <= 64
        parts = torch.cat([dense.movedim(1, 2)[valid] for dense, _, valid in found])
        torch.testing.assert_close(parts, pixels.dense.movedim(1, 2)[pixels.valid])


@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-4, 1e4),
    k=st.integers(2, 6),
    n=st.integers(2, 40),
    method=st.sampled_from(["newton", "grid"]),
)
@settings(max_examples=60)
def test_temperature_is_positive_and_does_no_harm(seed, scale, k, n, method):
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, k, generator=generator)
    y = torch.randint(0, k, (n,), generator=generator)
    y[:2] = torch.tensor([0, 1])
    calibrator = segcal.TemperatureScaling(method=method).fit(z, y)
    assert T_MIN * 0.999 <= calibrator.temperature_.item() <= T_MAX * 1.001
    before = nll(z, y)
    assert nll(calibrator(z.double()), y) <= before + 1e-12 * max(1, before)
    assert torch.equal(calibrator(z).argmax(1), z.argmax(1))


@given(cuts=st.lists(st.integers(1, 15), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_batches_and_order_do_not_matter(cuts, seed):
    z, y = whole(random_holdout(4, n=4))
    one = segcal.TemperatureScaling().fit(z, y)
    cut = sorted(set(cuts))
    split = list(zip(z.tensor_split(cut), y.tensor_split(cut), strict=True))
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    for other in (split, [(z[order], y[order])]):
        calibrator = segcal.TemperatureScaling().fit(other)
        assert calibrator.temperature_.item() == pytest.approx(one.temperature_.item(), rel=1e-7)
        assert calibrator.nll_after_ == pytest.approx(one.nll_after_, rel=1e-9)


def test_a_minimum_at_infinity_ends_at_the_bound_and_says_so():
    z = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]).repeat(5, 1)
    for labels, bound in ((z.argmax(1), T_MIN), (z.argmin(1), T_MAX)):
        with pytest.warns(UserWarning, match=f"bound T = {bound:g}"):
            found = segcal.TemperatureScaling().fit(z, labels).temperature_
        assert found.item() == pytest.approx(bound)


def test_the_calibrated_need_no_temperature():
    with pytest.warns(UserWarning, match="logits are left as they are"):
        calibrator = segcal.TemperatureScaling(method="grid").fit(exact_holdout(1.0))
    assert calibrator.temperature_ == 1
    assert not calibrator.improved_


def test_options_are_checked():
    with pytest.raises(ValueError, match="'newton' or 'grid', but got 'sgd'"):
        segcal.TemperatureScaling(method="sgd")
    with pytest.raises(ValueError, match="shares must be numbers >= 0"):
        segcal.ClasswiseTemperatureScaling(shares=[-1.0])


def test_temperatures_of_predicted_classes_are_the_literal_minimum():
    holdout = random_holdout()
    z, y = valid(holdout)
    share = 0.01
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[share]).fit(holdout)
    beta = least(lambda beta: nll_at(z, y, 1 / beta))
    assert calibrator.temperature_.item() == pytest.approx(1 / beta, rel=1e-5)
    step = 1e-3
    around = [nll_at(z, y, 1 / (beta + k * step)) for k in (-1, 0, 1)]
    curvature = (around[0] - 2 * around[1] + around[2]) / step**2
    for c in range(5):
        mine = z.argmax(1) == c

        def penalised(at, mine=mine):
            return nll_at(z[mine], y[mine], 1 / at) + share * curvature * (at - beta) ** 2 / 2

        assert calibrator.temperatures_[c].item() == pytest.approx(1 / least(penalised), rel=1e-4)


def test_temperatures_of_predicted_classes_are_recovered():
    """Logits that are too large by a factor that depends on the predicted class."""
    planted = [1.0, 2.0, 4.0]

    def holdout(seed):
        generator = torch.Generator().manual_seed(seed)
        z = 2 * torch.randn(20, 3, 16, 16, generator=generator)
        y = draw(z.softmax(1), generator)
        y[torch.rand(y.shape, generator=generator) < 0.1] = 255
        return z * torch.tensor(planted)[z.argmax(1)].unsqueeze(1), y

    (z, y), (fresh, labels) = holdout(0), holdout(1)
    calibrator = segcal.ClasswiseTemperatureScaling().fit(z, y)
    assert calibrator.temperatures_.tolist() == pytest.approx(planted, rel=0.15)
    one = segcal.TemperatureScaling().fit(z, y)
    assert nll(calibrator(fresh), labels) < nll(one(fresh), labels) - 0.01


def test_few_right_pixels_do_not_make_a_class_certain():
    z, y = whole(random_holdout(ignored=0))
    z = torch.cat([z, torch.full_like(z[:, :1], -20)], 1)  # a class that is predicted ten times
    z[0, 5, 0], z[2, 5, 0, :2] = 20, 20
    y[0, 0], y[2, 0, :2] = 5, 5
    hasty = segcal.ClasswiseTemperatureScaling(shares=[0.0]).fit(z, y)
    assert hasty.temperatures_[5] < 0.1
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[0.1]).fit(z, y)
    torch.testing.assert_close(
        calibrator.temperatures_[5], calibrator.temperature_, rtol=0.1, atol=0
    )


def test_a_class_that_is_never_predicted_takes_the_common_temperature():
    holdout = [(torch.cat([z, z[:, :1] - 50], 1), y) for z, y in random_holdout()]
    calibrator = segcal.ClasswiseTemperatureScaling(shares=[0.0]).fit(holdout)
    assert calibrator.temperatures_[5] == calibrator.temperature_ != 1


def test_the_share_is_chosen_on_images_not_fitted_on():
    z, y = whole(random_holdout(5))
    shares = [0.0, 0.01, 10.0]
    calibrator = segcal.ClasswiseTemperatureScaling(shares=shares).fit(z, y)
    found = {s: segcal.ClasswiseTemperatureScaling(shares=[s]).fit(z, y).nll_after_ for s in shares}
    assert calibrator.nll_after_ == found[calibrator.share_] <= 1.001 * min(found.values())
