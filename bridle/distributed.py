"""Collective helpers over torch.distributed that also work alone.

Every function may be called without a process group and then acts as world size 1. Inputs are this rank's rows,
results are the same on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def is_active() -> bool:
    """Is there a process group with more than one rank?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    return dist.get_world_size() if is_active() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks; a new tensor, the argument is left alone."""
    if not is_active():
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total


def from_first_rank(x: Tensor) -> Tensor:
    """Rank 0's `x` on every rank; shapes must agree."""
    if not is_active():
        return x
    copy = x.contiguous().clone()
    dist.broadcast(copy, src=0)
    return copy


def gather_rows(x: Tensor) -> Tensor:
    """All ranks' rows joined along the first axis in rank order; row counts may differ."""
    if not is_active():
        return x
    counts = torch.zeros(world_size(), dtype=torch.int64, device=x.device)
    counts[rank()] = x.shape[0]
    dist.all_reduce(counts)
    most = int(counts.max())
    padded = torch.zeros(most, *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])
