"""Rank, world size and sums over ranks, plain and differentiable.

Without an initialised process group every function treats this process as the only one, at no cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process belongs to a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def communication_device() -> torch.device:
    """The device from which the process group sends tensors: the GPU for NCCL, else the CPU."""
    nccl = is_distributed() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def sum_(*tensors: Tensor) -> None:
    """Replace each tensor, in place and on every rank, by its sum over the ranks."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def total(tensor: Tensor) -> Tensor:
    """The sum over the ranks, on the device that the process group sends from."""
    tensor = tensor.to(communication_device())
    sum_(tensor)
    return tensor


def gathered(value: T) -> list[T]:
    """What each rank passed, in the order of the ranks. Every rank must call this."""
    values = [value] * world_size()
    if is_distributed():
        dist.all_gather_object(values, value)
    return values


def concatenate(tensor: Tensor) -> Tensor:
    """(Σ rows, ...) the rows of all ranks' tensors in the order of the ranks, of any numbers."""
    if not is_distributed():
        return tensor
    before, total = exclusive_prefix(torch.tensor(len(tensor), device=tensor.device))
    rows = tensor.new_zeros(int(total), *tensor.shape[1:])
    rows[int(before) : int(before) + len(tensor)] = tensor
    dist.all_reduce(rows)
    return rows


class _SumOverRanks(torch.autograd.Function):
    """y = Σ_r x_r on every rank.

    Every rank computes the same loss L from y, and DistributedDataParallel averages the parameter
    gradients of these W equal losses. The average is right if the gradient of x_r is the sum of
    dL/dy over ranks, W · dL/dy, which needs no communication.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad * dist.get_world_size()


def sum_over_ranks(x: Tensor, *, sync: bool = True) -> Tensor:
    """Σ of x over all ranks, differentiable under DistributedDataParallel; without `sync`, x.

    A loss of such sums has the value and the gradient of one process that holds the whole batch.
    """
    return _SumOverRanks.apply(x) if sync and is_distributed() else x


def exclusive_prefix(count: Tensor, *, sync: bool = True) -> tuple[Tensor, Tensor]:
    """The sums of `count` over lower ranks and over all ranks, without waiting for the device."""
    if not sync or not is_distributed():
        return torch.zeros_like(count), count
    counts = torch.zeros(world_size(), dtype=count.dtype, device=count.device)
    counts[rank()] = count
    dist.all_reduce(counts)
    return counts[: rank()].sum(), counts.sum()


def choose_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda, cuda:1, mps, or auto for the fastest there is.

    Under torchrun `cuda` is the GPU of this process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"Expected --device auto, cpu, cuda, cuda:N or mps, but got {name}"
        ) from None
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"Expected --device among {torch.cuda.device_count()} CUDA GPU(s), "
                f"but got cuda:{index}"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type not in ("cpu", "mps"):
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
            raise ValueError(
                f"Expected --device where numbers can be computed, but got {name}: "
                f"{' '.join(str(error).split()):.120}"
            ) from None
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("Expected a machine with MPS for --device mps, but this one has none")
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of torchrun inside the block; without torchrun, do nothing."""
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
