"""Columns of a listing that may be too long for memory: numbers in arrays or in mapped files, and rows made of them.

Memory that a mapped file takes belongs to the page cache: all processes that read it share it, and the system takes it
back when it needs room. A column that is sent to another process travels as the name of its file.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from bridle.data.shards.tar_member import TarMember
from bridle.errors import DataError, quoted

Value = TypeVar("Value")
Span = tuple[float, float | None]  # start and end in seconds; None: to the end
WHOLE: Span = (0.0, None)
Columns = Mapping[str, Any]  # by name: an array that grows, or a Column
# Typecodes of columns by name; see `table_on_disk` for what they hold.
TYPES = {
    **dict.fromkeys(("ends", "label_ends", "folds", "offsets", "sizes", "rows"), "q"),
    **{"names": "B", "labels": "i", "of": "i", "starts": "d", "stops": "d"},
}


class Column(Sequence[Any]):
    """Numbers in a .npy file, mapped. One of them is a plain int or float, a slice is an array."""

    def __init__(self, file: Path, size: int | None = None) -> None:
        self.file, self.numbers = file, np.load(file, mmap_mode="r", allow_pickle=False)
        if self.numbers.ndim != 1 or self.numbers.dtype != TYPES[file.stem.rpartition(".")[2]]:
            raise ValueError(f"{file.name} holds other numbers than it should")
        if size not in (None, len(self.numbers)):
            raise DataError(
                f"the index file {quoted(file)} was changed while it was in use. Run the same command again; the index "
                "is made anew where it must be."
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        found = self.numbers[at]
        return found if isinstance(at, slice) else found.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numbers, dtype=dtype)

    def __getstate__(self) -> tuple[Path, int]:
        return self.file, len(self)

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a worker maps the same file


class Lazy(Sequence[Value], ABC):
    """A sequence that makes its values of columns when they are asked for."""

    NAMES: tuple[str, ...]  # of its columns; the first has a number for each row

    def __init__(self, columns: Columns | None = None) -> None:
        self.columns = columns or {name: array(TYPES[name]) for name in self.NAMES}

    @abstractmethod
    def row(self, at: int) -> Value:
        """Value `at`, counted from 0 and inside."""

    def part(self, name: str, ends: str, at: int) -> Any:
        """The numbers of a column that belong to row `at`, of which another column says where they end."""
        stops = self.columns[ends]
        return self.columns[name][stops[at - 1] if at else 0 : stops[at]]

    def __len__(self) -> int:
        return len(self.columns[self.NAMES[0]])

    @overload
    def __getitem__(self, at: int) -> Value: ...
    @overload
    def __getitem__(self, at: slice) -> list[Value]: ...
    def __getitem__(self, at: int | slice) -> Value | list[Value]:
        rows = range(len(self))[at]  # counts from the end and refuses what is outside, as lists do
        return self.row(rows) if isinstance(rows, int) else [self.row(row) for row in rows]


class PathList(Lazy[Path]):
    """Paths below one root, packed into one buffer: a million Path objects would be copied into every worker."""

    NAMES = ("ends", "names")

    def __init__(self, root: Path, names: Iterable[str] = (), *, columns: Columns | None = None) -> None:
        super().__init__(columns)
        self.root = root
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Add a path relative to the root, or an absolute one."""
        self.columns["names"].frombytes(os.fsencode(name))
        self.columns["ends"].append(len(self.columns["names"]))

    def row(self, at: int) -> Path:
        return self.root / os.fsdecode(bytes(self.part("names", "ends", at)))


class MultiLabels(Lazy[tuple[int, ...]]):
    """Any number of labels for each row."""

    NAMES = ("label_ends", "labels")

    def append(self, labels: Iterable[int]) -> None:
        self.columns["labels"].extend(labels)
        self.columns["label_ends"].append(len(self.columns["labels"]))

    def row(self, at: int) -> tuple[int, ...]:
        return tuple(self.part("labels", "label_ends", at).tolist())


class Spans(Lazy[Span]):
    """Start and end of each row; an end that is not a number stands for the end of the file."""

    NAMES = ("starts", "stops")

    def append(self, span: Span) -> None:
        self.columns["starts"].append(span[0])
        self.columns["stops"].append(nan if span[1] is None else span[1])

    def row(self, at: int) -> Span:
        end = self.columns["stops"][at]
        return self.columns["starts"][at], None if isnan(end) else end


class MemberList(Lazy[TarMember]):
    """Members of many shards: about 20 bytes each and the name."""

    NAMES = ("of", "offsets", "sizes", "ends", "names")

    def __init__(self, shards: Sequence[Path], columns: Columns | None = None) -> None:
        super().__init__(columns)
        self.shards, self.names = list(shards), PathList(Path(), columns=self.columns)

    def append(self, name: str, *, offset: int, size: int) -> None:
        """Add a member of the last of the shards."""
        self.names.append(name)
        for column, value in (("of", len(self.shards) - 1), ("offsets", offset), ("sizes", size)):
            self.columns[column].append(value)

    def row(self, at: int) -> TarMember:
        shard, offset, size = (int(self.columns[column][at]) for column in ("of", "offsets", "sizes"))
        return TarMember(self.shards[shard], os.fspath(self.names[at]), offset, size)


class Chosen(Lazy[Any]):
    """Some rows of another column."""

    NAMES = ("rows",)

    def __init__(self, column: Sequence[Any], rows: NDArray[np.int64]) -> None:
        super().__init__({"rows": rows})
        self.column = column

    def row(self, at: int) -> Any:
        return self.column[int(self.columns["rows"][at])]
