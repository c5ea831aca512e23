"""A temperature for each pixel: better than one where it varies, and the classes stay."""

import pytest
import torch

import segcal
from segcal.posthoc.holdout import Holdout
from segcal.posthoc.local import TILE_SIDE, TileSampler, _image_planes
from tests.support.holdouts import draw, nll, random_holdout, whole


def varying_holdout(seed, *, n=20, k=4, size=48):
    """Three times too sure on the left half of each image, not sure enough on the right.

    The images show which half is which; the logits do too, but only by their size.
    """
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, k, size, size, generator=generator)
    y = draw(z.softmax(1), generator)
    left = (torch.arange(size) < size // 2).expand(n, 1, size, size)
    image = 100 * left.float() + torch.randn(n, 1, size, size, generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.1] = 255
    return torch.where(left, 3 * z, 0.6 * z), y, image


def ece(logits, labels):
    meter = segcal.CalibrationMeter(logits.shape[1])
    meter.update(logits, labels)
    return meter.compute().ece


@pytest.mark.slow
def test_local_beats_one_temperature_where_it_varies():
    z, y, image = varying_holdout(0)
    fresh, labels, look = varying_holdout(1)
    temperature = segcal.TemperatureScaling().fit([(z, y)])
    with_image = segcal.LocalTemperatureScaling(epochs=8, lr=1e-2).fit([(z, y, image)])
    without = segcal.LocalTemperatureScaling(epochs=8, lr=1e-2).fit([(z, y)])
    one, seen, unseen = temperature(fresh), with_image(fresh, look), without(fresh)
    assert ece(seen, labels) < 0.5 * ece(one, labels)
    assert ece(unseen, labels) < ece(one, labels)
    assert nll(seen, labels) < nll(unseen, labels) < nll(one, labels)
    t = with_image.temperatures(fresh, look)
    assert t.shape == (20, 1, 48, 48)
    assert t[..., :20].median().item() == pytest.approx(3, rel=0.1)
    assert t[..., 28:].median().item() == pytest.approx(0.6, rel=0.1)
    for calibrated in (seen, unseen):
        assert torch.equal(calibrated.argmax(1), fresh.argmax(1))


def test_the_same_seed_gives_the_same_network():
    holdout = random_holdout()
    one, again = (segcal.LocalTemperatureScaling(epochs=2).fit(holdout) for _ in range(2))
    other = segcal.LocalTemperatureScaling(epochs=2, seed=1).fit(holdout)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert other.nll_before_ == one.nll_before_  # every tile is used
    assert not torch.equal(other.network_[0].weight, one.network_[0].weight)


def test_it_starts_at_the_best_constant_temperature():
    z, y = whole(random_holdout(5))
    calibrator = segcal.LocalTemperatureScaling(epochs=1, lr=1e-12).fit([(z, y)])
    constant = segcal.TemperatureScaling().fit(z, y)
    assert calibrator.temperature_.item() == pytest.approx(constant.temperature_.item(), rel=1e-3)
    torch.testing.assert_close(calibrator(z), z / calibrator.temperature_)


def test_no_epoch_better_than_the_constant_keeps_the_constant():
    holdout = random_holdout()
    calibrator = segcal.LocalTemperatureScaling(epochs=1, lr=10.0).fit(holdout)
    assert calibrator.epoch_ == 0
    z, _ = holdout[0]
    torch.testing.assert_close(calibrator(z), z / calibrator.temperature_)


def test_images_are_asked_for_as_in_the_fit():
    z, y, image = varying_holdout(0, n=4, size=16)
    calibrator = segcal.LocalTemperatureScaling(epochs=1).fit([(z, y, image)])
    with pytest.raises(ValueError, match="images of 1 channels, but got none"):
        calibrator(z)
    with pytest.raises(ValueError, match=r"of 1 channels.*but got \(4, 3, 16, 16\)"):
        calibrator(z, image.expand(4, 3, 16, 16))
    with pytest.raises(ValueError, match="4 classes with 0 image channels and 4 classes with 1"):
        segcal.LocalTemperatureScaling().fit([(z, y, image), (z, y)])
    without = segcal.LocalTemperatureScaling(epochs=1).fit([(z, y)])
    assert torch.equal(without(z, image), without(z))


def test_images_of_another_size_are_resized():
    z, y, image = varying_holdout(0, n=4, size=16)
    large = image.repeat_interleave(2, 2).repeat_interleave(2, 3)
    planes = _image_planes(large, z)
    assert planes.shape == image.shape
    torch.testing.assert_close(planes[..., 1:-1, 1:7], image[..., 1:-1, 1:7], atol=5, rtol=0)
    calibrator = segcal.LocalTemperatureScaling(epochs=1).fit([(z, y, large)])
    assert calibrator(z, large).shape == z.shape


@pytest.mark.parametrize("size", [(), (9,), (5, 3), (2, 4, 5)])
def test_any_number_of_axes(size):
    holdout = random_holdout(4, n=20, size=size, ignored=0)
    calibrator = segcal.LocalTemperatureScaling(epochs=2).fit(holdout)
    z, _ = holdout[0]
    assert calibrator(z).shape == z.shape
    assert calibrator.temperatures(z).shape == (20, 1, *size)
    assert torch.equal(calibrator(z).argmax(1), z.argmax(1))


def sampled_tiles(batches, pixels=1 << 20):
    holdout = Holdout(batches)
    sampler = TileSampler(holdout, pixels, seed=0)
    holdout.survey(sampler)
    return sampler.finish()


def test_tiles_cover_the_images():
    ((z, y),) = random_holdout(1, n=5, size=(150, 140))
    sample = sampled_tiles([(z, y)])
    fold, logits, labels = sample.fold, sample.x, sample.labels
    assert sorted(fold.bincount().tolist()) == [9, 2 * 9, 2 * 9]  # the tiles of an image together
    assert logits.shape == (45, 5, TILE_SIDE, TILE_SIDE)
    seen = logits[:, 0][labels >= 0].unique()
    assert torch.equal(seen, (z[:, 0] - z.amax(1))[y != 255].unique())  # the largest is 0


def test_tiles_are_bounded_and_small_images_filled_up_with_ignored_pixels():
    ((large, labels),) = random_holdout(1, n=6, size=(150, 140))
    ((small, few),) = random_holdout(1, n=2, size=(10, 7))
    batches = [(large, labels), (small, few)]
    assert len(sampled_tiles(batches, pixels=20 * TILE_SIDE**2).fold) == 20
    valid = sampled_tiles(batches).labels >= 0
    sparse = valid[valid.sum((1, 2)) < 100]
    assert len(sparse) == 2
    assert not sparse[:, 10:].any() and not sparse[:, :, 7:].any()
