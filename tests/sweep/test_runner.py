"""Grids: chosen on the hold-out, stopped and resumed; one driver at a time."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from segcal.files import locked
from segcal.sweep.definition import Method, Training
from segcal.sweep.pools import Pool, Processes
from segcal.sweep.runner import plan, work
from segcal.training.config import RECIPES
from tests.support import ROOT
from tests.support.stepwise import STEPS, Counted, Stepwise

PLAIN = Method("nll", "nll", "scenes", seeds=(0, 1, 2), posthoc=("none", "ts"))
GRID = tuple((("beta", beta),) for beta in (1, 5, 10))
TUNED = replace(PLAIN, name="nll+mdca", loss="nll+mdca", posthoc=("none",), grid=GRID)


def run(methods, runs, **options):
    return work(methods, runs, Pool(runs), **options)


def labels(trainings):
    return sorted(training.label for training in trainings)


class Fake(Counted):
    """Trains in no time; the hold-out likes beta = 5."""

    def do(self, training, methods=()):
        label = training.label
        if len(self.trained) == self.stop_at:
            raise KeyboardInterrupt
        if label in self.fail:
            return "loss term 'mdca' is no longer finite at step 7"
        if self.scores(training) is None:
            self.trained.append(label)
            beta = dict(training.changes).get("beta", 0)
            self.kept[label] = {"accuracy": 0.9 - abs(beta - 5) / 100, "nll": 0.3, "ece": 0.01}
        for method in methods:
            new = [(label, posthoc) for posthoc in method.posthoc]
            self.asked += [each for each in new if each not in self.asked]
        return self.kept[label]


def test_a_grid_tries_each_candidate_once_and_reports_the_best(tmp_path):
    fake = Fake(tmp_path)
    assert run([TUNED, PLAIN], fake) == {}
    tried = [f"scenes-nll+mdca-beta{beta}-seed0" for beta in (1, 5, 10)]
    others = [f"scenes-nll+mdca-beta5-seed{seed}" for seed in (1, 2)]
    plain = [f"scenes-nll-seed{seed}" for seed in (0, 1, 2)]
    assert sorted(fake.trained) == sorted(tried + others + plain)
    reported = {name for name, _ in fake.asked}
    assert reported == {tried[1], *others, *plain}  # losers never see the test data
    assert fake.asked.count(("scenes-nll-seed0", "ts")) == 1


def test_ties_go_to_the_lower_nll_and_failures_do_not_count(tmp_path):
    fake = Fake(tmp_path)
    one, five, ten = TUNED.candidates()
    fake.kept[one.label] = {"accuracy": 0.9, "nll": 0.31}
    fake.kept[five.label] = {"accuracy": 0.9, "nll": 0.30}
    assert fake.choice(TUNED) is None  # one is still missing
    fake.failures[ten] = "diverged"
    assert fake.choice(TUNED) == GRID[1]
    fake.kept.clear()
    fake.failures |= {one: "diverged", five: "diverged"}
    assert fake.choice(TUNED) is None and fake.chosen(TUNED) == []  # none is left


def test_a_stopped_grid_goes_on_where_it_stopped(tmp_path):
    kept = {}
    first, second, third = (Fake(tmp_path, kept, stop_at=stop) for stop in (4, None, None))
    with pytest.raises(KeyboardInterrupt):
        run([TUNED, PLAIN], first)
    run([TUNED, PLAIN], second)
    assert len(first.trained) == 4 and len(second.trained) == 8 - 4
    assert not set(first.trained) & set(second.trained)
    run([TUNED, PLAIN], third)
    assert third.trained == []


def test_only_what_is_trained_is_evaluated_on_request(tmp_path):
    fake = Fake(tmp_path)
    fake.kept["scenes-nll-seed1"] = {"accuracy": 0.9, "nll": 0.3, "ece": 0.01}
    run([TUNED, PLAIN], fake, train=False)
    assert fake.trained == [] and {name for name, _ in fake.asked} == {"scenes-nll-seed1"}


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    fake, said = Fake(tmp_path, fail=["scenes-nll-seed1"]), []
    failures = run([PLAIN, TUNED], fake, say=said.append)
    assert [(t.label, why) for t, why in failures.items()] == [
        ("scenes-nll-seed1", "loss term 'mdca' is no longer finite at step 7")
    ]
    assert len(fake.trained) == 7
    assert said[-1].startswith("[8/8] ")
    assert sum("failed: loss term" in line for line in said) == 1


def test_tables_that_share_a_run_share_its_training(tmp_path):
    shorter = replace(PLAIN, seeds=(0,), posthoc=("vs",))
    fake = Fake(tmp_path)
    run([PLAIN, shorter], fake)
    assert len(fake.trained) == 3
    first = shorter.candidates()[0]
    assert [method.posthoc for method in fake.measured[first]] == [("none", "ts"), ("vs",)]


def test_methods_of_two_rules_share_the_candidates(tmp_path):
    """Accuracy likes beta = 5; NLL likes the largest."""

    class Both(Fake):
        def scores(self, training):
            found = super().scores(training)
            return found and {**found, "nll": 1 / beta_of(training)}

    fake, by_nll = Both(tmp_path), replace(TUNED, name="by NLL", select="nll")
    assert plan([TUNED, by_nll], fake)[0] == "7 trainings, 0 done"
    run([TUNED, by_nll], fake)
    assert fake.choice(TUNED) == GRID[1] and fake.choice(by_nll) == GRID[2]
    assert sorted(fake.trained) == sorted(
        [f"scenes-nll+mdca-beta{beta}-seed0" for beta in (1, 5, 10)]
        + [f"scenes-nll+mdca-beta{beta}-seed{seed}" for beta in (5, 10) for seed in (1, 2)]
    )


def beta_of(training):
    return dict(training.changes)["beta"]


def test_the_plan_estimates_by_the_mean_of_what_is_done(tmp_path):
    fake = Fake(tmp_path)
    assert plan([PLAIN], fake)[0] == "3 trainings, 0 done"
    fake.kept["scenes-nll-seed0"] = {"accuracy": 0.9, "nll": 0.3, "ece": 0.1, "seconds": 60}
    counted, time_left, *commands = plan([PLAIN], fake)
    assert counted == "3 trainings, 1 done" and time_left.startswith("about 2 min of training left")
    assert [line.split(" --out")[0] for line in commands] == [
        f"segcal train --config {RECIPES}/scenes.yaml --loss nll --seed {seed}" for seed in (1, 2)
    ]


STOPPED = """
import signal
import sys
from pathlib import Path
from segcal.sweep.pools import Processes
from segcal.sweep.runner import work
from tests.sweep.test_runner import PLAIN
from tests.support.stepwise import Stepwise
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    root, log, gate = map(Path, sys.argv[1:])
    runs = Stepwise(root, log, gate=gate, slow="scenes-nll-seed1")
    try:
        work([PLAIN], runs, Processes(runs, 2))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.slow
