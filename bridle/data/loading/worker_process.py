"""One worker process: started by fork or spawn, watched, unmoved by signals, gone when its parent is.

Ctrl-C and SIGTERM often go to the whole process group, and the main process still needs its data to reach the end of
its step and save. So workers ignore both and end when the main process closes their connection, kills them, or is gone.
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle  # for the function that a spawned worker is to run; see `messages` for the way back
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any
from weakref import WeakSet

import torch

from bridle.data.loading import watchdog
from bridle.data.loading.messages import send
from bridle.errors import UsageError, quoted
from bridle.plugins import load_plugins

START_METHOD = "BRIDLE_START_METHOD"  # environment variable: fork or spawn
BUFFER = 2**28  # bytes of shared memory for one result; pages that are not written take no memory
PREFETCH = 2  # tasks that a worker is given ahead
EXIT_SECONDS = 5.0  # that a process has to end in
POLL = 0.25  # seconds between looks at whether the parent is still there


def start_context() -> BaseContext:
    """How workers start: fork on Linux, spawn elsewhere, unless BRIDLE_START_METHOD says otherwise."""
    method = os.environ.get(START_METHOD) or ("fork" if sys.platform == "linux" else "spawn")
    if method not in ("fork", "spawn"):
        raise UsageError(f"{START_METHOD}={quoted(method)}: expected fork or spawn.")
    return get_context(method)


class WorkerProcess:
    """A process that runs `function` on the tasks it is sent; `waiting` holds those without a result yet."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context, self.parent = start_context(), os.getpid()
        forks = context.get_start_method() == "fork"
        self.slot = watchdog.Slot(context)
        self.connection, theirs = context.Pipe()
        # A spawned process does not inherit anonymous memory; its arrays come through the connection.
        self.buffers = [shared_memory() if forks else None for _ in range(PREFETCH)]
        self.waiting: dict[int, tuple[Any, int]] = {}  # item and number of the buffer, by number of the task
        self.blocked = set(watchdog.blocklist)  # keys that the worker knows
        known = watchdog.limits, dict(watchdog.blocklist)
        self.process = context.Process(  # type: ignore[attr-defined]  # every context has one
            target=serve,
            args=(theirs, self.slot, self.buffers, known, function if forks else None),
            daemon=True,
        )
        content = None if forks else pickled(function)
        self.process.start()
        theirs.close()
        living.add(self)
        if content is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send_bytes(content)

    @property
    def is_free(self) -> bool:
        return len(self.waiting) < PREFETCH

    def task(self, number: int, item: Any) -> tuple[int, Any, int, dict[int, str]]:
        """What to send for a task, which is then waiting: with it files that were blocked meanwhile."""
        taken = {buffer for _, buffer in self.waiting.values()}
        buffer = next(i for i in range(PREFETCH) if i not in taken)
        self.waiting[number] = item, buffer
        news = {key: why for key, why in watchdog.blocklist.items() if key not in self.blocked}
        self.blocked.update(news)
        return number, item, buffer, news

    def close(self) -> int | None:
        """End the process, whatever it is doing; returns its exit code."""
        living.discard(self)
        self.connection.close()
        if self.parent != os.getpid():  # this is a fork of the process that it belongs to
            return None
        if self.process.is_alive():
            self.process.kill()
        self.process.join(EXIT_SECONDS)
        code: int | None = self.process.exitcode
        return code

    def blame_and_close(self, *, died: bool) -> bool:
        """End a process that died, timed out or sent nonsense, and blame the file it decoded; False: it had none."""
        late, key, timeout = self.slot.is_late and self.process.is_alive(), self.slot.key, self.slot.timeout
        if died and not late:
            self.process.join(EXIT_SECONDS)  # its connection breaks a moment before it is gone
        watchdog.blame(key, exit_code=self.close(), timed_out=timeout / 1e9 if late else None)
        return key != watchdog.NONE


def shared_memory() -> mmap.mmap | None:
    """Memory for a result that forks of this process see; None where there is not so much address space."""
    try:
        return mmap.mmap(-1, BUFFER)
    except OSError:
        return None


living: WeakSet[WorkerProcess] = WeakSet()


# After multiprocessing's own exit hook was registered, so it runs before: that one would wait for processes to end.
atexit.register(lambda: [one.close() for one in list(living)])


def pickled(function: Callable[[Any], Any]) -> bytes:
    """A function for a spawned worker; tensors in it are copied, not shared."""
    try:
        return pickle.dumps(function)
    except Exception as error:  # whatever the data set of a user holds
        raise UsageError(
            f"this data set cannot be sent to a worker that is spawned: {quoted(error)}. Define its classes and "
            "functions at the top of a module, or set data.workers=0."
        ) from error


def serve(
    connection: Connection,
    slot: watchdog.Slot,
    buffers: list[mmap.mmap | None],
    known: tuple[watchdog.Limits, dict[int, str]],
    function: Callable[[Any], Any] | None,
) -> None:
    """The life of a worker process: run `function` (without one: the one that is sent first) on task after task."""
    prepare(slot, *known)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is done
        if function is None:
            load_plugins()  # which the function may come from
            function = connection.recv()
        while True:
            number, item, buffer, blocked = connection.recv()
            watchdog.blocklist.update(blocked)
            try:
                result, failed = function(item), False
            except Exception as error:  # it is raised where the result is asked for
                result, failed = error, True
            try:
                send(connection, number, result, buffers[buffer], failed=failed)
            except TypeError as error:
                send(connection, number, error, None, failed=True)
    os._exit(0)


def prepare(slot: watchdog.Slot, limits: watchdog.Limits, blocked: dict[int, str]) -> None:
    """Make this process a worker: watched, with one thread, ignoring signals, ending with its parent."""
    for other in list(living):  # of a parent that forked: connections must break when their owner goes
        other.connection.close()
    living.clear()
    watchdog.slot, watchdog.limits = slot, limits
    watchdog.blocklist.update(blocked)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The main process decides when to stop. Not SIG_IGN, which programs started from here would inherit.
        signal.signal(number, lambda signum, frame: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    while parent.is_alive() and os.getppid() == parent.pid:
        time.sleep(POLL)
    os._exit(0)
