"""Grids: chosen on the hold-out, cut and resumed; one driver at a time."""

import os
import signal
import subprocess
import sys
import time

import pytest

from segcal.data.samples import WorkerDied
from segcal.files import locked
from segcal.sweep.plan import Evaluation, Method, Training, merge_methods
from segcal.sweep.pools import Alone, Processes
from segcal.sweep.runner import work
from segcal.sweep.store import GridProgress, Store
from tests.support import ROOT
from tests.support.stepwise import STEPS, Stepwise

PLAIN, TS = Evaluation(), Evaluation("ts")
GRID = tuple((("beta", float(beta)),) for beta in (1, 5, 10))
TUNED = Method("tiny", "nll+mdca", grid=GRID, seeds=(0, 1, 2))
PLAIN_NLL = Method("tiny", "nll", seeds=(0, 1, 2), evaluations=frozenset({PLAIN, TS}))


def run(methods, store, worker):
    return work(methods, store, worker, Alone())


class Fake:
    """Trains in no time; the hold-out likes beta = 5."""

    def __init__(self, fail=(), stop_at=None):
        self.trained, self.evaluated = [], []
        self.fail, self.stop_at = fail, stop_at

    def train(self, run, store):
        if len(self.trained) == self.stop_at:
            raise KeyboardInterrupt
        if run.name in self.fail:
            raise ValueError("loss term 'mdca' is no longer finite at step 7")
        self.trained.append(run.name)
        beta = dict(run.hyper).get("beta", 0.0)
        return {"accuracy": 0.9 - abs(beta - 5) / 100, "nll": 0.3, "ece": 0.01}

    def evaluate(self, run, store, evaluations):
        for evaluation in evaluations:
            self.evaluated.append((run.name, evaluation.name))
            path = store.report(run, evaluation)
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text("{}")


def test_grid_tries_each_candidate_once_and_reports_the_best(tmp_path):
    fake = Fake()
    assert run([TUNED, PLAIN_NLL], Store(tmp_path), fake) == []
    tried = [f"tiny-nll+mdca-beta{beta}-seed0" for beta in (1, 5, 10)]
    others = [f"tiny-nll+mdca-beta5-seed{seed}" for seed in (1, 2)]
    plain = [f"tiny-nll-seed{seed}" for seed in (0, 1, 2)]
    assert sorted(fake.trained) == sorted(tried + others + plain)
    reported = {name for name, _ in fake.evaluated}
    assert reported == {tried[1], *others, *plain}  # losers never see the test data
    assert fake.evaluated.count(("tiny-nll-seed0", "test-ts")) == 1


def test_ties_go_to_the_lower_nll_and_failures_do_not_count(tmp_path):
    store = Store(tmp_path)
    one, five, ten = TUNED.candidates()
    store.set_trained(one, {"accuracy": 0.9, "nll": 0.31})
    store.set_trained(five, {"accuracy": 0.9, "nll": 0.30})
    assert store.choice(TUNED) is None  # one is still missing
    store.set_failure(ten, "diverged")
    assert store.choice(TUNED) == five.hyper
    for run in (one, five):
        store.set_failure(run, "diverged")
    assert store.choice(TUNED) is None  # none is left
    assert GridProgress.of([TUNED], store).reports == 0


def test_interrupted_grid_resumes_where_it_stopped(tmp_path):
    first, second = Fake(stop_at=4), Fake()
    with pytest.raises(KeyboardInterrupt):
        run([TUNED, PLAIN_NLL], Store(tmp_path), first)
    run([TUNED, PLAIN_NLL], Store(tmp_path), second)
    assert len(first.trained) == 4 and len(second.trained) == 8 - 4
    assert not set(first.trained) & set(second.trained)
    assert not set(first.evaluated) & set(second.evaluated)
    third = Fake()
    run([TUNED, PLAIN_NLL], Store(tmp_path), third)
    assert third.trained == third.evaluated == []


def test_another_table_evaluates_what_is_trained_already(tmp_path):
    run([Method("tiny", "nll", seeds=(0, 1, 2))], Store(tmp_path), Fake())
    fake = Fake()
    run([PLAIN_NLL], Store(tmp_path), fake)
    assert fake.trained == []
    assert [evaluation for _, evaluation in fake.evaluated] == ["test-ts"] * 3


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    store = Store(tmp_path)
    failures = run([PLAIN_NLL, TUNED], store, Fake(fail=["tiny-nll-seed1"]))
    assert failures == ["tiny-nll-seed1: loss term 'mdca' is no longer finite at step 7"]
    now = GridProgress.of([PLAIN_NLL, TUNED], store)
    assert (now.done, now.total) == (7, 8)
    store.forget_failure(Training("tiny", "nll", seed=1))
    assert run([PLAIN_NLL, TUNED], store, Fake()) == []


