"""Rows on their way to disk: one raw file per column and a ledger of finished files, so that work can be continued.

    OUT.parts/job.json       what is computed, with which model; a job with another answer is not continued
    OUT.parts/NAME.bin       the rows of column NAME, one after the other, as numpy stores them
    OUT.parts/ledger.jsonl   one line per finished file: its name, size and change time, its rows, why it failed

A file counts when its line is in the ledger; rows behind the last line are cut off when the work goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bridle import failpoints
from bridle.errors import UsageError, quoted
from bridle.files import json_line, read_lines, write_json, write_text

JOB, LEDGER = "job.json", "ledger.jsonl"
BLOCK = 2**20  # bytes copied at a time


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


class Entry(NamedTuple):
    """A finished file."""

    name: str
    stamp: tuple[int, int]  # size and change time, which tell whether a file is still the same
    rows: int
    reason: str | None = None  # why it could not be read


class Parts:
    """The columns and the ledger of one job; a folder that holds the same job already is continued."""

    def __init__(self, folder: Path, *, columns: tuple[Column, ...], job: Mapping[str, Any]) -> None:
        self.folder, self.columns = folder, columns
        self.entries: list[Entry] = []
        self.rows = 0  # of finished files
        self.fresh = 0  # of the file at hand
        folder.mkdir(parents=True, exist_ok=True)
        described = json.loads(json.dumps({**job, "columns": columns}))
        if (folder / JOB).exists():
            self._require_same(described)
            self._read_ledger()
        else:
            write_json(folder / JOB, described)
        self.open_files = ExitStack()
        self.files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        for column in self.columns:
            file = self.open_files.enter_context((self.folder / f"{column.name}.bin").open("ab"))
            file.truncate(self.rows * column.row_bytes)
            self.files[column.name] = file
        # Written anew: a last line cut short by a crash must not stay in the middle of the ledger.
        write_text(self.folder / LEDGER, "".join(json_line(entry._asdict()) for entry in self.entries))
        self.ledger = self.open_files.enter_context((self.folder / LEDGER).open("a", encoding="utf-8"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_files.close()

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Rows of the file at hand, by column."""
        for column in self.columns:
            self.files[column.name].write(np.ascontiguousarray(values[column.name], dtype=column.dtype).data)
        self.fresh += len(values[self.columns[0].name])

    def finish(self, name: str, stamp: tuple[int, int], *, reason: str | None = None) -> None:
        """The file at hand is done; with a reason it could not be read, and its rows are dropped."""
        for column in self.columns:
            self.files[column.name].flush()
            if reason is not None:
                self.files[column.name].truncate(self.rows * column.row_bytes)
        entry = Entry(name, stamp, self.fresh if reason is None else 0, reason)
        self.rows, self.fresh = self.rows + entry.rows, 0
        self.entries.append(entry)
        failpoints.hit("export.before_ledger")
        self.ledger.write(json_line(entry._asdict()))
        self.ledger.flush()
        failpoints.hit("export.file_done")

    @property
    def size(self) -> int:
        """Bytes of the finished rows."""
        return self.rows * sum(column.row_bytes for column in self.columns)

    def readable(self) -> Iterator[Entry]:
        """The finished files that have rows."""
        return (entry for entry in self.entries if entry.reason is None)

    def blocks(self, column: Column) -> Iterator[bytes]:
        """The finished rows of a column as bytes, a block at a time."""
        left = self.rows * column.row_bytes
        with (self.folder / f"{column.name}.bin").open("rb") as file:
            while left:
                block = file.read(min(BLOCK, left))
                if not block:
                    raise OSError(f"{file.name} is shorter than its ledger says")
                left -= len(block)
                yield block

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], dict[str, bytes]]]:
        """A function that gives the next rows of every column as bytes."""
        with ExitStack() as stack:
            files = {c: stack.enter_context((self.folder / f"{c.name}.bin").open("rb")) for c in self.columns}

            def read(rows: int) -> dict[str, bytes]:
                return {column.name: file.read(rows * column.row_bytes) for column, file in files.items()}

            yield read

    def remove(self) -> None:
        """The job is done, its result is elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _require_same(self, job: dict[str, Any]) -> None:
        try:
            before = json.loads((self.folder / JOB).read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if before != job:
            changed = [key for key in job if not isinstance(before, dict) or before.get(key) != job[key]]
            raise UsageError(
                f"{quoted(self.folder)} holds an unfinished job with another {', '.join(changed) or 'setting'}; run "
                "that command again to finish it, or give --overwrite to begin anew."
            )

    def _read_ledger(self) -> None:
        """The finished files whose rows are all there; a power cut can lose rows that the ledger knows."""
        sizes = {column: self.folder / f"{column.name}.bin" for column in self.columns}
        stored = min((path.stat().st_size if path.exists() else 0) // c.row_bytes for c, path in sizes.items())
        for line in read_lines(self.folder / LEDGER):
            entry = Entry(line["name"], (line["stamp"][0], line["stamp"][1]), line["rows"], line["reason"])
            if self.rows + entry.rows > stored:
                break
            self.rows += entry.rows
            self.entries.append(entry)
