"""Columns of a listing that may be too long for memory: arrays that grow, files that are mapped, rows made of them.

Memory that a mapped file takes belongs to the page cache: all processes that read it share it, and the system takes it
back when it needs room. A column that is sent to another process travels as the name of its file.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from bridle.data.shards.tar_member import TarMember
from bridle.errors import DataError, quoted

Value = TypeVar("Value")
Span = tuple[float, float | None]  # start and end in seconds; None: to the end
WHOLE: Span = (0.0, None)

# Typecodes of columns by the end of their file's name; "q" for the others. On disk all are little-endian.
TYPECODES = {"names": "B", "labels": "i", "of": "i", "starts": "d", "stops": "d"}
AGAIN = "Run the same command again; the index is made anew where it must be."
PIECE = 1 << 20  # numbers that are looked at in one go


def dtype_of(file: Path) -> np.dtype[Any]:
    """How the numbers of a column are stored in its file."""
    return np.dtype(TYPECODES.get(file.suffix[1:], "q")).newbyteorder("<")


class Column(Sequence[Any]):
    """Numbers in a file. One of them is a plain int or float, a slice is an array."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.size: int | None = None  # numbers; None until they are mapped for the first time
        self.mapped: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.numbers())

    def __getitem__(self, at: Any) -> Any:
        found = self.numbers()[at]
        return found if isinstance(at, slice) else found.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numbers(), dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "size": self.size, "mapped": None}

    def numbers(self) -> NDArray[Any]:
        """All of them, mapped."""
        if self.mapped is None:
            kind = dtype_of(self.file)
            try:  # an empty file cannot be mapped
                empty = self.file.stat().st_size == 0
                mapped = np.empty(0, kind) if empty else np.memmap(self.file, dtype=kind, mode="r")
            except (OSError, ValueError) as error:
                raise DataError(
                    f"the index file {quoted(self.file)} cannot be read: {quoted(error)}. {AGAIN}"
                ) from error
            if self.size not in (None, len(mapped)):
                raise DataError(f"the index file {quoted(self.file)} was changed while it was in use. {AGAIN}")
            self.mapped, self.size = mapped, len(mapped)
        return self.mapped


Numbers: TypeAlias = "array[int] | Column"
Reals: TypeAlias = "array[float] | Column"


class Growing:
    """A column in the making: in memory or, with a folder, in a file there whenever `spill` is called."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.file = None if folder is None else folder / name
        self.recent: array[Any] = array(TYPECODES.get(name.rpartition(".")[2], "q"))
        # The array's own methods: one of ours around each would take half of the time that reading a list takes.
        self.append, self.extend, self.add_bytes = self.recent.append, self.recent.extend, self.recent.frombytes

    def spill(self) -> None:
        """Move to the file what is in memory."""
        if self.file is not None:
            with self.file.open("ab") as file:
                file.write(np.asarray(self.recent, dtype=dtype_of(self.file)).tobytes())
            del self.recent[:]

    def finish(self) -> Any:
        """The column, complete: an array, or the file."""
        self.spill()
        return self.recent if self.file is None else Column(self.file)

    def discard(self) -> None:
        """Remove a column that is not needed."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def renumbered(numbers: Any, final: NDArray[np.int32]) -> Any:
    """final[number] for each number: a new array, or the same file with other content."""
    if not isinstance(numbers, Column):
        return array("i", final[np.asarray(numbers, dtype=np.int64)].astype(np.intc).tobytes())
    if len(numbers):
        content = np.memmap(numbers.file, dtype=dtype_of(numbers.file), mode="r+")
        for at in range(0, len(content), PIECE):
            content[at : at + PIECE] = final[content[at : at + PIECE]]
        content.flush()
    return Column(numbers.file)


class Lazy(Sequence[Value], ABC):
    """A sequence that makes its values when they are asked for; a subclass says how long it is and what row i is."""

    @abstractmethod
    def row(self, at: int) -> Value:
        """Value `at`, counted from 0 and inside."""

    @overload
    def __getitem__(self, at: int) -> Value: ...
    @overload
    def __getitem__(self, at: slice) -> list[Value]: ...
    def __getitem__(self, at: int | slice) -> Value | list[Value]:
        rows = range(len(self))[at]  # counts from the end and refuses what is outside, as lists do
        return self.row(rows) if isinstance(rows, int) else [self.row(row) for row in rows]


class PathList(Lazy[Path]):
    """Paths below one root, packed into one buffer: a million Path objects would be copied into every worker."""

    def __init__(self, root: Path, names: Iterable[str] = ()) -> None:
        self.root = root
        self.ends: Numbers = array("q", [0])
        self.buffer: bytearray | Numbers = bytearray()
        for name in names:
            self.append(name)

    @classmethod
    def packed(cls, root: Path, *, buffer: Numbers, ends: Numbers) -> PathList:
        """Of names that lie in a buffer already; name i ends where name i + 1 begins."""
        paths = cls(root)
        paths.buffer, paths.ends = buffer, ends
        return paths

    def append(self, name: str) -> None:
        """Add a path relative to the root, or an absolute one."""
        assert isinstance(self.buffer, bytearray) and isinstance(self.ends, array)  # a finished index does not grow
        self.buffer += os.fsencode(name)
        self.ends.append(len(self.buffer))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def row(self, at: int) -> Path:
        return self.root / os.fsdecode(bytes(self.buffer[self.ends[at] : self.ends[at + 1]]))


class MultiLabels(Lazy[tuple[int, ...]]):
    """Any number of labels for each row."""

    def __init__(self, values: Numbers, ends: Numbers) -> None:
        self.values, self.ends = values, ends  # row i has values[ends[i] : ends[i + 1]]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def row(self, at: int) -> tuple[int, ...]:
        return tuple(self.values[self.ends[at] : self.ends[at + 1]].tolist())


class Spans(Lazy[Span]):
    """Start and end of each row; an end that is not a number stands for the end of the file."""

    def __init__(self, starts: Reals, ends: Reals) -> None:
        self.starts, self.ends = starts, ends

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, at: int) -> Span:
        end = self.ends[at]
        return self.starts[at], None if isnan(end) else end


class MemberList(Lazy[TarMember]):
    """Members of many shards: about 20 bytes each and the name."""

    def __init__(
        self, shards: Sequence[Path], *, names: PathList, shard_of: Numbers, offsets: Numbers, sizes: Numbers
    ) -> None:
        self.shards, self.names = shards, names
        self.shard_of, self.offsets, self.sizes = shard_of, offsets, sizes

    def __len__(self) -> int:
        return len(self.shard_of)

    def row(self, at: int) -> TarMember:
        name = os.fspath(self.names[at])
        return TarMember(self.shards[int(self.shard_of[at])], name, int(self.offsets[at]), int(self.sizes[at]))


class Chosen(Lazy[Any]):
    """Some rows of another column."""

    def __init__(self, column: Sequence[Any], rows: NDArray[np.int64]) -> None:
        self.column, self.rows = column, rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, at: int) -> Any:
        return self.column[int(self.rows[at])]
