"""Samples of files decoded at arm's length even without workers, and what was decoded kept there.

A method marked `@kept` runs in a fork of this process that holds the same data set, its cache included, when the
loader asks for a sample (`at_arms_length`) and this process is not itself one that is watched. A decoder that crashes,
hangs or eats memory then costs one file and not the run; see `watch`. One process serves one data set, as long as that
is used; when it must be replaced, its cache begins anew.

A request and an answer are JSON and arrays. Nothing is unpickled: the process may be in the hands of a file it read.
"""

from __future__ import annotations

import builtins
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from math import prod
from multiprocessing import current_process
from multiprocessing.connection import Connection
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from bridle import errors
from bridle.data.loading import watchdog
from bridle.data.loading.worker_process import DataProcess
from bridle.data.sources import Sample
from bridle.errors import BridleError, DataError, quoted

MOST_DEATHS = 4  # in one call
LARGEST = 2**31 - 2  # bytes of one array
LONGEST_HEADER = 2**24  # bytes of its JSON
SHARED = 2**26  # bytes of memory that both processes see
LOOK = 0.5  # seconds between looks at the deadline
GENERATOR = "a generator, whose state follows"
TYPES = {"float32": np.float32, "bool": np.bool_, "uint8": np.uint8}

Owner = TypeVar("Owner")
P = ParamSpec("P")

asked = 0  # how many blocks of `at_arms_length` are open


@contextmanager
def at_arms_length() -> Iterator[None]:
    """Calls of `@kept` methods inside the block run elsewhere."""
    global asked  # noqa: PLW0603 - a switch of this process
    asked += 1
    try:
        yield
    finally:
        asked -= 1


@contextmanager
def here() -> Iterator[None]:
    """Calls inside the block run in this process after all: to measure them, or because they are trusted."""
    global asked  # noqa: PLW0603 - a switch of this process
    before, asked = asked, -(10**6)
    try:
        yield
    finally:
        asked = before


def kept(method: Callable[Concatenate[Owner, P], Sample]) -> Callable[Concatenate[Owner, P], Sample]:
    """Mark a method that decodes files: numbers and generators go in, a sample comes out."""

    @wraps(method)
    def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Sample:
        if asked <= 0 or watchdog.at_hand is not None or current_process().daemon:
            return method(self, *args, **kwargs)
        assert not kwargs  # of those nothing is sent
        return keeper_of(self).call(self, method.__name__, args)

    return call


class Answer(NamedTuple):
    """What came back."""

    facts: dict[str, Any]
    arrays: list[Tensor | None]


class Keeper:
    """A process that holds a data set and loads samples of it; replaced when it dies."""

    def __init__(self, owner: object) -> None:
        self.shared = mmap.mmap(-1, SHARED)  # of the two processes; pages that are not written take no memory
        self.process = self._start(owner)

    def _start(self, owner: object) -> DataProcess:
        self.knows = set(watchdog.condemned)  # a fork knows what this process knows
        return DataProcess(partial(serve, owner, self.shared))

    def close(self) -> None:
        self.process.close()

    def call(self, owner: object, method: str, arguments: Sequence[Any]) -> Sample:
        """owner.method(*arguments), there."""
        generators = [x for x in arguments if isinstance(x, torch.Generator)]
        plain = [GENERATOR if isinstance(x, torch.Generator) else x for x in arguments]
        request = {"method": method, "arguments": plain}
        for _ in range(MOST_DEATHS):
            answer = self._ask(request, [one.get_state() for one in generators])
            if answer is not None:
                break
            self.process.bury()
            self.process = self._start(owner)
        else:
            raise DataError(
                f"the process that loads data died {MOST_DEATHS} times in a row; it may have run out of memory. "
                "Lower data.cache_mb, and run the same command again."
            )
        for one, state in zip(generators, answer.arrays[3:], strict=True):
            if state is not None:
                one.set_state(state)
        if "error" in answer.facts:
            raise told(answer.facts)
        x, label, valid = answer.arrays[:3]
        assert x is not None
        return Sample(x, answer.facts["label"] if label is None else label, valid)

    def _ask(self, request: dict[str, Any], states: list[Tensor]) -> Answer | None:
        """The answer; None if the process died or is late. Whatever else ends the wait ends the process, too."""
        line = self.process.connection
        try:
            news = [(key, why) for key, why in watchdog.condemned.items() if key not in self.knows]
            send(line, {**request, "condemned": news}, states, self.shared)
            self.knows.update(key for key, _ in news)
            while not line.poll(LOOK):
                if self.process.slot.late:
                    return None
            return receive(line, self.shared)
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            return None
        except BaseException:  # a signal: the answer will come when nobody waits for it
            self.process.close()
            raise


