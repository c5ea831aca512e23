"""Sweeps on a real Ray of two emulated nodes: the same tables, nothing lost or done twice."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from segcal.cli import main
from segcal.sweep.definition import Method
from segcal.sweep.pools import OnRay
from segcal.sweep.runner import work
from tests.support.stepwise import STEPS, Stepwise

pytestmark = pytest.mark.slow
NLL = Method("nll", "nll", "scenes", seeds=(0, 1))
GRID = tuple((("gamma", gamma),) for gamma in (1, 3))
TUNED = replace(NLL, name="fl", loss="fl", grid=GRID)
METHODS = [TUNED, NLL]
RUNS = ["fl-gamma1-seed0", "fl-gamma3-seed0", "fl-gamma3-seed1", "nll-seed0", "nll-seed1"]
FAST = {"worker_niceness": 0, "health_check_initial_delay_ms": 0, "health_check_period_ms": 300}
FAST |= {"health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster():
    """A head without cores of its own for runs, and two nodes of one core."""
    memory = {"object_store_memory": 80 * 2**20}
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": FAST, **memory}
    )
    made.add_node(num_cpus=1, **memory)
    made.add_node(num_cpus=1, **memory)
    made.wait_for_nodes()
    ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def steps(log):
    """The steps of each run, in order, and the nodes they ran on."""
    found = {}
    for line in log.read_text().splitlines():
        name, step, _, node = line.split()
        found.setdefault(name.removeprefix("scenes-"), []).append((int(step), node))
    return found


def each_step_once(log):
    return all([step for step, _ in done] == list(range(STEPS)) for done in steps(log).values())


def test_a_killed_worker_goes_on_from_its_checkpoint(cluster, tmp_path):
    said, log = [], tmp_path / "log"
    runs = Stepwise(tmp_path / "runs", log, dies="scenes-fl-gamma1-seed0")
    assert work(METHODS, runs, OnRay(runs, cluster.address), say=said.append) == {}
    assert sorted(steps(log)) == RUNS and each_step_once(log)
    assert runs.choice(TUNED) == GRID[1] and said[-1].startswith("[5/5] ")


def test_what_fails_is_named_and_the_others_finish(cluster, tmp_path):
    fails = {
        "scenes-nll-seed0": ValueError("loss term 'nll' is no longer finite at step 7"),
        "scenes-nll-seed1": KeyError("a bug"),
        "scenes-fl-gamma1-seed0": "dies",
    }
    runs = Stepwise(tmp_path / "runs", tmp_path / "log", fails=fails)
    failures = work(METHODS, runs, OnRay(runs, cluster.address))
    found = {training.label: reason for training, reason in failures.items()}
    assert "no longer finite at step 7" in found["scenes-nll-seed0"]
    assert found["scenes-nll-seed1"] == "KeyError: 'a bug'"
    assert found["scenes-fl-gamma1-seed0"].startswith("WorkerCrashedError")
    assert sorted(steps(tmp_path / "log")) == ["fl-gamma3-seed0", "fl-gamma3-seed1"]


def test_stopping_saves_every_run(cluster, tmp_path):
    log = tmp_path / "log"
    runs = Stepwise(tmp_path / "runs", log, gate=tmp_path / "never")
    pool = OnRay(runs, cluster.address)
    for training in TUNED.candidates():
        pool.start(training, [])
    wait_for(lambda: log.exists() and len(steps(log)) == 2)
    pool.stop(2)
    assert all((runs.folder(training) / "saved").exists() for training in TUNED.candidates())
    again = Stepwise(tmp_path / "runs", log)
    assert work(METHODS, again, OnRay(again, cluster.address)) == {}
    assert each_step_once(log)


def test_the_tables_of_one_process(cluster, tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "data: {name: digits, limit: 60}\nmodel: {name: resnet8}\nepochs: 1\nbatch_size: 20\n"
        "workers: 0\noptim: {lr: 0.05}\nschedule: {name: constant, warmup: 0}\n"
    )
    (tmp_path / "grid.yaml").write_text(
        "config: tiny.yaml\nseeds: 2\nposthoc: [none, ts]\nscores: [accuracy, ece]\n"
        "methods: [{loss: nll}, {loss: fl}]\ncompare: [[nll / none, fl / none]]\n"
    )
    words = ["sweep", str(tmp_path / "grid.yaml"), "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "ray"), "--ray", cluster.address]) == 0
    plain, on_ray = ((tmp_path / kind / "grid.csv").read_text() for kind in ("plain", "ray"))
    assert plain == on_ray


def test_a_lost_node_loses_nothing(cluster, tmp_path):
    """The run of the node that dies goes on elsewhere, after the step that it had done."""
    log = tmp_path / "log"
    runs = Stepwise(tmp_path / "runs", log, gate=tmp_path / "gate")
    mine = ray.get_runtime_context().get_node_id()  # the driver talks to it
    dying = next(node for node in cluster.worker_nodes if node.node_id != mine)
    dead = dying.node_id

    class Watched(OnRay):
        killed = False

        def wait(self):
            if not self.killed:
                wait_for(lambda: log.exists() and dead in log.read_text())
                cluster.remove_node(dying, allow_graceful=False)
                lines = [line.split() for line in log.read_text().splitlines()]
                (process,) = {int(pid) for _, _, pid, node in lines if node == dead}
                wait_for(lambda: not Path(f"/proc/{process}").exists())  # it outlives its node
                self.killed = True
                (tmp_path / "gate").touch()
            return super().wait()

    assert work(METHODS, runs, Watched(runs, cluster.address)) == {}
    assert sorted(steps(log)) == RUNS and each_step_once(log)
    moved = [done for done in steps(log).values() if len({node for _, node in done}) == 2]
    assert moved and all(done[0][1] == dead for done in moved)


def test_a_cluster_that_is_too_small_or_not_there_is_one_line(cluster, tmp_path, capsys):
    with pytest.raises(ValueError, match="64 CPU"):
        OnRay(None, cluster.address, cpus=64)
    ray.shutdown()
    for address in ("foo", "ray://foo", "127.0.0.1:-1", ":1", "h:0", "é..:1", "127.0.0.1:1"):
        with pytest.raises(ValueError, match=r"--ray|no Ray cluster"):
            OnRay(None, address)
    (tmp_path / "s.yaml").write_text("config: scenes\nmethods: [{loss: nll}]\n")
    words = ["sweep", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")]
    assert main([*words, "--ray", "127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no Ray cluster at 127.0.0.1:1" in line


def wait_for(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
