"""Calibrators of K sigmoid outputs: one temperature for all, or a temperature or curve for each."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import binary_cross_entropy_with_logits

import segcal
from segcal.posthoc import CALIBRATORS, METHODS, temperature
from segcal.sources.source import Batch
from tests.support.ranks import run_on_ranks

MULTILABEL = [name for name, method in METHODS.items() if method.multilabel]
SHARPNESS = (0.5, 1.0, 3.0)  # of the outputs: each is calibrated at this temperature


def holdout(images=10, side=16, ignored=0.1, seed=0):
    """Batches of logits (N, 3, H, W), sharpened by `SHARPNESS`, and labels of 0, 1, 255."""
    generator = torch.Generator().manual_seed(seed)
    true = 2 * torch.randn(images, 3, side, side, generator=generator, dtype=torch.float64) - 1
    labels = (torch.rand(true.shape, generator=generator) < true.sigmoid()).long()
    labels[torch.rand(true.shape, generator=generator) < ignored] = 255
    logits = true * torch.tensor(SHARPNESS).double().view(3, 1, 1)
    return list(zip(logits.split(3), labels.split(3), strict=True))


def whole(batches):
    return tuple(torch.cat(part) for part in zip(*batches, strict=True))


def nll(logits, labels):
    known = labels != 255
    return float(binary_cross_entropy_with_logits(logits[known], labels[known].double()))


@pytest.mark.parametrize("guess", [1 << 16, 50], ids=["in one pass", "in several passes"])
@pytest.mark.parametrize("method", ["newton", "grid"])
def test_two_exclusive_classes_have_the_temperature_of_the_softmax(method, guess, monkeypatch):
    monkeypatch.setattr(temperature, "_GUESS_PIXELS", guess)
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(6, 2, 9, 9, generator=generator, dtype=torch.float64)
    labels = (torch.rand(6, 9, 9, generator=generator) < logits.div(2).softmax(1)[:, 1]).long()
    labels[:, 0] = 255
    margin = logits[:, 1] - logits[:, 0]
    pair = torch.stack([-margin, margin], 1)
    other = torch.stack([torch.where(labels == 255, 255, 1 - labels), labels], 1)
    softmax = segcal.TemperatureScaling(method=method).fit([(logits, labels)])
    sigmoid = segcal.TemperatureScaling(method=method, multilabel=True).fit([(pair, other)])
    assert float(sigmoid.temperature_) == pytest.approx(float(softmax.temperature_), abs=1e-6)
    assert sigmoid.nll_after_ == pytest.approx(softmax.nll_after_, abs=1e-8)
    assert sigmoid.num_classes_ == 2


def test_one_temperature_has_the_least_cross_entropy():
    batches = holdout()
    logits, labels = whole(batches)
    calibrator = segcal.TemperatureScaling(multilabel=True).fit(batches)
    best = minimize_scalar(lambda t: nll(logits / t, labels), bounds=(0.1, 10), method="bounded")
    assert float(calibrator.temperature_) == pytest.approx(best.x, rel=1e-4)
    assert calibrator.nll_before_ == pytest.approx(nll(logits, labels))
    assert calibrator.nll_after_ == pytest.approx(best.fun)
    torch.testing.assert_close(calibrator(logits), logits / calibrator.temperature_.double())


def test_ignored_labels_leave_no_trace():
    batches = holdout()
    spoilt = [(z.clone().masked_fill_(y == 255, 50.0), y) for z, y in batches]
    a, b = (segcal.TemperatureScaling(multilabel=True).fit(part) for part in (batches, spoilt))
    assert float(a.temperature_) == pytest.approx(float(b.temperature_), rel=1e-9)


def test_each_output_has_its_own_temperature():
    calibrator = CALIBRATORS["cts"](multilabel=True).fit(holdout(images=40))
    assert calibrator.improved_
    assert calibrator.temperatures_.tolist() == pytest.approx(SHARPNESS, rel=0.1)
    logits, _ = whole(holdout())
    expected = logits / calibrator.temperatures_.double().view(3, 1, 1)
    torch.testing.assert_close(calibrator(logits), expected)


def test_beta_is_a_logistic_regression_of_each_output():
    batches = holdout()
    logits, labels = whole(batches)
    calibrator = CALIBRATORS["beta"](multilabel=True).fit(batches)
    got = calibrator.predict_proba(logits)
    for c in range(3):
        known = labels[:, c] != 255
        z, y = logits[:, c][known], labels[:, c][known].numpy()
        x = torch.stack([z.sigmoid().log(), -(-z).sigmoid().log()], 1).numpy()
        fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(x, y)
        assert (fitted.coef_ > 0).all()  # so that the bounds of beta calibration do not matter
        expected = fitted.predict_proba(x)[:, 1]
        np.testing.assert_allclose(got[:, c][known].numpy(), expected, atol=1e-3)


def test_isotonic_is_sklearns_curve_of_each_output():
    batches = holdout()
    logits, labels = whole(batches)
    calibrator = CALIBRATORS["isotonic"](multilabel=True).fit(batches)
    got = calibrator.predict_proba(logits)
    for c in range(3):
        known = labels[:, c] != 255
        z, y = logits[:, c][known].numpy(), labels[:, c][known].numpy()
        expected = IsotonicRegression(y_min=0, y_max=1).fit(z, y).predict(z)
        away = np.abs(got[:, c][known].numpy() - expected)
        assert away.mean() < 1e-2  # steps of the curve lie between points of the grid


@pytest.mark.parametrize("name", MULTILABEL)
def test_saved_is_loaded_and_half_precision_and_shapes_stay(tmp_path, name):
    batches = holdout()
    calibrator = CALIBRATORS[name](multilabel=True).fit(batches)
    assert calibrator.improved_ and calibrator.nll_after_ < calibrator.nll_before_
    calibrator.save(tmp_path / "calibrator")
    loaded = segcal.load_calibrator(tmp_path / "calibrator")
    logits = batches[0][0]
    assert loaded.multilabel and torch.equal(loaded(logits), calibrator(logits))
    assert calibrator(logits.half()).dtype == torch.float16
    for shaped in (logits[:, :, 0, 0], logits[:, :, 0]):
        assert calibrator(shaped).shape == shaped.shape


@pytest.mark.parametrize("name", ["ts", "beta"])
def test_one_output_is_the_binary_problem(name):
    batches = [(z[:, 2:], y[:, 2]) for z, y in holdout()]
    pairs = [(torch.cat([0 * z, z], 1), y) for z, y in batches]
    binary, softmax = (
        CALIBRATORS[name](multilabel=True).fit(batches),
        CALIBRATORS[name]().fit(pairs),
    )
    z = batches[0][0]
    expected = softmax(torch.cat([0 * z, z], 1)).softmax(1)[:, 1:]
    torch.testing.assert_close(binary(z).sigmoid(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", MULTILABEL)
def test_logits_and_their_probabilities_fit_the_same_map(name):
    """And so do permuted batches."""
    batches = holdout()
    calibrator = CALIBRATORS[name](multilabel=True).fit(batches)
    expected = torch.cat([calibrator.predict_proba(z) for z, _ in batches])
    saved = [Batch(None, "sigmoid_probs", z.sigmoid(), y) for z, y in batches]
    permuted = [(z.flip(0), y.flip(0)) for z, y in batches[::-1]]
    for other in ([(batch.logits, batch.labels) for batch in saved], permuted):
        again = CALIBRATORS[name](multilabel=True).fit(other)
        found = torch.cat([again.predict_proba(z) for z, _ in batches])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_probabilities_that_are_rounded_to_1_are_no_certainties():
    logits, labels = whole(holdout(images=20))
    halves = Batch(None, "sigmoid_probs", (3 * logits).sigmoid().half(), labels)
    assert (halves.values == 1).float().mean() > 0.02
    found, expected = (
        segcal.TemperatureScaling(multilabel=True).fit(z, labels).temperature_
        for z in (halves.logits, 3 * logits)
    )
    assert float(found) == pytest.approx(float(expected), rel=0.03)


def test_others_refuse_in_a_plain_sentence():
    for name in METHODS.keys() - set(MULTILABEL):
        with pytest.raises(
            ValueError, match=f"{name} does not calibrate sigmoid outputs .* choose"
        ):
            CALIBRATORS[name](multilabel=True)


def test_what_cannot_be_fitted_is_named():
    (z, y), *_ = holdout()
    with pytest.raises(ValueError, match=r"look like probabilities.*before the sigmoid"):
        segcal.TemperatureScaling(multilabel=True).fit([(z.sigmoid(), y)])
    with pytest.raises(ValueError, match=r"at least 2 classes, but all .* of class 0"):
        segcal.TemperatureScaling(multilabel=True).fit([(z, torch.zeros_like(y))])
    with pytest.raises(ValueError, match="labels of the logits' shape"):
        segcal.TemperatureScaling(multilabel=True).fit([(z, y[:, 0])])


def _fit_share(rank):
    images = [(z[i : i + 1], y[i : i + 1]) for z, y in holdout() for i in range(len(z))]
    return {
        name: CALIBRATORS[name](multilabel=True).fit(images[rank::2]).state_dict()
        for name in MULTILABEL
    }


@pytest.mark.slow
def test_over_ranks_is_one_process():
    images = [(z[i : i + 1], y[i : i + 1]) for z, y in holdout() for i in range(len(z))]
    ranks = run_on_ranks(_fit_share)
    for name in MULTILABEL:
        alone = CALIBRATORS[name](multilabel=True).fit(images).state_dict()
        for state in ranks:
            for key, value in alone.items():
                torch.testing.assert_close(state[name][key], value, atol=1e-6, rtol=1e-6)
