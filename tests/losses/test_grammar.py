"""What a spec may say, what it builds, and what is refused."""

import inspect
import math

import pytest
import torch

from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss, describe, parse_spec
from segcal.losses.softmax import STATISTICS
from tests.support import ROOT
from tests.support.loss_batches import batch


def test_terms_add_up_and_call_gives_the_total():
    logits, labels = batch(5, 5)
    criterion = build_loss("FL+MDCA", gamma=2.0, beta=5.0)
    parts = criterion.terms(logits, labels)
    assert set(parts) == {"fl", "mdca", "loss"}
    assert float(parts["loss"]) == pytest.approx(float(parts["fl"] + 5 * parts["mdca"]), abs=1e-12)
    assert torch.equal(criterion(logits, labels), parts["loss"])
    assert set(build_loss("nll").terms(logits, labels)) == {"nll", "loss"}


def test_the_page_on_choosing_has_the_table_of_losses_as_it_is():
    assert describe() in (ROOT / "docs/choosing.md").read_text()


def test_an_entry_says_what_its_function_takes():
    for name, loss in {**BASE_LOSSES, **AUXILIARY_LOSSES}.items():
        assert loss.function.__name__ == name and loss.about
        parameters = inspect.signature(loss.function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["batch", *loss.reads] and set(loss.reads) <= set(STATISTICS)
        build_loss(name if name in BASE_LOSSES else f"nll+{name}", **loss.hyper)


@pytest.mark.parametrize("beta", [None, {"dca": 3.0}, {"mdca": 2.0, "dca": 0.5, "mmce": 0.0}])
def test_several_auxiliaries_each_have_their_weight(beta):
    logits, labels = batch(5, 5)
    parts = build_loss("fl+mdca+dca+mmce", beta=beta).terms(logits, labels)
    assert list(parts) == ["fl", "mdca", "dca", "mmce", "loss"]
    weights = {"fl": 1.0, "mdca": 1.0, "dca": 1.0, "mmce": 1.0, **(beta or {})}
    expected = sum(weight * float(parts[name]) for name, weight in weights.items())
    assert float(parts["loss"]) == pytest.approx(expected, abs=1e-12)
    for name in ("mdca", "dca", "mmce"):
        single = build_loss(f"nll+{name}").terms(logits, labels)[name]
        assert float(parts[name]) == pytest.approx(float(single), abs=1e-12)


def test_an_auxiliary_has_its_usual_weight_unless_told():
    logits, labels = batch(5, 5)
    parts = build_loss("nll+cp+mdca").terms(logits, labels)
    expected = parts["nll"] + 0.1 * parts["cp"] + parts["mdca"]
    assert float(parts["loss"]) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "beta", "says"),
    [
        ("nll+mdca+dca", 2.0, "which auxiliary"),
        ("nll+mdca", {"dca": 1.0}, "names dca"),
        ("nll+mdca", {"mdca": math.nan}, "finite"),
        ("nll+mdca", True, "finite"),
        ("nll", {}, "takes none"),
    ],
)
def test_a_weight_that_fits_no_auxiliary_raises(spec, beta, says):
    with pytest.raises(ValueError, match=says):
        build_loss(spec, beta=beta)


def test_any_case_is_the_same_loss():
    for spec in ("fl+mdca", "FL+MDCA", "Fl + Mdca"):
        assert build_loss(spec).spec == "fl+mdca"
    assert parse_spec("FL+MDCA+CP") == ("fl", ("mdca", "cp"))


@pytest.mark.parametrize(
    "spec", ["", "mdca", "nll+", "nll+fl", "focal", "nll+mdca+mdca", "+mdca", "nll mdca"]
)
def test_unknown_names_list_the_options(spec):
    with pytest.raises(ValueError) as error:
        build_loss(spec)
    assert all(name in str(error.value) for name in (*BASE_LOSSES, *AUXILIARY_LOSSES))
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize(
    ("spec", "hyper"),
    [
        ("nll", {"gamma": 2.0}),
        ("nll", {"beta": 1.0}),
        ("fl+mdca", {"gama": 2.0}),
        ("ls", {"gamma": 1.0}),
        ("nll+mdca", {"bandwidth": 0.4}),
    ],
)
def test_a_hyper_parameter_without_a_taker_raises(spec, hyper):
    with pytest.raises(ValueError, match=f"no {next(iter(hyper))}"):
        build_loss(spec, **hyper)


@pytest.mark.parametrize(
    ("spec", "hyper"),
    [
        ("fl", {"gamma": -1.0}),
        ("fl", {"gamma": True}),
        ("dual", {"gamma": -1.0}),
        ("ls", {"alpha": 1.5}),
        ("ls", {"alpha": 0.9, "slope": 0.2}),
        ("svls", {"sigma": 0.0}),
        ("nll+mmce", {"bandwidth": 0.0}),
        ("nll+mmce", {"sample": 1}),
        ("nll+mmce", {"sample": 64.5}),
        ("nll+mbls", {"margin": -1.0}),
        ("nll+ace", {"bins": 0}),
        ("nll+ace", {"bins": 1, "soft": True}),
        ("nll+ace", {"soft": 1}),
        ("nll+dece", {"t_b": 0.0}),
    ],
)
def test_hyper_parameters_out_of_range_raise(spec, hyper):
    with pytest.raises(ValueError, match=next(iter(hyper))):
        build_loss(spec, **hyper)(*batch(2, 2))
