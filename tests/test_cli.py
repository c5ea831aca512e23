"""The commands as typed: what they leave behind, and one line and status 2 for what is wrong."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import segcal
from segcal import cli
from segcal.cli import COMMANDS, main
from segcal.metrics.protocols import PROTOCOLS
from segcal.metrics.regions import REGIONS
from segcal.metrics.triage import TARGETS
from segcal.sources import KINDS, open_source
from segcal.training import checkpoint
from segcal.training.log import Diverged
from segcal.training.signals import Interrupted
from tests.support import ROOT
from tests.support.datasets import write_masks

QUICK = shlex.split(
    "--data.name digits --data.limit 64 --model.name resnet20 --epochs 2 --workers 0"
)


def train(*arguments):
    return main(["train", *map(str, arguments)])


@pytest.fixture
def fails(capfd):
    """Runs `segcal train …`, expects status 2 and one line, and gives the line."""

    def run(*arguments):
        assert train(*arguments) == 2
        err = capfd.readouterr().err
        assert err.startswith("segcal: error: ") and err.count("\n") == 1
        return err.strip()

    return run


def test_a_run_and_what_it_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train("--loss", "fl+mdca", *QUICK) == 0
    out = capsys.readouterr().out
    folder = Path("runs/digits-resnet20-fl+mdca")
    assert f"segcal eval {folder}" in out
    assert "segcal train --config voc2012_deeplabv3plus_xception65 --loss" in out
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml", "log.jsonl", "best.pt", "last.pt", "last.prev.pt",
    }  # fmt: skip
    assert len((folder / "log.jsonl").read_text().splitlines()) == 2
    run = open_source(folder)
    assert "loss: fl+mdca" in run.config and run.num_classes == 10
    assert run.record["best"] and not run.model.training
    assert open_source(folder, weights="last").record["epoch"] == 2
    # A run is not written over; resuming one that is done changes nothing.
    assert train(*QUICK) == 2
    assert "continue it with --resume, or choose another folder" in capsys.readouterr().err
    before = checkpoint.read_checkpoint(folder / "last.pt")["model"]
    assert train("--resume", "--out", folder) == 0
    after = checkpoint.read_checkpoint(folder / "last.pt")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Its config.yaml is a config: the same run again, elsewhere.
    assert train("--config", folder / "config.yaml", "--out", "again") == 0
    again = checkpoint.read_checkpoint(Path("again/last.pt"))["model"]
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_usage(capsys):
    assert main([]) == 0 and "train" in capsys.readouterr().out
    assert main(["paint"]) == 2
    assert "paint" in capsys.readouterr().err


def help_of(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_every_command_is_listed_and_explains_itself(capsys):
    main(["--help"])
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*[.]$", listed, re.MULTILINE), name
        assert f"usage: segcal {name} " in help_of(name, capsys)


def test_as_a_module(tmp_path):
    command = [sys.executable, "-m", "segcal", "merge", "nowhere.npz"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("segcal: error: ") and "nowhere.npz" in done.stderr
    listed = subprocess.run(command[:3], capture_output=True, text=True, cwd=ROOT)
    assert listed.stdout.startswith("usage: python -m segcal COMMAND")


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"segcal {segcal.__version__}\n"


def test_help_of_eval_names_what_its_options_take(capsys):
    text = " ".join(help_of("eval", capsys).split()).replace("- ", "-")  # lines break there
    assert [name for name in (*REGIONS, *PROTOCOLS) if f" {name} (" not in text] == []
    assert [name for name in TARGETS if f"{name}=" not in text] == []
    assert f"--kind {{{','.join(KINDS)}}}" in text


def test_help_needs_no_torch():
    names = ["--help", *COMMANDS]
    code = f"""
