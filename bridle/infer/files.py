"""Files of any length as rows of codes or features, one row per token, in constant memory.

A reader cuts a file into windows of the model's input size; windows of one or several files go through the networks
together; padding is left out of what comes back.

Shapes: T tokens (of a file, real ones only), M codebooks, D width, rank the number of grid axes.

    position of a token  =  its place in the grid; along the first axis the count goes on from window to window
    time of a token      =  the moment its patch begins, position[0] · patch[0] · frame_seconds, or as the file says
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.listing.folders import printable
from bridle.data.loading.loader import stack_valid
from bridle.data.sources import Reader, Sample
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry
from bridle.infer.inputs import Item, Items, require_readable
from bridle.infer.prefetch import Ended, Event, Placed, events_of_items

Array = NDArray[Any]
Compute = Callable[[Tensor, Tensor | None], Array]  # x (B, C, *input), valid (B, T) -> rows (B, T, M or D)


class FileCodes(NamedTuple):
    """Codes of a file, or of a part of it."""

    codes: Array  # (T, M), the smallest unsigned type that holds them
    times: NDArray[np.float64] | None  # (T,) seconds into the file; None where the first axis is not time
    positions: NDArray[np.int32]  # (T, rank)
    name: str


class FileFeatures(NamedTuple):
    """Features of a file, or of a part of it; pooled ones are a single vector without times and positions."""

    z: NDArray[np.float32]  # (T, D); pooled (D,), or (grid[axis] · D,)
    times: NDArray[np.float64] | None
    positions: NDArray[np.int32] | None
    name: str


class Rows(NamedTuple):
    """What was computed of some tokens of one item."""

    item: int  # which of the items asked for
    values: Array  # (n, M or D)
    times: NDArray[np.float64] | None  # (n,)
    positions: NDArray[np.int32]  # (n, rank)


def rows_of_files(
    items: Sequence[Item], *, reader: Reader, geometry: Geometry, compute: Compute, batch: int, workers: int = 0
) -> Iterator[Rows | Ended]:
    """The rows of all items in order, each followed by its end; up to `batch` windows are computed together.

    `workers` processes decode ahead; the rows are the same bit for bit.
    """
    if batch < 1:
        raise UsageError(f"batch is {batch}; at least one window must be computed at a time.")
    if workers < 0:
        raise UsageError(f"workers is {workers}; give 0 to decode in this process, or a number of processes.")
    waiting: list[Event] = []
    windows = 0  # of those that wait
    with closing(events_of_items(items, reader, workers=workers)) as events:
        for event in events:
            waiting.append(event)
            windows += isinstance(event, Placed)
            if windows in (0, batch):  # the end of an item whose windows are all computed need not wait
                yield from _computed(waiting, items, reader, geometry, compute)
                waiting, windows = [], 0
    yield from _computed(waiting, items, reader, geometry, compute)


def _computed(
    waiting: Sequence[Event], items: Sequence[Item], reader: Reader, geometry: Geometry, compute: Compute
) -> Iterator[Rows | Ended]:
    """The networks once over all windows that wait, then everything in the order in which it came."""
    samples = [Sample(item.window.x, valid=item.window.valid) for item in waiting if isinstance(item, Placed)]
    if samples:
        values = iter(compute(torch.stack([sample.x for sample in samples]), stack_valid(samples)))
    for event in waiting:
        if isinstance(event, Ended):
            yield event
        else:
            yield _rows(event, next(values), items[event.item].span[0], reader, geometry)


def _rows(placed: Placed, values: Array, begin: float, reader: Reader, geometry: Geometry) -> Rows:
    """The rows of the real tokens of one window; `begin` is the second of the file at which its item begins."""
    window, patch = placed.window, geometry.patch[0]
    positions = np.indices(geometry.grid, dtype=np.int32).reshape(geometry.rank, -1).T.copy()  # (T, rank)
    first = positions[:, 0].astype(np.int64) * patch  # (T,) frame of the window with which a token begins
    positions[:, 0] += window.start // patch
    if window.valid is not None:
        real = window.valid.numpy()
        values, positions, first = values[real], positions[real], first[real]
    times: NDArray[np.float64] | None = None
    if window.seconds is not None:
        times = np.array(window.seconds, dtype=np.float64)[first]
    elif reader.frame_seconds is not None:
        times = begin + (window.start + first).astype(np.float64) * reader.frame_seconds
    return Rows(placed.item, values, times, positions)


class Pool:
    """A running mean over the tokens of a file: over all of them, or one per place along a grid axis."""

    def __init__(self, *, places: int, axis: int) -> None:
        """`places` = 1 pools everything; otherwise places along grid axis `axis`."""
        self.places, self.axis = places, axis
        self.total: NDArray[np.float64] | None = None  # (places, D)
        self.count = np.zeros((places, 1))

    def add(self, rows: Rows) -> None:
        place = rows.positions[:, self.axis] if self.places > 1 else np.zeros(len(rows.values), dtype=np.int32)
        if place.max(initial=0) >= self.places:
            raise UsageError(
                f"pool 'axis' cannot keep grid axis {self.axis}: along it this file is longer than the model's input; "
                "keep another axis, or use pool 'mean'."
            )
        member = (np.arange(self.places)[:, None] == place).astype(np.float64)  # (places, n)
        total = member @ rows.values  # (places, D)
        self.total = total if self.total is None else self.total + total
        self.count += member.sum(axis=1, keepdims=True)

    def mean(self) -> NDArray[np.float32]:
        """(places · D,); a place without a real token gives zeros."""
        assert self.total is not None  # a file without tokens is an error before
        return (self.total / np.maximum(self.count, 1.0)).astype(np.float32).reshape(-1)


class Kept:
    """All rows of a file."""

    def __init__(self) -> None:
        self.parts: list[Rows] = []

    def add(self, rows: Rows) -> None:
        self.parts.append(rows)

    def joined(self) -> Rows:
        """In one piece."""
        times = [part.times for part in self.parts if part.times is not None]
        return Rows(
            self.parts[0].item,
            np.concatenate([part.values for part in self.parts]),
            np.concatenate(times) if times else None,
            np.concatenate([part.positions for part in self.parts]),
        )


Collected = TypeVar("Collected", Kept, Pool)
OnError = Callable[[str, DataError], None]  # file, reason


def collect_files(
    paths: Sequence[Path],
    reader: Reader,
    geometry: Geometry,
    compute: Compute,
    *,
    collector: Callable[[], Collected],
    batch: int,
    workers: int,
    on_error: OnError | None,
) -> Iterator[tuple[str, Collected]]:
    """Name and collected rows of each file that can be read."""
    for path in paths:
        require_readable(path, reader)
    items, collected = Items(map(Item, paths)), collector()
    found = rows_of_files(items, reader=reader, geometry=geometry, compute=compute, batch=batch, workers=workers)
    for event in found:
        if isinstance(event, Rows):
            collected.add(event)
            continue
        name = items[event.item].name
        if event.error is None:
            yield name, collected
        elif on_error is None:
            raise event.error
        else:
            on_error(name, event.error)
        collected = collector()


def stream_file(path: Path, reader: Reader, geometry: Geometry, compute: Compute, *, batch: int) -> Iterator[Rows]:
    """The rows of a long file, `batch` windows at a time."""
    require_readable(path, reader)
    kept = Kept()
    for event in rows_of_files([Item(path)], reader=reader, geometry=geometry, compute=compute, batch=batch):
        if isinstance(event, Ended):
            if event.error is not None:
                raise event.error
            break
        kept.add(event)
        if len(kept.parts) == batch:
            yield kept.joined()
            kept = Kept()
    if kept.parts:
        yield kept.joined()


def name_of(path: Path) -> str:
    """How a file is called in results."""
    return printable(path)
