"""The machine of a run: device, precision, threads, CPU traps, stop requests, memory, CPU time. Imports torch late.

Some CPUs announce AMX units that cannot be used. There oneDNN picks AMX kernels and the first bf16 matrix product dies
with an illegal instruction. Capping oneDNN's instruction set avoids it, if the cap is in place before the process first
uses oneDNN. `make_bf16_safe` therefore tries a product in a child process, then sets the cap or refuses.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from bridle.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CAP_NAME, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
_capped_in_time = False  # did `make_bf16_safe` set the cap before torch was loaded?
_TRIAL = "import torch; a = torch.ones(256, 256).bfloat16(); assert (a @ a)[0, 0].item() == 256"


# --- device, precision, threads ---------------------------------------------------------------------------------------


def choose_device(wanted: str) -> torch.device:
    """The torch device of a name; `auto` takes CUDA where there is one, else the CPU."""
    import torch

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
    """Number format of the networks: bf16 by default on GPUs that have it, or where asked for and safe; else fp32."""
    import torch

    if wanted == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    fp32_as = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if device.type == "cpu" and (wanted == "bf16" or fp32_as == "bf16"):
        make_bf16_safe()  # torch.set_float32_matmul_precision("medium") makes fp32 products go through bf16
    return "bf16" if wanted == "bf16" else "fp32"


class Machine:
    """Device and number format of a run; setting it up also sets torch's threads and determinism."""

    def __init__(
        self, *, device: str = "auto", precision: str = "auto", threads: int = 0, deterministic: bool = False
    ) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device)
        if self.device.type == "cuda":
            # TF32 for what is left in fp32, on GPUs alone: on CPUs the same wish goes through bf16, which kills some.
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
            torch.use_deterministic_algorithms(True)

    @property
    def product_rate(self) -> float:
        """Operations a second of bare matrix products on this device, in the number format of the run."""
        import torch

        return product_rate(self.device, torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def autocast(self) -> torch.autocast:
        """Context in which the networks compute in bf16, where asked for; quantizer and losses stay in float32."""
        import torch

        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- bf16 on CPUs -----------------------------------------------------------------------------------------------------


@cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a bare square matrix product, the best of five; on a CPU of all threads, by CPU time."""
    import torch

    size = 1024 if device.type == "cpu" else 4096
    a, threads = torch.zeros(size, size, dtype=dtype, device=device), torch.get_num_threads()

    def seconds() -> float:
        if device.type == "cpu":
            start = time.process_time()
            torch.mm(a, a)
            return (time.process_time() - start) / threads
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    return 2 * size**3 / max(min(seconds() for _ in range(5)), 1e-9)


def make_bf16_safe() -> str:
    """Arrange that bf16 products on the CPU cannot kill this process, or raise ConfigError. Returns what was done."""
    if _survives(os.environ.get(CAP_NAME)) and not _set_too_late():
        return "bf16 works on this CPU as it is"
    if not _survives(CAP):
        raise ConfigError(
            "runtime.precision: bf16 does not work on this CPU (a trial in a child process died); "
            "use runtime.precision=fp32."
        )
    if "torch" in sys.modules:
        raise ConfigError(
            "runtime.precision: bf16 would kill this process on this CPU (illegal instruction), and torch is already "
            f"loaded; start Python with {CAP_NAME}={CAP} set, or use runtime.precision=fp32."
        )
    global _capped_in_time
    os.environ[CAP_NAME], _capped_in_time = CAP, True
    return f"bf16 on this CPU needs {CAP_NAME}={CAP}; set for this run"


@cache
def _survives(cap: str | None) -> bool:
    """Does a bf16 product work in a child process under this cap?"""
    environment = {key: value for key, value in os.environ.items() if key != CAP_NAME}
    if cap is not None:
        environment[CAP_NAME] = cap
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, timeout=120, check=False
    )
    return done.returncode == 0


def _set_too_late() -> bool:
    """Was the cap put into os.environ after torch, and so perhaps oneDNN, had started?"""
    if _capped_in_time or "torch" not in sys.modules or CAP_NAME not in os.environ:
        return False
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux: there is no way to tell, so take the careful answer
        return True
    return f"{CAP_NAME}={os.environ[CAP_NAME]}".encode() not in started_with


# --- stop requests ----------------------------------------------------------------------------------------------------


class StopRequest:
    """Records Ctrl-C and SIGTERM; loops poll it with `leave` at a safe place. A second signal changes nothing."""

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


# --- memory and time --------------------------------------------------------------------------------------------------


def peak_memory() -> str:
    """Peak memory of this process and of its share of a GPU, in words."""
    import torch

    found = "unknown"
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kilobytes elsewhere
        found = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB"
    if torch.cuda.is_available() and (held := torch.cuda.max_memory_allocated()):
        found += f", {held / 1e9:.1f} GB on the GPU"
    return found


def cpu_seconds() -> float:
    """CPU time of this process and of all its children; those still running count where /proc exists."""
    return time.process_time() + children_seconds() + sum(map(_family_seconds, _children("self")))


def children_seconds() -> float:
    """CPU time of the children that were waited for so far, and of theirs; one more wait adds one child."""
    if resource is None:
        return 0.0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _children(process: str) -> list[str]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += task.read_text().split()
    return found


def _family_seconds(process: str) -> float:
    """CPU time of another process and of all its children."""
    try:
        # After the name, which may hold anything: state, 10 numbers, then user, system, and both of ended children.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_family_seconds, _children(process)))


def environment(command: str | None = None) -> dict[str, str | int]:
    """Versions and settings that a result depends on."""
    import importlib.metadata

    import torch

    return {
        "bridle": importlib.metadata.version("bridle"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "command": command or " ".join(sys.argv),
    }
