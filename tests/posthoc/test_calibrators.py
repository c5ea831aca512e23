"""What holds for every calibrator: what it refuses, any shape, saving and loading."""

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import segcal
from segcal import posthoc
from segcal.pixels import flatten
from segcal.posthoc import (
    CALIBRATORS,
    METHODS,
    Method,
    calibrator,
    holdout,
    label,
    method_names,
)
from segcal.posthoc.calibrator import PixelCalibrator
from segcal.posthoc.holdout import Holdout, PixelSampler
from tests.support.holdouts import make_calibrator, random_holdout, whole


@pytest.fixture(scope="module")
def fitted():
    return {name: make_calibrator(name).fit(random_holdout()) for name in CALIBRATORS}


every_calibrator = pytest.mark.parametrize("name", CALIBRATORS)
# One that streams, one on a sample of pixels and one on tiles.
each_way_of_fitting = pytest.mark.parametrize("name", ["ts", "vs", "lts"])


def test_the_table_declares_every_calibrator():
    assert [*METHODS] == [*CALIBRATORS]
    for name, kind in CALIBRATORS.items():
        assert kind.name == name
        assert getattr(segcal, kind.__name__) is kind
    assert method_names(" none,DC,ts") == ("ts", "dc")
    with pytest.raises(ValueError, match="'tz' is no post-hoc method; choose from none, ts,"):
        method_names("ts,tz")


def test_a_new_calibrator_is_one_class_and_one_entry(monkeypatch, tmp_path):
    class Division(PixelCalibrator):
        name = "division"
        keeps_mask = True
        _choices = 3

        def _identity(self, num_classes, image_channels):
            return {"divisor_": 1.0}

        def _learn(self, sample, choice):
            self.divisor_ = (1.0, 2.0, 4.0)[choice]

        def _map(self, x):
            return x / self.divisor_

    module = SimpleNamespace(Division=Division)
    monkeypatch.setitem(sys.modules, "segcal.posthoc.division", module)
    monkeypatch.setitem(METHODS, "division", Method("division", "Division", "one of three"))
    monkeypatch.delattr(posthoc, "CALIBRATORS")  # it is made of the entries again
    assert method_names("division,ts@shift") == ("ts@shift", "division")
    one = posthoc.Division().fit(random_holdout(temperature=2.0))
    assert one.divisor_ == 2 and one.improved_
    one.save(tmp_path / "one")
    z, _ = random_holdout()[0]
    assert torch.equal(segcal.load_calibrator(tmp_path / "one")(z), one(z))
    torch.testing.assert_close(one.predict_proba(z), (z / 2).softmax(1))


@every_calibrator
def test_fit_improves_and_returns_itself(name):
    one = make_calibrator(name)
    assert "not fitted" in repr(one)
    assert one.fit(random_holdout()) is one
    assert one.improved_ and one.nll_after_ < one.nll_before_
    assert one.num_classes_ == 5
    assert "num_classes_=5" in repr(one)
    z, _ = random_holdout()[0]
    torch.testing.assert_close(one.predict_proba(z), one(z).softmax(1))


@every_calibrator
def test_what_other_images_contradict_is_refused(name):
    """Of two images, one teaches that all predictions are right and the other that none is."""
    z, _ = whole(random_holdout(1, n=2, temperature=1, ignored=0))
    right = z.argmax(1)
    y = torch.stack([right[0], (right[1] + 1) % 5])
    if name == "ts":  # one number, judged on the hold-out as it is
        assert segcal.TemperatureScaling().fit(z, y).improved_
        return
    one = make_calibrator(name)
    with pytest.warns(UserWarning, match=r"the fit takes the NLL .* logits are left as they are"):
        one.fit(z, y)
    assert not one.improved_ and one.nll_after_ >= one.nll_before_
    expected = torch.nn.functional.cross_entropy(z, y).item()
    assert one.nll_before_ == pytest.approx(expected, rel=1e-5)
    assert torch.equal(one(z), z)


@every_calibrator
def test_a_constant_added_to_the_logits_of_a_pixel_changes_nothing(name):
    """Fit and transform of z, z + c and log softmax(z) agree; batches may be permuted."""
    holdout = random_holdout(6, n=4, size=(12, 12))
    generator = torch.Generator().manual_seed(3)
    offset = [(z + 10 * torch.randn(z[:, :1].shape, generator=generator), y) for z, y in holdout]
    logs = [(z.log_softmax(1), y) for z, y in holdout]
    one = make_calibrator(name).fit(holdout)
    assert one.improved_
    expected = torch.cat([one.predict_proba(z) for z, _ in holdout])
    for other in (offset, logs):
        again = make_calibrator(name).fit(other)
        for use in (one, again):
            found = torch.cat([use.predict_proba(z) for z, _ in other])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    permuted = make_calibrator(name).fit([(z.flip(0), y.flip(0)) for z, y in holdout[::-1]])
    found = torch.cat([permuted.predict_proba(z) for z, _ in holdout])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@every_calibrator
