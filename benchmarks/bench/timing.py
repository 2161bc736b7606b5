"""How speed is measured: CPU seconds on one thread, peak memory of a call, and a line that names the machine."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch

from bridle.train.trial_steps import Call, cpu_seconds

Tell = Callable[[str], None]  # hears what is measured next


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table whose first `words` columns are text and the others numbers."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def alternate(calls: Mapping[str, Call], gemm: Call, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds of every call and of the bare product timed right before it, turn by turn."""
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    for _ in range(repeats):
        for who, call in calls.items():
            bare = cpu_seconds(gemm)
            times[who].append((cpu_seconds(call), bare))
    return times


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and the libraries that have their own threads to one thread each."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def extra_memory(call: Call) -> float | None:
    """Peak resident memory in MB that a call adds to what the process holds; None where /proc does not tell."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier calls left free, or it would hide the peak
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    except OSError:
        return None
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    """A field of /proc/self/status in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def describe_machine(libraries: Sequence[str] = ()) -> str:
    """Processor, cores, and the versions of everything that took part, on one line."""
    installed = {found.name: found.version for found in metadata.distributions()} if libraries else {}
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{library} {installed.get(library, 'not installed')}" for library in libraries]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, platform.processor() or platform.machine())
    return f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} torch thread(s); {', '.join(versions)}."
