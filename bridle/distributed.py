"""Several processes as one: the group they form, the collectives they use, and how they fail together.

Every function may be called without a process group and then acts as world size 1. Inputs are this rank's rows,
results are the same on every rank unless a function says otherwise.

Two groups exist. The ordinary one has the run's timeout: whoever hangs in a training step ends the job. The patient one
waits for work that only some ranks do and that takes as long as it takes: a probe being solved, a data set measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from bridle import errors
from bridle.errors import BridleError, RankError, UsageError

PATIENCE = timedelta(hours=24)
ROLL_CALL_SECONDS = 5.0  # how long a rank that lost the others waits to hear who is still there

Value = TypeVar("Value")
_groups: dict[str, dist.ProcessGroup] = {}  # "patient", while there is one
_timeout: list[timedelta] = []  # of the ordinary group
_meshes: dict[int, DeviceMesh] = {}  # by the number of groups
_waits: list[float] = []  # seconds
_working_alone: list[bool] = []  # not empty while this rank does what is done once


def is_active() -> bool:
    """Is there a process group with more than one rank, and do the others take part?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _working_alone


def rank() -> int:
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    return dist.get_world_size() if is_active() else 1


# --- the group -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(*, device: str = "auto", timeout_minutes: float = 30.0) -> Iterator[None]:
    """Join the processes that torchrun started, for the length of the block; without torchrun nothing happens.

    gloo on CPUs, nccl between GPUs (this process takes GPU LOCAL_RANK). A collective that waits longer than the timeout
    ends the process. Inside another such block it does nothing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    if "RANK" not in os.environ:
        raise UsageError("WORLD_SIZE is set but RANK is not; start several processes with torchrun or `bridle launch`.")
    cuda = _take_gpu(device)
    try:
        join(cuda=cuda, timeout=timedelta(minutes=timeout_minutes))
        yield
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        raise RankError(_who_is_missing(error)) from error
    leave()


def join(*, cuda: bool, timeout: timedelta) -> None:
    """Form the two groups from the environment's addresses."""
    # Both, because decisions and lists travel as CPU tensors also where the networks are on GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    _groups["patient"] = dist.new_group(backend="gloo", timeout=PATIENCE)
    _timeout.append(timeout)


def device_mesh(groups: int, device: str) -> DeviceMesh | None:
    """The ranks as (groups, ranks of a group), neighbours in one group; None for a single group (collective)."""
    if groups == 1 or not is_active():
        return None
    if groups not in _meshes:
        ranks = torch.arange(world_size()).view(groups, -1)
        timeout = _timeout[-1] if _timeout else None
        # Every rank must create all groups, in the same order; it belongs to one of a kind.
        across = [dist.new_group(column.tolist(), timeout=timeout) for column in ranks.T]
        within = [dist.new_group(row.tolist(), timeout=timeout) for row in ranks]
        row, column = divmod(rank(), ranks.shape[1])
        _meshes[groups] = DeviceMesh.from_group(
            [across[column], within[row]], device, mesh=ranks, mesh_dim_names=("groups", "ranks")
        )
    return _meshes[groups]


def leave() -> None:
    """Dissolve the groups. Not called after an error: a rank that fails must not wait for the others."""
    _groups.clear()
    _timeout.clear()
    _meshes.clear()
    dist.destroy_process_group()


def _take_gpu(device: str) -> bool:
    """Choose this process's GPU; False where the networks stay on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return False
    if ":" in device:
        raise UsageError(f"runtime.device={device} names one device for all processes; use runtime.device=cuda.")
    local, present = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= present:
        raise UsageError(
            f"process {local + 1} on this machine finds only {present} GPU(s); start at most {present}, "
            "or give runtime.device=cpu."
        )
    torch.cuda.set_device(local)
    return True


# --- tensors ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Count the time inside the block as waiting for other ranks."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _waits.append(time.perf_counter() - began)


def waited_seconds() -> float:
    """Seconds in sums and gathers over ranks since the last call, without the exchange of gradients in the backward."""
    total = sum(_waits)
    _waits.clear()
    return total


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks; a new tensor, the argument is left alone."""
    if not is_active():
        return x
    total = x.clone()
    with _waiting():
        dist.all_reduce(total)
    return total


def from_first_rank(x: Tensor) -> Tensor:
    """Rank 0's `x` on every rank; shapes must agree. Waits patiently: rank 0 may have had work that nobody else had."""
    if not is_active():
        return x
    copy = x.detach().to("cpu", copy=True).contiguous()  # the patient group is one of CPUs
    dist.broadcast(copy, src=0, group=_groups.get("patient"))
    return copy.to(x.device)