def test_the_mask_is_kept_where_that_is_promised(name, fitted):
    z = 4 * torch.randn(500, 5, 4, 4, generator=torch.Generator().manual_seed(3))
    stays = torch.equal(fitted[name](z).argmax(1), z.argmax(1))
    assert stays == CALIBRATORS[name].keeps_mask


@every_calibrator
def test_extreme_logits(name, fitted):
    z = torch.tensor([[1e4, -1e4, 0, 0, 3], [0, 0, 0, 0, 0], [200, 200, -200, 0, 1]])
    assert fitted[name].predict_proba(z).isfinite().all()
    logits = random_holdout()[0][0].clone()
    logits[:, 0], logits[:, 1] = 2e38, -2e38
    found = fitted[name].predict_proba(logits)
    assert (found[:, 0] > 0.99).all() and (found >= 0).all()
    for mask in (-torch.inf, torch.finfo(torch.float32).min):
        logits = random_holdout()[0][0].clone()
        logits[:, 2:4] = mask  # these classes are masked
        found = fitted[name].predict_proba(logits)
        assert (found[:, 2:4] == 0).all()
        torch.testing.assert_close(found.sum(1), torch.ones_like(found[:, 0]))


@each_way_of_fitting
def test_logits_that_are_not_finite_are_refused_unless_ignored(name):
    z, y = whole(random_holdout(ignored=0))
    ignored = y.clone()
    ignored[3, 4, 4] = 255
    theirs = make_calibrator(name).fit(z, ignored)
    for value in (torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).min):
        spoilt = z.clone()
        spoilt[3, 2, 4, 4] = value
        with pytest.raises(ValueError, match=r"1 pixels .*fit on finite logits .* not masked"):
            make_calibrator(name).fit(spoilt, y)
        ours = make_calibrator(name).fit(spoilt, ignored)
        assert ours.nll_before_ == pytest.approx(theirs.nll_before_, rel=1e-12)
        # A local temperature is also made of its neighbours.
        assert ours.nll_after_ == pytest.approx(theirs.nll_after_, rel=1e-3 if name == "lts" else 0)


def test_probabilities_are_refused():
    probs = [(z.softmax(1), y) for z, y in random_holdout()]
    with pytest.raises(ValueError, match=r"look like probabilities.* before the softmax"):
        segcal.TemperatureScaling().fit(probs)
    with pytest.raises(ValueError, match="look like probabilities"):
        segcal.TemperatureScaling().fit([(p.half(), y) for p, y in probs])
    # What looks like probabilities at times is taken.
    assert segcal.TemperatureScaling().fit([probs[0], *random_holdout()]).improved_


def test_holdouts_that_teach_nothing_are_refused():
    z, y = whole(random_holdout())
    cases = {
        "all of it is ignored": [(z, torch.full_like(y, 255))],
        "at least 2 classes, but all 512 valid pixels are of class 3": [(z, torch.full_like(y, 3))],
        "no batches": [],
        r"but a batch is Tensor": z,
        r"but a batch is \['Tensor', 'Tensor', 'str'\]": [(z, y, "name")],
        "labels of shape": [(z, y[:, :-1])],
        "the same classes": [(z, y), (torch.cat([z, z], 1), y)],
        "labels in 0..4": [(z, y.masked_fill(y == 4, 7))],
        "more than once.* not a generator": (batch for batch in random_holdout()),
    }
    for message, batches in cases.items():
        with pytest.raises(ValueError, match=message):
            segcal.TemperatureScaling().fit(batches)


def test_labels_out_of_range_on_an_accelerator_are_noticed(monkeypatch):
    """There `flatten` does not raise."""

    def accelerated(*arguments, **options):
        return replace(flatten(*arguments, **options), out_of_range=torch.tensor(3))

    monkeypatch.setattr(holdout, "flatten", accelerated)
    with pytest.raises(ValueError, match="3 labels are neither"):
        segcal.TemperatureScaling().fit(random_holdout(2))


def test_batches_that_change_between_passes_are_noticed(monkeypatch):
    monkeypatch.setattr("segcal.posthoc.temperature._GUESS_PIXELS", 50)

    class Once:
        def __init__(self):
            self.generator = iter(random_holdout(ignored=0))

        def __iter__(self):
            yield from self.generator

    with pytest.raises(ValueError, match=r"same 512 pixels .* has 0 in pass 2"):
        segcal.TemperatureScaling().fit(Once())


