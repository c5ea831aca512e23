"""The place for talk between ranks: who we are, and sums over everyone, plain and differentiable.

Without an initialised process group every function here is the one-process case and costs nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's number, 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes there are, 1 when alone."""
    return dist.get_world_size() if is_distributed() else 1


def communication_device() -> torch.device:
    """Where a tensor must be for the process group to send it: the GPU for NCCL, else the CPU."""
    nccl = is_distributed() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def sum_(*tensors: Tensor) -> None:
    """Replace each tensor, in place and on every rank, by its sum over the ranks."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def concatenate(tensor: Tensor) -> Tensor:
    """(Σ rows, ...) the rows of every rank's tensor in order of rank; shares may be uneven.

    Dtype and all other dimensions must agree; every rank must call this.
    """
    if not is_distributed():
        return tensor
    before, total = exclusive_prefix(torch.tensor(len(tensor), device=tensor.device))
    rows = tensor.new_zeros(int(total), *tensor.shape[1:])
    rows[int(before) : int(before) + len(tensor)] = tensor
    dist.all_reduce(rows)
    return rows


class _SumOverRanks(torch.autograd.Function):
    """y = Σ_r x_r on every rank.

    Every rank goes on to compute the same loss from y, and DistributedDataParallel averages the
    parameter gradients of those W equal losses. So that the average is the gradient of the one
    loss, x_r's gradient is Σ over ranks of dL/dy = W · dL/dy: no communication is needed for it.
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
    """Σ of x over all ranks, differentiable for use under DistributedDataParallel.

    A loss made of such sums has the same value on every rank, and the gradient that
    DistributedDataParallel averages to is the gradient of one process holding the whole batch.

    Args:
        x: same shape and dtype on every rank; every rank must call this.
        sync: False returns x unchanged (statistics of the local share only).
    """
    if not sync or not is_distributed():
        return x
    total: Tensor = _SumOverRanks.apply(x)
    return total


def exclusive_prefix(count: Tensor, *, sync: bool = True) -> tuple[Tensor, Tensor]:
    """(sum of `count` over lower ranks, sum over all ranks), without waiting for the device."""
    if not sync or not is_distributed():
        return torch.zeros_like(count), count
    counts = torch.zeros(world_size(), dtype=count.dtype, device=count.device)
    counts[rank()] = count
    dist.all_reduce(counts)
    return counts[: rank()].sum(), counts.sum()
