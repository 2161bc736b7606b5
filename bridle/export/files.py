"""Files of any length as rows of codes or features, one row per token, in constant memory.

A reader cuts a file into windows of the model's input size; windows of one or several files go through the networks
together; padding is left out of what comes back.

Shapes: T tokens (of a file, real ones only), M codebooks, D width, rank the number of grid axes.

    position of a token  =  its place in the grid; along the first axis the count goes on from window to window
    time of a token      =  the moment its patch begins, position[0] · patch[0] · frame_seconds, or as the file says
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.folders import printable
from bridle.data.loader import stack_valid
from bridle.data.sources import Reader, Sample, Window
from bridle.errors import DataError, UsageError, quoted
from bridle.geometry import Geometry

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
    """What was computed of some tokens of one file."""

    file: int  # which of the files asked for
    values: Array  # (n, M or D)
    times: NDArray[np.float64] | None  # (n,)
    positions: NDArray[np.int32]  # (n, rank)


class Ended(NamedTuple):
    """A file is done; with an error its rows do not count."""

    file: int
    error: DataError | None


class Placed(NamedTuple):
    """A window and the file it belongs to."""

    file: int
    window: Window


def rows_of_files(
    paths: Iterable[Path], *, reader: Reader, geometry: Geometry, compute: Compute, batch: int
) -> Iterator[Rows | Ended]:
    """The rows of all files in order, each file followed by its end; up to `batch` windows are computed together."""
    if batch < 1:
        raise UsageError(f"batch is {batch}; at least one window must be computed at a time.")
    waiting: list[Placed | Ended] = []
    windows = 0  # of those that wait
    for item in _windows_of_files(paths, reader):
        waiting.append(item)
        windows += isinstance(item, Placed)
        if windows in (0, batch):  # the end of a file whose windows are all computed need not wait
            yield from _computed(waiting, reader, geometry, compute)
            waiting, windows = [], 0
    yield from _computed(waiting, reader, geometry, compute)


def _windows_of_files(paths: Iterable[Path], reader: Reader) -> Iterator[Placed | Ended]:
    for file, path in enumerate(paths):
        empty = True
        try:
            for window in reader.windows(path):
                if not torch.isfinite(window.x).all():
                    raise DataError(f"{quoted(path)} holds numbers that are not finite (NaN or infinity).")
                if window.valid is None or bool(window.valid.any()):
                    empty = False
                    yield Placed(file, window)
        except DataError as error:
            yield Ended(file, error)
        except OSError as error:
            yield Ended(file, DataError(f"{quoted(path)} cannot be read: {error.strerror or quoted(error)}."))
        else:
            nothing = DataError(f"{quoted(path)} holds nothing that fills a token of this model.")
            yield Ended(file, nothing if empty else None)


def _computed(
    waiting: Sequence[Placed | Ended], reader: Reader, geometry: Geometry, compute: Compute
) -> Iterator[Rows | Ended]:
    """The networks once over all windows that wait, then everything in the order in which it came."""
    samples = [Sample(item.window.x, valid=item.window.valid) for item in waiting if isinstance(item, Placed)]
    if samples:
        values = iter(compute(torch.stack([sample.x for sample in samples]), stack_valid(samples)))
    for item in waiting:
        yield item if isinstance(item, Ended) else _rows(item, next(values), reader, geometry)


def _rows(placed: Placed, values: Array, reader: Reader, geometry: Geometry) -> Rows:
    """The rows of the real tokens of one window."""
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
        times = (window.start + first).astype(np.float64) * reader.frame_seconds
    return Rows(placed.file, values, times, positions)


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
            self.parts[0].file,
            np.concatenate([part.values for part in self.parts]),
            np.concatenate(times) if times else None,
            np.concatenate([part.positions for part in self.parts]),
        )


def name_of(path: Path) -> str:
    """How a file is called in results."""
    return printable(path)