def test_the_ignore_index_is_255_or_negative_beyond_255_classes():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 300, generator=generator)
    y = torch.randint(0, 300, (3000,), generator=generator)
    y[::10] = -100
    many = segcal.TemperatureScaling().fit(z, y)
    kept = y >= 0
    expected = torch.nn.functional.cross_entropy(z[kept], y[kept]).item()
    assert (y == 255).any() and many.nll_before_ == pytest.approx(expected, rel=1e-6)
    z, y = whole(random_holdout())
    stated = segcal.TemperatureScaling(ignore_index=255).fit(z, y)
    assert segcal.TemperatureScaling().fit(z, y).temperature_ == stated.temperature_


@each_way_of_fitting
def test_a_failed_fit_keeps_what_was_learned(name, fitted):
    one = copy.deepcopy(fitted[name])
    with pytest.raises(ValueError, match="no batches"):
        one.fit([])
    assert one.numbers() == fitted[name].numbers()
    for key, tensor in fitted[name].state_dict().items():
        assert torch.equal(one.state_dict()[key], tensor)


def test_the_unfitted_and_the_misfit_say_so(fitted, tmp_path):
    z, _ = random_holdout()[0]
    for use in (lambda one: one(z), lambda one: one.save(tmp_path / "calibrator")):
        with pytest.raises(ValueError, match="not fitted yet: call fit first"):
            use(segcal.VectorScaling())
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match=r"fitted on logits \(N, 5, \*S\), but got \(2, 4, 8, 8\)"):
        fitted["vs"](z[:, :4])


@every_calibrator
@given(size=st.lists(st.integers(1, 4), max_size=3), n=st.integers(0, 3))
@settings(max_examples=10)
def test_any_shape_and_dtype(name, fitted, size, n):
    z = torch.randn(n, 5, *size)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out = fitted[name](z.to(dtype))
        assert out.shape == z.shape and out.dtype == dtype


@every_calibrator
def test_classification_is_an_image_of_one_pixel(name, fitted):
    z = torch.randn(7, 5)
    assert torch.equal(fitted[name](z), fitted[name](z[..., None, None])[..., 0, 0])
    flat = make_calibrator(name).fit(random_holdout(n=64, size=()))
    square = make_calibrator(name).fit(random_holdout(n=64, size=(1, 1)))
    assert flat.nll_after_ == square.nll_after_
    assert torch.equal(flat(z), square(z))


@every_calibrator
def test_it_is_a_module_like_others(name, fitted):
    model = nn.Sequential(nn.Conv2d(3, 5, 1), copy.deepcopy(fitted[name])).double()
    assert len(model.state_dict()) == 2 + len(fitted[name].state_dict())
    assert model(torch.randn(2, 3, 4, 4).double()).dtype == torch.float64
    z = torch.randn(2, 5, 4, 4, requires_grad=True)
    fitted[name](z).square().sum().backward()
    assert z.grad.isfinite().all() and z.grad.abs().sum() > 0


@each_way_of_fitting
def test_fitting_within_inference_mode(name, fitted):
    with torch.inference_mode():
        one = make_calibrator(name).fit(random_holdout())
    assert one.nll_after_ == fitted[name].nll_after_


@every_calibrator
def test_saved_and_loaded_it_is_the_same(name, fitted, tmp_path):
    one = fitted[name]
    one.save(tmp_path / "sub" / "calibrator.safetensors")
    loaded = segcal.load_calibrator(tmp_path / "sub" / "calibrator.safetensors")
    z = torch.randn(3, 5, 6, 6)
    assert type(loaded) is type(one)
    assert torch.equal(loaded(z), one(z))
    assert loaded.numbers() == one.numbers()
    assert loaded.fit(random_holdout()).nll_after_ == one.nll_after_  # the options are kept


def test_files_that_are_no_calibrators(tmp_path, fitted):
    bad = tmp_path / "bad"
    fitted["vs"].save(bad)
    content = bad.read_bytes()
    tensors = {name: t.clone() for name, t in fitted["vs"].state_dict().items()}
    ours = {
        "format": calibrator.CALIBRATOR_FORMAT,
        "calibrator": "vs",
        "options": "{}",
        "learned": '{"num_classes_": 5, "improved_": true}',
    }
    for written in (b"", b"hello", content[:20], content[:-1], content + b"x"):
        bad.write_bytes(written)
        with pytest.raises(ValueError, match="bad is no saved calibrator: "):
            segcal.load_calibrator(bad)
    stated = {
        "format is None": {},
        "format is other": {**ours, "format": "other"},
        "os.system": {**ours, "calibrator": "os.system"},
        "evil": {**ours, "options": '{"evil": 1}'},
        "Expecting property": {**ours, "options": "{"},
        "mapping": {**ours, "options": "3"},
        "recursion": {**ours, "options": "[" * 10**5},
        "num_classes_": {**ours, "learned": "{}"},
        "learned forward": {**ours, "learned": '{"num_classes_": 5, "forward": 1}'},
        r"\(5,\)": {**ours, "learned": '{"num_classes_": 60000}'},
        "state_dict": {**ours, "calibrator": "ts"},
    }
    for message, metadata in stated.items():
        save_file(tensors, bad, metadata)
        with pytest.raises(ValueError, match=f"no saved calibrator: .*{message}") as caught:
            segcal.load_calibrator(bad)
        assert "\n" not in str(caught.value)
    save_file({**tensors, "bias_": tensors["bias_"] * torch.nan}, bad, ours)
    with pytest.raises(ValueError, match="bias_ is not finite"):
        segcal.load_calibrator(bad)
    with pytest.raises(FileNotFoundError):
        segcal.load_calibrator(tmp_path / "absent")


