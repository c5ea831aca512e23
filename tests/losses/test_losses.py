"""Laws that every loss of the grammar keeps, against literal formulas and by hand."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import segcal
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss, hyper_names
from segcal.losses.auxiliary import _sample
from segcal.pixels import flatten
from tests.support.loss_batches import SPECS, batch
from tests.support.loss_oracles import ORACLES


def oracle(spec, logits, labels, beta=1.0):
    """The spec by literal loops over the valid pixels."""
    pixels = flatten(logits, labels)
    rows, wanted = pixels.logits.tolist(), pixels.labels.tolist()
    base, _, aux = spec.partition("+")
    value = ORACLES[base](rows, wanted)
    return value + beta * ORACLES[aux](rows, wanted) if aux else value


def term(name, logits, labels):
    """One loss of either dict alone."""
    spec = name if name in BASE_LOSSES else f"nll+{name}"
    return build_loss(spec).terms(logits, labels)[name]


def test_every_loss_has_an_oracle():
    assert set(ORACLES) == set(BASE_LOSSES) | set(AUXILIARY_LOSSES)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("spatial", [(), (5, 6), (2, 3, 2)], ids=str)
def test_equals_the_papers_formula(spec, spatial):
    logits, labels = batch(*spatial, n=3 if spatial else 12)
    hyper = {"beta": 2.5} if "+" in spec else {}
    expected = oracle(spec, logits, labels, beta=2.5)
    assert float(build_loss(spec, **hyper)(logits, labels)) == pytest.approx(expected, abs=1e-9)
    single = build_loss(spec, **hyper)(logits.float(), labels)
    assert single.dtype is torch.float32
    assert float(single) == pytest.approx(expected, abs=1e-6, rel=1e-6)


# Two pixels, two classes: p = (3/4, 1/4) with label 0, and p = (3/5, 2/5) with label 1.
HAND_LOGITS = torch.tensor([[3.0, 1.0], [3.0, 2.0]], dtype=torch.float64).log()
HAND_LABELS = torch.tensor([0, 1])
FOCAL = -(0.25**3 * math.log(0.75) + 0.6**3 * math.log(0.4)) / 2
BY_HAND = {
    "nll": -(math.log(0.75) + math.log(0.4)) / 2,
    "ls": -(
        (0.9 * math.log(0.75) + 0.1 * math.log(0.25)) + (0.9 * math.log(0.4) + 0.1 * math.log(0.6))
    )
    / 2,
    "fl": FOCAL,
    "flsd": FOCAL,
    "brier": (2 * 0.25**2 + 2 * 0.6**2) / 2,
    "mdca": 0.175,  # both classes: |(0.75 + 0.6) / 2 − 1/2|
    "dca": 0.175,  # (0.75 + 0.6) / 2 − 1/2
    # One right with 1 − r = 0.25, one wrong with r = 0.6.
    "mmce": math.sqrt(0.25**2 + 0.6**2 - 2 * 0.25 * 0.6 * math.exp(-0.15 / 0.4) + 1e-10),
}


@pytest.mark.parametrize("name", ORACLES)
def test_two_pixels_by_hand(name):
    assert float(term(name, HAND_LOGITS, HAND_LABELS)) == pytest.approx(BY_HAND[name], abs=1e-12)


def test_flsd_uses_gamma_five_below_a_fifth():
    logits = torch.tensor([[1.0, 9.0]], dtype=torch.float64).log()  # p_y = 0.1
    value = build_loss("flsd")(logits, torch.tensor([0]))
    assert float(value) == pytest.approx(-(0.9**5) * math.log(0.1), abs=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_classification_is_a_one_by_one_image_bitwise(spec):
    logits, labels = batch(n=64, k=5, dtype=torch.float32)
    criterion = build_loss(spec)
    flat, image = logits.clone().requires_grad_(), logits[..., None, None].clone().requires_grad_()
    a, b = criterion(flat, labels), criterion(image, labels[:, None, None])
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(flat.grad, image.grad[..., 0, 0])


@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck(spec):
    logits, labels = batch(2, 3, n=2)
    criterion = build_loss(spec)
    assert torch.autograd.gradcheck(lambda z: criterion(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("term", ["fl", "mdca"])
def test_each_term_alone_has_its_own_gradient(term):
    logits, labels = batch(2, 3, n=2)
    criterion = build_loss("fl+mdca", beta=3.0)
    assert torch.autograd.gradcheck(
        lambda z: criterion.terms(z, labels)[term], logits.requires_grad_()
    )


@pytest.mark.parametrize("spec", SPECS)
def test_ignored_pixels_touch_nothing(spec):
    logits, labels = batch(4, 4, ignored=0.4)
    kept = flatten(logits, labels)
    garbage = logits.clone()
    garbage.movedim(1, -1)[labels == 255] = torch.nan
    garbage.requires_grad_()
    loss = build_loss(spec)(garbage, labels)
    loss.backward()
    alone = build_loss(spec)(kept.logits, kept.labels)
    assert float(loss.detach()) == pytest.approx(float(alone), abs=1e-12)
    assert torch.all(garbage.grad.movedim(1, -1)[labels == 255] == 0)
    assert garbage.grad.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_ignored_is_zero_with_zero_gradient(spec, dtype):
    logits = torch.randn(2, 3, 4, 4).to(dtype).requires_grad_()
    loss = build_loss(spec)(logits, torch.full((2, 4, 4), 255, dtype=torch.uint8))
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_extreme_logits_one_class_and_one_pixel_stay_finite(spec, gamma):
    criterion = build_loss(spec, **({"gamma": gamma} if "gamma" in hyper_names(spec) else {}))
    wild = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [0.0, 0.0, 0.0], [-1e4, 0.0, 1e4]])
    for logits, labels in [
        (wild, torch.tensor([0, 0, 1, 2])),
        (wild, torch.tensor([1, 1, 1, 1])),
        (wild[:1], torch.tensor([1])),
        (wild[:1], torch.tensor([0])),
    ]:
        logits = logits.clone().requires_grad_()
        loss = criterion(logits, labels)
        loss.backward()
        assert loss.isfinite()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize(("spec", "hyper"), [("fl", {"gamma": 0.0}), ("ls", {"alpha": 0.0})])
def test_limits_are_nll(spec, hyper):
    logits, labels = batch(5, 5)
    nll = F.cross_entropy(logits, labels, ignore_index=255)
    assert float(build_loss(spec, **hyper)(logits, labels)) == pytest.approx(float(nll), abs=1e-12)


def test_class_weights_follow_torch():
    logits, labels = batch(5, 5)
    weight = torch.tensor([0.125, 2.0, 1.0, 0.0], dtype=torch.float64)
    expected = F.cross_entropy(logits, labels, weight=weight, ignore_index=255)
    value = build_loss("nll", weight=weight)(logits, labels)
    assert float(value) == pytest.approx(float(expected), abs=1e-12)
    with pytest.raises(ValueError, match=r"weight of shape \(4,\).*got \(2,\)"):
        build_loss("fl", weight=[1, 2])(logits, labels)


@pytest.mark.parametrize("base", BASE_LOSSES)
def test_equal_class_weights_change_nothing(base):
    logits, labels = batch(5, 5)
    plain, weighted = build_loss(base), build_loss(base, weight=[2.0] * 4)
    assert float(weighted(logits, labels)) == pytest.approx(float(plain(logits, labels)), abs=1e-12)


def test_mdca_counts_absent_classes_and_is_over_the_batch_not_per_image():
    # Two images, each wrong about itself, right together: the batch's MDCA is 0.
    logits = torch.tensor([[[50.0], [-50.0], [-50.0]], [[-50.0], [50.0], [-50.0]]])
    labels = torch.tensor([[1], [0]])
    assert float(term("mdca", logits, labels)) == pytest.approx(0, abs=1e-7)
    # One pixel sure of class 0 and labelled 1: (1 + 1 + 0) / 3, class 2 being absent.
    assert float(term("mdca", logits[:1], labels[:1])) == pytest.approx(2 / 3, abs=1e-7)


def test_leaving_ignored_pixels_in_the_mean_would_show():
    logits, labels = batch(64, 64, n=2, k=21, ignored=0.05)
    pixels = flatten(logits, labels)
    exact = ORACLES["mdca"](pixels.logits.tolist(), pixels.labels.tolist())
    assert float(term("mdca", logits, labels)) == pytest.approx(exact, abs=1e-9)
    count = len(pixels.labels)
    frequency = F.one_hot(pixels.labels, 21).sum(0) / count
    leaky = (logits.softmax(1).sum((0, 2, 3)) / count - frequency).abs().mean()
    assert float(leaky) > 1.2 * exact


@given(seed=st.integers(0, 50), extra=st.integers(0, 40))
def test_mmce_sample_takes_distinct_valid_pixels_spread_over_the_batch(seed, extra):
    valid = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed)) < 0.7
    count = int(valid.sum())
    size = max(2, count - extra)
    index, mine, drawn = _sample(valid, size, seed, False)
    taken = index[mine & drawn]
    assert len(taken) == min(size, count)
    assert valid.flatten()[taken].all()
    assert (taken.diff() > 0).all()
    # Stratified: the j-th draw is among the valid pixels of the j-th of `size` equal runs.
    ordinal = valid.flatten().cumsum(0)[taken] - 1
    run = torch.arange(len(taken)) * count / size
    assert ((ordinal - run).abs() < 1 + count / size).all()


def test_mmce_on_a_sample_is_mmce_of_those_pixels_and_repeats():
    logits, labels = batch(30, 30)
    criterion = build_loss("nll+mmce", sample=100, seed=3)
    value = criterion.terms(logits, labels)["mmce"]
    pixels = flatten(logits, labels)
    index, _, _ = _sample(pixels.valid, 100, 3, False)
    rows = pixels.dense.movedim(1, 2).reshape(-1, 4)[index]
    expected = ORACLES["mmce"](rows.tolist(), pixels.target.flatten()[index].tolist())
    assert float(value) == pytest.approx(expected, abs=1e-9)
    assert torch.equal(value, criterion.terms(logits, labels)["mmce"])
    other = build_loss("nll+mmce", sample=100, seed=4).terms(logits, labels)["mmce"]
    assert not torch.equal(value, other)


def test_terms_add_up_and_call_gives_the_total():
    logits, labels = batch(5, 5)
    criterion = build_loss("FL+MDCA", gamma=2.0, beta=5.0)
    parts = criterion.terms(logits, labels)
    assert set(parts) == {"fl", "mdca", "loss"}
    assert float(parts["loss"]) == pytest.approx(float(parts["fl"] + 5 * parts["mdca"]), abs=1e-12)
    assert torch.equal(criterion(logits, labels), parts["loss"])
    assert set(build_loss("nll").terms(logits, labels)) == {"nll", "loss"}


@pytest.mark.parametrize("beta", [None, {"dca": 3.0}, {"mdca": 2.0, "dca": 0.5, "mmce": 0.0}])
def test_several_auxiliaries_each_have_their_weight(beta):
    logits, labels = batch(5, 5)
    parts = build_loss("fl+mdca+dca+mmce", beta=beta).terms(logits, labels)
    assert list(parts) == ["fl", "mdca", "dca", "mmce", "loss"]
    weights = {"fl": 1.0, "mdca": 1.0, "dca": 1.0, "mmce": 1.0, **(beta or {})}
    expected = sum(weight * float(parts[name]) for name, weight in weights.items())
    assert float(parts["loss"]) == pytest.approx(expected, abs=1e-12)
    for name in ("fl", "mdca", "dca", "mmce"):
        assert float(parts[name]) == pytest.approx(float(term(name, logits, labels)), abs=1e-12)


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
    assert all(name in str(error.value) for name in ORACLES)
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
    [("fl", {"gamma": -1.0}), ("ls", {"alpha": 1.5}), ("nll+mmce", {"bandwidth": 0.0})],
)
def test_hyper_parameters_out_of_range_raise(spec, hyper):
    with pytest.raises(ValueError, match="Expected"):
        build_loss(spec, **hyper)(*batch(2, 2))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_computed_in_float32(spec, dtype):
    logits, labels = batch(4, 4, dtype=torch.float32)
    half = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = build_loss(spec)(half, labels)
    value.backward()
    assert value.dtype is torch.float32
    assert half.grad.dtype is dtype
    assert torch.equal(value, build_loss(spec)(half.float(), labels))


@pytest.mark.parametrize("spec", ["nll", "brier", "ls", "nll+dca"])
def test_memory_layout_does_not_matter(spec):
    logits, labels = batch(6, 5)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        z = logits.clone(memory_format=layout).requires_grad_()
        loss = build_loss(spec)(z, labels)
        loss.backward()
        results.append((loss.detach(), z.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=0)


class _SlowEvent:
    """Stands for a device event that has happened by the second look."""

    def __init__(self, _device):
        self.looks = 0

    def record(self):
        pass

    def query(self):
        self.looks += 1
        return self.looks > 1


def test_late_label_check_reports_an_earlier_batch_without_waiting(monkeypatch):
    """On an accelerator `flatten` only counts bad labels; the criterion reads the count later."""
    monkeypatch.setattr(torch, "Event", _SlowEvent)
    check = build_loss("nll")._late
    meta = flatten(torch.zeros(1, 3, 2, device="meta"), torch.zeros(1, 2, device="meta").long())
    for bad in (0, 7):  # a clean batch is queued; a bad one comes while that is under way
        check.look(dataclasses.replace(meta, out_of_range=torch.tensor(bad)), 255)
    good = dataclasses.replace(meta, out_of_range=torch.tensor(0))
    check.look(good, 255)  # the clean sum has arrived, the one with the bad batch is queued
    check.look(good, 255)
    with pytest.raises(ValueError, match=r"labels in 0\.\.2 .* but got others in 7 pixels"):
        check.look(good, 255)


def test_criterion_copies_and_moves_like_any_module():
    criterion = build_loss("fl+mdca", weight=[1, 2, 3, 4])
    logits, labels = batch(3, 3)
    assert torch.equal(copy.deepcopy(criterion)(logits, labels), criterion(logits, labels))
    assert "weight" in dict(criterion.named_buffers())
    assert "fl+mdca" in repr(criterion)


def test_public_names():
    assert segcal.build_loss is build_loss
    assert isinstance(segcal.build_loss("nll"), segcal.Criterion)
