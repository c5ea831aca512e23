"""Laws that every loss of the grammar keeps, against literal formulas and by hand."""

import contextlib
import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import segcal
from segcal.losses import AUXILIARY_LOSSES, BASE_LOSSES, build_loss
from segcal.losses.auxiliary import sampled_pixels
from segcal.losses.softmax import LossBatch
from segcal.pixels import flatten
from tests.support.loss_batches import FEW, LOSSES, batch
from tests.support.loss_oracles import ORACLES, images_of

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=str)
a_few = pytest.mark.parametrize("loss", FEW, ids=str)
# Classification has no neighbours; what the losses say of that is looked at once, further down.
pytestmark = pytest.mark.filterwarnings("ignore:.*looks at neighbouring pixels")


def oracle(loss, images, beta):
    """The loss by literal loops over the valid pixels, each auxiliary with the weight beta."""
    total = 0.0
    for name, weight in zip(loss.spec.split("+"), [1.0, *[beta] * 99], strict=False):
        function = ORACLES[name]
        taken = inspect.signature(function).parameters.keys() & loss.hyper
        total += weight * function(images, **{key: loss.hyper[key] for key in taken})
    return total


def alone(name, logits, labels, **hyper):
    """One loss of either dict alone."""
    spec = name if name in BASE_LOSSES else f"nll+{name}"
    return build_loss(spec, **hyper).terms(logits, labels)[name]


def test_every_loss_has_an_oracle():
    assert set(ORACLES) == set(BASE_LOSSES) | set(AUXILIARY_LOSSES)


@pytest.mark.parametrize(
    ("loss", "spatial"),
    [(loss, (5, 6)) for loss in LOSSES]
    + [(loss, spatial) for loss in FEW for spatial in [(), (7,), (2, 3, 3)]],
    ids=str,
)
def test_equals_the_literal_formula(loss, spatial):
    logits, labels = batch(*spatial, n=3 if spatial else 12)
    beta = dict.fromkeys(loss.spec.split("+")[1:], 2.5)
    criterion = loss.build(beta=beta or None)
    expected = oracle(loss, images_of(logits, labels), 2.5)
    assert float(criterion(logits, labels)) == pytest.approx(expected, abs=1e-9)
    single = criterion(logits.float(), labels)
    assert single.dtype is torch.float32
    assert float(single) == pytest.approx(expected, abs=1e-6, rel=1e-6)


# Two pixels, two classes: p = (3/4, 1/4) with label 0, and p = (3/5, 2/5) with label 1.
HAND_LOGITS = torch.tensor([[3.0, 1.0], [3.0, 2.0]], dtype=torch.float64).log()
HAND_LABELS = torch.tensor([0, 1])
DICE = 1 - (2 * 0.75 / (1.35 + 1) + 2 * 0.4 / (0.65 + 1)) / 2
FOCAL = -(0.25**3 * math.log(0.75) + 0.6**3 * math.log(0.4)) / 2
BY_HAND = {
    "nll": -(math.log(0.75) + math.log(0.4)) / 2,
    "ls": -(
        (0.9 * math.log(0.75) + 0.1 * math.log(0.25)) + (0.9 * math.log(0.4) + 0.1 * math.log(0.6))
    )
    / 2,
    "fl": FOCAL,
    "flsd": FOCAL,
    # p_j is 1/4 below 3/4, and there is none below 2/5.
    "dual": -(0.5**5 * math.log(0.75) + 0.6**5 * math.log(0.4)) / 2,
    "brier": (2 * 0.25**2 + 2 * 0.6**2) / 2,
    "svls": -(math.log(0.75) + math.log(0.4)) / 2,  # no neighbours
    "dice": DICE,
    "dicece": DICE - (math.log(0.75) + math.log(0.4)) / 2,
    "mdca": 0.175,  # both classes: |(0.75 + 0.6) / 2 − 1/2|
    "dca": 0.175,  # (0.75 + 0.6) / 2 − 1/2
    # One right with 1 − r = 0.25, one wrong with r = 0.6.
    "mmce": math.sqrt(0.25**2 + 0.6**2 - 2 * 0.25 * 0.6 * math.exp(-0.15 / 0.4) + 1e-10),
    "cp": sum(p * math.log(p) for p in (0.75, 0.25, 0.6, 0.4)) / 2,
    "mbls": 0.0,  # no two logits lie 10 apart
    # One-hot labels (1, 0) and (0, 1) against the logits (ln 3, 0) and (ln 3, ln 2).
    "nacl": ((math.log(3) - 1) + 0 + math.log(3) + (1 - math.log(2))) / 4,
    "ace": (0.25 + 0.6) / 2,  # each image has one pixel, in one bin of the class that is there
    # Bins 12 and 9 of 15, each with one pixel; the rank of the label is sharp.
    "dece": (0.25 + 0.6) / 2,
}


