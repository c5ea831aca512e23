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

from segcal.cli import COMMANDS, SAVE_MEMORY, main, run_command
from segcal.commands.options import spell
from segcal.evaluation.saved import KINDS
from segcal.metrics.protocols import PROTOCOLS
from segcal.metrics.regions import REGIONS
from segcal.metrics.triage import TARGETS
from segcal.run import open_run
from segcal.training import checkpoint
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
    run = open_run(folder)
    assert run.config.loss == "fl+mdca" and run.data.num_classes == 10
    assert run.record["best"] and not run.model.training
    assert open_run(folder, weights="last.pt").record["epoch"] == 2
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
    assert "Expected a command (train" in capsys.readouterr().err


def help_of(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_and_explains_itself(name, capsys):
    main(["--help"])
    assert re.search(rf"^  {name} +[A-Z].*[.]$", capsys.readouterr().out, re.MULTILINE)
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


@pytest.mark.parametrize("name", [*REGIONS, *PROTOCOLS])
def test_help_of_eval_names_regions_and_protocols(name, capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert f" {name} (" in " ".join(capsys.readouterr().out.split())


def test_help_of_eval_names_targets_and_kinds_of_predictions(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    text = capsys.readouterr().out
    assert [name for name in TARGETS if f"{name}=" not in text] == []
    assert f"--kind {{{','.join(KINDS)}}}" in " ".join(text.split())


def test_help_needs_no_torch():
    # The help of train lists the fields of classes that import torch.
    names = ["--help", *(name for name in COMMANDS if name != "train")]
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


def test_options_are_spelled_with_hyphens_or_underscores():
    typed = [
        "a-b_c",
        "--num-bins",
        "3",
        "--data.crop_size=a-b_c",
        "-x-y_z",
        "--",
        "--not-an_option",
    ]
    assert spell(typed, "_") == [
        "a-b_c", "--num_bins", "3", "--data.crop_size=a-b_c", "-x-y_z", "--", "--not-an_option",
    ]  # fmt: skip
    assert spell(typed, "-") == [
        "a-b_c", "--num-bins", "3", "--data.crop-size=a-b_c", "-x-y_z", "--", "--not-an_option",
    ]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_knows_both_spellings(name, capsys):
    """Of an option that lacks its value, so that nothing runs: the error is the same."""
    option = {"train": "--data.crop_size", "report": "--out"}.get(name, "--batch-size")
    option = "--resamples" if name in ("merge", "compare") else option
    errors = set()
    for separator in "-_":
        words = option[2:].replace("-", separator).replace("_", separator)
        assert main([name, "in", f"--{words}"]) == 2
        errors.add(capsys.readouterr().err)
    assert len(errors) == 1 and "nknown" not in errors.pop()


@pytest.mark.parametrize("name", COMMANDS)
def test_out_of_memory(name, capsys):
    """The advice names options that the command has."""

    def greedy(arguments, prog):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore")

    SAVE_MEMORY[greedy] = SAVE_MEMORY.get(COMMANDS[name], "")
    assert run_command(greedy, [], "segcal") == 1
    line = capsys.readouterr().err
    assert "segcal: error: out of memory: " in line and line.count("\n") == 1
    flags = re.findall(r"--[\w-]+", SAVE_MEMORY.pop(greedy))
    assert len(flags) == {"train": 3, "eval": 2, "export": 2}.get(name, 0)
    shown = help_of(name, capsys)
    assert all(re.search(rf"^ +{flag}\b", shown, re.MULTILINE) for flag in flags)


@pytest.mark.parametrize(
    "said",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1",
        "[Rank 1] Watchdog caught collective operation timeout: NCCL",
        "The client socket has failed to connect to any network address of (a, 1). TCPStore",
    ],
)
def test_another_process_that_ended_is_one_line(said, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    def command(arguments, prog):
        raise RuntimeError(f"{said}\nmore")

    assert run_command(command, [], "segcal train") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "another process of this run ended" in err and "(process 0)" in err


@pytest.mark.parametrize("name", ["resize", "crop_size", "base_size"])
def test_images_past_memory_are_refused(name, tmp_path, capsys):
    arguments = ["--data.name", "scenes", f"--data.{name}", "100000", "--out", str(tmp_path / "r")]
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"{name}=100000" in err and err.count("\n") == 1


def test_a_task_that_died_is_no_fault_of_the_input(capsys):
    def command(arguments, prog):
        raise ChildProcessError("a task of the Ray cluster ended early: killed")

    assert run_command(command, [], "segcal eval") == 1
    assert capsys.readouterr().err == (
        "segcal: error: a task of the Ray cluster ended early: killed\n"
    )


def test_a_bug_is_not_hidden():
    def broken(arguments, prog):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        run_command(broken, [], "segcal")


def test_bad_settings(fails, tmp_path):
    assert "Expected a loss BASE or BASE+AUX" in fails("--loss", "focal")
    assert "Unknown option optim.lrr" in fails("--optim.lrr", 3)
    assert "Expected a YAML file at" in fails("--config", tmp_path / "no.yaml")
    assert "Expected --device" in fails("--device", "abacus")
    assert "Expected data name to be one of scenes" in fails("--data.name", "imagenet")
    assert "Expected model name to be one of small_unet" in fails("--model.name", "alexnet")
    assert "Expected 10 class_weights" in fails(*QUICK, "--class_weights", "[1,2]")
    assert "training samples, but got 64; lower --batch_size" in fails(*QUICK, "--batch_size", 65)
    assert "with an encoder" in fails(*QUICK, "--optim.encoder_lr", 0.1)
    assert "Expected select to be one of" in fails(*QUICK, "--select", "miou")
    assert list(tmp_path.iterdir()) == []


def test_bad_folders(fails, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in fails(*QUICK, "--out", tmp_path / "file")
    assert "Not a directory" in fails(*QUICK, "--out", tmp_path / "file" / "run")
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
    assert "gamma=2.0" in line and "optim.lr=7.0" in line
    torch.save({"w": torch.zeros(2)}, tmp_path / "run" / "last.pt")
    (tmp_path / "run" / "last.prev.pt").unlink()
    assert "Expected a checkpoint of segcal" in fails("--resume", *out)


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
    one, other = (checkpoint.read_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "cut"))
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


def test_a_reader_that_has_seen_enough_is_no_error():
    """`segcal train --list | head -1`: more than a pipe holds is left unread."""
    code = (
        "from segcal.cli import run_command; import sys;"
        "sys.exit(run_command(lambda a, p: print('line\\n' * 100_000), [], 'segcal'))"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=ROOT) as started:
        assert started.stdout.readline() == b"line\n"
        started.stdout.close()
        assert started.wait(timeout=60) == 128 + signal.SIGPIPE
        assert started.stderr.read() == b""
