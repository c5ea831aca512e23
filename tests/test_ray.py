"""Grids and evaluations on a real Ray of two emulated nodes: equal, nothing lost or done twice."""

import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from segcal.cli import main
from segcal.evaluation import on_ray
from segcal.sources.saved import PredictionFolder
from segcal.metrics import CalibrationMeter, Report
from segcal.runtime import join_ray
from segcal.sweep.plan import Method
from segcal.sweep.pools import RayPool
from segcal.sweep.runner import OpenTask, work
from segcal.sweep.store import Store
from tests.support.saved import save_folder
from tests.support.stepwise import STEPS, Stepwise

GRID = tuple((("gamma", gamma),) for gamma in (1, 3))
METHODS = [Method("tiny", "fl", grid=GRID, seeds=(0, 1)), Method("tiny", "nll", seeds=(0, 1))]
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


@pytest.fixture
def pool(cluster):
    return RayPool(cluster.address)


def steps(log):
    """The steps of each run, in order, and the nodes they ran on."""
    found = {}
    for line in log.read_text().splitlines():
        name, step, _, node = line.split()
        found.setdefault(name.removeprefix("tiny-"), []).append((int(step), node))
    return found


def test_a_killed_worker_goes_on_from_its_checkpoint(pool, tmp_path):
    assert pool.size == 2
    store, log = Store(tmp_path / "runs"), tmp_path / "log"
    said = []
    worker = Stepwise(log, dies="tiny-fl-gamma1-seed0")
    assert work(METHODS, store, worker, pool, say=said.append) == []
    found = steps(log)
    assert sorted(found) == RUNS
    for name, done in found.items():
        assert [step for step, _ in done] == list(range(STEPS)), name
    assert store.choice(METHODS[0]) == GRID[1]
    assert said[-1].startswith("[5/5] ")


def test_what_fails_is_named_and_the_others_finish(cluster, tmp_path):
    pool = RayPool(cluster.address, retries=1)
    fails = (
        ("tiny-nll-seed0", ValueError("loss term 'nll' is no longer finite at step 7")),
        ("tiny-nll-seed1", KeyError("a bug")),
        ("tiny-fl-gamma1-seed0", "dies"),
    )
    store, log = Store(tmp_path / "runs"), tmp_path / "log"
    failures = dict(
        failure.split(": ", 1) for failure in work(METHODS, store, Stepwise(log, fails=fails), pool)
    )
    assert failures["tiny-nll-seed0"] == "loss term 'nll' is no longer finite at step 7"
    assert failures["tiny-nll-seed1"] == "KeyError: 'a bug'"
    assert failures["tiny-fl-gamma1-seed0"].startswith("WorkerCrashedError")
    assert sorted(steps(log)) == ["fl-gamma3-seed0", "fl-gamma3-seed1"]


def test_stopping_saves_every_run(pool, tmp_path):
    store, log = Store(tmp_path / "runs"), tmp_path / "log"
    worker = Stepwise(log, gate=tmp_path / "never")
    tasks = [OpenTask(run, ()) for run in METHODS[0].candidates()]
    handles = [pool.submit(task, store, worker) for task in tasks]
    wait_for(lambda: log.exists() and len(steps(log)) == 2)
    pool.stop(handles)
    assert all((store.folder(task.run) / "saved").exists() for task in tasks)
    with pytest.raises(KeyboardInterrupt):
        pool.wait(handles)
    assert work(METHODS, store, Stepwise(log), pool) == []
    assert all([s for s, _ in done] == list(range(STEPS)) for done in steps(log).values())


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
    for name in ("grid.csv", "grid.html"):
        plain, on_ray = (
            (tmp_path / kind / name).read_text().replace(str(tmp_path / kind), "")
            for kind in ("plain", "ray")
        )
        if name == "grid.csv":
            assert plain == on_ray
        else:  # they differ in their command
            assert plain.split("<ul>")[1] == on_ray.split("<ul>")[1]


