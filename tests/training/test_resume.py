"""A run cut at any moment and resumed ends as if it had not been: weights, log, best, all bits."""

import os
import signal

import pytest
import torch

from segcal.training import checkpoint
from segcal.training.signals import Interrupted
from tests.support.small_run import expect_equal, outcome
from tests.support.tiny import Patches, trainer

RUN = {"epochs": 2, "ema": 0.9, "save_every": 3, "mixup": 0.3}  # 8 steps of 8 reads


class Cut(BaseException):
    """What SIGKILL is to a process: nobody catches it, nothing is tidied up."""


def after(calls, action):
    """A function that does nothing but at its `calls`-th call."""
    count = iter(range(1, calls + 1))

    def call(*_):
        if next(count, None) == calls:
            action()

    return call


def die():
    raise Cut


def finish(folder, **options):
    """Resume the run in `folder` as if nothing had happened, and end it."""
    run = trainer(folder, **{**RUN, **options})
    state = checkpoint.load_last(folder)
    if state is not None:
        torch.rand(7)  # a new process has drawn other numbers
        run.restore(state)
    run.fit()
    return outcome(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer(folder, **RUN).fit()
    return outcome(folder)


@pytest.mark.parametrize("reads", [1, 30, 32, 33, 64])
def test_cut_while_training(tmp_path, uninterrupted, reads):
    with pytest.raises(Cut):
        trainer(tmp_path, train=Patches(on_read=after(reads, die)), **RUN).fit()
    expect_equal(finish(tmp_path), uninterrupted)


@pytest.mark.parametrize("reads", [2, 15, 29])  # the first is the trainer's look at a label
def test_cut_while_evaluating(tmp_path, uninterrupted, reads):
    with pytest.raises(Cut):
        trainer(tmp_path, holdout=Patches(14, seed=1, on_read=after(reads, die)), **RUN).fit()
    expect_equal(finish(tmp_path), uninterrupted)


def test_cut_before_or_after_every_rename_of_a_run(tmp_path, uninterrupted, monkeypatch):
    """Files change only by being renamed, so these are all the states a kill can leave."""
    replace = os.replace
    moments = 0
    while True:
        folder = tmp_path / str(moments)
        folder.mkdir()
        cut = after(moments + 1, die)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda a, b, cut=cut: (cut(), replace(a, b)))
            try:
                trainer(folder, **RUN).fit()
                break  # fewer renames than that: every one was tried
            except Cut:
                pass
        expect_equal(finish(folder), uninterrupted)
        moments += 1
    assert moments == 15  # of 4 checkpoints, 2 best and 2 logs


def test_cut_again_and_again(tmp_path, uninterrupted):
    for reads in (30, 20, 20):
        with pytest.raises(Cut):
            run = trainer(tmp_path, train=Patches(on_read=after(reads, die)), **RUN)
            state = checkpoint.load_last(tmp_path)
            if state is not None:
                run.restore(state)
            run.fit()
    expect_equal(finish(tmp_path), uninterrupted)


@pytest.mark.parametrize(("number", "reads"), [(signal.SIGINT, 3), (signal.SIGTERM, 40)])
def test_a_signal_saves_after_the_step(tmp_path, uninterrupted, number, reads):
    data = Patches(on_read=after(reads, lambda: os.kill(os.getpid(), number)))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stop:
        trainer(tmp_path, train=data, **RUN).fit()
    assert stop.value.signal == number
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert checkpoint.read_checkpoint(tmp_path / "last.pt")["learner"]["steps"] == -(-reads // 8)
    expect_equal(finish(tmp_path), uninterrupted)


def test_a_signal_during_evaluation_does_not_wait_for_its_end(tmp_path, uninterrupted):
    reads = []
    holdout = Patches(14, seed=1)
    kill = after(17, lambda: os.kill(os.getpid(), signal.SIGTERM))  # in the second evaluation
    holdout.on_read = lambda: (reads.append(1), kill())
    with pytest.raises(Interrupted):
        trainer(tmp_path, holdout=holdout, **RUN).fit()
    assert len(reads) < 1 + 2 * 14
    expect_equal(finish(tmp_path), uninterrupted)


def test_fp16_scaler_is_restored(tmp_path):
    (tmp_path / "whole").mkdir(), (tmp_path / "cut").mkdir()
    trainer(tmp_path / "whole", precision="fp16", **RUN).fit()
    with pytest.raises(Cut):
        data = Patches(on_read=after(50, die))
        trainer(tmp_path / "cut", precision="fp16", train=data, **RUN).fit()
    resumed = finish(tmp_path / "cut", precision="fp16")
    assert resumed["last"]["learner"]["scaler"]["scale"] > 0
    expect_equal(resumed, outcome(tmp_path / "whole"))


def test_a_longer_run_can_be_asked_for(tmp_path):
    trainer(tmp_path, epochs=2).fit()
    run = trainer(tmp_path, epochs=4)
    run.restore(checkpoint.load_last(tmp_path))
    assert [record["epoch"] for record in run.fit()] == [1, 2, 3, 4]


def test_data_of_another_fingerprint_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Patches, "fingerprint", lambda self: "as it was", raising=False)
    trainer(tmp_path).fit()
    state = checkpoint.load_last(tmp_path)
    trainer(tmp_path).restore(state)
    assert not caplog.messages
    monkeypatch.setattr(Patches, "fingerprint", lambda self: "edited")
    trainer(tmp_path).restore(state)
    assert "other names, sizes or times" in caplog.text


def test_other_data_or_fewer_epochs_are_refused(tmp_path):
    trainer(tmp_path).fit()
    state = checkpoint.load_last(tmp_path)
    with pytest.raises(ValueError, match=r"Expected the 36 training samples .* but got 30"):
        trainer(tmp_path, train=Patches(30)).restore(state)
    with pytest.raises(ValueError, match=r"epochs: 3 are done"):
        trainer(tmp_path, epochs=2).restore(state)