def test_ctrl_c_saves_the_runs_of_every_process(tmp_path):
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
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    assert first.wait(timeout=120) == 130
    assert len(list(tmp_path.glob("runs/*/saved"))) == 2
    gate.touch()
    assert start().wait(timeout=120) == 0
    steps = [line.split()[:2] for line in log.read_text().splitlines()]
    wanted = [[f"scenes-nll-seed{seed}", str(step)] for seed in (0, 1, 2) for step in range(STEPS)]
    assert sorted(steps) == wanted  # each once


@pytest.mark.slow
def test_a_killed_process_is_one_failure_and_the_same_command_goes_on(tmp_path):
    one = replace(PLAIN, seeds=(0, 1))
    runs = Stepwise(tmp_path / "runs", tmp_path / "log", dies="scenes-nll-seed0")
    failures = work([one], runs, Processes(runs, 2))
    assert labels(failures) == ["scenes-nll-seed0"]
    assert "ended with status -9" in next(iter(failures.values()))
    again = Stepwise(tmp_path / "runs", tmp_path / "log", dies="scenes-nll-seed0")
    assert work([one], again, Processes(again, 2)) == {}
    steps = sorted(line.split()[:2] for line in (tmp_path / "log").read_text().splitlines())
    assert steps == [[f"scenes-nll-seed{n}", str(step)] for n in (0, 1) for step in range(STEPS)]


HOLDER = """
import sys, time
from pathlib import Path
from segcal.files import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_second_driver_is_told_who_works_and_a_dead_one_holds_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    told = pytest.raises(ValueError, match="another process")
    with told, locked(tmp_path, wait=False):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path, wait=False):
        pass


def test_a_training_is_called_by_all_that_tells_it_from_others():
    changes = (("loss", "fl+mdca"), ("beta", 0.5), ("data.limit", 40))
    one, pooled = (Training("some/where/tiny.yaml", changes, seeds) for seeds in ((3,), (0, 2)))
    assert one.label == "tiny-fl+mdca-beta0.5-data.limit40-seed3"
    assert pooled.label == "tiny-fl+mdca-beta0.5-data.limit40-seeds0_2"
