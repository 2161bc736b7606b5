"""A process of our own that loads data: started by fork, deaf to signals, watched, gone when it is not needed.

The main process decides when to stop: Ctrl-C and SIGTERM often go to the whole group, and the main process still needs
its data to reach the end of its step and save. So loading processes go on, and end when the main process closes their
line, kills them, or is gone.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from weakref import WeakSet

import torch

from bridle.data.loading import watchdog

LAST_WORDS = 5.0  # seconds to wait for a process that is ending
POLL = 0.25  # seconds between looks at whether the parent is still there


class DataProcess:
    """A fork of this process that runs `serve` with its end of a line; `slot` says what it has in hand."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = get_context("fork")  # the data set need not be copied, or be something that can be pickled
        self.slot, self.parent = watchdog.Slot(), os.getpid()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(serve, theirs, self.slot, self.parent), daemon=True)
        self.process.start()
        theirs.close()
        living.add(self)

    @property
    def is_ours(self) -> bool:
        """Was it started by this process, and not by the one that this is a fork of?"""
        return self.parent == os.getpid()

    def close(self) -> int | None:
        """End it, whatever it is doing; returns how it ended."""
        living.discard(self)
        self.connection.close()
        if not self.is_ours:
            return None
        if self.process.is_alive():
            self.process.kill()
        self.process.join(LAST_WORDS)
        return self.process.exitcode

    def bury(self) -> None:
        """It died or is late: count that against the file it had in hand."""
        late, key = self.slot.late and self.process.is_alive(), self.slot.key
        if not late:
            self.process.join(LAST_WORDS)  # its line breaks a moment before it is gone
        watchdog.blame(key, exit_code=self.close(), late=late)


living: WeakSet[DataProcess] = WeakSet()


def close_all() -> None:
    for one in list(living):
        one.close()


# After multiprocessing's own exit hook was registered, so it runs before: that one would wait for processes to end.
atexit.register(close_all)


def _live(serve: Callable[[Connection], None], connection: Connection, slot: watchdog.Slot, parent: int) -> None:
    """The life of a loading process."""
    for other in list(living):  # lines of others must break when their owner goes
        other.connection.close()
    living.clear()
    watchdog.at_hand = slot
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _go_on)  # not SIG_IGN, which programs started from here would inherit
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other side is done
        serve(connection)
    os._exit(0)


def _go_on(signum: int, frame: object) -> None:
    """The main process decides when to stop."""


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(0)
