"""W ranks with uneven shares give the loss and the gradient of one rank with everything."""

import pytest
import torch
from torch import nn

from segcal.losses import build_loss
from tests.support.loss_batches import SPECS, batch
from tests.support.ranks import run_on_ranks

# Images of the one batch that each rank holds; in "empty" the second has no valid pixel at all.
SHARES = {"uneven": (slice(0, 4), slice(4, 5)), "empty": (slice(0, 5), slice(5, 6))}
# With pixel samples for MMCE that take the whole batch and a part of it.
CASES = [(share, sample) for share in SHARES for sample in (512, 50)]


def whole_batch():
    features, labels = batch(6, 7, n=6, k=4, ignored=0.3)
    labels[5] = 255
    return features, labels


def network():
    torch.manual_seed(1)
    return nn.Conv2d(4, 5, 3, padding=1, dtype=torch.float64)


def criterion(spec, sample):
    return build_loss(spec, **({"sample": sample} if "mmce" in spec else {}))


def on_rank(rank):
    """Every spec's loss and the gradient DDP makes of it, for this rank's share of the batch."""
    out = {}
    for share, sample in CASES:
        features, labels = (part[SHARES[share][rank]] for part in whole_batch())
        for spec in SPECS:
            net = nn.parallel.DistributedDataParallel(network())
            loss = criterion(spec, sample)(net(features), labels)
            loss.backward()
            gradients = (net.module.weight.grad, net.module.bias.grad)
            out[share, sample, spec] = (loss.detach(), *gradients)
        out[share] = build_loss("nll+mdca", sync=False)(network()(features), labels).detach()
    return out


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(on_rank)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("share", "sample"), CASES)
def test_two_ranks_equal_one(ranks, share, sample, spec):
    features, labels = whole_batch()
    held = slice(0, 5 if share == "uneven" else 6)
    net = network()
    loss = criterion(spec, sample)(net(features[held]), labels[held])
    loss.backward()
    expected = (loss.detach(), net.weight.grad, net.bias.grad)
    for result in ranks:
        torch.testing.assert_close(result[share, sample, spec], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("share", SHARES)
def test_without_sync_a_rank_sees_its_own_share_only(ranks, share):
    features, labels = whole_batch()
    for mine, result in zip(SHARES[share], ranks, strict=True):
        alone = build_loss("nll+mdca")(network()(features[mine]), labels[mine])
        torch.testing.assert_close(result[share], alone.detach())
