"""Files of any length as rows of codes or features: one row per token, or pooled to one vector, in constant memory.

A reader cuts a file into windows of the model's input size; windows of one or several files go through the networks
together; padding is left out of what comes back.

Shapes: T tokens (of a file, real ones only), M codebooks, D width, P grid positions that pooling keeps.

    position of a token  =  its grid position; along the first axis the count goes on from window to window
    time of a token      =  the moment its patch begins, position[0] · patch[0] · frame_seconds, or as the file says
    pooled features      =  mean over windows of each window's pooled features, weighted by its real tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.listing.folders import printable
from bridle.data.listing.items import Item, Items, require_readable
from bridle.data.loading.loader import stack_valid
from bridle.data.sources import Reader, Sample, Window
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry
from bridle.infer.prefetch import Ended, Event, Placed, events_of_items

Array = NDArray[Any]
Compute = Callable[[Tensor, Tensor | None], Array]  # x (B, C, *input), valid (B, T) -> (B, T, M or D), pooled (B, P, D)


class FileCodes(NamedTuple):
    """Codes of a file, or of a stretch of it."""

    codes: Array  # (T, M), the smallest unsigned type that holds them
    times: NDArray[np.float64] | None  # (T,) seconds into the file; None where the first axis is not time
    positions: NDArray[np.int32]  # (T, rank)
    name: str


class FileFeatures(NamedTuple):
    """Features of a file, or of a stretch of it; pooled ones are a single vector without times and positions."""

    z: NDArray[np.float32]  # (T, D); pooled (P · D,), with deviations (2 · P · D,)
    times: NDArray[np.float64] | None
    positions: NDArray[np.int32] | None
    name: str


class WindowValues(NamedTuple):
    """What was computed of one window."""

    item: int  # number of the item it belongs to
    begin: float  # second of the file at which the item begins
    window: Window
    values: Array  # (T, M or D), pooled (P, D)


class Rows(NamedTuple):
    """What was computed of some tokens of one item."""

    values: Array  # (n, M or D)
    times: NDArray[np.float64] | None  # (n,)
    positions: NDArray[np.int32]  # (n, rank)


def values_of_items(
    items: Sequence[Item], *, reader: Reader, compute: Compute, batch: int, workers: int = 0
) -> Iterator[WindowValues | Ended]:
    """The windows of all items in order, each item followed by its end; up to `batch` windows are computed together.

    `workers` processes decode ahead; the values are the same bit for bit.
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
                yield from _computed(waiting, items, compute)
                waiting, windows = [], 0
    yield from _computed(waiting, items, compute)


def _computed(waiting: Sequence[Event], items: Sequence[Item], compute: Compute) -> Iterator[WindowValues | Ended]:
    """Run the networks once over all windows that wait, then give everything in the order in which it came."""
    samples = [Sample(event.window.x, valid=event.window.valid) for event in waiting if isinstance(event, Placed)]
    if samples:
        values = iter(compute(torch.stack([sample.x for sample in samples]), stack_valid(samples)))
    for event in waiting:
        if isinstance(event, Ended):
            yield event
        else:
            yield WindowValues(event.item, items[event.item].span[0], event.window, next(values))


def token_rows(found: WindowValues, reader: Reader, geometry: Geometry) -> Rows:
    """The rows of the real tokens of one window."""
    window, values, patch = found.window, found.values, geometry.patch[0]
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
        times = found.begin + (window.start + first).astype(np.float64) * reader.frame_seconds
    return Rows(values, times, positions)


class TokenCollector:
    """All token rows of a file."""

    def __init__(self, reader: Reader, geometry: Geometry) -> None:
        self.reader, self.geometry = reader, geometry
        self.pieces: list[Rows] = []

    def add(self, found: WindowValues) -> None:
        self.pieces.append(token_rows(found, self.reader, self.geometry))

    def joined(self) -> Rows:
        """All rows in one piece."""
        times = [piece.times for piece in self.pieces if piece.times is not None]
        return Rows(
            np.concatenate([piece.values for piece in self.pieces]),
            np.concatenate(times) if times else None,
            np.concatenate([piece.positions for piece in self.pieces]),
        )


class MeanCollector:
    """Weighted mean over the windows of a file of their pooled features."""

    def __init__(self, geometry: Geometry, axis: int | None) -> None:
        """`axis` is the grid axis that pooling keeps, or None."""
        self.grid, self.axis = geometry.grid, axis
        self.total: NDArray[np.float64] | None = None  # (P, D), with deviations (2P, D)
        self.count: NDArray[np.float64] | None = None  # (P, 1)

    def add(self, found: WindowValues) -> None:
        valid = found.window.valid
        real = np.ones(math.prod(self.grid)) if valid is None else valid.numpy().astype(np.float64)
        others = tuple(axis for axis in range(len(self.grid)) if axis != self.axis)
        kept = real.reshape(self.grid).sum(axis=others).reshape(-1)  # (P,) real tokens at each position kept
        count = np.resize(kept, len(found.values))[:, None]  # deviations follow the means
        total = count * found.values
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    def mean(self) -> NDArray[np.float32]:
        """(P · D,) or, with deviations, (2 · P · D,); a position without a real token gives zeros."""
        assert self.total is not None  # a file without tokens is an error before
        assert self.count is not None
        return (self.total / np.maximum(self.count, 1.0)).astype(np.float32).reshape(-1)


Collector = TypeVar("Collector", TokenCollector, MeanCollector)
OnError = Callable[[str, DataError], None]  # file, reason


def collect_files(
    paths: Sequence[Path],
    reader: Reader,
    compute: Compute,
    *,
    collector: Callable[[], Collector],
    batch: int,
    workers: int,
    on_error: OnError | None,
) -> Iterator[tuple[str, Collector]]:
    """Name and collected values of each file that can be read."""
    for path in paths:
        require_readable(path, reader)
    items, collected = Items(map(Item, paths)), collector()
    for event in values_of_items(items, reader=reader, compute=compute, batch=batch, workers=workers):
        if isinstance(event, WindowValues):
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
    """The token rows of a long file, `batch` windows at a time."""
    require_readable(path, reader)
    collected = TokenCollector(reader, geometry)
    for event in values_of_items([Item(path)], reader=reader, compute=compute, batch=batch):
        if isinstance(event, Ended):
            if event.error is not None:
                raise event.error
            break
        collected.add(event)
        if len(collected.pieces) == batch:
            yield collected.joined()
            collected = TokenCollector(reader, geometry)
    if collected.pieces:
        yield collected.joined()


def name_of(path: Path) -> str:
    """The name of a file in results."""
    return printable(path)
