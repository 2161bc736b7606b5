"""A part in the making: one raw file per column and a ledger of finished items, so that work can be continued.

    PART/NAME.bin       the rows of column NAME, one after the other, as numpy stores them
    PART/ledger.jsonl   one line per finished item: its name, size and change time, its rows, why it failed

An item counts when its line is in the ledger; rows behind the last line are cut off when the work goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bridle import failpoints

LEDGER = "ledger.jsonl"


class Column(NamedTuple):
    """One array of the result: (rows,), or (rows, width)."""

    name: str
    dtype: str  # as numpy writes it, "<i4"
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * (self.width or 1)

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.width is None else (rows, self.width)


class LedgerEntry(NamedTuple):
    """A finished item."""

    name: str
    stamp: tuple[int, int]  # size and change time of its file, which tell whether it is still the same
    rows: int
    reason: str | None = None  # why it could not be read


class StagedPart:
    """Columns and ledger in `folder`, which may hold the beginning of the same part already."""

    def __init__(self, folder: Path, columns: tuple[Column, ...]) -> None:
        self.folder, self.columns = folder, columns
        self.items = 0  # finished
        self.rows = 0  # of finished items
        self.unfinished_rows = 0  # of the item being written
        self.ledger_bytes = 0
        self.open_files = ExitStack()
        self.files: dict[str, BinaryIO] = {}
        self._recover()

    def _recover(self) -> None:
        """Count the finished items whose rows are all stored: a power cut can lose rows that the ledger knows."""
        sizes = {column: self.folder / f"{column.name}.bin" for column in self.columns}
        stored = min((path.stat().st_size if path.exists() else 0) // c.row_bytes for c, path in sizes.items())
        for entry, end in read_ledger(self.folder / LEDGER):
            if self.rows + entry.rows > stored:
                break
            self.rows += entry.rows
            self.items += 1
            self.ledger_bytes = end

    def __enter__(self) -> Self:
        for column in self.columns:
            file = self.open_files.enter_context((self.folder / f"{column.name}.bin").open("ab"))
            file.truncate(self.rows * column.row_bytes)
            self.files[column.name] = file
        self.ledger = self.open_files.enter_context((self.folder / LEDGER).open("ab"))
        self.ledger.truncate(self.ledger_bytes)  # a crash may have cut the last line short
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_files.close()

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Append rows of the item being written, by column."""
        for column in self.columns:
            self.files[column.name].write(np.ascontiguousarray(values[column.name], dtype=column.dtype).data)
        self.unfinished_rows += len(values[self.columns[0].name])

    def finish(self, name: str, stamp: tuple[int, int], *, reason: str | None = None) -> None:
        """End the item being written; with a reason it could not be read, and its rows are dropped."""
        for column in self.columns:
            self.files[column.name].flush()
            if reason is not None:
                self.files[column.name].truncate(self.rows * column.row_bytes)
        entry = LedgerEntry(name, stamp, self.unfinished_rows if reason is None else 0, reason)
        self.rows, self.items, self.unfinished_rows = self.rows + entry.rows, self.items + 1, 0
        failpoints.hit("export.before_ledger")
        self.ledger_bytes += self.ledger.write(json.dumps(entry._asdict()).encode() + b"\n")
        self.ledger.flush()
        failpoints.hit("export.file_done")

    @property
    def size(self) -> int:
        """Bytes of the finished rows."""
        return self.rows * sum(column.row_bytes for column in self.columns)

    def entries(self) -> Iterator[LedgerEntry]:
        """The finished items in order, read from disk."""
        return (entry for entry, end in read_ledger(self.folder / LEDGER) if end <= self.ledger_bytes)

    def readable(self) -> Iterator[LedgerEntry]:
        """The finished items that have rows."""
        return (entry for entry in self.entries() if entry.reason is None)

    def column(self, column: Column) -> NDArray[Any]:
        """The finished rows of a column, mapped and not read; OSError if the file is shorter than the ledger says."""
        path, shape = self.folder / f"{column.name}.bin", column.shape(self.rows)
        if path.stat().st_size < self.rows * column.row_bytes:
            raise OSError(f"{path} is shorter than its ledger says")
        return np.memmap(path, column.dtype, "r", shape=shape) if self.rows else np.zeros(shape, column.dtype)

    def remove_columns(self) -> None:
        """Remove the rows, which are elsewhere now; the ledger stays."""
        for column in self.columns:
            (self.folder / f"{column.name}.bin").unlink(missing_ok=True)


def read_ledger(path: Path) -> Iterator[tuple[LedgerEntry, int]]:
    """The entries of a ledger and the byte at which each ends, up to a line that a crash cut short."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                found = json.loads(line)
                size, changed = found["stamp"]
                entry = LedgerEntry(found["name"], (size, changed), found["rows"], found["reason"])
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield entry, end
