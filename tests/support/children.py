"""Processes to kill: real ones, started in milliseconds because torch is loaded once for all."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.children_loaded"])


def start(target, *arguments):
    """A process that calls `target`, in a group of its own; what it prints goes nowhere."""
    process = FORKS.Process(target=_alone, args=(target, arguments))
    process.start()
    return process


def _alone(target, arguments):
    os.setpgrp()
    multiprocessing.set_start_method("fork", force=True)  # as usual, for the process's own workers
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    sys.exit(target(*arguments))


def kill(process):
    """SIGKILL, and wait until it is gone."""
    assert met_alive(process)


def met_alive(process):
    """SIGKILL, unless it has ended by itself; whether it had not."""
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def wait_for(path: Path, process):
    """Until a file exists; the process that is to make it must be alive meanwhile."""
    end = time.monotonic() + 120
    while not path.exists():
        assert process.is_alive() and time.monotonic() < end, f"{path} never came"
        time.sleep(0.002)
