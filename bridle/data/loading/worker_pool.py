"""A function mapped over items by worker processes, results in order.

What long runs need: nothing is drawn from a global generator, one thread per load (so that results do not depend on the
machine), workers that outlive a SIGTERM sent to the whole process group, and workers that may die: a worker that is
killed, or hangs in a decoder, is replaced, its items are given out again, and the results are the same. See `watch` for
what becomes of the file it had in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.multiprocessing  # teaches connections to send tensors through shared memory
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.loading import watchdog
from bridle.data.loading.worker_process import DataProcess
from bridle.errors import BridleError, DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

PREFETCH = 2  # results each worker prepares ahead
MOST_DEATHS = 4  # of workers without a file in hand, which no file explains
LOOK = 0.5  # seconds between looks at the workers' deadlines


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, pin_memory: bool = False
) -> Iterator[Result]:
    """function(item) for each item, in order; `workers` processes compute ahead, 0 computes here."""
    if workers > 0:
        crew = Crew(function, workers)
        try:
            for result in crew.results(iter(items)):
                yield pinned(result) if pin_memory and torch.cuda.is_available() else result
        finally:
            crew.close()
        return
    for item in items:
        with one_thread():
            result = function(item)
        yield result


class Worker(Generic[Item, Result]):
    """One process and the items it was given, oldest first."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.function = function
        self.waiting: deque[tuple[int, Item]] = deque()
        self.process = DataProcess(self._serve)

    def give(self, number: int, item: Item) -> None:
        self.waiting.append((number, item))
        try:
            self.process.connection.send((number, item, watchdog.condemned))
        except (BrokenPipeError, ConnectionResetError):
            return  # it died; that shows when its answer is waited for

    def take(self) -> tuple[int, Any]:
        """An answer that is there; EOFError or OSError if the worker died before all of it came."""
        number, result = self.process.connection.recv()
        self.waiting.remove(next(entry for entry in self.waiting if entry[0] == number))
        return number, shared_again(result)

    def replace(self) -> bool:
        """Bury the process and give its items to a new one; False if no file explains the death."""
        explained = self.process.slot.key != watchdog.NOTHING
        self.process.bury()
        again, self.waiting = self.waiting, deque()
        self.process = DataProcess(self._serve)
        for number, item in again:
            self.give(number, item)
        return explained

    def _serve(self, connection: Connection) -> None:
        """In the worker."""
        while True:
            number, item, condemned = connection.recv()
            watchdog.condemned.update(condemned)
            try:
                result: Any = self.function(item)
            except Exception as error:  # it belongs to whoever asked
                result = Raised.of(error)
            try:
                connection.send((number, result))
            except RuntimeError as error:
                if "shared memory" not in str(error):
                    raise
                connection.send((number, unshared(result)))  # containers often have little room in /dev/shm


class Raised(NamedTuple):
    """An error on its way from a worker."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Raised:
        """Errors of others may not survive the journey; they are told in words."""
        known = isinstance(error, BridleError) or type(error).__module__ == "builtins"
        return cls(error if known else RuntimeError(f"{type(error).__name__}: {error}"))


class Crew(Generic[Item, Result]):
    """The workers of one pass."""

    def __init__(self, function: Callable[[Item], Result], workers: int) -> None:
        self.workers: list[Worker[Item, Result]] = [Worker(function) for _ in range(workers)]
        self.deaths = 0

    def results(self, items: Iterator[Item]) -> Iterator[Result]:
        """The results in order; at most PREFETCH for each worker are on their way."""
        ready: dict[int, Any] = {}
        given = taken = 0
        exhausted = False
        while True:
            while not exhausted and given - taken < PREFETCH * len(self.workers):
                try:
                    item = next(items)
                except StopIteration:
                    exhausted = True
                    break
                min(self.workers, key=lambda worker: len(worker.waiting)).give(given, item)
                given += 1
            if taken == given:
                return
            while taken not in ready:
                ready.update(self._wait())
            result = ready.pop(taken)
            if isinstance(result, Raised):
                raise result.error
            taken += 1
            yield result

    def close(self) -> None:
        for worker in self.workers:
            worker.process.close()

    def _wait(self) -> list[tuple[int, Any]]:
        """Answers that have come; dead and late workers are replaced."""
        lines = {worker.process.connection: worker for worker in self.workers}
        answers = []
        for line in wait(list(lines), LOOK):
            worker = lines[line]  # type: ignore[index]  # the lines that were given
            try:
                answers.append(worker.take())
            except (EOFError, OSError):
                self._replace(worker)
        for worker in self.workers:
            if worker.process.slot.late:
                self._replace(worker)
        return answers

    def _replace(self, worker: Worker[Item, Result]) -> None:
        if worker.replace():
            return
        self.deaths += 1
        if self.deaths > MOST_DEATHS:
            raise DataError(
                f"a data worker died {self.deaths} times with no file in hand; it may have run out of memory, or of "
                "room in /dev/shm. Use fewer data workers, or 0, and run the same command again."
            )


class Content(NamedTuple):
    """A tensor on its way through the line itself."""

    array: NDArray[Any]


def unshared(value: Any) -> Any:
    """A result that needs no shared memory; slower."""
    return with_tensors(value, Tensor, lambda tensor: Content(tensor.detach().numpy()))


def shared_again(value: Any) -> Any:
    """The result as it was before `unshared`."""
    return with_tensors(value, Content, lambda content: torch.from_numpy(content.array))


def pinned(value: Any) -> Any:
    """A result with its tensors in memory that a GPU can copy from."""
    return with_tensors(value, Tensor, lambda tensor: tensor.pin_memory())


def with_tensors(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A result with everything of one kind in it changed; tuples and lists are looked into."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [with_tensors(part, kind, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread inside the block, as workers do: other thread counts give other last bits."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
