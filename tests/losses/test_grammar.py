"""What a spec may say, what it builds, and what is refused."""

import math

import pytest
import torch

from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, all_terms, build_loss
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


@pytest.mark.parametrize("term", all_terms(), ids=lambda term: term.name)
def test_the_page_on_choosing_lists_every_loss_as_it_is(term):
    defaults = {n: str(h.default).lower() for n, h in term.hyper.items() if n != "seed"}
    hyper = ", ".join(f"`{n}` {d.removesuffix('.0')}" for n, d in defaults.items())
    beta = f"{term.beta:g}" if term.name in AUXILIARY_LOSSES else "base"
    summary = term.summary.rstrip(".").replace("|", "\\|")
    row = f"| `{term.name}` | {summary} | {hyper or 'none'} | {beta} |"
    assert row in (ROOT / "docs/choosing.md").read_text().splitlines()


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


def test_a_term_says_what_it_takes():
    for term in all_terms():
        assert term.summary.strip()
        for hyper in term.hyper.values():
            assert hyper.meaning and isinstance(hyper.default, hyper.kind)
        build = term.name if term.name in BASE_LOSSES else f"nll+{term.name}"
        build_loss(build, **{name: hyper.default for name, hyper in term.hyper.items()})


@pytest.mark.parametrize(
    ("spec", "beta", "says"),
    [
        ("nll+mdca+dca", 2.0, "beta to name its auxiliary"),
        ("nll+mdca", {"dca": 1.0}, "beta for mdca, but got dca"),
        ("nll+mdca", {"mdca": math.nan}, "beta of mdca to be a finite number"),
        ("nll+mdca", True, "beta to be a finite number"),
        ("nll", {}, "it has none"),
    ],
)
def test_a_weight_that_fits_no_auxiliary_raises(spec, beta, says):
    with pytest.raises(ValueError, match=says):
        build_loss(spec, beta=beta)


@pytest.mark.parametrize("spec", ["fl+mdca", "FL+MDCA", "Fl + Mdca"])
def test_any_case_is_the_same_loss(spec):
    assert build_loss(spec).spec == "fl+mdca"


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
    with pytest.raises(ValueError, match=f"got {next(iter(hyper))}"):
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
    with pytest.raises(ValueError, match="Expected"):
        build_loss(spec, **hyper)(*batch(2, 2))
