"""W ranks with uneven shares give the loss and the gradient of one rank with everything."""

import pytest
import torch
from torch import nn

from segcal.losses import AUXILIARY_LOSSES, build_loss, hyper_names
from tests.support.loss_batches import FEW, LOSSES, Loss, batch
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow  # starts processes

# Images of the one batch that each rank holds. The second has no valid pixel in "ignored", and no
# image in "empty".
SHARES = {
    "uneven": (slice(0, 4), slice(4, 5)),
    "ignored": (slice(0, 5), slice(5, 6)),
    "empty": (slice(0, 5), slice(0, 0)),
}
# A sample that takes a part of the batch, besides the usual one that takes it whole.
SAMPLED = [
    Loss(s.spec, {**s.hyper, "sample": 50}) for s in LOSSES if "sample" in hyper_names(s.spec)
]
CASES = {str(loss): (loss, False) for loss in [*LOSSES, *SAMPLED]}
CASES["multilabel"] = (Loss("dicece+" + "+".join(AUXILIARY_LOSSES), {"sample": 50}), True)
# Every loss where ranks differ most, and a few where one of them has nothing to count.
COMPARED = [
    (share, name)
    for share in SHARES
    for name in CASES
    if share == "uneven" or name in {*map(str, [*FEW, *SAMPLED]), "multilabel"}
]


def whole_batch(multilabel):
    features, labels = batch(6, 7, n=6, k=5, ignored=0.3)
    if multilabel:
        generator = torch.Generator().manual_seed(2)
        labels = torch.randint(0, 2, features.shape, generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = 255
        labels[:, 3] = 255  # a class without any label
    labels[5] = 255
    return features, labels


def network():
    torch.manual_seed(1)
    return nn.Conv2d(5, 5, 3, padding=1, dtype=torch.float64)


def on_rank(rank):
    """Every loss and the gradient DDP makes of it, for this rank's share of the batch."""
    out = {}
    net = nn.parallel.DistributedDataParallel(network())
    for share, name in COMPARED:
        loss, multilabel = CASES[name]
        features, labels = (part[SHARES[share][rank]] for part in whole_batch(multilabel))
        net.zero_grad()
        value = loss.build(multilabel=multilabel)(net(features), labels)
        value.backward()
        out[share, name] = (value.detach(), *(p.grad.clone() for p in net.parameters()))
    for share, slices in SHARES.items():
        features, labels = (part[slices[rank]] for part in whole_batch(False))
        out[share] = build_loss("nll+mdca", sync=False)(network()(features), labels).detach()
    return out


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(on_rank)


@pytest.mark.parametrize(("share", "name"), COMPARED)
def test_two_ranks_equal_one(ranks, share, name):
    loss, multilabel = CASES[name]
    features, labels = whole_batch(multilabel)
    held = slice(0, 6 if share == "ignored" else 5)
    net = network()
    value = loss.build(multilabel=multilabel)(net(features[held]), labels[held])
    value.backward()
    expected = (value.detach(), net.weight.grad, net.bias.grad)
    for result in ranks:
        torch.testing.assert_close(result[share, name], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("share", SHARES)
def test_without_sync_a_rank_sees_its_own_share_only(ranks, share):
    features, labels = whole_batch(False)
    for mine, result in zip(SHARES[share], ranks, strict=True):
        alone = build_loss("nll+mdca")(network()(features[mine]), labels[mine])
        torch.testing.assert_close(result[share], alone.detach())
