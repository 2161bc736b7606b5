"""Data-parallel training: averaged gradients (DDP), sharded weights (FSDP2), common decisions, equality checks.

Every process computes its rows of the global batch. DDP averages gradients over the W processes, so a micro-batch of b
rows out of a global batch of B counts b·W/B: the average is then the mean over the global batch, as with one process.
With `shard` the weights of the trained networks are sharded over the processes instead (FSDP2); codebooks stay whole.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bridle import distributed
from bridle.data.loading.loader import BadSample
from bridle.errors import RankError
from bridle.machine import StopRequest

Step = Callable[..., Any]


class StepModule(nn.Module):
    """A module whose forward is the step of a phase: DDP wraps modules."""

    def __init__(self, trained: Mapping[str, nn.Module], step: Step) -> None:
        super().__init__()
        self.trained = nn.ModuleDict(trained)
        self.step = step

    def forward(self, *arguments: Any) -> Any:
        return self.step(*arguments)


class Replicas:
    """The trained networks wrapped for several processes; with one process nothing is wrapped.

    `some_steps_only`: some steps leave parameters without a gradient.
    """

    def __init__(
        self, trained: Mapping[str, nn.Module], step: Step, *, shard: bool, compiled: bool, some_steps_only: bool
    ) -> None:
        self.trained, self.step = trained, step
        self.sharded: list[FSDPModule] = []
        self.whole: dict[str, nn.Module] = {}  # unsharded copies, which take the final weights when the phase ends
        if compiled:
            for block in blocks(trained.values()):
                block.compile()
        self.wrapped: DistributedDataParallel | None = None
        if not distributed.is_active():
            return
        if shard:
            self.whole = {name: copy.deepcopy(module).cpu() for name, module in trained.items()}
            self.sharded = shard_networks(trained.values())
            return
        with warnings.catch_warnings():
            # Older versions of torch, which bridle supports, do not know the new name of the argument.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            # Buffers change only by calls that reduce over ranks themselves; broadcasting them would hide divergence.
            self.wrapped = DistributedDataParallel(
                StepModule(trained, step), broadcast_buffers=False, find_unused_parameters=some_steps_only
            )

    def __call__(self, *arguments: Any) -> Any:
        if not self.sharded:
            return (self.wrapped or self.step)(*arguments)
        with warnings.catch_warnings():
            # Outputs that are views are safe as long as nothing is written into them, which no step does.
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            return self.step(*arguments)

    @property
    def scale(self) -> int:
        """Factor of the loss that makes up for averaging gradients over the processes."""
        return distributed.world_size()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Context for a micro-batch: gradients are reduced over ranks with the last one only."""
        for module in self.sharded:
            module.set_requires_gradient_sync(last)
        if self.wrapped is None or last:
            return contextlib.nullcontext()
        waiting: AbstractContextManager[None] = self.wrapped.no_sync()
        return waiting

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale gradients down to a total norm of `limit` and return the norm they had; the same on all ranks."""
        parameters = list(parameters)
        if not self.sharded and limit == float("inf"):  # saves multiplying all gradients by one
            return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not self.sharded:
            return nn.utils.clip_grad_norm_(parameters, limit)
        spread = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        plain = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        for gradient in plain:  # FSDP reduces only what it shards
            gradient.copy_(distributed.sum_over_ranks(gradient) / distributed.world_size())
        norms = [whole(nn.utils.get_total_norm(group)) for group in (spread, plain) if group]
        total = torch.stack(norms).square().sum().sqrt()
        scale = min(1.0, limit / (float(total) + 1e-6))  # as torch's own
        for gradient in (*spread, *plain) if scale < 1.0 else ():
            gradient.mul_(scale)
        return total

    def dissolve(self, owner: object, state: Mapping[str, Tensor]) -> None:
        """Remove the wrapping; sharded networks of `owner` are replaced by whole ones that hold `state`."""
        for name, module in self.whole.items():
            prefix, device = f"{name}.", next(iter(self.trained[name].parameters())).device
            module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
            setattr(owner, name, module.to(device))
        self.wrapped = None
        gc.collect()  # DDP's hooks on the parameters go with its last reference, which is in a cycle


def blocks(networks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks of all trunks, which are compiled and sharded one by one."""
    trunks = [part.blocks for network in networks for part in network.modules() if hasattr(part, "blocks")]
    return [block for trunk in trunks if isinstance(trunk, nn.ModuleList) for block in trunk]


def shard_networks(networks: Iterable[nn.Module]) -> list[FSDPModule]:
    """Shard every block, then the rest of each network; quantizers are not sharded."""
    units: list[nn.Module] = []
    for network in networks:
        parts = [network]
        if hasattr(network, "quantizer"):
            parts = [part for name, part in network.named_children() if name != "quantizer"]
        units += [*blocks(parts), *parts]
    return [fully_shard(unit) for unit in units]


def whole(value: Tensor) -> Tensor:
    """A sharded tensor in full (collective); any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in full; sharded ones are moved to the CPU one by one, so that no device must hold them all."""
    return {key: whole(value).cpu() if isinstance(value, DTensor) else value for key, value in state.items()}


class Agreed(NamedTuple):
    """The outcome of a step, the same on all processes."""

    total: dict[str, Tensor]  # figures summed over ranks
    bad: list[BadSample]  # of all ranks, in rank order
    stop: bool  # was any rank asked to stop?


def agree(total: Mapping[str, Tensor], bad: Sequence[BadSample], stop: StopRequest) -> Agreed:
    """Reduce figures and flags over ranks in one small vector, so that all ranks skip, stop or raise together."""
    if not distributed.is_active():
        return Agreed(dict(total), list(bad), stop.received is not None)
    figures = [value.detach().double().flatten() for value in total.values()]
    flags = figures[0].new_tensor([float(len(bad)), float(stop.received is not None)])
    summed = distributed.sum_over_ranks(torch.cat([*figures, flags]))
    parts = summed.split([len(figure) for figure in (*figures, flags)])
    known = {
        key: part.reshape(value.shape).to(value.dtype)
        for (key, value), part in zip(total.items(), parts[:-1], strict=True)
    }
    bad_samples, asked = parts[-1].tolist()
    return Agreed(known, share_bad(bad) if bad_samples else [], asked > 0)


def share_bad(bad: Sequence[BadSample]) -> list[BadSample]:
    """The bad samples of all ranks, in rank order."""
    return [BadSample(*row) for rows in distributed.gather_json(bad) for row in rows]


def require_equal(state: Mapping[str, Tensor], *, where: str) -> None:
    """RankError if a tensor that should be equal on all ranks is not (collective); sharded tensors are left out."""
    if not distributed.is_active():
        return
    names = [name for name, value in state.items() if not isinstance(value, DTensor)]
    digests = torch.tensor([digest(state[name]) for name in names], dtype=torch.int64)
    every = distributed.gather_rows(digests[None])  # (W, tensors)
    differs = every != every[:1]
    if not bool(differs.any()):
        return
    first = int(differs.any(0).nonzero()[0])
    ranks = ", ".join(str(int(r)) for r in differs[:, first].nonzero().flatten())
    raise RankError(
        f"{where}: '{names[first]}' on rank {ranks} differs from rank 0 ({int(differs.any(0).sum())} of {len(names)} "
        "tensors differ). The run stops and the last checkpoint is safe; check that all machines have the same "
        "versions and no faulty memory, then run again."
    )


def digest(value: Tensor) -> int:
    """The first 63 bits of a tensor's SHA-256."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1