def test_saving_over_a_calibrator_is_all_or_nothing(tmp_path, fitted, monkeypatch):
    path = tmp_path / "calibrator"
    fitted["ts"].save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        fitted["vs"].save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def drawn(batches, size, seed=0):
    sampler = PixelSampler(holdout := Holdout(batches), size, seed)
    holdout.survey(sampler)
    return sampler.finish()


def test_the_sample_is_uniform_and_of_the_size_asked_for():
    y = torch.arange(100).repeat(40).reshape(4, 10, 100)  # the label says which column it is
    y[0, 0, :50], y[1, 0, 50:] = 255, 255
    z = torch.zeros(4, 100, 10, 100)
    z[:, 0] = torch.arange(1000.0).view(10, 100)  # the first logit says which pixel
    counts = np.zeros(10)
    for seed in range(10):
        sample = drawn([(z[:1], y[:1]), (z[1:], y[1:])], 790, seed)
        place = (sample.x[0] - sample.x[1]).round().long()
        assert len(place) == 790
        assert torch.equal(place % 100, sample.labels)
        counts += np.histogram(sample.labels, 10, (0, 100))[0]
    # Per decile 10·790 draws of 395 in 3900 pixels each: about 790 ± 27.
    assert abs(counts - 790).max() < 120


def test_the_pixels_of_an_image_are_validated_together():
    for images, expected in ((31, [11, 10, 10]), (2, [1, 1])):
        z, y = whole(random_holdout(1, n=images, size=(9, 9), ignored=0))
        z[:, 0] = torch.arange(images).view(-1, 1, 1)  # the first logit says which image
        z[:, 1] = 0
        sample = drawn([(z, y)], 10**6)
        image = (sample.x[0] - sample.x[1]).round().long()
        folds = [sample.fold[image == i].unique().item() for i in range(images)]
        assert np.bincount(folds).tolist() == expected
    (z, y), *_ = random_holdout(1, n=1, size=(9, 9), ignored=0)
    assert drawn([(z, y)], 10**6).fold.bincount().tolist() == [27, 27, 27]  # of a single image


def test_the_images_of_a_group_are_validated_together():
    z, y = whole(random_holdout(1, n=12, size=(9, 9), ignored=0))
    z[:, 0] = torch.arange(12).view(-1, 1, 1)  # the first logit says which image
    z[:, 1] = 0

    def folds(groups):
        batches = [(z[i : i + 4], y[i : i + 4], groups[i : i + 4]) for i in (0, 4, 8)]
        sample = drawn(batches, 10**6)
        image = (sample.x[0] - sample.x[1]).round().long()
        return [sample.fold[image == i].unique().item() for i in range(12)]

    by_group = np.reshape(folds([f"patient {i // 2}" for i in range(12)]), (6, 2))
    assert np.ptp(by_group, 1).max() == 0 and np.bincount(by_group[:, 0]).tolist() == [2, 2, 2]
    assert np.bincount(folds(["all"] * 12)).tolist() == [4, 4, 4]  # one group: by image
    with pytest.raises(ValueError, match="12 groups"):
        drawn([(z, y, ["a"])], 10**6)


def test_images_of_the_same_labels_are_different_images():
    z, y = whole(random_holdout(1, n=4, size=(9, 9), ignored=0))
    sample = drawn([(z, y[:1].expand(4, 9, 9))], 10**6)
    assert sorted(sample.fold.bincount().tolist()) == [81, 81, 162]


@pytest.mark.parametrize("options", [{"max_pixels": 0}, {"width": 0}, {"epochs": 0}, {"lr": -1.0}])
def test_options_are_checked(options):
    kind = segcal.LocalTemperatureScaling if "width" in options else segcal.SelectiveScaling
    with pytest.raises(ValueError, match="must be > 0, but got"):
        kind(**options)


def test_initials_are_printed_in_capitals_and_words_are_not():
    labels = [label(method) for method in ("ts@shift", "capm", "beta", "selective")]
    assert labels == ["TS@shift", "CAPM", "Beta", "Selective"]