def test_a_worker_that_writes_no_report_is_a_failure_not_a_loop(tmp_path):
    fake = Fake()
    fake.evaluate = lambda run, store, evaluations: None
    failures = run([Method("tiny", "nll")], Store(tmp_path), fake)
    assert failures == ["tiny-nll-seed0: no report was written for test-none"]


def test_merge_unites_evaluations():
    assert merge_methods([Method("tiny", "nll", seeds=(0, 1, 2)), PLAIN_NLL, TUNED]) == [
        PLAIN_NLL,
        TUNED,
    ]


def test_two_rules_share_the_candidates_and_each_reports_its_choice(tmp_path):
    """Accuracy likes beta = 5; NLL likes the largest."""

    class Both(Fake):
        def train(self, run, store):
            beta = dict(run.hyper)["beta"]
            return {**super().train(run, store), "nll": 1 / beta}

    fake, store = Both(), Store(tmp_path)
    by_nll = Method(**{**vars(TUNED), "select": "nll"})
    assert GridProgress.of([TUNED, by_nll], store).total == 3 + 2 + 2
    run([TUNED, by_nll], store, fake)
    assert store.choice(TUNED) == GRID[1] and store.choice(by_nll) == GRID[2]
    assert sorted(fake.trained) == sorted(
        [f"tiny-nll+mdca-beta{beta}-seed0" for beta in (1, 5, 10)]
        + [f"tiny-nll+mdca-beta{beta}-seed{seed}" for beta in (5, 10) for seed in (1, 2)]
    )


def test_time_left_is_by_the_mean_of_what_is_done(tmp_path):
    store = Store(tmp_path)
    assert GridProgress.of([PLAIN_NLL], store).seconds is None
    first, *_ = PLAIN_NLL.chosen(())
    store.set_trained(first, {"seconds": 60, "seconds_per_report": 5})
    now = GridProgress.of([PLAIN_NLL], store)
    assert (now.done, now.total, now.reports) == (1, 3, 6)
    assert now.seconds == 2 * 60 + 6 * 5


STOPPED = """
import sys
from pathlib import Path
from segcal.sweep.plan import Method
from segcal.sweep.pools import Processes
from segcal.sweep.runner import work
from segcal.sweep.store import Store
from tests.support.stepwise import Stepwise
if __name__ == "__main__":
    runs, log, gate = map(Path, sys.argv[1:])
    worker = Stepwise(log, gate=gate, slow="tiny-nll-seed1")
    try:
        work([Method("tiny", "nll", seeds=(0, 1, 2))], Store(runs), worker, Processes(2))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("reached", ["every process", "one process"])
def test_ctrl_c_saves_the_runs_of_every_process(tmp_path, reached):
    """Also of one that is within a step when another has saved and ended."""
    (tmp_path / "stopped.py").write_text(STOPPED)
    log, gate = tmp_path / "log", tmp_path / "gate"

    def start():
        return subprocess.Popen(
            [sys.executable, tmp_path / "stopped.py", tmp_path / "runs", log, gate],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    first = start()
    while not log.exists() or len({line.split()[0] for line in log.read_text().splitlines()}) < 2:
        assert first.poll() is None
        time.sleep(0.05)
    if reached == "every process":
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    else:
        steps = [line.split() for line in log.read_text().splitlines()]
        os.kill(next(int(s[2]) for s in steps if s[0] == "tiny-nll-seed0"), signal.SIGINT)
    assert first.wait(timeout=60) == 130
    assert len(list(tmp_path.glob("runs/*/saved"))) == 2
    gate.touch()
    assert start().wait(timeout=60) == 0
    steps = [line.split()[:2] for line in log.read_text().splitlines()]
    wanted = [[f"tiny-nll-seed{seed}", str(step)] for seed in (0, 1, 2) for step in range(STEPS)]
    assert sorted(steps) == wanted  # each once


HOLDER = """
import sys, time
from pathlib import Path
from segcal.files import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_driver_is_told_who_works_and_a_dead_one_holds_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    told = pytest.raises(ValueError, match=f"but process {holder.pid} on .* is working in it")
    with told, locked(tmp_path, wait=False):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path, wait=False):
        pass


def test_a_killed_process_is_one_line_and_the_grid_goes_on(tmp_path):
    method, store = Method("tiny", "nll", seeds=(0,)), Store(tmp_path / "runs")
    worker = Stepwise(tmp_path / "log", dies="tiny-nll-seed0")
    with pytest.raises(WorkerDied, match=r"^a process of the grid died.*goes on[^\n]*$"):
        work([method], store, worker, Processes(2))
    assert work([method], store, worker, Processes(2)) == []
    steps = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert steps == [str(step) for step in range(STEPS)]
