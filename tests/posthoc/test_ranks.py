"""Several ranks with uneven shares learn what one process with everything learns."""

import pytest
import torch
import torch.distributed as dist

from segcal.posthoc import CALIBRATORS, TemperatureScaling
from segcal.posthoc import temperature as module
from tests.support.holdouts import random_holdout, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow  # two processes each


# In each, pixels are sampled: there are 5 images of 16 · 16, one pixel in ten ignored.
CASES = {name: {"max_pixels": 300} for name in CALIBRATORS} | {
    "ts": {},
    "dc": {"max_pixels": 300, "lambdas": [0, 0.1, 10], "mus": [0, 1]},
    "lts": {"max_pixels": 600, "epochs": 3},
    "selective": {"max_pixels": 300, "epochs": 3, "lr": 1e-2},
}


def images():
    z, y = whole(random_holdout(1, n=5, size=(16, 16)))
    return [(z[i : i + 1], y[i : i + 1]) for i in range(5)]


def fit(batches, name, **options):
    module._GUESS_PIXELS = 200
    calibrator = CALIBRATORS[name](**CASES[name], **options).fit(batches)
    numbers = {name: torch.tensor(value).double() for name, value in calibrator.numbers().items()}
    return {**numbers, **calibrator.state_dict()}


def on_rank(rank):
    ranks = dist.get_world_size()
    share = images()[rank::ranks]
    out = {name: fit(share, name) for name in CASES}
    out["alone"] = fit(share, "ts", sync=False)
    out["with none"] = fit(images()[rank:3:ranks][:1] if rank == 0 else [], "ts")
    out["grid"] = TemperatureScaling(method="grid").fit(share).state_dict()
    # A fault on one rank is an error on all, so that none of them waits for the other.
    z, y = share[0]
    faults = {"finite": z * float("nan"), "probabilities": z.softmax(1), "labels in": z}
    for fault, spoilt in faults.items():
        everywhere = fault == "probabilities"
        labels = y + 9 if rank and fault == "labels in" else y
        with pytest.raises(ValueError, match=fault):
            TemperatureScaling().fit([(spoilt if rank or everywhere else z, labels)])
    return out


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(on_rank)


@pytest.fixture(autouse=True)
def same_guess(monkeypatch):
    monkeypatch.setattr(module, "_GUESS_PIXELS", 200)


def assert_alike(one, other, tolerance):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_learns(results, name):
    expected = fit(images(), name)
    for result in results:
        # L-BFGS and Adam carry rounding on, but not far.
        assert_alike(expected, result[name], 1e-6 if name == "ts" else 1e-4)
    assert_alike(results[0][name], results[1][name], 0)


def test_grid_over_ranks(results):
    expected = TemperatureScaling(method="grid").fit(images()).temperature_
    assert all(torch.equal(result["grid"]["temperature_"], expected) for result in results)


def test_without_sync_each_rank_is_alone(results):
    for rank, result in enumerate(results):
        assert_alike(fit(images()[rank::2], "ts"), result["alone"], 1e-6)
    assert results[0]["alone"]["temperature_"] != results[1]["alone"]["temperature_"]


def test_a_rank_may_have_nothing(results):
    expected = fit(images()[:1], "ts")
    for result in results:
        assert_alike(expected, result["with none"], 1e-6)
