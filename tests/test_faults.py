"""Processes killed, disks full, workers dead, files damaged: nothing is lost, and it is said."""

import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from segcal.cli import main
from segcal.data import scenes
from segcal.data.samples import Part
from segcal.evaluation import folder as results
from segcal.evaluation import measure as measuring
from segcal.evaluation.folder import load_evaluation
from segcal.training import checkpoint
from segcal.training.step import Learner
from tests.support import children
from tests.support.datasets import write_masks
from tests.support.evaluations import QUICK, draw_nothing
from tests.support.ranks import free_port
from tests.support.saved import save_folder
from tests.support.small_run import RUN, expect_equal, outcome

# Each of them a run, an evaluation or a grid killed, and done again.
KILLS = int(os.environ.get("SEGCAL_KILLS", 3))
EVAL_KILLS = int(os.environ.get("SEGCAL_EVAL_KILLS", 2))
GRID_KILLS = int(os.environ.get("SEGCAL_GRID_KILLS", 1))


def train(folder, *arguments):
    """`segcal train` in its own process; the settings that a run keeps must not tell runs apart."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return main(["train", *RUN, "--out", "run", *arguments])


def resumed(folder):
    """What the run is in the end, if it is started again until it ends."""
    process = children.start(train, folder, "--resume")
    process.join(120)
    assert process.exitcode == 0
    assert {path.name for path in (folder / "run").iterdir()} == {
        "config.yaml", "log.jsonl", "best.pt", "last.pt", "last.prev.pt",
    }  # fmt: skip
    return outcome(folder / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the run is if nobody kills it, and how many seconds it takes."""
    folder = tmp_path_factory.mktemp("whole")
    process = children.start(train, folder)
    children.wait_for(folder / "run" / "config.yaml", process)
    started = time.monotonic()
    process.join(120)
    assert process.exitcode == 0
    return outcome(folder / "run"), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment_of_training(tmp_path, whole, number, record_property):
    expected, seconds = whole
    process = children.start(train, tmp_path)
    children.wait_for(tmp_path / "run" / "config.yaml", process)
    time.sleep(random.Random(number).random() * seconds)
    # Another run may be faster than the one that was timed.
    record_property("met a live process", children.met_alive(process))
    saved = checkpoint.load_last(tmp_path / "run")  # whole, whenever it was
    assert saved is None or 0 < saved["learner"]["steps"] <= 12
    expect_equal(resumed(tmp_path), expected)


def stall(path, owner, name, calls):
    """As on a disk that hangs: the n-th call of a function makes the file `path` and never ends."""
    left = iter(range(calls - 1))
    usual = getattr(owner, name)

    def call(*args, **kwargs):
        if next(left, None) is None:
            path.touch()
            time.sleep(1000)
        return usual(*args, **kwargs)

    setattr(owner, name, call)


