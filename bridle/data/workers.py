"""A function mapped over items by worker processes, results in order.

torch's DataLoader does the work; this module adds what long runs need: nothing is drawn from a global generator, one
thread per load (so that results do not depend on the machine), and workers that outlive a SIGTERM sent to the whole
process group, because the main process still needs them to reach the end of its step and save.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bridle.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

PREFETCH = 2  # results each worker prepares ahead
GRACE = 2.0  # seconds a worker has to end by itself


class Mapped(Dataset[Result], Generic[Item, Result]):
    """A dataset whose 'indices' are items and whose samples are the function's results."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.function = function

    def __getitem__(self, item: Item) -> Result:
        return self.function(item)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, pin_memory: bool = False
) -> Iterator[Result]:
    """function(item) for each item, in order; `workers` processes compute ahead, 0 computes here."""
    if workers > 0:
        yield from _by_workers(function, items, workers=workers, pin_memory=pin_memory)
        return
    for item in items:
        with one_thread():
            result = function(item)
        yield result


def _by_workers(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, pin_memory: bool
) -> Iterator[Result]:
    closing = torch.zeros(1, dtype=torch.bool).share_memory_()
    loader: DataLoader[Result] = DataLoader(
        Mapped(function),
        batch_size=None,  # the function makes whole batches
        sampler=items,  # any iterable of "indices" will do
        num_workers=workers,
        prefetch_factor=PREFETCH,
        collate_fn=_as_it_is,
        worker_init_fn=partial(_start_worker, closing, os.getpid()),
        pin_memory=pin_memory and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),  # or the iterator would draw a seed from the global generator
    )

    def close() -> None:
        closing.fill_(True)

    # Runs before multiprocessing's own exit hook, which waits for the workers to end.
    atexit.register(close)
    results = iter(loader)
    try:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"a data worker died ({str(error).splitlines()[0]}); it may have run out of memory, or of room in "
            "/dev/shm. Use fewer data workers, or 0, and run the same command again."
        ) from error
    finally:
        close()
        atexit.unregister(close)


def _as_it_is(result: Result) -> Result:
    return result


def _start_worker(closing: Tensor, parent: int, worker: int) -> None:
    """Settle a worker: one thread, deaf to signals, and leaving when the main process is done or gone."""
    torch.set_num_threads(1)
    for signal_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_, _go_on)  # not SIG_IGN, which programs started from here would inherit
    threading.Thread(target=_leave_in_time, args=(closing, parent), daemon=True).start()


def _go_on(signum: int, frame: object) -> None:
    """The main process decides when to stop."""


def _leave_in_time(closing: Tensor, parent: int) -> None:
    """End this process, whatever it is doing, when it is no longer needed."""
    while not closing.item() and os.getppid() == parent:
        time.sleep(0.25)
    time.sleep(GRACE)  # torch's own way of ending a worker comes first
    os._exit(0)


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