keepers: WeakKeyDictionary[object, Keeper] = WeakKeyDictionary()


def keeper_of(owner: object) -> Keeper:
    """The process for a data set, started when it is first needed."""
    keeper = keepers.get(owner)
    if keeper is None or not keeper.process.is_ours:
        keeper = keepers[owner] = Keeper(owner)
        finalize(owner, keeper.close)
    return keeper


def serve(owner: object, shared: mmap.mmap, line: Connection) -> None:
    """In the process: answer requests until the other side is gone."""
    while True:
        request = receive(line, shared)
        watchdog.condemned.update(request.facts["condemned"])
        generators = [from_state(state) for state in request.arrays if state is not None]
        left = iter(generators)
        arguments = [next(left) if x == GENERATOR else x for x in request.facts["arguments"]]
        facts: dict[str, Any] = {"label": None}
        sample: tuple[Tensor | None, ...] = (None, None, None)
        try:
            x, label, valid = getattr(owner, request.facts["method"])(*arguments)
            sample = (x, label if isinstance(label, Tensor) else None, valid)
            facts["label"] = None if isinstance(label, Tensor) else label
        except Exception as error:  # whose it is, the caller decides
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)  # as a worker's would be told
            facts = {"error": type(error).__name__, "text": text}
        send(line, facts, [*sample, *(one.get_state() for one in generators)], shared)


def from_state(state: Tensor) -> torch.Generator:
    one = torch.Generator()
    one.set_state(state)
    return one


def told(facts: dict[str, Any]) -> Exception:
    """An error of the other process; ours keep their kind."""
    kind = getattr(errors, facts["error"], None)
    if isinstance(kind, type) and issubclass(kind, BridleError):
        return kind(facts["text"])
    if facts["error"] == "MemoryError":
        return MemoryError(facts["text"])
    kind = getattr(builtins, facts["error"], None)
    if isinstance(kind, type) and issubclass(kind, OSError):  # a disk has many: no such file, timed out, stale, …
        return OSError(facts["text"])
    return RuntimeError(f"{facts['error']}: {quoted(facts['text'])}")


def send(line: Connection, facts: dict[str, Any], arrays: Sequence[Tensor | None], shared: mmap.mmap) -> None:
    """Facts through the line; arrays through shared memory, which is faster, or behind the facts if they do not fit."""
    plain = [None if x is None else x.detach().contiguous().numpy() for x in arrays]
    kinds = [None if x is None else [x.dtype.name, list(x.shape)] for x in plain]
    contents = [x.reshape(-1).view(np.uint8).data for x in plain if x is not None and x.size]
    fits = sum(map(len, contents)) <= len(shared)
    if fits:
        shared.seek(0)
        for content in contents:
            shared.write(content)
    line.send_bytes(json.dumps({**facts, "arrays": kinds, "shared": fits}).encode())
    for content in () if fits else contents:
        line.send_bytes(content)


def receive(line: Connection, shared: mmap.mmap) -> Answer:
    """What the other side sent; ValueError, KeyError or TypeError if it makes no sense."""
    facts = json.loads(line.recv_bytes(LONGEST_HEADER))
    fits, arrays = facts.pop("shared"), list[Tensor | None]()
    shared.seek(0)
    for kind in facts.pop("arrays"):
        if kind is None:
            arrays.append(None)
            continue
        dtype, shape = np.dtype(TYPES[kind[0]]), [int(size) for size in kind[1]]
        size = prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or size > LARGEST:
            raise ValueError(f"an array of shape {shape}")
        content = bytearray(size and (shared.read(size) if fits else line.recv_bytes(LARGEST)))
        arrays.append(torch.from_numpy(np.frombuffer(content, dtype=dtype).reshape(shape)))
    return Answer(facts, arrays)
