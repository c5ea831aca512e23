"""Laws of `segcal.runtime.in_processes`: what shares work out must change no result."""

import os
import signal
import sys
import time

import pytest
import torch

from segcal.runtime import in_processes

THREADS = torch.get_num_threads()


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(THREADS)


@pytest.mark.parametrize("number", range(6))
def test_results_are_in_the_order_of_the_calls(threads, number):
    assert in_processes([lambda i=i: i for i in range(number)]) == list(range(number))


def test_as_many_processes_as_threads_work(threads):
    def call():
        time.sleep(0.2)  # long enough for the others to take one too
        return os.getpid()

    processes = threads if sys.platform == "linux" else 1
    assert len(set(in_processes([call] * 2 * threads))) == processes


@pytest.mark.parametrize("place", range(4))
def test_an_error_is_raised_wherever_it_arose(threads, place):
    with pytest.raises(ZeroDivisionError):
        in_processes([lambda i=i: 1 // (i - place) for i in range(4)])


def test_a_share_whose_process_dies_is_not_lost(threads):
    here = os.getpid()

    def call(i):
        if i == 3 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    assert in_processes([lambda i=i: call(i) for i in range(5)]) == list(range(5))


def test_large_results_arrive(threads):
    found = in_processes([lambda i=i: bytes([i]) * 3_000_000 for i in range(4)])
    assert [(part[0], len(part)) for part in found] == [(i, 3_000_000) for i in range(4)]
