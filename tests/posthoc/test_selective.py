"""Selective scaling: it softens what it takes for wrong, and leaves everything else."""

import pytest
import torch

import segcal
from segcal.posthoc.selective import _detector, _folded
from tests.support.holdouts import make_calibrator, random_holdout, whole

WRONG = 2  # a prediction of this class is wrong nine times in ten


def planted_holdout(seed, *, n=20, k=4, size=(12, 12)):
    """Sure predictions that are right, unless they are of the class WRONG."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, k, *size, generator=generator)
    y = torch.randint(0, k, (n, *size), generator=generator)
    z.scatter_add_(1, y.unsqueeze(1), torch.full_like(z[:, :1], 6.0))
    predicted = z.argmax(1)
    spoilt = (predicted == WRONG) & (torch.rand(y.shape, generator=generator) < 0.9)
    others = (y + torch.randint(1, k, y.shape, generator=generator)) % k
    y = torch.where(spoilt, others, y)
    y[torch.rand(y.shape, generator=generator) < 0.1] = 255
    return z, y


@pytest.fixture(scope="module")
def planted():
    return segcal.SelectiveScaling(epochs=6, lr=1e-2).fit([planted_holdout(0)])


def test_the_planted_wrong_region_is_found_and_softened(planted):
    z, y = planted_holdout(1)
    wrong = planted.wrong(z)
    assert wrong.shape == y.shape and (wrong >= 0).all() and (wrong <= 1).all()
    region = z.argmax(1) == WRONG
    assert wrong[region].mean() > 0.9
    assert wrong[~region].mean() < 0.1
    assert planted.temperature_ > 2 and planted.epoch_ >= 1
    before, after = (segcal.CalibrationMeter(4) for _ in range(2))
    before.update(z, y)
    after.update(planted(z), y)
    assert after.compute().nll < 0.5 * before.compute().nll
    assert after.compute().ece < 0.5 * before.compute().ece


def test_right_pixels_stay_and_the_predicted_class_too(planted):
    z, _ = planted_holdout(1)
    out, q = planted(z), planted.wrong(z).unsqueeze(1)
    expected = (z * (1 - q + q / planted.temperature_)).softmax(1)
    torch.testing.assert_close(out.softmax(1), expected)
    assert (q < 0.05).any() and (q > 0.9).any()
    assert torch.equal(out.argmax(1), z.argmax(1))


def test_the_temperature_has_the_least_nll():
    """With q as the network gives it, no other temperature is better on the pixels fitted on."""
    z, y = whole(random_holdout())
    calibrator = segcal.SelectiveScaling(epochs=1, lr=1e-2)
    learn, learned_from = calibrator._learn, []
    calibrator._learn = lambda sample, choice: (learned_from.append(sample), learn(sample, choice))
    calibrator.fit(z, y)
    (fitting,) = learned_from
    q = calibrator._wrong(fitting.x[None])[0].detach().double()

    @torch.no_grad()
    def at(t):
        return fitting.nll(fitting.x * (1 - q + q / t))

    t = float(calibrator.temperature_)
    assert t > 1 and at(t) < min(at(1.05 * t), at(t / 1.05))


def test_ignored_pixels_are_never_learned_as_wrong():
    """Most pixels predicted as class 1 are ignored; the others are right."""
    z, y = planted_holdout(0)
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.9
    y = torch.where((z.argmax(1) == 1) & hidden, 255, y)
    calibrator = segcal.SelectiveScaling(epochs=6, lr=1e-2).fit([(z, y)])
    assert calibrator.improved_
    assert calibrator.wrong(z)[z.argmax(1) == 1].mean() < 0.2
    generator = torch.Generator().manual_seed(2)
    other = torch.where((y == 255).unsqueeze(1), 9 * torch.randn(z.shape, generator=generator), z)
    again = segcal.SelectiveScaling(epochs=6, lr=1e-2).fit([(other, y)])
    for key, tensor in calibrator.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor)


def test_without_wrong_predictions_nothing_changes():
    z, _ = whole(random_holdout(ignored=0))
    with pytest.warns(UserWarning, match="SelectiveScaling: .*logits are left as they are"):
        calibrator = make_calibrator("selective").fit([(z, z.argmax(1))])
    assert not calibrator.improved_ and calibrator.epoch_ == 0 and calibrator.temperature_ == 1
    assert torch.equal(calibrator(z), z)


def test_the_same_seed_gives_the_same_network():
    holdout = random_holdout()
    one, again = (make_calibrator("selective").fit(holdout) for _ in range(2))
    other = make_calibrator("selective", seed=1).fit(holdout)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(other.network_[0].weight, one.network_[0].weight)


def test_batch_norm_and_standardisation_are_part_of_the_weights(planted):
    detector = _detector(4, seed=0)
    x = torch.randn(2, 4, 50)
    mean, scale = torch.randn(4), torch.rand(4) + 0.5
    for _ in range(3):
        detector(5 + 3 * x)  # moves the running means
    expected = detector.eval()(x)
    with torch.no_grad():
        folded = _folded(detector, mean, scale)
    found = folded(x * scale[:, None] + mean[:, None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    widths = [tuple(w.shape[:2]) for w in planted.network_.parameters() if w.ndim > 1]
    assert widths == [(4, 4), (8, 4), (4, 8), (2, 4)]
