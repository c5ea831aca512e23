"""The order of samples does not depend on processes, pieces, workers or restarts."""

import functools
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from segcal.data.samples import Batches, eval_loader
from segcal.training.order import EpochOrder, permutation


def order(samples=23, *, epochs=3, seed=1, batch_size=4, **options):
    return EpochOrder(samples, batch_size=batch_size, epochs=epochs, seed=seed, **options)


@given(st.integers(1, 60), st.integers(0, 5), st.integers(0, 2**40))
def test_permutation_has_every_sample_once(samples, epoch, seed):
    assert sorted(permutation(samples, seed, epoch)) == list(range(samples))


def test_epochs_and_seeds_differ():
    assert permutation(50, 0, 0) != permutation(50, 0, 1) != permutation(50, 1, 1)


@given(
    st.integers(8, 40),
    st.sampled_from([(8, 1, 1), (8, 2, 1), (8, 4, 2), (8, 1, 4), (6, 3, 1)]),
)
def test_processes_and_pieces_share_the_same_batches(samples, cut):
    batch_size, world_size, accumulate = cut
    whole = list(order(samples, batch_size=batch_size, world_size=1, rank=0))
    shares = [
        list(
            order(
                samples,
                batch_size=batch_size,
                world_size=world_size,
                rank=rank,
                accumulate=accumulate,
            )
        )
        for rank in range(world_size)
    ]
    for step, batch in enumerate(whole):
        pieces = [
            piece
            for share in shares
            for piece in share[step * accumulate : (step + 1) * accumulate]
        ]
        assert functools.reduce(operator.iadd, pieces, []) == batch
    assert all(len(share) == len(whole) * accumulate for share in shares)


@given(st.integers(0, 15))
def test_a_restart_goes_on_where_it_was(first_step):
    whole = list(order())
    assert list(order(first_step=first_step)) == whole[first_step:]
    assert len(order(first_step=first_step)) == 15 - first_step


def test_epoch_travels_with_the_index():
    epochs = [{epoch for epoch, _ in batch} for batch in order()]
    assert epochs == [{0}] * 5 + [{1}] * 5 + [{2}] * 5


def test_bad_batch_sizes():
    with pytest.raises(ValueError, match=r"a multiple of .*, but got 4"):
        order(batch_size=4, world_size=3, rank=0)
    with pytest.raises(ValueError, match=r"at least batch_size=24 training samples, but got 23"):
        order(batch_size=24)


class Numbers(Dataset):
    """Sample i is the number i; some cannot be read."""

    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return 23

    def __getitem__(self, key):
        index = key[1] if isinstance(key, tuple) else key
        if index in self.broken:
            raise ValueError(f"Expected a JPEG, but {index}.jpg is cut short")
        return torch.tensor([float(index)]), torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_keeps_the_order_and_draws_no_random_numbers(workers):
    before = torch.get_rng_state()
    batches = Batches(Numbers(), workers=workers, pin=False, batch_sampler=order())
    labels = [y.tolist() for _, y in batches]
    assert labels == [[index for _, index in batch] for batch in order()]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_arrives_as_it_was_raised(workers):
    with pytest.raises(ValueError, match=r"^Expected a JPEG, but 7.jpg is cut short$"):
        list(eval_loader(Numbers(broken={7}), batch_size=5, workers=workers, pin=False))


def test_evaluation_sees_everything_once_and_in_order():
    labels = [y for _, y in eval_loader(Numbers(), batch_size=5, workers=0, pin=False)]
    assert torch.cat(labels).tolist() == list(range(23))