def test_predictions_are_counted_as_by_one_process(cluster, tmp_path):
    files = save_folder(tmp_path / "files", 11, temperature=2.0)
    (files / "im003.npz").write_bytes(b"damaged")
    fit = save_folder(tmp_path / "fit", 4, first=20, temperature=2.0)
    words = ["eval", "--predictions", str(files), "--fit-predictions", str(fit), "--posthoc", "ts"]
    words += ["--regions", "boundary:1", "--protocol", "pooled,image,foreground", "--skip-bad"]
    words += ["--operate", "accuracy=0.7,coverage=0.5", "--conformal", "miss=0.3"]
    words += ["--overlays", "none", "--save-state", "--out"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "ray"), "--ray", cluster.address]) == 0
    for folder in ("", "posthoc/ts"):
        plain, on_ray = (
            Report.load(tmp_path / kind / folder / "report.json") for kind in ("plain", "ray")
        )
        assert on_ray.scores == pytest.approx(plain.scores, rel=1e-12, nan_ok=True)
        assert on_ray.protocol == plain.protocol and plain.protocol.images == 10
        assert (on_ray.confusion == plain.confusion).all()
        for name, interval in plain.intervals.items():
            assert on_ray.intervals[name].low == pytest.approx(interval.low, abs=1e-9)
        region = plain.regions["boundary:1"].scores
        assert on_ray.regions["boundary:1"].scores == pytest.approx(region, rel=1e-12, nan_ok=True)
        assert on_ray.protocols.keys() == plain.protocols.keys()
        assert len(plain.operating_points) == 2 and 0 < plain.operating_points[1].coverage < 1
        for kind in ("operating_points", "class_sets"):
            for one, other in zip(getattr(on_ray, kind), getattr(plain, kind), strict=True):
                assert flat(asdict(one)) == pytest.approx(flat(asdict(other)), rel=1e-12)
        assert len(plain.class_sets) == 1
        paths = [tmp_path / kind / folder / "state.npz" for kind in ("plain", "ray")]
        names = [sorted(CalibrationMeter.load(path).names) for path in paths]
        assert names[0] == names[1]
    assert "im003" in (tmp_path / "ray/report.html").read_text()


def flat(value):
    """Every number of an operating point or of class sets, in order."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in flat(each)]
    return [value] if isinstance(value, float | int) else []


def test_a_bad_file_is_one_line_from_ray_too(cluster, tmp_path, capsys):
    files = save_folder(tmp_path / "files", 5)
    (files / "im003.npz").write_bytes(b"damaged")
    words = ["eval", "--predictions", str(files), "--out", str(tmp_path / "out")]
    assert main([*words, "--ray", cluster.address]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("segcal: error: ") and "im003.npz" in line
    assert not (tmp_path / "out").exists()


def end_process(*_):
    """A calibrator that takes its worker with it."""
    os._exit(1)


def test_a_task_that_always_dies_is_one_line(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "RETRIES", 0)
    source = PredictionFolder(save_folder(tmp_path / "files", 1))
    settings = {"regions": {}, "protocols": (), "num_bins": 15, "per_image": False}
    with pytest.raises(ChildProcessError, match="a task of the Ray cluster ended early: .") as told:
        on_ray.measure_on_ray(
            source, {"none": end_process}, cluster=cluster.address, observers={}, **settings
        )
    assert "\n" not in str(told.value)


def test_a_lost_node_loses_nothing(cluster, pool, tmp_path):
    """The run of the node that dies goes on elsewhere, after the step that it had done."""
    store, log = Store(tmp_path / "runs"), tmp_path / "log"
    worker = Stepwise(log, gate=tmp_path / "gate")
    mine = ray.get_runtime_context().get_node_id()  # the driver talks to it
    dying = next(node for node in cluster.worker_nodes if node.node_id != mine)
    dead = dying.node_id

    class Watched(RayPool):
        killed = False

        def wait(self, handles):
            if not self.killed:
                wait_for(lambda: log.exists() and dead in log.read_text())
                cluster.remove_node(dying, allow_graceful=False)
                lines = [line.split() for line in log.read_text().splitlines()]
                (process,) = {int(pid) for _, _, pid, node in lines if node == dead}
                wait_for(lambda: not Path(f"/proc/{process}").exists())  # it outlives its node
                self.killed = True
                (tmp_path / "gate").touch()
            return super().wait(handles)

    watched = Watched(cluster.address)
    assert work(METHODS, store, worker, watched) == []
    found = steps(log)
    assert sorted(found) == RUNS
    for name, done in found.items():
        numbers = [step for step, _ in done]
        assert numbers == list(range(STEPS)), name
    moved = [done for done in found.values() if len({node for _, node in done}) == 2]
    assert moved and all(done[0][1] == dead for done in moved)


def test_a_cluster_that_is_too_small_or_not_there_is_one_line(cluster, tmp_path, capsys):
    ray.shutdown()
    with pytest.raises(ValueError, match="Expected a cluster with 64 CPU for a run, but it has"):
        RayPool(cluster.address, cpus=64)
    (tmp_path / "s.yaml").write_text("config: scenes\nmethods: [{loss: nll}]\n")
    words = ["sweep", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")]
    assert main([*words, "--ray", "127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected a Ray cluster at 127.0.0.1:1, but got" in line


@pytest.mark.parametrize(
    "address",
    [
        "foo",
        "ray://",
        "ray://foo",
        "127.0.0.1:-1",
        "ray://a:b:c",
        ":1",
        "http://x",
        "h:0",
        "h:65536",
    ],
)
def test_an_address_that_ray_would_wait_for_is_refused_at_once(address):
    with pytest.raises(ValueError, match="Expected auto or HOST:PORT as the address of a Ray"):
        join_ray(address)


@pytest.mark.parametrize("address", ["é..:1", "[::1]:1", "ray://127.0.0.1:1"])
def test_an_address_where_nothing_answers_is_named(address):
    with pytest.raises(ValueError, match=re.escape(f"Expected a Ray cluster at {address}, but")):
        join_ray(address)


def wait_for(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
