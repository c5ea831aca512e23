"""One temperature: the known one is found, by few passes, and it never does harm."""

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
from segcal.posthoc.stream import pixel_blocks
from segcal.posthoc.temperature import T_MAX, T_MIN, sum_derivatives, sum_grid_nll
from tests.support.holdouts import exact_holdout, nll, random_holdout, whole

pytestmark = pytest.mark.filterwarnings("ignore:TemperatureScaling")


def reference_nll(holdout, temperature):
    """The mean NLL at T, by numpy on all pixels at once."""
    z, y = whole(holdout)
    z = z.double().movedim(1, -1).reshape(-1, z.shape[1]).numpy()
    y = y.flatten().numpy()
    z, y = z[y != 255] / temperature, y[y != 255]
    return np.mean(logsumexp(z, 1) - z[np.arange(len(y)), y])


@pytest.mark.parametrize("sampled", [False, True], ids=["one pass", "streamed"])
@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.7, 4.0, 30.0])
def test_newton_recovers_a_known_temperature(temperature, sampled, monkeypatch):
    if sampled:  # the first guess comes from a tenth of the pixels
        monkeypatch.setattr(module, "_GUESS_PIXELS", 40)
    calibrator = segcal.TemperatureScaling().fit(exact_holdout(temperature, copies=4))
    assert calibrator.temperature_.item() == pytest.approx(temperature, rel=1e-6)
    assert calibrator.improved_
    assert (1 < calibrator.passes_ <= 6) if sampled else calibrator.passes_ == 1


@pytest.mark.parametrize("temperature", [0.3, 1.74, 4.0, 9.96])
def test_grid_recovers_a_known_temperature_to_its_step(temperature):
    calibrator = segcal.TemperatureScaling(method="grid").fit(exact_holdout(temperature))
    assert calibrator.temperature_.item() == pytest.approx(round(temperature, 1))
    assert calibrator.passes_ == 1


@pytest.mark.parametrize("seed", range(3))
def test_both_methods_agree_with_scipy(seed):
    holdout = random_holdout(temperature=0.5 + seed, seed=seed)
    found = minimize_scalar(
        lambda u: reference_nll(holdout, math.exp(u)),
        bounds=(-3, 3),
        method="bounded",
        options={"xatol": 1e-9},
    )
    newton = segcal.TemperatureScaling().fit(holdout)
    assert newton.temperature_.item() == pytest.approx(math.exp(found.x), rel=1e-4)
    assert newton.nll_after_ == pytest.approx(found.fun, abs=1e-9)
    grid = segcal.TemperatureScaling(method="grid").fit(holdout)
    literal = min((i / 10 for i in range(1, 101)), key=lambda t: reference_nll(holdout, t))
    assert grid.temperature_.item() == pytest.approx(literal)
    assert grid.nll_before_ == newton.nll_before_ == pytest.approx(reference_nll(holdout, 1))


@pytest.fixture(params=["compiled", "torch"])
def summed_by(request, monkeypatch):
    """Sums over pixels by the compiled pass, and by that of accelerators."""
    if request.param == "torch":
        monkeypatch.setattr(module, "compiled_passes", lambda: None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_grid_sums_are_the_nll_at_each_temperature(dtype, summed_by):
    holdout = [(z.to(dtype), y) for z, y in random_holdout(1, k=3)]
    pixels = flatten(*holdout[0])
    sums = sum_grid_nll(pixels) / pixels.valid.sum()
    expected = [reference_nll(holdout, i / 10) for i in range(1, 101)]
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


@pytest.mark.parametrize("size", [(), (40, 50)], ids=["classification", "segmentation"])
def test_derivatives_are_those_of_autograd(size, summed_by):
    (z, y), *_ = random_holdout(1, n=7, size=size)
    for dense in (z.double(), z.double().movedim(1, -1).contiguous().movedim(-1, 1)):
        pixels = flatten(dense, y)
        beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        value = torch.nn.functional.cross_entropy(
            beta * pixels.logits, pixels.labels, reduction="sum"
        )
        (first,) = torch.autograd.grad(value, beta, create_graph=True)
        (second,) = torch.autograd.grad(first, beta)
        found = sum_derivatives(pixels, 0.7)
        torch.testing.assert_close(found, torch.stack([value, first, second]).detach())


def test_blocks_cover_every_pixel_once(monkeypatch):
    monkeypatch.setattr("segcal.posthoc.stream._BLOCK_VALUES", 64)
    for size in [(), (3,), (5, 7), (2, 3, 4)]:
        (z, y), *_ = random_holdout(1, n=9, size=size)
        parts = [block.logits.movedim(1, 2)[block.valid] for block in pixel_blocks(flatten(z, y))]
        assert max(part.numel() for part in parts) <= 64
        torch.testing.assert_close(torch.cat(parts), flatten(z, y).logits.double())


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
    calibrator = segcal.TemperatureScaling(method=method).fit([(z, y)])
    assert T_MIN * 0.999 <= calibrator.temperature_.item() <= T_MAX * 1.001
    before = nll(z, y)
    assert nll(calibrator(z.double()), y) <= before + 1e-12 * max(1, before)
    assert torch.equal(calibrator(z).argmax(1), z.argmax(1))


@given(cuts=st.lists(st.integers(1, 15), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_batches_and_order_do_not_matter(cuts, seed):
    z, y = whole(random_holdout(4, n=4))
    one = segcal.TemperatureScaling().fit([(z, y)])
    cut = sorted(set(cuts))
    split = list(zip(z.tensor_split(cut), y.tensor_split(cut), strict=True))
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    for other in (split, [(z[order], y[order])]):
        calibrator = segcal.TemperatureScaling().fit(other)
        assert calibrator.temperature_.item() == pytest.approx(one.temperature_.item(), rel=1e-7)
        assert calibrator.nll_after_ == pytest.approx(one.nll_after_, rel=1e-9)


def test_a_minimum_at_infinity_ends_at_the_bound_and_says_so():
    z = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]).repeat(5, 1)
    right, wrong = z.argmax(1), z.argmin(1)
    with pytest.warns(UserWarning, match="bound T = 0.01"):
        assert segcal.TemperatureScaling().fit([(z, right)]).temperature_.item() == pytest.approx(
            T_MIN
        )
    with pytest.warns(UserWarning, match="bound T = 100"):
        assert segcal.TemperatureScaling().fit([(z, wrong)]).temperature_.item() == pytest.approx(
            T_MAX
        )


def test_the_calibrated_need_no_temperature():
    with pytest.warns(UserWarning, match="logits are left as they are"):
        calibrator = segcal.TemperatureScaling(method="grid").fit(exact_holdout(1.0))
    assert calibrator.temperature_ == 1
    assert not calibrator.improved_


def test_method_is_checked():
    with pytest.raises(ValueError, match="'newton' or 'grid', but got 'sgd'"):
        segcal.TemperatureScaling(method="sgd")
