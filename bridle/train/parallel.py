"""Data-parallel training: averaged gradients (DDP), sharded weights (FSDP2), common decisions, equality checks.

Every process computes its rows of the global batch. DDP averages gradients over the W processes, so a micro-batch of b
rows out of a global batch of B counts b·W/B: the average is then the mean over the global batch, as with one process.
With `shard` the weights of the trained networks are sharded over the processes instead (FSDP2); codebooks stay whole.
With several shard groups (HSDP) every group holds all shards, and gradients are averaged over the groups.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bridle import distributed
from bridle.data.loading.loader import BadSample
from bridle.errors import RankError
from bridle.machine import StopRequest
from bridle.quantize import Statistics

Step = Callable[..., Any]
Shard = Literal["none", "optimizer", "full"]
BUCKETS, MOST_BUCKET = 4, 25.0  # parts of the gradients, at least; MB in one, at most


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
        self,
        trained: Mapping[str, nn.Module],
        step: Step,
        *,
        shard: Shard = "none",
        shard_groups: int = 1,
        compiled: bool,
        some_steps_only: bool,
    ) -> None:
        self.trained, self.step = trained, step
        self.sharded: list[FSDPModule] = []
        self.gathers_once = shard == "optimizer"  # whole weights from the first forward to the last backward of a step
        self.whole: dict[str, nn.Module] = {}  # unsharded copies, which take the final weights when the phase ends
        if compiled:
            for block in blocks(trained.values()):
                block.compile()
        self.wrapped: DistributedDataParallel | None = None
        if not distributed.is_active():
            return
        if shard != "none":
            self.whole = {name: copy.deepcopy(module).cpu() for name, module in trained.items()}
            mesh = distributed.device_mesh(shard_groups, next(next(iter(trained.values())).parameters()).device.type)
            self.sharded = shard_networks(trained.values(), mesh=mesh, gather_again=shard == "full")
            return
        with warnings.catch_warnings():
            # Older versions of torch, which bridle supports, do not know the new name of the argument.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            # Buffers change only by calls that reduce over ranks themselves; broadcasting them would hide divergence.
            self.wrapped = DistributedDataParallel(
                StepModule(trained, step),
                broadcast_buffers=False,
                find_unused_parameters=some_steps_only,
                gradient_as_bucket_view=True,  # gradients are not copied back from what was exchanged
                bucket_cap_mb=bucket_megabytes(trained),
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
            if self.gathers_once:  # the next micro-batch uses the same weights
                module.set_reshard_after_backward(last)
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
        average(plain)  # FSDP reduces only what it shards
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


def bucket_megabytes(trained: Mapping[str, nn.Module]) -> float:
    """Size of the parts in which gradients are exchanged; small networks too exchange some during the backward pass."""
    total = sum(p.numel() * p.element_size() for module in trained.values() for p in module.parameters())
    return min(MOST_BUCKET, total / BUCKETS / 2**20)


def blocks(networks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks of all trunks, which are compiled and sharded one by one."""
    trunks = [part.blocks for network in networks for part in network.modules() if hasattr(part, "blocks")]
    return [block for trunk in trunks if isinstance(trunk, nn.ModuleList) for block in trunk]


def shard_networks(networks: Iterable[nn.Module], *, mesh: DeviceMesh | None, gather_again: bool) -> list[FSDPModule]:
    """Shard every block, then the rest of each network; quantizers are not sharded.

    Weights are gathered for the forward pass and, with `gather_again`, dropped and gathered again for the backward.
    """
    units: list[nn.Module] = []
    for network in networks:
        parts = [network]
        if hasattr(network, "quantizer"):
            parts = [part for name, part in network.named_children() if name != "quantizer"]
        units += [*blocks(parts), *parts]
    return [fully_shard(unit, mesh=mesh, reshard_after_forward=gather_again) for unit in units]


def average(gradients: Sequence[Tensor]) -> None:
    """Replace tensors by their means over ranks, in one all-reduce."""
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = (distributed.sum_over_ranks(flat) / distributed.world_size()).split([g.numel() for g in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))


def whole(value: Tensor) -> Tensor:
    """A sharded tensor in full (collective); any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in full; sharded ones are moved to the CPU one by one, so that no device must hold them all."""
    return {key: whole(value).cpu() if isinstance(value, DTensor) else value for key, value in state.items()}


class Gathered(NamedTuple):
    """What a step has found, by one rank or by all."""

    figures: dict[str, Tensor]  # parts of the global batch's means; `loss` and `grad_norm` decide about the step
    statistics: Statistics | None = None  # for the codebook update
    counts: Tensor | None = None  # (ΣK_m,) int64, how often each code was chosen


class Agreed(NamedTuple):
    """The outcome of a step, the same on all processes."""

    gathered: Gathered  # summed over ranks
    bad: list[BadSample]  # of all ranks, in rank order
    stop: bool  # was any rank asked to stop?
    is_finite: bool  # are loss and gradient norm?


def agree(own: Gathered, bad: Sequence[BadSample], stop: StopRequest) -> Agreed:
    """Sum over ranks what a step has found, and its flags, so that all ranks skip, stop or raise together.

    One all-reduce of one float64 vector, which holds counts exactly, and one wait for the device.
    """
    if not distributed.is_active():
        return Agreed(own, list(bad), stop.received is not None, bool(finite(own.figures)))
    like = [*own.figures.values(), *([] if own.counts is None else [own.counts])]
    parts = [value.detach().double().flatten() for value in like]
    parts += [] if own.statistics is None else [own.statistics.flatten()]
    flags = parts[0].new_tensor([float(len(bad)), float(stop.received is not None)])
    summed = distributed.sum_over_ranks(torch.cat([*parts, flags])).split([len(part) for part in (*parts, flags)])
    shaped = [part.reshape(value.shape).to(value.dtype) for part, value in zip(summed, like, strict=False)]
    figures = dict(zip(own.figures, shaped, strict=False))
    bad_samples, asked, is_finite = torch.cat([summed[-1], finite(figures).double()[None]]).tolist()
    gathered = Gathered(
        figures,
        None if own.statistics is None else own.statistics.unflatten(summed[-2]),
        None if own.counts is None else shaped[-1],
    )
    return Agreed(gathered, share_bad(bad) if bad_samples else [], asked > 0, is_finite > 0)


def finite(figures: Mapping[str, Tensor]) -> Tensor:
    """Are loss and gradient norm finite? A tensor, on their device."""
    return torch.isfinite(figures["loss"]) & torch.isfinite(figures["grad_norm"])


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
