"""Runs a function on several gloo ranks of this machine, for tests of what crosses ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Call function(rank, *args) in `world_size` processes of one group; their results by rank.

    `function` must be importable (module level), and its result what torch.save can hold.
    """
    with TemporaryDirectory() as folder:
        mp.spawn(_main, (world_size, free_port(), folder, function, args), nprocs=world_size)
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)
        ]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
