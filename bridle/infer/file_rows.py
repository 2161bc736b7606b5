"""Files of any length as rows of codes or features: one row per token, or pooled to one vector, in constant memory.

A reader cuts a file into windows of the model's input size; windows of one or several files go through the networks
together; padding is left out of what comes back.

Shapes: T tokens (of a file, real ones only), M codebooks, D width, W numbers of a pooled vector.

    position of a token  =  its grid position; along the first axis the count goes on from window to window
    time of a token      =  the moment its patch begins, position[0] · patch[0] · frame_seconds, or as the file says
    pooled features      =  mean over windows of each window's pooled features, weighted by its real tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.listing.items import Item, Items, require_readable
from bridle.data.loading.loader import stack_valid
from bridle.data.sources import Reader, Sample, Window
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry
from bridle.infer.feature_spec import Pooled
from bridle.infer.prefetch import Ended, Event, Placed, events_of_items

Array = NDArray[Any]
Compute = Callable[[Tensor, Tensor | None], Array]  # x (B, C, *input), valid (B, T) -> (B, T, M or D), pooled (B, W)


class FileCodes(NamedTuple):
    """Codes of a file, or of a stretch of it."""

    codes: Array  # (T, M), the smallest unsigned type that holds them
    times: NDArray[np.float64] | None  # (T,) seconds into the file; None where the first axis is not time
    positions: NDArray[np.int32]  # (T, rank): place of each token in the grid
    name: str  # the file


class FileFeatures(NamedTuple):
    """Features of a file, or of a stretch of it; pooled ones are a single vector without times and positions."""

    z: NDArray[np.float32]  # (T, D); pooled (W,)
    times: NDArray[np.float64] | None  # (T,) seconds into the file
    positions: NDArray[np.int32] | None  # (T, rank)
    name: str  # the file


class WindowValues(NamedTuple):
    """What was computed of one window."""

    item: int  # number of the item it belongs to
    begin: float  # second of the file at which the item begins
    window: Window
    values: Array  # (T, M or D), pooled (W,)


class Rows(NamedTuple):
    """What was computed of some tokens of one item, or of a whole one, pooled."""

    values: Array  # (n, M or D); pooled (W,)
    times: NDArray[np.float64] | None  # (n,)
    positions: Any  # (n, rank) int32; None when pooled


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


class Collector:
    """The rows of a file: those of all tokens, or the weighted mean over windows of their pooled features."""

    def __init__(self, reader: Reader, geometry: Geometry, pooled: Pooled | None = None) -> None:
        """None collects a row of every token."""
        self.reader, self.geometry, self.pooled = reader, geometry, pooled
        self.pieces: list[Rows] = []
        self.total: NDArray[np.float64] | None = None  # (W,)
        self.count: NDArray[np.float64] | None = None  # (W,)

    def add(self, found: WindowValues) -> None:
        """Take in the values of the next window."""
        if self.pooled is None:
            self.pieces.append(token_rows(found, self.reader, self.geometry))
            return
        grid, valid = self.geometry.grid, found.window.valid
        real = np.ones(math.prod(grid)) if valid is None else valid.numpy().astype(np.float64)
        others = tuple(axis for axis in range(len(grid)) if axis != self.pooled.axis)
        kept = real.reshape(grid).sum(axis=others).reshape(-1)  # (P,) real tokens at each position kept
        count = kept[self.pooled.places]
        total = count * found.values
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    def rows(self) -> Rows:
        """All rows; pooled one vector (W,), zeros where no real token is."""
        if self.total is not None and self.count is not None:
            mean = (self.total / np.maximum(self.count, 1.0)).astype(np.float32)
            return Rows(mean, None, None)
        times = [piece.times for piece in self.pieces if piece.times is not None]
        return Rows(
            np.concatenate([piece.values for piece in self.pieces]),
            np.concatenate(times) if times else None,
            np.concatenate([piece.positions for piece in self.pieces]),
        )


OnError = Callable[[str, DataError], None]  # file, reason


def rows_of_files(
    paths: Sequence[Path],
    reader: Reader,
    geometry: Geometry,
    compute: Compute,
    pooled: Pooled | None,
    *,
    batch: int,
    workers: int = 0,
    on_error: OnError | None = None,
    stream: bool = False,
) -> Iterator[tuple[str, Rows]]:
    """Name and rows of each file that can be read; with `stream` in pieces of `batch` windows."""
    for path in paths:
        require_readable(path, reader)
    collector = partial(Collector, reader, geometry, pooled)
    items, collected = Items(map(Item, paths)), collector()
    for event in values_of_items(items, reader=reader, compute=compute, batch=batch, workers=workers):
        name = items[event.item].name
        if isinstance(event, WindowValues):
            collected.add(event)
            if stream and len(collected.pieces) == batch:
                yield name, collected.rows()
                collected = collector()
            continue
        if event.error is None:
            if collected.pieces or collected.pooled is not None:
                yield name, collected.rows()
        elif on_error is None:
            raise event.error
        else:
            on_error(name, event.error)
        collected = collector()
