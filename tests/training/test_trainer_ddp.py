"""Several processes train as one does: same losses, same weights, same numbers in the log."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch

from segcal.training import checkpoint
from segcal.training.signals import Interrupted
from tests.support import ROOT
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Patches, Uneven, network, steady_network, trainer

pytestmark = pytest.mark.slow  # starts processes


def fit(*, folder=None, data=None, **options):
    """Train, or go on training; losses and scores, weights, and the signal that stopped it."""
    options = {"epochs": 2, "model": steady_network, **options}
    run = trainer(folder, train=data or Uneven(), **options)
    if folder is not None and (folder / "last.pt").exists():
        run.restore(checkpoint.load_last(folder))
    stopped = 0
    try:
        run.fit()
    except Interrupted as stop:
        stopped = stop.signal
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in run.history]
    weights = {k: v.detach().clone() for k, v in run.learner.evaluated.state_dict().items()}
    return records, weights, stopped


ALIKE = {
    "global batch statistics": {"loss": "fl+mdca", "data": Patches()},
    "average of the weights": {"loss": "nll+mmce", "ema": 0.9, "data": Patches()},
    "pieces": {"loss": "nll"},
    "mixup in pieces": {"loss": "svls", "mixup": 0.4},
}
PIECES = {
    name: {"accumulate": 2} for name in ("pieces", "mixup in pieces")
}  # what the two processes do otherwise


def on_one_rank(rank, folder):
    """All that is asked of two processes, in one go: starting them is what takes long."""
    alike = {name: fit(**(options | PIECES.get(name, {}))) for name, options in ALIKE.items()}
    noisy = {"model": network, "save_every": 3}  # dropout draws differ between the processes
    whole = fit(**noisy, data=Patches())
    data = Patches()
    if rank == 1:
        reads = iter(range(1000))
        data.on_read = lambda: next(reads) == 10 and os.kill(os.getpid(), signal.SIGTERM)
    stopped = fit(**noisy, folder=folder, data=data)[2]
    return alike, whole, stopped, fit(**noisy, folder=folder, data=Patches())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(on_one_rank, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_equal_one(ranks, name):
    records, weights, _ = fit(**ALIKE[name])
    for alike, *_ in ranks:
        for mine, theirs in zip(records, alike[name][0], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)
        for key, weight in weights.items():
            torch.testing.assert_close(alike[name][1][key], weight, rtol=1e-4, atol=1e-5)


def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_bit_for_bit(ranks):
    for _, whole, stopped, resumed in ranks:
        assert stopped == signal.SIGTERM
        assert resumed[0] == whole[0]
        assert all(torch.equal(resumed[1][key], weight) for key, weight in whole[1].items())


def test_torchrun_gives_the_loss_curve_of_one_process(tmp_path):
    """The commands as typed, on the scenes, with a network whose statistics are per image."""
    script = str(ROOT / "tools/train_seg.py")
    options = (
        "--loss fl+mdca --data.limit 24 --batch_size 8 --epochs 2 --model.norm group "
        "--model.width 4 --workers 0 --device cpu"
    )
    commands = {
        "one": [sys.executable, script],
        "two": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", script),
        ],
    }
    logs, weights = {}, {}
    for name, command in commands.items():
        done = subprocess.run(
            [*command, "--out", str(tmp_path / name), *shlex.split(options)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("best by accuracy") == 1  # said once, not by every process
        text = (tmp_path / name / "log.jsonl").read_text()
        logs[name] = [json.loads(line) for line in text.splitlines()]
        weights[name] = checkpoint.read_checkpoint(tmp_path / name / "last.pt")["model"]
    for one, two in zip(logs["one"], logs["two"], strict=True):
        one.pop("seconds"), two.pop("seconds")
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    for name, weight in weights["one"].items():
        torch.testing.assert_close(weights["two"][name], weight, rtol=1e-3, atol=1e-5)
