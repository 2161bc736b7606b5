"""What a process that loads data has in hand, known to the process that watches it.

    loading process     with watched("dog.wav"): decode …      notes the file and a deadline in shared memory
    watching process    the other one died or is late           blame(slot.key, …): which file, how often

Decoders are libraries in C: on a damaged file they may crash, hang or ask for any amount of memory. A file that was in
hand when its process died is tried once more, because something else may have killed the process; the second time, or
when it took too long, it is condemned, and `watched` refuses it in this process and in those it starts later.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bridle.errors import DataError, quoted

PATIENCE = 120.0  # seconds for one file, or for a block of a long one
GRACE = 2.0  # seconds more: whoever stops a run (Ctrl-Z, a scheduler) stops its loading processes, not the clock
MEMORY = 4 * 2**30  # bytes one file may take beyond what its process holds already
TRIES = 2  # deaths with the same file in hand that condemn it
NOTHING = 0

condemned: dict[int, str] = {}  # why, by the file's key; the end of a sentence that begins with its name
strikes: Counter[int] = Counter()


class Slot:
    """Shared by a loading process and its watcher: the key of the file in hand, and when it must be done."""

    def __init__(self) -> None:
        self.cells = memoryview(mmap.mmap(-1, 16)).cast("q")  # key, nanoseconds of the monotonic clock; 0 is none
        self.seen_late = NOTHING, NOTHING  # a deadline that has passed, and when the watcher first saw that

    def note(self, key: int, deadline: int) -> None:
        self.cells[0], self.cells[1] = key, deadline

    @property
    def key(self) -> int:
        return self.cells[0]

    @property
    def deadline(self) -> int:
        return self.cells[1]

    @property
    def late(self) -> bool:
        now, deadline = time.monotonic_ns(), self.deadline
        if deadline == NOTHING or now <= deadline:
            return False
        if self.seen_late[0] != deadline:
            self.seen_late = deadline, now
        return now - self.seen_late[1] > GRACE * 1e9


at_hand: Slot | None = None  # of this process, if it is one that is watched


@contextmanager
def watched(name: object, *, limited: bool = True) -> Iterator[None]:
    """Have a file (or a sample) in hand inside the block, by its name; DataError if it is condemned.

    It must be done after PATIENCE seconds, or `renew` the time whenever it has got on. Not `limited`: the block has a
    time limit of its own.
    """
    key = key_of(name)
    if key in condemned:
        raise DataError(f"{quoted(name)} {condemned[key]}.")
    if at_hand is None:
        yield
        return
    before = at_hand.key, at_hand.deadline
    at_hand.note(key, deadline() if limited else NOTHING)
    try:
        with bounded_memory() if before[0] == NOTHING else nullcontext():  # inside another block it is bounded already
            yield
    finally:
        at_hand.note(*before)


def renew() -> None:
    """The file at hand has got on, as long files do block by block."""
    if at_hand is not None and at_hand.deadline != NOTHING:
        at_hand.note(at_hand.key, deadline())


def deadline() -> int:
    return time.monotonic_ns() + int(PATIENCE * 1e9)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let allocations fail that one file has no right to."""
    try:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):  # not on every system
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (held + MEMORY, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def blame(key: int, *, exit_code: int | None, late: bool) -> None:
    """A process ended with a file in hand: count it against the file, and condemn the file when that is enough."""
    if key == NOTHING:
        return
    strikes[key] += 1
    if late:
        condemned[key] = f"was given up: it took longer than {PATIENCE:g} s to load"
    elif strikes[key] >= TRIES:
        condemned[key] = f"made its decoder crash {strikes[key]} times ({ending(exit_code)})"


def ending(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    known = [known.name for known in signal.Signals if known == -exit_code]
    return known[0] if known else f"signal {-exit_code}"


def key_of(name: object) -> int:
    """A number for a name, never 0; any bytes can be a file's name."""
    digest = hashlib.blake2b(os.fsencode(str(name)), digest_size=7).digest()
    return int.from_bytes(digest, "little") | 1
