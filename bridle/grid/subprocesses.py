"""Several `bridle` commands side by side, each a process of its own; their output is shown line by line.

One process on one thread each uses all cores of a small machine, where two threads in one process often do not.

`python -m bridle.grid.subprocesses PARENT ARGUMENTS…` runs `bridle ARGUMENTS…` and makes it save and leave when process
PARENT dies. A parent that is killed outright (kill -9, out of memory) cannot notify its children; without
this they would train on, and the same command given again would find their run directories locked. The kernel sends
SIGTERM instead. Only Linux can be asked to: elsewhere children run to their end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from bridle.console import PROGRESS_SECONDS
from bridle.errors import BridleError, Interrupted
from bridle.machine import StopRequest, children_seconds

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, str], None]  # takes the name of a command and a line of its output

POLL = 0.2  # seconds between two looks at the processes
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Started(NamedTuple):
    """A running command."""

    process: subprocess.Popen[str]
    reader: threading.Thread
    said: list[str]


def run_beside(
    commands: Mapping[str, Sequence[str]],
    *,
    jobs: int,
    console: Console,
    spent: Callable[[str, float], None] | None = None,
    tell: Tell | None = None,
    after: Mapping[str, str] | None = None,
) -> None:
    """Run `bridle ARGUMENTS…` for each name, at most `jobs` at once. The first failure or a signal ends all of them.

    `after` names for a command the one that must have ended before it starts.
    `spent` is called with the name and the CPU seconds (its children's included) of every command that has ended.
    `tell` is called with the name and every line of output, which is then not printed.
    """
    waiting, running = dict(commands), dict[str, Started]()
    with StopRequest().listening() as stop:
        try:
            while waiting or running:
                stop.leave("what is finished is kept.")
                while len(running) < jobs:
                    unfinished = waiting.keys() | running.keys()
                    name = next((name for name in waiting if (after or {}).get(name) not in unfinished), None)
                    if name is None:
                        break
                    running[name] = start(name, waiting.pop(name), console, tell)
                for name in list(running):
                    before = children_seconds()
                    if running[name].process.poll() is not None:
                        started = running.pop(name)
                        if spent is not None:
                            spent(name, children_seconds() - before)
                        finish(name, started)
                time.sleep(POLL)
        finally:  # the others save and leave
            for started in running.values():
                started.process.terminate()
            for name, started in running.items():
                before = children_seconds()
                started.process.wait()
                if spent is not None:
                    spent(name, children_seconds() - before)
                started.reader.join()


def start(name: str, arguments: Sequence[str], console: Console, tell: Tell | None = None) -> Started:
    """Start `bridle ARGUMENTS…` as a child that ends with this process; with `tell` its progress comes every second."""
    command, environment = f"$ bridle {' '.join(arguments)}", dict(os.environ)
    if tell is None:
        console.print(command, soft_wrap=True, markup=False)
    else:
        tell(name, command)
        environment[PROGRESS_SECONDS] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "bridle.grid.subprocesses", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        errors="replace",  # C libraries print names as they are; a reader that stops would block the command
    )
    said: list[str] = []
    reader = threading.Thread(target=relay, args=(process.stderr, name, said, console, tell), daemon=True)
    reader.start()
    return Started(process, reader, said)


def finish(name: str, started: Started) -> None:
    """Raise if a command failed or was stopped."""
    started.reader.join()
    code = started.process.returncode
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # negative: before it could listen
        raise Interrupted(
            "stopped; run the same command again to continue.", exit_code=code if code > 0 else 128 - code
        )
    if code:
        reason = started.said[-1] if started.said else f"exit code {code}"
        if code < 0:  # its last words are about something else
            reason = f"killed by {signal.Signals(-code).name}"
            reason += ", most often for want of memory; try a smaller batch." if code == -signal.SIGKILL else "."
        error = BridleError(f"{name}: {reason}")
        error.exit_code = code if code > 0 else 1
        raise error


def relay(stream: IO[str] | None, name: str, kept: list[str], console: Console, tell: Tell | None) -> None:
    """Print each line under the command's name, or tell it, and keep it."""
    for line in stream or ():
        kept.append(line.rstrip())
        if tell is None:
            console.print(f"{name}  {line.rstrip()}", soft_wrap=True, markup=False)
        else:
            tell(name, line.rstrip())


def main() -> None:
    """Set PR_SET_PDEATHSIG, then exec bridle; the request outlives the exec."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before the request
            sys.exit(128 + signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", "bridle", *arguments])


if __name__ == "__main__":
    main()
