"""Work on untrusted files in a process of its own, so that a decoder that hangs, crashes or eats memory costs one file.

`Contained(program).call("function", timeout=…, …)` runs a function of a program file in a child process and returns its
answer: JSON facts and one array of bytes. Children are plain programs, not multiprocessing's, which the worker
processes of a loader may not have. A child is started once per process, serves one call after another, is killed and
replaced when a call takes too long, and ends when its parent does. `serving` is the child's side of the conversation.

Nothing is pickled either way, and what a child sends is bounded: it may be in the hands of the file it reads.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.video import serving
from bridle.data.video.serving import LENGTH

MEMORY = 4 * 2**30  # bytes of address space a child may use
LARGEST = 2**30  # bytes of one answer
LONGEST_HEADER = 2**20  # bytes of its JSON
START_TIMEOUT = 600.0  # seconds to import what the program needs; no file is to blame for a busy machine
LAST_WORDS = 5.0  # seconds to wait for a process that is ending


class Answer(NamedTuple):
    """What a contained function yields."""

    facts: dict[str, Any]
    array: NDArray[np.uint8]


class ContainedError(Exception):
    """Why a call gave no answer, as the end of a sentence."""


class RefusedError(ContainedError):
    """The function's own reason; its process goes on."""


class SlowError(ContainedError):
    """The call took too long and was ended."""


class CrashError(ContainedError):
    """The process ended in the middle of a call."""


class Contained:
    """The functions of one program file, each a generator of (facts, array of uint8), run at arm's length."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def call(self, function: str, *, timeout: float, **arguments: Any) -> Answer:
        """The only answer of a function, within `timeout` seconds."""
        child = borrow(self.program)
        try:
            return only(child, function, timeout, arguments)
        except CrashError:
            if child.calls == 1:
                raise
        # The file of an earlier call may have damaged the process that died now; a fresh one tells whose fault it is.
        return only(Child(self.program), function, timeout, arguments)

    def stream(self, function: str, *, timeout: float, **arguments: Any) -> Iterator[Answer]:
        """The answers of a function as it yields them, `timeout` seconds for each."""
        yield from answers(borrow(self.program), function, timeout, arguments)


class Child:
    """One process that serves a program."""

    def __init__(self, program: Path) -> None:
        self.program, self.calls = program, 0
        self.channel, theirs = socket.socketpair()
        command = [sys.executable, "-P", serving.__file__, str(theirs.fileno()), str(program), str(MEMORY)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders talk a lot; what matters comes as an error
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # threads take address space
                start_new_session=True,  # Ctrl-C is the parent's business, which may still need an answer
            )
        try:
            self._receive(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def answers(self, function: str, timeout: float, arguments: dict[str, Any]) -> Iterator[Answer]:
        self.calls += 1
        request = json.dumps({"function": function, "arguments": arguments, "timeout": timeout}).encode()
        try:
            self.channel.settimeout(timeout)
            self.channel.sendall(LENGTH.pack(len(request)) + request)
        except OSError as error:
            raise CrashError(self._ending()) from error
        while (answer := self._receive(timeout)) is not None:
            yield answer

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        try:
            self.process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:  # stuck in the kernel, on a dead disk for example; it is nobody's any more
            self.process.returncode = -signal.SIGKILL

    def forget(self) -> None:
        """Let go of a process that belongs to the parent of this one."""
        self.channel.close()
        self.process.returncode = 0  # or its last breath would warn of a process still running

    def _receive(self, timeout: float) -> Answer | None:
        """The next answer, None after the last one."""
        deadline = time.monotonic() + timeout
        try:
            size = LENGTH.unpack(bytes(self._read(LENGTH.size, deadline)))[0]
            header = json.loads(bytes(self._read(min(size, LONGEST_HEADER), deadline)))
            if "error" in header:
                raise RefusedError(str(header["error"]))
            if "end" in header:
                return None
            shape = [int(size) for size in header["shape"]]
            if min(shape) < 1 or prod(shape) > LARGEST:
                raise ContainedError(f"the part of shape {shape} decoded from it is larger than {LARGEST >> 20} MB")
            return Answer(dict(header["facts"]), self._read(prod(shape), deadline).reshape(shape))
        except (KeyError, TypeError, ValueError) as error:
            raise ContainedError("the decoder sent nonsense") from error
        except TimeoutError as error:
            raise SlowError(f"the decoder took longer than {timeout:g} s") from error
        except (EOFError, OSError) as error:
            ending = self._ending()
            if self.process.returncode == -signal.SIGALRM:
                raise SlowError(f"the decoder took longer than {timeout:g} s") from error
            raise CrashError(ending) from error

    def _read(self, size: int, deadline: float) -> NDArray[np.uint8]:
        data = np.empty(size, dtype=np.uint8)
        view, done = data.data, 0
        while done < size:
            self.channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            count = self.channel.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return data

    def _ending(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            return "the decoder went silent"
        if code >= 0:
            return f"the decoder ended by itself (code {code})"
        known = [known.name for known in signal.Signals if known == -code]
        return f"the decoder crashed ({known[0] if known else f'signal {-code}'})"


# Children of this process that wait for work, by program.
idle: dict[Path, list[Child]] = {}


def borrow(program: Path) -> Child:
    """A child for one call, alone."""
    waiting = idle.get(program)
    return waiting.pop() if waiting else Child(program)


def answers(child: Child, function: str, timeout: float, arguments: dict[str, Any]) -> Iterator[Answer]:
    """The answers of one call; afterwards the child waits for the next one, or is gone if the call did not end well."""
    owner, sound = os.getpid(), False
    try:
        yield from child.answers(function, timeout, arguments)
        sound = True
    except RefusedError:
        sound = True
        raise
    finally:
        if os.getpid() != owner:
            child.forget()
        elif sound:
            idle.setdefault(child.program, []).append(child)
        else:
            child.close()


def only(child: Child, function: str, timeout: float, arguments: dict[str, Any]) -> Answer:
    (answer,) = answers(child, function, timeout, arguments)
    return answer


def close_idle() -> None:
    while idle:
        for child in idle.popitem()[1]:
            child.close()


def forget_idle() -> None:
    """In a forked process: the children are its parent's. Closing our copy of the line lets them see the parent end."""
    while idle:
        for child in idle.popitem()[1]:
            child.forget()


atexit.register(close_idle)
os.register_at_fork(after_in_child=forget_idle)
