"""How speed is measured: CPU seconds on one thread, peak memory of a call, and a line that names the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

Call = Callable[[], object]
Tell = Callable[[str], None]  # hears what is measured next


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table whose first `words` columns are text and the others numbers."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cpu_seconds(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and the libraries that have their own threads to one thread each."""
    before, limits = torch.get_num_threads(), None
    torch.set_num_threads(1)
    if find_spec("threadpoolctl"):
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        limits = threadpool_limits(1)
    try:
        yield
    finally:
        if limits is not None:
            limits.restore_original_limits()
        torch.set_num_threads(before)


def extra_memory(call: Call) -> float | None:
    """Peak resident memory in MB that a call adds to what the process holds; None where /proc does not tell."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier calls left free, or it would hide the peak
        reset.write_text("5")  # the peak starts again from here
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
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for library in libraries:
        try:
            versions.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{library} not installed")
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch thread(s); {', '.join(versions)}."


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
