"""Codes and features as Parquet, one row per file, for `datasets`, pandas, polars and DuckDB.

    file       string                    name of the file
    tokens     int64                     T, how many tokens it has; absent when pooled
    codes      list<uint8[M]>            (T, M), or features list<float[D]>; pooled: float[D]
    times      list<double>              (T,) where the first axis is time
    positions  list<int32[rank]>         (T, rank)

The header is the schema's metadata, key "bridle". A row is written and read whole, other rows are not held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError
from bridle.infer.columns import Column, Parts

KEY = b"bridle"
GROUP_BYTES = 16 * 2**20  # of a row group; one long file may be more
GROUP_FILES = 1024
READ_FILES = 16  # rows decoded at a time

Array = NDArray[Any]


def require_pyarrow() -> None:
    """UsageError where Parquet cannot be written or read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError('.parquet files need pyarrow; install it with `pip install "bridle[parquet]"`.') from error


def write_parquet(file: IO[bytes], parts: Parts, header: str, pooled: bool) -> None:
    """All finished files of the parts, a group of rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("file", pa.string(), nullable=False)]
    fields += [] if pooled else [pa.field("tokens", pa.int64(), nullable=False)]
    fields += [pa.field(column.name, _kind(column, pooled), nullable=False) for column in parts.columns]
    schema = pa.schema(fields, metadata={KEY: header.encode()})
    with pq.ParquetWriter(file, schema) as writer:
        for names, counts, values in _groups(parts):
            arrays = [pa.array(names, pa.string())]
            arrays += [] if pooled else [pa.array(counts, pa.int64())]
            arrays += [_nested(column, values[column.name], counts, pooled) for column in parts.columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _groups(parts: Parts) -> Iterator[tuple[list[str], list[int], dict[str, bytes]]]:
    """Names, numbers of rows and contents of some files at a time."""
    row_bytes = sum(column.row_bytes for column in parts.columns)
    with parts.reading() as read:
        names, counts = list[str](), list[int]()
        for entry in parts.readable():
            names.append(entry.name)
            counts.append(entry.rows)
            if len(names) == GROUP_FILES or sum(counts) * row_bytes >= GROUP_BYTES:
                yield names, counts, read(sum(counts))
                names, counts = [], []
        if names:
            yield names, counts, read(sum(counts))


def _kind(column: Column, pooled: bool) -> Any:
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(column.dtype))
    row = number if column.width is None else pa.list_(number, column.width)
    return row if pooled else pa.list_(row)


def _nested(column: Column, content: bytes, counts: list[int], pooled: bool) -> Any:
    """The rows of some files as one arrow array, without copying."""
    import pyarrow as pa

    flat = pa.array(np.frombuffer(content, dtype=column.dtype))
    rows = flat if column.width is None else pa.FixedSizeListArray.from_arrays(flat, column.width)
    return rows if pooled else pa.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), rows)


class ParquetArrays:
    """The arrays of a Parquet file as those of other formats are read, the large ones row by row."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.file = pq.ParquetFile(path)
        schema = self.file.schema_arrow
        self.header = (schema.metadata or {})[KEY].decode()
        names = self.file.read(columns=["file"]).column(0)
        self.files = [str(name) for name in names.to_pylist()]
        self.pooled = json.loads(self.header).get("pool") is not None
        counts = np.ones(len(self.files), np.int64) if self.pooled else self._counts()
        self.starts: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.widths = {name: self._width(schema.field(name).type) for name in schema.names[1:] if name != "tokens"}
        rows = int(self.starts[-1])
        self.shapes = {name: (rows,) if width is None else (rows, width) for name, width in self.widths.items()}

    def whole(self, name: str) -> Array:
        if name != "starts":
            raise KeyError(name)
        return self.starts

    def stream(self, name: str) -> Callable[[int], Array]:
        """read(count) gives the rows of the next file, which has `count`."""
        values = self._values(name)
        width = self.widths[name]

        def read(count: int) -> Array:
            found = next(values, None)
            if found is None:
                raise EOFError("a column ends early")
            return found.reshape((count,) if width is None else (count, width)).copy()  # arrow's own is read-only

        return read

    def _values(self, name: str) -> Iterator[Array]:
        for batch in self.file.iter_batches(batch_size=READ_FILES, columns=[name]):
            column = batch.column(0)
            for at in range(len(column)):
                value = column[at].values
                while hasattr(value, "flatten") and hasattr(value.type, "value_type"):
                    value = value.flatten()
                yield value.to_numpy(zero_copy_only=False)

    def _counts(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.file.read(columns=["tokens"]).column(0).to_numpy()
        return found

    def _width(self, kind: Any) -> int | None:
        """Numbers in a row; None where it is a single one."""
        row = kind if self.pooled else kind.value_type
        return int(row.list_size) if hasattr(row, "list_size") else None
