"""What holds for every calibrator: what it refuses, any shape, the same after saving and loading."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import segcal
from segcal.pixels import flatten
from segcal.posthoc import CALIBRATORS, load, stream
from tests.support import ROOT
from tests.support.holdouts import make_calibrator, random_holdout, whole


@pytest.fixture(scope="module")
def fitted():
    return {name: make_calibrator(name).fit(random_holdout()) for name in CALIBRATORS}


every_calibrator = pytest.mark.parametrize("name", CALIBRATORS)


def test_names():
    assert [*CALIBRATORS] == [
        *("ts", "vs", "ms", "dc", "lts"),
        *("cts", "cdats", "beta", "isotonic", "selective"),
    ]
    for name, calibrator in CALIBRATORS.items():
        assert calibrator.name == name
        assert getattr(segcal, calibrator.__name__) is calibrator


@every_calibrator
def test_fit_improves_and_returns_itself(name):
    calibrator = make_calibrator(name)
    assert calibrator.fit(random_holdout()) is calibrator
    assert calibrator.improved_ and calibrator.nll_after_ < calibrator.nll_before_
    assert calibrator.num_classes_ == 5


@every_calibrator
def test_what_other_images_contradict_is_refused(name):
    """Nine images teach that predictions mean nothing, and every fifth that all are right."""
    z, y = whole(random_holdout(10, n=1, temperature=4, ignored=0))
    validates = torch.arange(10) % 5 == 1
    y = torch.randint(0, 5, y.shape, generator=torch.Generator().manual_seed(0))
    y[validates] = z[validates].argmax(1)
    calibrator = make_calibrator(name)
    if name == "ts":  # one number, validated on all of the hold-out
        assert calibrator.fit([(z, y)]).improved_
        return
    with pytest.warns(UserWarning, match="it would take the NLL .* logits are left as they are"):
        calibrator.fit([(z, y)])
    assert not calibrator.improved_ and calibrator.nll_after_ >= calibrator.nll_before_
    expected = torch.nn.functional.cross_entropy(z[validates], y[validates]).item()
    assert calibrator.nll_before_ == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(calibrator(z).softmax(1), z.softmax(1))


def rows_of_the_page():
    """The table of methods in docs/evaluation.md: (short name, what becomes of predictions)."""
    text = (ROOT / "docs" / "evaluation.md").read_text()
    table = text.partition("## Post-hoc methods")[2].partition("##")[0]
    for names, last in re.findall(r"^\| (`.*?`) \|.*\| ([a-z ]+) \|$", table, flags=re.M):
        yield from ((name, last) for name in re.findall(r"`(\w+)`", names))


def test_the_page_says_what_becomes_of_the_predicted_class(fitted):
    rows = dict(rows_of_the_page())
    assert [*rows] == [*CALIBRATORS]
    z = 4 * torch.randn(500, 5, 4, 4, generator=torch.Generator().manual_seed(3))
    for name, calibrator in fitted.items():
        stays = torch.equal(calibrator(z).argmax(1), z.argmax(1))
        assert rows[name] == ("stays" if stays else "may change"), name


@every_calibrator
def test_extreme_logits_give_finite_logits(name, fitted):
    z = torch.tensor([[1e4, -1e4, 0, 0, 3], [0, 0, 0, 0, 0], [200, 200, -200, 0, 1]])
    assert fitted[name](z).isfinite().all()


@every_calibrator
@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min])
def test_masked_classes_stay_masked_and_touch_no_other(name, fitted, mask):
    """A class that another one is masked for gets all its probability, whatever the calibrator does."""
    logits = random_holdout()[0][0].clone()
    logits[:, 2:4] = mask
    found = fitted[name](logits).softmax(1)
    assert not found.isnan().any()
    assert (found[:, 2:4] == 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones_like(found[:, 0]))


@every_calibrator
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, 2e38, -2e38])
def test_fits_on_masked_classes_are_refused_with_the_remedy(name, value):
    (logits, labels), *others = random_holdout()
    logits = logits.clone()
    logits[0, 3] = value
    with pytest.raises(ValueError, match="fit on logits whose classes are not masked"):
        make_calibrator(name).fit([(logits, labels), *others])


@every_calibrator
def test_huge_logits_have_probabilities(name, fitted):
    logits = random_holdout()[0][0].clone()
    logits[:, 0], logits[:, 1] = 2e38, -2e38
    found = fitted[name](logits).softmax(1)
    assert (found[:, 0] > 0.99).all() and (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones_like(found[:, 0]))


@every_calibrator
def test_labels_may_be_of_16_bits(name, fitted):
    again = make_calibrator(name).fit([(z, y.to(torch.uint16)) for z, y in random_holdout()])
    assert again.nll_after_ == pytest.approx(fitted[name].nll_after_, rel=1e-6)


@pytest.mark.parametrize("ignore_index", [None, 1.5, "255"])
def test_an_ignore_index_is_a_number(ignore_index):
    with pytest.raises(ValueError, match="Expected ignore_index to be an integer, but got"):
        make_calibrator("ts", ignore_index=ignore_index).fit(random_holdout())


@every_calibrator
def test_probabilities_are_refused(name):
    probs = [(z.softmax(1), y) for z, y in random_holdout()]
    with pytest.raises(ValueError, match="Expected logits, but got probabilities: .* before the"):
        make_calibrator(name).fit(probs)
    half = [(p.half(), y) for p, y in probs]
    with pytest.raises(ValueError, match="but got probabilities"):
        make_calibrator(name).fit(half)


def test_what_only_looks_like_probabilities_at_times_is_taken():
    holdout = random_holdout()
    z, y = holdout[0]
    assert segcal.TemperatureScaling().fit([(z.softmax(1), y), *holdout]).improved_
    logs = [(z.log_softmax(1), y) for z, y in holdout]
    expected = segcal.TemperatureScaling().fit(holdout).temperature_
    torch.testing.assert_close(segcal.TemperatureScaling().fit(logs).temperature_, expected)


@every_calibrator
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_refused_unless_ignored(name, value):
    z, y = whole(random_holdout(ignored=0))
    spoilt, masked = z.clone(), y.clone()
    spoilt[3, 2, 4, 4] = value
    with pytest.raises(ValueError, match="finite logits, but 1 of 512 pixels"):
        make_calibrator(name).fit([(spoilt, y)])
    masked[3, 4, 4] = 255
    ours, theirs = (
        make_calibrator(name).fit([(spoilt, masked)]),
        make_calibrator(name).fit([(z, masked)]),
    )
    assert ours.nll_before_ == theirs.nll_before_
    # A local temperature is also made of its neighbours.
    assert ours.nll_after_ == pytest.approx(theirs.nll_after_, rel=1e-3 if name == "lts" else 0)


@every_calibrator
def test_holdouts_that_teach_nothing_are_refused(name):
    z, y = whole(random_holdout())
    cases = {
        "with valid pixels, but all of it is ignored": [(z, torch.full_like(y, 255))],
        "at least 2 classes, but all 512 valid pixels are of class 3": [(z, torch.full_like(y, 3))],
        r"batches of \(logits, labels\), but got none": [],
        r"images\) tensors, but got Tensor": (z, y),
        r"images\) tensors, but got \(Tensor, Tensor, list\)": [(z, y, ["name"] * len(z))],
        "labels of shape": [(z, y[:, :-1])],
        "the same classes": [(z, y), (torch.cat([z, z], 1), y)],
        "labels in 0..4": [(z, y.masked_fill(y == 4, 7))],
    }
    for message, batches in cases.items():
        with pytest.raises(ValueError, match=message):
            make_calibrator(name).fit(batches)


@every_calibrator
def test_generators_are_refused(name):
    with pytest.raises(ValueError, match="read more than once.*but got a generator"):
        make_calibrator(name).fit(batch for batch in random_holdout())


def test_batches_that_change_between_passes_are_noticed(monkeypatch):
    monkeypatch.setattr("segcal.posthoc.temperature._GUESS_PIXELS", 50)
    holdout = random_holdout(ignored=0)

    class Once:
        def __init__(self):
            self.generator = iter(holdout)

        def __iter__(self):
            yield from self.generator

    with pytest.raises(ValueError, match="same 512 pixels .* but got 0 in pass 2"):
        segcal.TemperatureScaling().fit(Once())


def test_labels_out_of_range_on_an_accelerator_are_counted_once(monkeypatch):
    """There `flatten` does not raise, and a batch is checked in blocks."""

    def accelerated(*arguments, **options):
        return replace(flatten(*arguments, **options), out_of_range=torch.tensor(3))

    monkeypatch.setattr(stream, "flatten", accelerated)
    monkeypatch.setattr(stream, "_BLOCK_VALUES", 64)
    with pytest.raises(ValueError, match="but got others in 6 pixels"):
        segcal.TemperatureScaling().fit(random_holdout(2))


@every_calibrator
def test_a_failed_fit_keeps_what_was_learned(name, fitted):
    calibrator = copy.deepcopy(fitted[name])
    with pytest.raises(ValueError, match="none"):
        calibrator.fit([])
    assert calibrator.numbers() == fitted[name].numbers()
    for key, tensor in fitted[name].state_dict().items():
        assert torch.equal(calibrator.state_dict()[key], tensor)


@every_calibrator
def test_the_unfitted_and_the_misfit_say_so(name, fitted, tmp_path):
    z, _ = random_holdout()[0]
    for use in (
        lambda: make_calibrator(name)(z),
        lambda: make_calibrator(name).save(tmp_path / "calibrator"),
    ):
        with pytest.raises(ValueError, match=r"fitted .*: call fit\(batches\) first"):
            use()
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match=r"shape \(N, 5, \*S\), but got \(2, 4, 8, 8\)"):
        fitted[name](z[:, :4])


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
    calibrator = fitted[name]
    z = torch.randn(2, 5, 4, 4)
    model = nn.Sequential(nn.Conv2d(3, 5, 1), copy.deepcopy(calibrator)).double()
    assert len(model.state_dict()) == 2 + len(calibrator.state_dict())
    assert model(torch.randn(2, 3, 4, 4).double()).dtype == torch.float64
    assert not calibrator(z).requires_grad or name == "lts"
    assert "nll_after_" in repr(calibrator)


@every_calibrator
def test_gradients_pass_through(name, fitted):
    z = torch.randn(2, 5, 4, 4, requires_grad=True)
    fitted[name](z).square().sum().backward()
    assert z.grad.isfinite().all() and z.grad.abs().sum() > 0


@every_calibrator
def test_fitting_within_inference_mode(name):
    with torch.inference_mode():
        holdout = random_holdout()
        calibrator = make_calibrator(name).fit(holdout)
    expected = make_calibrator(name).fit(random_holdout())
    assert calibrator.nll_after_ == expected.nll_after_


@every_calibrator
def test_saved_and_loaded_it_is_the_same(name, fitted, tmp_path):
    calibrator = fitted[name]
    calibrator.save(tmp_path / "sub" / "calibrator.safetensors")
    loaded = load(tmp_path / "sub" / "calibrator.safetensors")
    z = torch.randn(3, 5, 6, 6)
    assert type(loaded) is type(calibrator)
    assert torch.equal(loaded(z), calibrator(z))
    assert loaded.numbers() == calibrator.numbers()
    for option in calibrator._options():
        ours, theirs = getattr(calibrator, option), getattr(loaded, option)
        assert theirs == (tuple(ours) if isinstance(ours, list) else ours)
    assert loaded.fit(random_holdout()).nll_after_ == calibrator.nll_after_


def test_files_that_are_no_calibrators(tmp_path, fitted):
    good = tmp_path / "good"
    fitted["vs"].save(good)
    content = good.read_bytes()
    tensors = {name: t.clone() for name, t in fitted["vs"].state_dict().items()}
    ours = {
        "format": "segcal.posthoc/1",
        "calibrator": "vs",
        "options": "{}",
        "learned": '{"num_classes_": 5}',
    }
    bad = tmp_path / "bad"
    bad.write_bytes(b"")
    files = [b"", b"hello", content[:20], content[:-1], content + b"x"]
    stated = [
        ({}, "format is None"),
        ({**ours, "format": "other"}, "format is 'other'"),
        ({**ours, "calibrator": "os.system"}, "'os.system' is none of ts, vs, ms, dc, lts"),
        ({**ours, "options": '{"evil": 1}'}, "evil"),
        ({**ours, "options": "{"}, "Expecting property name"),
        ({**ours, "options": "3"}, "mapping"),
        ({**ours, "options": "[" * 10**5}, "recursion"),
        ({**ours, "calibrator": "lts", "options": '{"width": 1000000000000}'}, "overflow"),
        ({**ours, "calibrator": "lts", "options": '{"seed": "x"}'}, "got str"),
        ({**ours, "learned": "{}"}, "what it learned is {}"),
        ({**ours, "learned": '{"num_classes_": 5, "forward": 1}'}, "learned forward = 1"),
        ({**ours, "learned": '{"num_classes_": 1e99}'}, "num_classes_ = 1e"),
        ({**ours, "learned": '{"num_classes_": 60000}'}, r"float32 \(5,\), not"),
        ({**ours, "calibrator": "ts"}, "its bias_ is torch.float32"),
        ({**ours, "calibrator": "lts"}, "its bias_ is torch.float32"),
    ]
    for written in files:
        bad.write_bytes(written)
        with pytest.raises(ValueError, match="bad: expected a saved calibrator, but ") as caught:
            load(bad)
        assert "\n" not in str(caught.value)
    for metadata, message in stated:
        save_file(tensors, bad, metadata)
        with pytest.raises(
            ValueError, match=f"expected a saved calibrator, but .*{message}"
        ) as caught:
            load(bad)
        assert "\n" not in str(caught.value)
    save_file({**tensors, "bias_": tensors["bias_"] * float("nan")}, bad, ours)
    with pytest.raises(ValueError, match="its bias_ is not finite"):
        load(bad)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")


def test_saving_over_a_calibrator_is_all_or_nothing(tmp_path, fitted, monkeypatch):
    path = tmp_path / "calibrator"
    fitted["ts"].save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        fitted["vs"].save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
