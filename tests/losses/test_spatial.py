"""Windows of svls and nacl by hand, with ignored neighbours, in one to three dimensions."""

import math

import pytest
import torch

from segcal.losses import build_loss

EDGE, CORNER, FAR = (math.exp(-square / 2) for square in (1, 2, 3))  # sigma 1


def target(spatial, labels, at, sigma=1.0):
    """The smoothed label of one pixel: what makes the gradient of its svls p − q."""
    classes = int(labels[labels != 255].max()) + 1
    logits = torch.zeros(1, classes, *spatial, dtype=torch.float64, requires_grad=True)
    build_loss("svls", sigma=sigma)(logits, labels[None]).backward()
    count = (labels != 255).sum()
    return (1 / classes - logits.grad[(0, slice(None), *at)] * count).tolist()


def test_svls_middle_of_three_by_three():
    labels = torch.tensor([[0, 1, 2], [0, 0, 2], [255, 1, 255]])
    middle = 4 * EDGE + 4 * CORNER  # as much as all eight, ignored or not
    total = middle + 4 * EDGE + 2 * CORNER  # two corners are ignored
    expected = [
        (middle + EDGE + CORNER) / total,  # itself, left, upper left
        2 * EDGE / total,  # above and below
        (EDGE + CORNER) / total,  # right, upper right
    ]
    assert target((3, 3), labels, (1, 1)) == pytest.approx(expected, abs=1e-12)


def test_svls_corner_repeats_the_border():
    labels = torch.tensor([[0, 1, 2], [2, 255, 2], [2, 2, 2]])
    # Row and column −1 are those of 0: of the eight places, the upper left, upper and left are the
    # pixel itself, upper right and right class 1, lower left and lower class 2, and one ignored.
    own, right, below = CORNER + 2 * EDGE, CORNER + EDGE, CORNER + EDGE
    middle = 4 * EDGE + 4 * CORNER
    total = middle + own + right + below
    expected = [(middle + own) / total, right / total, below / total]
    assert target((3, 3), labels, (0, 0)) == pytest.approx(expected, abs=1e-12)


def test_svls_half_and_half_in_three_dimensions():
    labels = torch.ones(3, 3, 3, dtype=torch.int64)
    labels[1, 1, 1] = 0
    assert target((3, 3, 3), labels, (1, 1, 1)) == pytest.approx([0.5, 0.5], abs=1e-12)
    labels[0, 0, 0] = labels[0, 0, 1] = labels[0, 1, 1] = 255  # a corner, an edge, a face
    middle = 6 * EDGE + 12 * CORNER + 8 * FAR
    rest = 5 * EDGE + 11 * CORNER + 7 * FAR
    expected = [middle / (middle + rest), rest / (middle + rest)]
    assert target((3, 3, 3), labels, (1, 1, 1)) == pytest.approx(expected, abs=1e-12)


def test_svls_of_a_row():
    labels = torch.tensor([0, 1, 1, 255, 2])  # weights of a row: 1/2 itself, 1/4 each neighbour
    assert target((5,), labels, (0,)) == pytest.approx([3 / 4, 1 / 4, 0], abs=1e-12)
    assert target((5,), labels, (1,)) == pytest.approx([1 / 4, 3 / 4, 0], abs=1e-12)
    assert target((5,), labels, (2,)) == pytest.approx([0, 1, 0], abs=1e-12)
    assert target((5,), labels, (4,)) == pytest.approx([0, 0, 1], abs=1e-12)


@pytest.mark.parametrize("sigma", [1e-3, 1e3])
def test_svls_of_any_width_is_half_own_half_neighbours(sigma):
    labels = torch.ones(3, 3, dtype=torch.int64)
    labels[1, 1] = 0
    assert target((3, 3), labels, (1, 1), sigma) == pytest.approx([0.5, 0.5], abs=1e-12)


def nacl(labels, logits):
    return float(build_loss("nll+nacl").terms(logits, labels)["nacl"])


def shares(labels, classes, at):
    """τ of one pixel: all others are moved out of the way, then |τ − z| is read at z = 10."""
    logits = torch.zeros(1, classes, *labels.shape, dtype=torch.float64)
    base = nacl(labels[None], logits)
    found = []
    for c in range(classes):
        moved = logits.clone()
        moved[(0, c, *at)] = 10.0  # |τ| becomes 10 − τ
        change = (nacl(labels[None], moved) - base) * int((labels != 255).sum()) * classes
        found.append((10 - change) / 2)
    return found


def test_nacl_shares_of_three_by_three():
    labels = torch.tensor([[0, 1, 2], [0, 0, 2], [255, 1, 255]])
    assert shares(labels, 3, (1, 1)) == pytest.approx([3 / 7, 2 / 7, 2 / 7], abs=1e-12)
    # Beyond the border there is nothing: four pixels, all labelled.
    assert shares(labels, 3, (0, 0)) == pytest.approx([3 / 4, 1 / 4, 0], abs=1e-12)
    assert shares(labels, 3, (2, 1)) == pytest.approx([2 / 4, 1 / 4, 1 / 4], abs=1e-12)


def test_nacl_shares_in_one_and_three_dimensions():
    assert shares(torch.tensor([1, 0, 255, 1]), 2, (1,)) == pytest.approx([1 / 2, 1 / 2], abs=1e-12)
    labels = torch.ones(3, 3, 3, dtype=torch.int64)
    labels[1, 1, 1], labels[0, 0, 0] = 0, 255
    assert shares(labels, 2, (1, 1, 1)) == pytest.approx([1 / 26, 25 / 26], abs=1e-12)
    assert shares(labels, 2, (2, 2, 2)) == pytest.approx([1 / 8, 7 / 8], abs=1e-12)


@pytest.mark.parametrize("spec", ["svls", "nll+nacl"])
def test_a_side_of_one_is_no_axis(spec):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    labels = torch.randint(0, 3, (2, 4, 5), generator=generator)
    flat = build_loss(spec)(logits, labels)
    assert torch.equal(flat, build_loss(spec)(logits.unsqueeze(3), labels.unsqueeze(2)))


@pytest.mark.parametrize("spec", ["svls", "nll+nacl"])
def test_classification_has_no_neighbours_and_four_axes_are_too_many(spec):
    with pytest.warns(UserWarning, match="classification has none"):
        build_loss(spec)(torch.zeros(2, 3, 1, 1), torch.zeros(2, 1, 1).long())
    with pytest.raises(ValueError, match="at most 3 spatial axes"):
        build_loss(spec)(torch.zeros(1, 3, 2, 2, 2, 2), torch.zeros(1, 2, 2, 2, 2).long())


def test_svls_of_classification_is_nll():
    logits, labels = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 4
    with pytest.warns(UserWarning, match="it is nll there"):
        value = build_loss("svls")(logits, labels)
    assert float(value) == pytest.approx(float(build_loss("nll")(logits, labels)), abs=1e-12)