@pytest.mark.parametrize("name", ORACLES)
def test_two_pixels_by_hand(name):
    exact = 1e-3 if name == "dece" else 1e-12  # soft bins and soft ranks are never quite sharp
    assert float(alone(name, HAND_LOGITS, HAND_LABELS)) == pytest.approx(BY_HAND[name], abs=exact)


def test_flsd_uses_gamma_five_below_a_fifth():
    logits = torch.tensor([[1.0, 9.0]], dtype=torch.float64).log()  # p_y = 0.1
    value = build_loss("flsd")(logits, torch.tensor([0]))
    assert float(value) == pytest.approx(-(0.9**5) * math.log(0.1), abs=1e-12)


@every_loss
def test_classification_is_a_one_by_one_image_bitwise(loss):
    logits, labels = batch(n=64, k=5, dtype=torch.float32)
    criterion = loss.build()
    flat, image = logits.clone().requires_grad_(), logits[..., None, None].clone().requires_grad_()
    a, b = criterion(flat, labels), criterion(image, labels[:, None, None])
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(flat.grad, image.grad[..., 0, 0])


@every_loss
def test_gradcheck(loss):
    logits, labels = batch(2, 3, n=2)
    criterion = loss.build()
    assert torch.autograd.gradcheck(lambda z: criterion(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("name", ["dual", *AUXILIARY_LOSSES])
def test_each_term_alone_has_its_own_gradient(name):
    logits, labels = batch(2, 2, n=2)
    criterion = build_loss("dual+" + "+".join(AUXILIARY_LOSSES), margin=1.0)
    assert torch.autograd.gradcheck(
        lambda z: criterion.terms(z, labels)[name], logits.requires_grad_()
    )


@every_loss
def test_ignored_pixels_touch_nothing(loss):
    logits, labels = batch(4, 4, ignored=0.4)
    values, gradients = [], []
    for garbage in (0.0, torch.nan, torch.inf):
        z = logits.clone()
        z.movedim(1, -1)[labels == 255] = garbage
        value = loss.build()(z.requires_grad_(), labels)
        value.backward()
        values.append(value.detach())
        gradients.append(z.grad)
        assert torch.all(z.grad.movedim(1, -1)[labels == 255] == 0)
    assert all(torch.equal(value, values[0]) for value in values)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@every_loss
def test_all_ignored_is_zero_with_zero_gradient(loss):
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 3, 4, 4).to(dtype).requires_grad_()
        value = loss.build()(logits, torch.full((2, 4, 4), 255, dtype=torch.uint8))
        value.backward()
        assert value == 0
        assert torch.equal(logits.grad, torch.zeros_like(logits))


@every_loss
def test_extreme_logits_one_class_and_one_pixel_stay_finite(loss):
    criterion = loss.build()
    wild = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [0.0, 0.0, 0.0], [-1e4, 0.0, 1e4]])
    for logits, labels in [
        (wild, torch.tensor([0, 0, 1, 2])),
        (wild, torch.tensor([1, 1, 1, 1])),
        (wild[:1], torch.tensor([1])),
        (wild[:1], torch.tensor([0])),
    ]:
        logits = logits.clone().requires_grad_()
        value = criterion(logits, labels)
        value.backward()
        assert value.isfinite()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "hyper"),
    [("fl", {"gamma": 0.0}), ("dual", {"gamma": 0.0}), ("ls", {"alpha": 0.0})],
)
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
    with pytest.raises(ValueError, match=r"class weights .*\(2,\)"):
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
    assert float(alone("mdca", logits, labels)) == pytest.approx(0, abs=1e-7)
    # One pixel sure of class 0 and labelled 1: (1 + 1 + 0) / 3, class 2 being absent.
    assert float(alone("mdca", logits[:1], labels[:1])) == pytest.approx(2 / 3, abs=1e-7)


