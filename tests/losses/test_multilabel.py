"""Sigmoid outputs: K two-class problems through the same code, and ignored labels of each class."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from segcal.losses import BASE_LOSSES, build_loss
from segcal.pixels import flatten, fold_multilabel
from tests.support.loss_batches import FEW, LOSSES, batch, multilabel_batch
from tests.support.loss_oracles import ORACLES, PER_CLASS, problems_of

a_few = pytest.mark.parametrize("loss", FEW, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:.*looks at neighbouring pixels")


def oracle(name, problems, hyper):
    function = ORACLES[name]
    taken = inspect.signature(function).parameters.keys() & hyper
    options = {key: hyper[key] for key in taken}
    if name in PER_CLASS:
        return sum(function(images, **options) for images in problems) / len(problems)
    if name == "dicece":
        return oracle("dice", problems, hyper) + oracle("nll", problems, hyper)
    if name == "ls" and hyper:  # frequencies are those of a class's own problem
        count = [sum(y is not None for i in images for _, y in i.values()) for images in problems]
        parts = [function(images, **options) for images in problems]
        return sum(c * part for c, part in zip(count, parts, strict=True)) / sum(count)
    return function([image for images in problems for image in images], **options)


@pytest.mark.parametrize(
    ("loss", "spatial"), [(loss, (4, 5)) for loss in LOSSES] + [(loss, ()) for loss in FEW], ids=str
)
def test_equals_the_literal_formula(loss, spatial):
    logits, labels = multilabel_batch(*spatial, n=3 if spatial else 9)
    parts = loss.build(multilabel=True).terms(logits, labels)
    problems = problems_of(logits, labels)
    for name in loss.spec.split("+"):
        expected = oracle(name, problems, loss.hyper)
        assert float(parts[name]) == pytest.approx(expected, abs=1e-9), name


# nacl reads raw logits: those of the pairs (0, z) and (0, −z) are not the same.
@pytest.mark.parametrize("loss", [s for s in FEW if "nacl" not in s.spec], ids=str)
def test_two_exclusive_classes_are_a_softmax_of_two(loss):
    logits, labels = batch(4, 5, k=2)
    margin = logits[:, 1] - logits[:, 0]
    other = torch.where(labels == 255, 255, 1 - labels)
    value = loss.build(multilabel=True)(
        torch.stack([-margin, margin], 1), torch.stack([other, labels], 1)
    )
    assert float(value) == pytest.approx(float(loss.build()(logits, labels)), abs=1e-6)


@a_few
def test_one_output_is_the_binary_problem(loss):
    logits, labels = batch(4, 5, k=1)
    labels = torch.where(labels == 255, 255, (logits[:, 0] > 0.3).long())
    pair = torch.cat([torch.zeros_like(logits), logits], 1)
    expected = loss.build()(pair, labels)
    for shaped in (labels, labels.unsqueeze(1)):
        value = loss.build(multilabel=True)(logits, shaped)
        assert float(value) == pytest.approx(float(expected), abs=1e-12)


def test_nll_is_torchs_binary_cross_entropy_over_what_is_labelled():
    logits, labels = multilabel_batch(4, 5)
    logits.requires_grad_()
    value = build_loss("nll", multilabel=True)(logits, labels)
    known = labels != 255
    expected = F.binary_cross_entropy_with_logits(logits[known], labels[known].double())
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=0)
    got, wanted = (torch.autograd.grad(v, logits)[0] for v in (value, expected))
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


@a_few
def test_gradcheck(loss):
    logits, labels = multilabel_batch(2, 2, n=2, k=2)
    criterion = loss.build(multilabel=True)
    assert torch.autograd.gradcheck(lambda z: criterion(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("name", sorted(PER_CLASS))
def test_classes_do_not_cancel_and_unlabelled_ones_are_left_out(name):
    """One class too sure, the other too unsure: pooled they would look calibrated."""
    logits, labels = multilabel_batch(6, 6, k=2, ignored=0)
    spec = name if name in BASE_LOSSES else f"nll+{name}"
    criterion = build_loss(spec, multilabel=True)
    both = float(criterion.terms(logits, labels)[name])
    ones = []
    for k in range(2):
        masked = torch.full_like(labels, 255)
        masked[:, k] = labels[:, k]
        ones.append(float(criterion.terms(logits, masked)[name]))
    assert both == pytest.approx(sum(ones) / 2, abs=1e-9)
    assert min(ones) > 0


@pytest.mark.parametrize("base", BASE_LOSSES)
def test_weights_are_of_the_classes(base):
    logits, labels = multilabel_batch(4, 4, n=4, k=3, ignored=0)
    weight = torch.tensor([1.0, 0.0, 0.0])
    value = build_loss(base, multilabel=True, weight=weight)(logits, labels)
    first = build_loss(base, multilabel=True)(logits[:, :1], labels[:, :1])
    assert float(value) == pytest.approx(float(first), abs=1e-12)
    with pytest.raises(ValueError, match=r"class weights .*\(2,\)"):
        build_loss(base, multilabel=True, weight=[1.0, 1.0])(logits, labels)


def test_folding_puts_class_k_of_image_n_in_row_n_k():
    logits, labels = multilabel_batch(2, 3, n=2, k=3)
    z, y = fold_multilabel(logits, labels)
    assert z.shape == (6, 2, 2, 3) and y.shape == (6, 2, 3)
    for n in range(2):
        for k in range(3):
            assert torch.equal(z[n * 3 + k, 1], logits[n, k]) and not z[n * 3 + k, 0].any()
            assert torch.equal(y[n * 3 + k], labels[n, k])
    pixels = flatten(logits, labels, multilabel=True)
    assert pixels.problems == 3 and pixels.num_classes == 2
    torch.testing.assert_close(pixels.dense.softmax(1)[:, 1], logits.sigmoid().reshape(6, 6))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((2, 4, 4), r"\(2, 4, 4\)"),
        ((2, 2, 4, 4), r"\(2, 2, 4, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shape, says):
    with pytest.raises(ValueError, match=says):
        build_loss("nll", multilabel=True)(torch.zeros(2, 3, 4, 4), torch.zeros(shape).long())


def test_labels_are_zero_one_or_ignored():
    with pytest.raises(ValueError, match=r"0\.\.1"):
        build_loss("nll", multilabel=True)(torch.zeros(1, 3), torch.tensor([[0, 2, 255]]))
    with pytest.raises(ValueError, match="multilabel=True"):
        build_loss("nll")(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4).long())