import contextlib, io, sys
from segcal.cli import main
for name in {names}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([name, "--help"])
    print(name, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == [f"{name} False" for name in names], done.stderr


def test_every_command_knows_both_spellings(capsys):
    """Of an option that lacks its value, so that nothing runs: the error is the same."""
    for name in COMMANDS:
        if name == "train":  # see tests of settings
            continue
        option = {"report": "--out", "sweep": "--same-data"}.get(name, "--batch-size")
        option = "--resamples" if name in ("merge", "compare") else option
        errors = set()
        for word in (option, "--" + option[2:].replace("-", "_")):
            assert main([name, "in", word]) == 2
            errors.add(capsys.readouterr().err)
        assert len(errors) == 1 and "nrecognized" not in errors.pop(), name


@pytest.fixture
def raising(monkeypatch, capsys):
    """The status and what is printed when a command raises."""

    def run(error, *words):
        def broken(*_):
            raise error

        monkeypatch.setattr(cli, "_run", broken)
        status = main(["eval", *words])
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (ValueError("12 is\nwrong"), 2, "12 is wrong"),
        (FileNotFoundError(2, "No such file", "a.npz"), 2, "a.npz: No such file"),
        (OSError(28, "No space left on device", "a.npz"), 1, "a.npz: No space"),
        (ChildProcessError("a worker was killed"), 1, "a worker was killed"),
        (Diverged("loss term 'fl' is no longer finite"), 1, "no longer finite"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), 1, "--batch-size"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed"), 1, "another process"),
        (torch.distributed.DistNetworkError("The client socket failed"), 1, "another process"),
    ],
)
def test_an_error_is_one_line_and_a_status(raising, error, status, word):
    found, line = raising(error)
    assert found == status
    assert line.startswith("segcal: error: ") and word in line and line.count("\n") == 1