def test_leaving_ignored_pixels_in_the_mean_would_show():
    logits, labels = batch(64, 64, n=2, k=21, ignored=0.05)
    pixels = flatten(logits, labels)
    exact = ORACLES["mdca"](images_of(logits, labels))
    assert float(alone("mdca", logits, labels)) == pytest.approx(exact, abs=1e-9)
    count = len(pixels.target[pixels.valid])
    frequency = F.one_hot(pixels.target[pixels.valid], 21).sum(0) / count
    leaky = (logits.softmax(1).sum((0, 2, 3)) / count - frequency).abs().mean()
    assert float(leaky) > 1.2 * exact


@given(seed=st.integers(0, 50), extra=st.integers(0, 40))
def test_mmce_sample_takes_distinct_valid_pixels_spread_over_the_batch(seed, extra):
    valid = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed)) < 0.7
    count = int(valid.sum())
    size = max(2, count - extra)
    pixels = flatten(torch.zeros(3, 2, 20), torch.where(valid, 0, 255))
    index, mine, drawn = sampled_pixels(LossBatch(pixels), size, seed)
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
    index, _, _ = sampled_pixels(LossBatch(pixels), 100, 3)
    rows = pixels.dense.movedim(1, 2).reshape(-1, 4)[index]
    expected = ORACLES["mmce"](images_of(rows, pixels.target.flatten()[index]))
    assert float(value) == pytest.approx(expected, abs=1e-9)
    assert torch.equal(value, criterion.terms(logits, labels)["mmce"])
    other = build_loss("nll+mmce", sample=100, seed=4).terms(logits, labels)["mmce"]
    assert not torch.equal(value, other)


@a_few
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_computed_in_float32(loss, dtype):
    logits, labels = batch(4, 4, dtype=torch.float32)
    half = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss.build()(half, labels)
    value.backward()
    assert value.dtype is torch.float32
    assert half.grad.dtype is dtype
    assert torch.equal(value, loss.build()(half.float(), labels))