def gather_rows(x: Tensor, *, patient: bool = False) -> Tensor:
    """All ranks' rows joined along the first axis in rank order; row counts may differ."""
    if not is_active():
        return x
    group = _groups.get("patient") if patient else None
    with _waiting():
        counts, padded = _padded(x, group)
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def rows_on_first_rank(parts_here: list[Tensor]) -> Tensor | None:
    """All ranks' rows (CPU tensors) joined in rank order on rank 0, none on the others: what is large is held once.

    None if no rank has any; waits patiently.
    """
    if not is_active():
        return torch.cat(parts_here) if parts_here else None
    # A rank without rows does not know their form.
    forms = gather_json([list(parts_here[0].shape[1:]), str(parts_here[0].dtype)] if parts_here else None, patient=True)
    form = next(filter(None, forms), None)
    if form is None:
        return None
    x = torch.cat([torch.empty(0, *form[0], dtype=getattr(torch, form[1].removeprefix("torch."))), *parts_here])
    counts, padded = _padded(x, _groups.get("patient"))
    parts = [torch.empty_like(padded) for _ in counts] if rank() == 0 else None
    dist.gather(padded, parts, dst=0, group=_groups.get("patient"))
    if parts is None:
        return x[:0]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _padded(x: Tensor, group: dist.ProcessGroup | None) -> tuple[list[int], Tensor]:
    """Every rank's row count, and this rank's rows filled up to the most of them."""
    counts = torch.zeros(world_size(), dtype=torch.int64, device=x.device)
    counts[rank()] = x.shape[0]
    dist.all_reduce(counts, group=group)
    padded = torch.zeros(int(counts.max()), *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    return counts.tolist(), padded


# --- values and decisions --------------------------------------------------------------------------------------------


def gather_json(value: Any, *, patient: bool = False) -> list[Any]:
    """Every rank's value, in rank order; it travels as JSON, never as a pickle."""
    if not is_active():
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = gather_rows(torch.tensor([len(text)]), patient=patient).tolist()
    parts = gather_rows(text, patient=patient).split(lengths)
    return [json.loads(bytes(part.tolist())) for part in parts]


def done_once(work: Callable[[], Value]) -> Value:
    """What rank 0's `work()` returns (plain JSON values), or raises if it is one of ours, on every rank.

    During `work()` rank 0 counts as alone: the others wait for its result and cannot take part in collectives.
    """
    if not is_active():
        return work()
    found: list[Value] = []

    def on_first() -> None:
        if rank() == 0:
            _working_alone.append(True)
            try:
                found.append(work())
            finally:
                _working_alone.pop()

    done_together(on_first)
    first: Value = gather_json(found, patient=True)[0][0]
    return found[0] if found else first


def done_together(work: Callable[[], Value]) -> Value:
    """This rank's `work()`; if any rank's raises an error of ours, all ranks raise the first rank's."""
    if not is_active():
        return work()
    failure: BridleError | None = None
    try:
        found = work()
    except BridleError as error:
        failure = error
    failures = gather_json(None if failure is None else [type(failure).__name__, str(failure)], patient=True)
    for name, text in filter(None, failures):
        raise failure if failure is not None else getattr(errors, name)(text)
    return found


def barrier() -> None:
    """Wait, patiently, until every rank has called this."""
    if is_active():
        dist.barrier(group=_groups.get("patient"))


# --- failures --------------------------------------------------------------------------------------------------------


def lost_contact(error: BaseException) -> bool:
    """Does this error of torch mean that another rank is gone or does not answer?"""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(name in words for name in ("gloo", "nccl", "process group"))


def _who_is_missing(error: BaseException) -> str:
    missing = [str(other) for other in silent_ranks()]
    # gloo puts a source file in front and advice behind.
    why = re.sub(r"^(\[\S+\] )+", "", str(error).splitlines()[0]).split(". ")[0][:120]
    if not missing:
        return f"the processes lost contact with each other ({why}); the last checkpoint is safe, start the job again."
    return (
        f"rank {', '.join(missing)} died or hangs ({why}); its last output is above, or in its own log. "
        "The last checkpoint is safe: start the job again, with a longer runtime.timeout_minutes if it was only slow."
    )


def silent_ranks() -> list[int]:
    """Ranks that do not answer a roll call through the job's store within a few seconds."""
    store, world = _store(), int(os.environ["WORLD_SIZE"])
    if store is None:
        return []
    store.set(_key("present", os.environ["RANK"]), "1")
    missing = list(range(world))
    until = time.monotonic() + ROLL_CALL_SECONDS
    while missing and time.monotonic() < until:
        missing = [other for other in missing if not store.check([_key("present", str(other))])]
        time.sleep(0.1)
    return missing


def speaks_first() -> bool:
    """Is this the first process of the job that reports its end? True for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return True
    store = _store()
    return store is None or store.add(_key("spoken"), 1) == 1


def _store() -> TCPStore | None:
    """A connection of its own to the job's store, which torchrun's agent keeps beyond the end of any rank."""
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=ROLL_CALL_SECONDS)
        )
    except (RuntimeError, KeyError, ValueError):
        return None


def _key(*names: str) -> str:
    """A key of the job's store that names the attempt: restarted jobs use the same store."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "/".join(("bridle", os.environ.get("TORCHELASTIC_RUN_ID", ""), attempt, *names))
