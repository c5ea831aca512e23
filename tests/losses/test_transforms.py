"""Losses under torch.compile and torch.func, and their second derivatives."""

import pytest
import torch

from segcal.losses import build_loss
from tests.support.loss_batches import FEW, batch

a_few = pytest.mark.parametrize("loss", FEW, ids=str)


@pytest.mark.slow
@a_few
def test_a_compiled_loss_is_one_graph_with_the_same_value_and_gradient(loss):
    torch._dynamo.reset()
    logits, labels = batch(4, 5, n=2)
    logits.requires_grad_()
    criterion = loss.build()
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    values = [one(logits, labels) for one in (criterion, compiled)]
    gradients = [torch.autograd.grad(value, logits) for value in values]
    torch.testing.assert_close(values[1], values[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=0)


@pytest.mark.slow
def test_a_compiled_loss_leaves_labels_out_of_range_to_a_later_check():
    torch._dynamo.reset()
    criterion = build_loss("nll")
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    logits, labels = batch(4, 5)
    wrong = labels.clone()
    wrong[0, 0, :3] = torch.tensor([4, -1, 77])
    for _ in range(2):
        value = compiled(logits, wrong)
    assert value == criterion(logits, torch.where(wrong == labels, wrong, 255))
    with pytest.raises(ValueError, match="6 labels of earlier batches"):
        criterion.check_labels()


@a_few
def test_torch_func_and_second_derivatives(loss):
    logits, labels = batch(2, 2, n=2)
    criterion = loss.build()
    gradient = torch.func.grad(criterion)(logits, labels)
    logits.requires_grad_()
    expected = torch.autograd.grad(criterion(logits, labels), logits)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    assert torch.autograd.gradgradcheck(lambda z: criterion(z, labels), logits)


def test_torch_func_by_the_weights_of_a_network():
    """A functional training step, as in meta-learning."""
    images, labels = torch.randn(2, 3, 4, 4), batch(4, 4, n=2)[1]
    network, criterion = torch.nn.Conv2d(3, 4, 1), build_loss("fl+mdca")
    weights = {name: weight.detach() for name, weight in network.named_parameters()}

    def loss(weights):
        return criterion(torch.func.functional_call(network, weights, images), labels)

    gradients, value = torch.func.grad_and_value(loss)(weights)
    expected = criterion(network(images), labels)
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    for name, weight in network.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda z, y: criterion(z[None], y[None]))(network(images), labels)