def train_stalled(folder, call):
    stall(folder / "stalled", os, "fsync", call)
    return train(folder)


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 6, 7])  # checkpoints of 4 steps come after the config: 2 to 5
def test_killed_while_a_file_is_being_written(tmp_path, whole, call):
    process = children.start(train_stalled, tmp_path, call)
    children.wait_for(tmp_path / "stalled", process)
    children.kill(process)
    assert [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    expect_equal(resumed(tmp_path), whole[0])


MOMENTS = {
    "counting": (measuring, "count_batch", 3),
    "writing": (json, "dumps", 2),
    "moving": (os, "replace", 9),
    "tidying up": (results.Path, "rmdir", 1),
}


def evaluate(folder, moment, predictions, *more):
    """`segcal eval` that stalls at a moment; pages, which take seconds, are left out."""
    draw_nothing()
    if moment is not None:
        stall(folder / "stalled", *MOMENTS[moment])
    arguments = ["--predictions", str(predictions), "--overlays", "none", *QUICK, *more]
    return main(["eval", *arguments, "--posthoc", "ts", "--fit-predictions", str(predictions)])


def contents(folder):
    """What every file holds; of calibrators the temperature: their headers are shuffled."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = float(segcal.load_calibrator(path).temperature_)
        elif path.suffix == ".json":
            found[name] = {**json.loads(path.read_text()), "about": None}  # it has a random number
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def evaluated(folder, predictions, *more):
    """The files that an evaluation leaves that nobody kills."""
    process = children.start(evaluate, folder, None, predictions, *more)
    process.join(120)
    assert process.exitcode == 0
    return contents(predictions / "eval")


@pytest.fixture(scope="module")
def evaluated_twice(tmp_path_factory):
    """Predictions with results, and the files of these and of another evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    predictions = save_folder(folder / "net", 4)
    (predictions / "eval").mkdir()
    (predictions / "eval" / "notes.txt").write_text("mine")
    after = evaluated(folder, predictions, "--num-bins", "5")
    before = evaluated(folder, predictions)
    assert {"notes.txt", "report.json", "ts/report.json"} <= after.keys() == before.keys()
    return predictions, before, after


@pytest.fixture
def results_before_and_after(evaluated_twice, tmp_path):
    """The same, to be spoilt."""
    predictions, before, after = evaluated_twice
    return shutil.copytree(predictions, tmp_path / "net"), before, after


def bins_that_are_read(folder):
    """The bins of the results in a folder: all reports that are read were written together."""
    (bins,) = {r.protocol.num_bins for r in load_evaluation(folder).reports.values()}
    return bins


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_evaluating(tmp_path, results_before_and_after, moment):
    predictions, before, after = results_before_and_after
    if moment == "tidying up":  # a picture of the old results that the new ones do not have
        (predictions / "eval/overlays").mkdir()
        (predictions / "eval/overlays/old.png").touch()
    process = children.start(evaluate, tmp_path, moment, predictions, "--num-bins", "5")
    children.wait_for(tmp_path / "stalled", process)
    children.kill(process)
    # Whoever looks next finds the old results or the new ones.
    assert main(["report", str(predictions), "--out", str(tmp_path / "page")]) == 0
    assert bins_that_are_read(predictions) == (5 if moment == "tidying up" else 15)
    if moment in ("counting", "writing"):
        found = contents(predictions / "eval")
        assert {n: found[n] for n in found if not n.startswith(".")} == before
    assert evaluated(tmp_path, predictions, "--num-bins", "5") == after  # and nothing besides


@pytest.mark.slow
@pytest.mark.parametrize("number", range(EVAL_KILLS))
def test_killed_at_a_random_moment_of_evaluation(
    tmp_path, results_before_and_after, number, record_property
):
    predictions, _, after = results_before_and_after
    process = children.start(evaluate, tmp_path, None, predictions, "--num-bins", "5")
    time.sleep(random.Random(number).random() * 0.6)
    record_property("met a live process", children.met_alive(process))
    record_property("bins", bins_that_are_read(predictions))
    assert evaluated(tmp_path, predictions, "--num-bins", "5") == after


GRID = """
config: tiny.yaml
seeds: 2
methods:
  - {loss: nll, posthoc: [none, ts]}
  - {loss: fl, gamma: [1, 3]}
scores: [accuracy, ece]
"""
TINY = """
data: {name: digits, limit: 60}
model: {name: resnet8}
epochs: 2
batch_size: 20
save_every: 1
workers: 0
"""


def sweep(folder):
    """`segcal sweep` in its own process."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "grid.yaml").write_text(GRID)
    out = str(folder / "out")
    return main(["sweep", str(folder / "grid.yaml"), "--device", "cpu", "--out", out])


def swept(folder):
    """The table of a grid that is started again until it ends."""
    process = children.start(sweep, folder)
    process.join(240)
    assert process.exitcode == 0
    return (folder / "out" / "grid.csv").read_text()


@pytest.fixture(scope="module")
def whole_grid(tmp_path_factory):
    """The table of a grid that nobody kills, and how many seconds it takes."""
    started = time.monotonic()
    return swept(tmp_path_factory.mktemp("grid")), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("number", range(GRID_KILLS))
def test_killed_at_a_random_moment_of_a_grid(tmp_path, whole_grid, number):
    """Every kill meets a live process: a grid that ended first is begun again and killed sooner."""
    expected, seconds = whole_grid
    moment = random.Random(number).random() * seconds
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        process = children.start(sweep, folder)
        time.sleep(moment)
        if children.met_alive(process):
            break
        assert (folder / "out" / "grid.csv").read_text() == expected
        moment *= 0.7
    else:
        pytest.fail("no process was alive when it was killed")
    assert swept(folder) == expected


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB, where the system allows one to be made."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def expect_full(capsys, path):
    """One line that says what happened and where, and nothing left over."""
    err = capsys.readouterr().err
    assert err.startswith("segcal: error: ") and err.count("\n") == 1
    assert any(text in err for text in ("No space left on device", "File too large"))
    assert str(path) in err
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".")]


def fill(disk, leave):
    """Take all space but `leave` bytes."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(max(free - leave, 0)))


def test_results_on_a_disk_of_their_own(small_disk, tmp_path, monkeypatch):
    """A mount point, as every volume of a container is: nothing can be renamed into it."""
    monkeypatch.setattr(results, "write_figures", lambda *_, **__: None)
    predictions = save_folder(tmp_path / "net", 2)
    arguments = ["--predictions", str(predictions), "--overlays", "none", *QUICK]
    for _ in range(2):
        assert main(["eval", *arguments, "--out", str(small_disk)]) == 0
        assert main(["report", str(small_disk), "--out", str(small_disk)]) == 0
    assert not [path for path in small_disk.iterdir() if path.name.startswith(".")]
    state = str(tmp_path / "state.npz")
    shutil.move(small_disk / "state.npz", state)
    assert main(["merge", state, "--report", str(small_disk), "--resamples", "4"]) == 0


def test_a_full_tmpdir_is_named(small_disk, tmp_path, monkeypatch, capsys):
    """Whose space was thought to be enough: the fit of a network writes its logits there."""
    run = tmp_path / "run"
    assert main(["train", *RUN, "--epochs", "1", "--data.limit", "400", "--out", str(run)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    fill(small_disk, 8_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
    assert main(["eval", str(run), *QUICK, "--overlays", "none", "--posthoc", "ts"]) == 1
    err = capsys.readouterr().err
    assert str(small_disk) in err and "set TMPDIR to use another folder" in err
    assert err.count("\n") == 1
    assert not (run / "eval").exists()


def test_two_trainings_do_not_share_a_folder(tmp_path, whole, capfd):
    process = children.start(train, tmp_path)
    children.wait_for(tmp_path / "run" / "config.yaml", process)
    assert main(["train", *RUN, "--out", str(tmp_path / "run")]) == 2
    assert "another process" in capfd.readouterr().err
    assert main(["train", *RUN, "--resume", "--out", str(tmp_path / "run")]) == 2
    assert "another process" in capfd.readouterr().err
    children.kill(process)  # and the lock goes with it, at once
    expect_equal(resumed(tmp_path), whole[0])


@pytest.mark.parametrize("kept", ["best.pt", "log.jsonl"])
def test_a_run_that_lost_its_checkpoints_is_not_overwritten(tmp_path, capfd, kept):
    run = tmp_path / "run"
    assert main(["train", *RUN, "--epochs", "1", "--out", str(run)]) == 0
    for path in run.iterdir():
        if path.name not in (kept, "config.yaml"):
            path.unlink()
    before = contents(run)
    assert main(["train", "--resume", "--out", str(run)]) == 2
    assert f"only {kept}" in capfd.readouterr().err
    assert contents(run) == before


def test_disk_full_while_training(small_disk, whole, capsys, monkeypatch):
    """resnet8 has checkpoints of about 0.7 MB: the first fits, the second does not."""
    fill(small_disk, 2**20)
    monkeypatch.chdir(small_disk)
    assert main(["train", *RUN, "--workers", "0", "--out", "run"]) == 1
    expect_full(capsys, Path("run/last.next.pt"))
    assert checkpoint.read_checkpoint(Path("run/last.pt"))["learner"]["steps"] == 1
    # With room again, the run goes on to the end that it would have had.
    shutil.copytree("run", small_disk.parent / "run")
    expect_equal(resumed(small_disk.parent), whole[0])


def test_disk_full_while_writing_a_report(small_disk, capsys, monkeypatch):
    predictions = save_folder(small_disk / "net", 4)
    monkeypatch.setattr(results, "write_figures", lambda *_, **__: None)
    arguments = ["--predictions", str(predictions), "--overlays", "none", *QUICK]
    assert main(["eval", *arguments]) == 0
    before = contents(predictions)
    fill(small_disk, 40_000)  # the page is larger
    capsys.readouterr()
    assert main(["eval", *arguments]) == 1
    expect_full(capsys, predictions / "eval")
    assert contents(predictions) == before


@pytest.mark.parametrize("limit", [100, 20_000, 200_000])
def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path, limit):
    """What a full disk does, for those who may not mount one: writes fail part of the way."""
    meter = segcal.CalibrationMeter(19)
    checkpoint.save_last(tmp_path, {"n": 1})
    meter.save(tmp_path / "state.npz")
    meter.compute().save(tmp_path / "report.json")
    before = contents(tmp_path)
    state = {"n": 2, "w": torch.randn(300, 300)}
    bigger = segcal.CalibrationMeter(300)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        for write, name in (
            (lambda path: checkpoint.save_state(path, state), "last.pt"),
            (bigger.save, "state.npz"),
            (bigger.compute().save, "report.json"),
        ):
            with pytest.raises(OSError) as error:
                write(tmp_path / name)
            assert error.value.errno == errno.EFBIG
            assert error.value.filename == str(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert contents(tmp_path) == before


class DeadlyDigits(Part):
    """Kills the process that reads it, if that is a worker."""

    def __init__(self, part, number):
        self.part, self.names, self.number = part, part.names, number

    def fingerprint(self, indices):
        return self.part.fingerprint(indices)

    def image(self, index):
        return self.part.image(index)

    def label(self, index):
        return self.part.label(index)

    def read(self, index):
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), self.number)
        return self.part.read(index)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_dies_is_named(tmp_path, monkeypatch, capfd, number):
    usual = scenes.digits

    def deadly(config):
        source = usual(config)
        return dataclasses.replace(source, train=DeadlyDigits(source.train, number))

    monkeypatch.setattr(scenes, "digits", deadly)
    assert main(["train", *RUN, "--out", str(tmp_path / "run")]) == 1
    err = capfd.readouterr().err
    last = err.replace("\0", "").splitlines()[-1]  # torch's own signal handler writes a zero
    assert "Traceback" not in err
    assert last.startswith("segcal: error: DataLoader worker (pid ")
    assert {signal.SIGKILL: "Killed", signal.SIGBUS: "Bus error"}[number] in last
    assert "lower --workers" in last


def as_rank(rank, port, folder, fault, arguments):
    """`segcal` as one of two processes of torchrun; on the second, what `fault` says happens."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stderr = (folder / f"{rank}.err").open("w", buffering=1)
    draw_nothing()
    if rank == 1 and fault == "dies":

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        Learner.step = die
    return main(arguments)


@pytest.mark.parametrize("fault", ["dies", "bad file"])
def test_a_lost_process_is_one_line_for_the_others(tmp_path, fault):
    if fault == "dies":
        arguments = ["train", *RUN, "--workers", "0", "--out", str(tmp_path / "run")]
    else:
        folder = save_folder(tmp_path / "net", 4)
        (folder / "im001.npz").write_bytes(b"not an archive")  # the second process's
        arguments = ["eval", "--predictions", str(folder), "--overlays", "none", *QUICK]
    port = free_port()
    pair = [children.start(as_rank, r, port, tmp_path, fault, arguments) for r in (0, 1)]
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [1, -9 if fault == "dies" else 2]
    said = [(tmp_path / f"{rank}.err").read_text() for rank in (0, 1)]
    (line,) = [line for line in said[0].splitlines() if line.startswith("segcal: error: ")]
    assert "another process of this run ended" in line and "(process 0)" in line
    assert not any("Traceback" in text for text in said)
    if fault == "bad file":
        assert "im001.npz" in said[1] and "(process 1)" in said[1]


@pytest.fixture
def damaged(tmp_path):
    """Images with masks; in each part one image is cut short, and in train one mask is wrong."""
    root = tmp_path / "own"
    write_masks(root, count=16)
    for part in ("train", "test"):
        image = root / part / "images" / "5.jpg"
        image.write_bytes(image.read_bytes()[:-200])
    Image.fromarray(np.full((16, 16), 9, dtype=np.uint8)).save(root / "train" / "masks" / "7.png")
    return root


def own(root, out):
    arguments = ["--data.name", "masks", "--data.root", str(root), "--data.num_classes", "2"]
    arguments += ["--batch_size", "4", "--epochs", "1", "--device", "cpu", "--workers", "1"]
    return [*arguments, "--model.width", "4", "--out", str(out)]


def test_a_truncated_image_stops_the_run_and_is_named(damaged, tmp_path, capfd):
    assert main(["train", *own(damaged, tmp_path / "run")]) == 2
    err = capfd.readouterr().err
    assert err.startswith("segcal: error: ") and err.count("\n") == 1
    assert "5.jpg" in err or "7.png" in err


@pytest.mark.usefixtures("undrawn")
def test_or_is_left_out_and_counted(damaged, tmp_path, capfd):
    run = tmp_path / "run"
    assert main(["train", *own(damaged, run), "--data.skip_bad", "true"]) == 0
    out, err = capfd.readouterr()
    assert "left out 2 training and hold-out images" in out
    assert sorted(line[:16] for line in err.splitlines()) == ["segcal: left out"] * 3
    (record,) = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    assert record["skipped"] == 2
    assert main(["eval", str(run), *QUICK, "--overlays", "none"]) == 0
    assert "left out 1 files" in capfd.readouterr().out
    report = segcal.Report.load(run / "eval" / "report.json")
    assert report.protocol.images == 15
    assert str(damaged / "test" / "images" / "5.jpg") in load_evaluation(run).skipped["5"]
    # A run that does not say so can be evaluated so; its training images are not looked at again.
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("skip_bad: true", "skip_bad: false"))
    assert main(["eval", str(run), *QUICK, "--overlays", "none"]) == 2
    assert "5.jpg" in capfd.readouterr().err
    assert main(["eval", str(run), *QUICK, "--overlays", "none", "--skip-bad"]) == 0


def test_nothing_usable_is_an_error(tmp_path, capfd):
    write_masks(tmp_path / "own", count=4)
    for image in (tmp_path / "own" / "test" / "images").iterdir():
        image.write_bytes(b"")
    arguments = own(tmp_path / "own", tmp_path / "run")
    assert main(["train", *arguments, "--data.skip_bad", "true"]) == 2
    assert "4 files" in capfd.readouterr().err.splitlines()[-1]
