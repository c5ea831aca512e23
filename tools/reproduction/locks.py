"""Locks on folders, so that several processes can share the work of one grid."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of `folder` (made if missing) for the block; gives False if another has it.

    The system holds the lock for the open file, so it is free the moment its process ends, however
    it ends: no lock is ever stale. The file says who had it last, for people.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield True
    finally:
        os.close(descriptor)