def test_signals_and_processes(raising, monkeypatch):
    assert raising(KeyboardInterrupt()) == (130, "")
    assert raising(Interrupted(signal.SIGTERM)) == (143, "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "(process 1)" in raising(ValueError("wrong"))[1]


def test_a_bug_is_not_hidden_and_an_error_shows_where_it_arose_on_request(raising):
    with pytest.raises(TypeError, match="a bug"):
        raising(TypeError("a bug"))
    status, said = raising(ValueError("wrong"), "--traceback")
    assert status == 2 and "Traceback" in said and said.endswith("segcal: error: wrong\n")


@pytest.mark.parametrize("name", ["resize", "crop_size", "base_size"])
def test_images_past_memory_are_refused(name, tmp_path, capsys):
    arguments = ["--data.name", "scenes", f"--data.{name}", "100000", "--out", str(tmp_path / "r")]
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"{name}=100000" in err and err.count("\n") == 1


def test_bad_settings(fails, tmp_path):
    for words, telling in (
        (["--loss", "focal"], "focal"),
        (["--optim.lrr", 3], "optim.lr"),
        (["--config", tmp_path / "no.yaml"], "no.yaml"),
        (["--device", "abacus"], "--device"),
        (["--data.name", "imagenet"], "scenes"),
        (["--model.name", "alexnet"], "small_unet"),
        ([*QUICK, "--class_weights", "[1,2]"], "class_weights"),
        ([*QUICK, "--batch_size", 65], "batch_size"),
        ([*QUICK, "--optim.encoder_lr", 0.1], "encoder"),
        ([*QUICK, "--select", "speed"], "select"),
    ):
        assert telling in fails(*words)
    assert list(tmp_path.iterdir()) == []


def test_bad_folders(fails, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in fails(*QUICK, "--out", tmp_path / "file")
    assert "file" in fails(*QUICK, "--out", tmp_path / "file" / "run")
    if os.getuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "Permission denied" in fails(*QUICK, "--out", tmp_path / "closed" / "run")


def test_bad_data(fails, tmp_path):
    out = ("--out", tmp_path / "run", "--batch_size", 2, "--epochs", 1)
    missing = fails("--data.name", "voc2012", "--data.root", tmp_path / "none", *out)
    assert str(tmp_path / "none") in missing
    (tmp_path / "empty").mkdir()
    empty = fails("--data.name", "folders", "--data.root", tmp_path / "empty", *out)
    assert str(tmp_path / "empty") in empty
    root = tmp_path / "own"
    write_masks(root)
    own = ("--data.name", "masks", "--data.root", root, "--data.num_classes", 2, *out)
    good = (root / "train/masks/3.png").read_bytes()
    Image.fromarray(np.zeros((5, 7), dtype=np.uint8)).save(root / "train/masks/3.png")
    line = fails(*own, "--workers", 1)
    assert "3.png" in line or "3.jpg" in line
    (root / "train/masks/3.png").write_bytes(good)
    (root / "train/images/5.jpg").write_bytes((root / "train/images/5.jpg").read_bytes()[:80])
    assert "5.jpg" in fails(*own, "--workers", 0)
    assert {p.name for p in (tmp_path / "run").iterdir()} <= {"config.yaml"}


def test_a_run_that_cannot_be_resumed(fails, tmp_path, capfd):
    out = ("--out", tmp_path / "run")
    assert train(*QUICK, *out) == 0
    capfd.readouterr()
    line = fails("--resume", *out, "--gamma", 2, "--optim.lr", 7)
    assert "gamma=2" in line and "optim.lr=7.0" in line
    torch.save({"w": torch.zeros(2)}, tmp_path / "run" / "last.pt")
    (tmp_path / "run" / "last.prev.pt").unlink()
    assert "checkpoint" in fails("--resume", *out)


def test_resume_goes_on_from_the_previous_checkpoint(tmp_path, capfd):
    out = ("--out", tmp_path / "run")
    assert train(*QUICK, *out) == 0
    last = tmp_path / "run" / "last.pt"
    whole = checkpoint.read_checkpoint(last)["model"]
    last.write_bytes(last.read_bytes()[:1000])
    capfd.readouterr()
    assert train("--resume", *out) == 0
    out, err = capfd.readouterr()
    assert "last.pt is damaged" in err and "continuing from last.prev.pt" in err
    resumed = checkpoint.read_checkpoint(last)["model"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def start(folder, *arguments):
    command = [sys.executable, str(ROOT / "tools/train_seg.py"), "--out", str(folder), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder.parent,
    )  # fmt: skip


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_processes_end_as_one_that_was_not(tmp_path):
    """The real thing: SIGKILL and SIGTERM to `tools/train_seg.py`, from a folder elsewhere."""
    options = [*QUICK, "--epochs", "4", "--save_every", "1", "--batch_size", "32", "--workers", "1"]
    cut = start(tmp_path / "cut", *options)
    assert train("--out", tmp_path / "whole", *options) == 0  # while the other one starts
    wait_for(tmp_path / "cut" / "last.pt", cut)
    cut.kill()
    cut.wait()
    (tmp_path / "cut" / "best.pt").unlink(missing_ok=True)
    stopped = start(tmp_path / "cut", "--resume")
    wait_for(tmp_path / "cut" / "best.pt", stopped)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate()
    if stopped.returncode != 0:  # it may have been about to end
        assert stopped.returncode == 128 + signal.SIGTERM, err
        assert f"--resume --out {tmp_path / 'cut'}" in out
        assert "Traceback" not in err
    resumed = start(tmp_path / "cut", "--resume")
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert "best by accuracy" in out and "eval_calib.py" in out
    one, other = (
        checkpoint.read_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "cut")
    )
    assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    for log in logs:
        for record in log:
            record.pop("seconds")
    assert logs[0] == logs[1]
    assert yaml.safe_load((tmp_path / "cut" / "config.yaml").read_text())["save_every"] == 1


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    """`segcal train --list | head -1`: more than a pipe holds is left unread."""
    code = (
        "import sys; from segcal import cli;"
        "cli._run = lambda *_: print('line\\n' * 100_000); sys.exit(cli.main([]))"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=ROOT) as started:
        assert started.stdout.readline() == b"line\n"
        started.stdout.close()
        assert started.wait(timeout=60) == 128 + signal.SIGPIPE
        assert started.stderr.read() == b""