@a_few
def test_memory_layout_does_not_matter(loss):
    logits, labels = batch(6, 5)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        z = logits.clone(memory_format=layout).requires_grad_()
        value = loss.build()(z, labels)
        value.backward()
        results.append((value.detach(), z.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=0)


@a_few
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
def test_a_batch_without_pixels_is_zero(loss, shape):
    logits = torch.zeros(shape, requires_grad=True)
    value = loss.build()(logits, torch.zeros(shape[0], *shape[2:]).long())
    value.backward()
    assert value == 0


@every_loss
def test_masked_classes_have_no_probability_or_are_refused(loss):
    """As if the masked classes were not there, where the loss is one of probabilities."""
    for mask in (-math.inf, torch.finfo(torch.float32).min):
        _check_masked(loss, mask)


def _check_masked(loss, mask):
    logits, labels = batch(3, 4, k=5, dtype=torch.float32)
    labels[labels == 4], labels[labels == 2] = 0, 1
    logits[:, [2, 4]] = mask
    logits.requires_grad_()
    terms = set(loss.spec.split("+"))
    if terms & {"ls", "mbls", "nacl"}:
        with pytest.raises(ValueError, match=r"(ls|mbls|nacl) counts every class"):
            loss.build()(logits, labels)
        return
    value = loss.build()(logits, labels)
    value.backward()
    assert value.isfinite() and logits.grad.isfinite().all()
    if terms.isdisjoint({"mdca", "dece"}):  # which count all classes, absent ones too
        others = {0: 0, 1: 1, 3: 2, 255: 255}
        renamed = labels.clone().apply_(others.__getitem__)
        without = loss.build()(logits.detach()[:, [0, 1, 3]], renamed)
        assert float(value.detach()) == pytest.approx(float(without), abs=1e-6)


@a_few
@pytest.mark.parametrize("low", [-2e38, 0.0])
def test_huge_logits_have_a_finite_loss_or_are_refused(loss, low):
    """A difference of 4e38 is more than float32 holds."""
    logits = torch.tensor([[2e38, low, 0.0], [low, 2e38, 0.0], [2e38, low, 1.0]])
    logits = logits.T.reshape(1, 3, 1, 3).clone().requires_grad_()
    labels = torch.tensor([[[0, 1, 1]]])
    try:
        value = loss.build()(logits, labels)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    value.backward()
    assert value.isfinite() and logits.grad.isfinite().all()


@a_few
def test_labels_may_be_of_16_bits(loss):
    logits, labels = batch(3, 4)
    assert torch.equal(loss.build()(logits, labels.to(torch.uint16)), loss.build()(logits, labels))


@pytest.mark.parametrize("spec", ["nll", "fl", "dual", "svls", "dicece"])
def test_a_label_of_a_masked_class_is_refused(spec):
    logits, labels = batch(3, 4, dtype=torch.float32)
    logits[:, 1] = -math.inf
    with pytest.raises(ValueError, match="masked"):
        build_loss(spec)(logits, labels)


@pytest.mark.parametrize(
    "hyper", [{"spec": "nll"}, {"spec": "nll+ace"}, {"spec": "nll+ace", "soft": True}]
)
def test_a_loss_that_has_diverged_is_returned_as_it_is(hyper):
    logits, labels = batch(3, 4, dtype=torch.float32)
    for value in (math.nan, math.inf):
        bad = logits.clone()
        bad[0] = value
        assert not build_loss(**hyper)(bad, labels).isfinite()


def test_where_a_check_would_stall_bad_labels_are_counted_and_reported_later(monkeypatch):
    """As on an accelerator, whose stand-in is the meta device, which raises if it is looked at."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    criterion = build_loss("nll")
    for _ in range(49):
        criterion(torch.zeros(1, 3, 2, device="meta"), torch.zeros(1, 2, device="meta").long())
    assert criterion._outside.device.type == "meta"
    criterion._outside = torch.tensor(7)
    with pytest.raises(ValueError, match="7 labels of earlier batches"):
        criterion.check_labels()
    criterion.check_labels()  # is not said twice
    assert not criterion.state_dict()


@pytest.mark.parametrize("classes", [255, 256])
def test_the_ignored_label_is_255_unless_that_is_a_class(classes):
    logits, labels = batch(4, 4, k=classes)
    ignored = 255 if classes == 255 else -100
    labels = labels.masked_fill(labels == 255, ignored)
    labels[0, 0, 0] = classes - 1
    expected = F.cross_entropy(logits, labels, ignore_index=ignored)
    assert float(build_loss("nll")(logits, labels)) == pytest.approx(float(expected), abs=1e-12)
    with pytest.raises(ValueError, match="ignore_index"):
        build_loss("nll", ignore_index=7)(logits, labels)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])
def test_ace_in_float32_has_the_value_of_float64(scale, soft):
    """Of near-uniform probabilities too, all of which lie at the centre of a bin: 1/8 = 2.5/20."""
    logits, labels = batch(90, 130, k=8, ignored=0.1)
    # The same logits for both, so that no probability is in another bin.
    logits = (scale * logits).float()
    single, double = (alone("ace", z, labels, soft=soft) for z in (logits, logits.double()))
    assert single.item() == pytest.approx(double.item(), abs=2e-7, rel=1e-6)


def test_criterion_copies_and_moves_like_any_module():
    criterion = build_loss("fl+mdca", weight=[1, 2, 3, 4])
    logits, labels = batch(3, 3)
    assert torch.equal(copy.deepcopy(criterion)(logits, labels), criterion(logits, labels))
    assert "weight" in dict(criterion.named_buffers())
    assert "fl+mdca" in repr(criterion)


def test_public_names():
    assert segcal.build_loss is build_loss
    assert isinstance(segcal.build_loss("nll"), segcal.Criterion)
