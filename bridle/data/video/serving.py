"""The far side of `contained`: a process that runs the functions of one program file on request.

It is started by path, as a script, and imports nothing but the standard library and what the program imports; bridle's
own packages would bring torch, which takes seconds to load. A message is a JSON text with its length in front, and raw
bytes after it where the JSON names the shape of an array:

    -> {"function": name, "arguments": {…}, "timeout": seconds}
    <- {"facts": {…}, "shape": [...]} + bytes      any number of answers, which the function yields one by one
    <- {"end": true} or {"error": reason}          always last
"""

from __future__ import annotations

import json
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

LENGTH = struct.Struct("<I")  # of the JSON text
GRACE = 2.0  # seconds after which a call that the other side has given up on ends itself

Function = Callable[..., Iterator[tuple[dict[str, Any], Any]]]  # arguments -> answers: facts and an array


def main() -> None:
    channel, program, memory = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    limit_resources(memory)
    try:
        functions: dict[str, Function] = runpy.run_path(program)
    except Exception as error:
        send(channel, {"error": reason(error)})
        return
    send(channel, {"end": True})
    while (request := receive(channel)) is not None:
        last: dict[str, Any] = {"end": True}
        try:
            answer(channel, functions[request["function"]], request)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # decoders meet damaged files with errors of every type
            last = {"error": reason(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, last)


def answer(channel: socket.socket, function: Function, request: dict[str, Any]) -> None:
    """Send all that the function yields. Only its own work is timed, not how long the other side takes to read."""
    limit = request["timeout"] + GRACE
    signal.setitimer(signal.ITIMER_REAL, limit)  # SIGALRM ends the process even inside a decoder that hangs
    for facts, array in function(**request["arguments"]):
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, {"facts": facts, "shape": array.shape}, array)
        signal.setitimer(signal.ITIMER_REAL, limit)


def limit_resources(limit: int) -> None:
    """Make the process's own allocations fail beyond `limit` bytes, and let a crash leave no memory image behind."""
    try:
        import resource
    except ImportError:  # not on every system
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reason(error: Exception) -> str:
    """One line for an error; a ValueError is the program's own word on its input."""
    if isinstance(error, MemoryError):
        return "it needs more memory than a file may take"
    text = str(getattr(error, "strerror", None) or error)
    return text if isinstance(error, (OSError, ValueError, EOFError)) else f"{type(error).__name__}: {text}"


def send(channel: socket.socket, header: dict[str, Any], payload: Any = b"") -> None:
    """A header, and the bytes of anything that has some."""
    text, content = json.dumps(header).encode(), memoryview(payload).cast("B")  # what can fail, before a byte is sent
    channel.sendall(LENGTH.pack(len(text)) + text)
    channel.sendall(content)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next request; None when the other side is gone."""
    length = channel.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(length) < LENGTH.size:
        return None
    request: dict[str, Any] = json.loads(channel.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL))
    return request


if __name__ == "__main__":
    main()
