"""A pool of worker processes that maps a function over items, results in order.

What long runs need: nothing is drawn from a global generator; one thread per worker, so that results do not depend on
the machine; workers outlive a SIGTERM sent to the whole process group. A worker that is killed, crashes or times out in
a decoder is replaced, its tasks are given out again, and the results are the same. See `watchdog` for what becomes of
the file it was decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar

import torch

from bridle.console import ProgressLine
from bridle.data.loading.messages import MALFORMED, Record, receive
from bridle.data.loading.worker_process import PREFETCH, WorkerProcess
from bridle.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_DEATHS = 4  # of workers that decoded no file, which no file explains
LOOK = 0.5  # seconds between looks at the workers' deadlines


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    records: Sequence[Record] = (),
    pin_memory: bool = False,
) -> Generator[Result, None, None]:
    """function(item) for each item, in order; `workers` processes compute ahead, 0 computes in this process.

    Results are plain values, tensors, arrays, errors, and NamedTuples of the classes `records` (see `messages`).
    """
    if workers == 0 or current_process().daemon:  # a worker is contained already, and may not start processes
        return map_here(function, items)
    pin = pin_memory and torch.cuda.is_available()
    return WorkerPool(function, workers, records=records, pin_memory=pin).results(iter(items))


def map_here(function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    for item in items:
        with one_thread():
            result = function(item)
        yield result


class WorkerPool(Generic[Item, Result]):
    """Worker processes for one pass over some items."""

    def __init__(
        self, function: Callable[[Item], Result], size: int, *, records: Sequence[Record], pin_memory: bool
    ) -> None:
        self.function, self.size, self.records, self.pin_memory = function, size, records, pin_memory
        self.workers: list[WorkerProcess] = []
        self.deaths = 0
        self.retries: deque[tuple[int, Item]] = deque()  # tasks of workers that died
        self.ready: dict[int, tuple[bool, Any]] = {}  # failed, result

    def results(self, items: Iterator[Item]) -> Generator[Result, None, None]:
        """The results in order; at most PREFETCH for each worker are on their way. Ends its workers when closed."""
        given = taken = 0
        try:
            self.workers = [WorkerProcess(self.function) for _ in range(self.size)]
            while True:
                while (worker := self._next_free()) is not None:
                    if not self.retries and given - taken < PREFETCH * self.size:
                        with suppress(StopIteration):
                            self.retries.append((given, next(items)))
                            given += 1
                    if not self.retries:
                        break
                    with suppress(BrokenPipeError, ConnectionResetError):  # it died, which shows below
                        worker.connection.send(worker.task(*self.retries.popleft()))
                if taken == given:
                    return
                if taken not in self.ready:
                    self._receive()
                    continue
                failed, result = self.ready.pop(taken)
                taken += 1
                if failed:
                    raise result
                yield result
        finally:
            for worker in self.workers:
                worker.close()

    def _next_free(self) -> WorkerProcess | None:
        """The worker with the fewest tasks, if it can take another."""
        worker = min(self.workers, key=lambda one: len(one.waiting))
        return worker if worker.is_free else None

    def _receive(self) -> None:
        """Take in the results that have come; replace workers that died or timed out."""
        lines = {worker.connection: worker for worker in self.workers}
        for line in wait(list(lines), LOOK):
            worker = lines[line]  # type: ignore[index]  # the connections that were given
            buffers = {number: worker.buffers[buffer] for number, (_, buffer) in worker.waiting.items()}
            try:
                number, failed, result = receive(worker.connection, buffers, self.records, pin_memory=self.pin_memory)
                del worker.waiting[number]
            except (EOFError, OSError):
                self._replace(worker, died=True)
            except MALFORMED:
                self._replace(worker)
            else:
                self.ready[number] = failed, result
        for worker in list(self.workers):
            if worker.slot.is_late:
                self._replace(worker)

    def _replace(self, worker: WorkerProcess, *, died: bool = False) -> None:
        """Start another worker; the tasks of this one are given out again."""
        if not worker.blame_and_close(died=died):
            self.deaths += 1
        if self.deaths > MOST_DEATHS:
            raise DataError(
                f"a data worker died {self.deaths} times while it decoded no file; it may have run out of memory. "
                "Use fewer data workers and run the same command again."
            )
        self.retries.extendleft((number, item) for number, (item, _) in reversed(worker.waiting.items()))
        self.workers[self.workers.index(worker)] = WorkerProcess(self.function)


def note_unprotected() -> None:
    """Say, once in a process, that files are decoded in it."""
    global noted  # noqa: PLW0603 - once
    if not noted:
        noted = True
        ProgressLine().note(
            "no data workers: files are decoded in this process, and one that makes its decoder crash or hang ends it. "
            "With data.workers=1 (--workers 1) such a file is left out and listed."
        )


noted = False


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
