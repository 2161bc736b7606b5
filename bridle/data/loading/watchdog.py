"""Which file a worker decodes and until when, so that its parent can end it in time and block the file.

    worker    with watched("dog.wav"): decode …      writes the file's key and deadline into shared memory
    parent    the worker died, or slot.is_late        blame(slot, …): retry the file once, then block it

Decoders are C libraries: on a damaged file they may crash, hang or ask for any amount of memory. A file that a worker
was decoding when it died is tried once more, because something else may have killed the worker. The second time, or
when it timed out, it goes on the blocklist, and `watched` raises DataError for it in this process and its workers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

from bridle.errors import DataError, quoted

GRACE = 2.0  # seconds after the deadline: whoever pauses a run (Ctrl-Z, a scheduler) pauses workers, not the clock
TRIES = 2  # crashes that block a file
NONE = 0  # no file, no deadline


class Limits(NamedTuple):
    """What one file may take."""

    timeout: float = 120.0  # seconds for a file, or for a block of a long one
    memory: int = 4 * 2**30  # bytes beyond what its worker holds already


limits = Limits()
blocklist: dict[int, str] = {}  # reason by key of the file; the end of a sentence that begins with its name
crashes: Counter[int] = Counter()  # by key


class Slot:
    """Shared by a worker and its parent: key of the file that is decoded, its deadline and timeout (nanoseconds)."""

    def __init__(self, context: BaseContext) -> None:
        self.cells = context.RawArray("q", 3)
        self.seen_late = NONE, NONE  # a deadline that has passed, and when the parent first saw that

    def write(self, key: int, timeout: int) -> None:
        """Start the clock for a file; without a timeout no clock runs."""
        self.cells[0], self.cells[2] = key, timeout
        self.cells[1] = time.monotonic_ns() + timeout if timeout else NONE

    @property
    def key(self) -> int:
        return int(self.cells[0])

    @property
    def timeout(self) -> int:
        return int(self.cells[2])

    @property
    def is_late(self) -> bool:
        now, deadline = time.monotonic_ns(), self.cells[1]
        if deadline == NONE or now <= deadline:
            return False
        if self.seen_late[0] != deadline:
            self.seen_late = deadline, now
        return now - self.seen_late[1] > GRACE * 1e9


slot: Slot | None = None  # of this process, if it is a worker


@contextmanager
def watched(name: object, *, timeout: float | None = None) -> Iterator[None]:
    """Decode a file (or load a sample) inside the block; DataError if it is on the blocklist.

    In a worker the block is limited in memory and must end within `timeout` seconds (`limits.timeout` without it), or
    call `renew` whenever it has made progress. A block inside another one has a clock of its own.
    """
    key = key_of(name)
    if key in blocklist:
        raise DataError(f"{quoted(name)} {blocklist[key]}.")
    if slot is None:
        yield
        return
    before = slot.key, slot.timeout
    slot.write(key, int((timeout or limits.timeout) * 1e9))
    try:
        with limited_memory() if before[0] == NONE else nullcontext():
            yield
    finally:
        slot.write(*before)


@contextmanager
def decoding(path: object, what: str, *, timeout: float | None = None) -> Iterator[None]:
    """Decode a file as `what` inside the block, watched; whatever its decoder raises becomes a DataError."""
    try:
        with watched(path, timeout=timeout):
            yield
    except DataError:
        raise
    except Exception as error:  # decoders meet damaged files with errors of every type
        raise DataError(f"{quoted(path)} cannot be read as {what}: {reason(error)}.") from error


def reason(error: Exception) -> str:
    """One line for a decoder's error, without the file's name; escaped, because its words may be the file's."""
    name = type(error).__name__
    if name == "UnidentifiedImageError":
        return "not a JPEG, PNG, WebP or BMP file"
    if isinstance(error, MemoryError):
        return "it needs more memory than a file may take"
    text = str(getattr(error, "error_string", None) or getattr(error, "strerror", None) or error)
    if "Format not recognised" in text or "Invalid data" in text:
        return "its content is not of this format, or damaged"
    words = quoted(text, limit=300)[1:-1].rstrip(".")
    return words if words and isinstance(error, OSError | ValueError | EOFError) else f"{name}: {words}"


def renew() -> None:
    """Restart the clock of the file that is decoded, as long files do block by block."""
    if slot is not None and slot.key != NONE:
        slot.write(slot.key, slot.timeout)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Make allocations fail that exceed what one file may take; does nothing where the system has no such limit."""
    try:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [bound for bound in (held + limits.memory, soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def blame(key: int, *, exit_code: int | None, timed_out: float | None) -> None:
    """A worker ended while it decoded a file: count that, and block the file when it is enough."""
    if key == NONE:
        return
    crashes[key] += 1
    if timed_out is not None:
        blocklist[key] = f"timed out: it took longer than {timed_out:g} s to decode"
    elif crashes[key] >= TRIES:
        blocklist[key] = f"made its decoder crash {crashes[key]} times ({exit_reason(exit_code)})"


def exit_reason(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    names = [known.name for known in signal.Signals if known == -exit_code]
    return names[0] if names else f"signal {-exit_code}"


def key_of(name: object) -> int:
    """A number for a name, never 0; any bytes can be a file's name."""
    digest = hashlib.blake2b(os.fsencode(str(name)), digest_size=7).digest()
    return int.from_bytes(digest, "little") | 1
