"""The machine a run meets: device, precision, threads, signals, the lock on its directory, the environment record."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import torch

from bridle.config.schema import RuntimeConfig
from bridle.cpu import make_bf16_safe
from bridle.errors import ConfigError, Interrupted, UsageError


def choose_device(wanted: str) -> torch.device:
    """`auto` takes CUDA where there is one, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"runtime.device: {wanted!r} cannot be used here ({reason}); try runtime.device=cpu."
        ) from error
    if device.type not in ("cpu", "cuda"):  # Apple's mps, for one, has no float64, which codebook statistics need
        raise ConfigError(f"runtime.device: {wanted!r} is not supported; use cpu or cuda.")
    return device


def choose_precision(wanted: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """bf16 where it is the sensible default (GPUs) or asked for and safe; fp32 elsewhere."""
    if wanted == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    fp32_as = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if device.type == "cpu" and (wanted == "bf16" or fp32_as == "bf16"):
        make_bf16_safe()  # torch.set_float32_matmul_precision("medium") makes fp32 products go through bf16
    return "bf16" if wanted == "bf16" else "fp32"


class Machine:
    """Device and number format of a run."""

    def __init__(self, config: RuntimeConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = choose_device(config.device)
        self.precision = choose_precision(config.precision, self.device)
        if self.device.type == "cuda":
            # TF32 for what is left in fp32, on GPUs alone: on CPUs the same wish goes through bf16, which kills some.
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
            torch.use_deterministic_algorithms(True)

    def autocast(self) -> torch.autocast:
        """bf16 for the networks where asked for; quantizer and losses stay in float32 by themselves."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


class StopRequest:
    """Notes Ctrl-C and SIGTERM; loops poll it and leave at a safe place. A second signal changes nothing."""

    CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # noqa: RUF012 - a constant table

    def __init__(self) -> None:
        self.received: int | None = None
        self.at_once = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals inside the block, then put the old handlers back. Outside the main thread: no handlers."""
        try:
            before = {number: signal.signal(number, self._note) for number in self.CODES}
        except ValueError:  # not the main thread, where Python allows no handlers
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def leaving_at_once(self, saved: str) -> Iterator[None]:
        """Inside the block a signal need not wait for a poll: all is saved, and other libraries' loops never poll."""
        self.leave(saved)
        self.at_once, self.saved = True, saved
        try:
            yield
        finally:
            self.at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self.at_once:
            self.leave(self.saved)

    def leave(self, saved: str) -> None:
        """Raise Interrupted if a signal has arrived; `saved` says what is safe."""
        if self.received is not None:
            name = signal.Signals(self.received).name
            raise Interrupted(
                f"stopped by {name}; {saved} Run the same command again to continue.",
                exit_code=self.CODES[signal.Signals(self.received)],
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time in a run directory. The lock is the kernel's, so a crash releases it."""
    with (folder / "run.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{folder}: another bridle command is running in this directory; wait for it to end."
            ) from None
        held.append(file)
        try:
            yield
        finally:
            held.remove(file)


held: list[TextIO] = []  # open lock files of this process


def let_go() -> None:
    """In a forked process: a lock that it shared would outlive the run, as long as a decoder hangs there."""
    while held:
        held.pop().close()


os.register_at_fork(after_in_child=let_go)


def peak_memory() -> str:
    """The most memory this process has held so far, and its share of a GPU if it used one."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kilobytes elsewhere
    found = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB"
    if torch.cuda.is_available() and (held := torch.cuda.max_memory_allocated()):
        found += f", {held / 1e9:.1f} GB on the GPU"
    return found


def cpu_seconds() -> float:
    """CPU time of this process and of all it has started, those still at work included where /proc tells."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_family_seconds, _children("self")))


def _children(process: str) -> list[str]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += task.read_text().split()
    return found


def _family_seconds(process: str) -> float:
    """CPU time of another process, of its ended children, and of those at work."""
    try:
        # After the name, which may hold anything: state, 10 numbers, then user, system, and both of ended children.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_family_seconds, _children(process)))


def environment(command: str | None = None) -> dict[str, Any]:
    """Versions and settings that a result depends on."""
    return {
        "bridle": importlib.metadata.version("bridle"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "command": command or " ".join(sys.argv),
    }
