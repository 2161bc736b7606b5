"""File formats of codes and features: a `Writer` writes one file and opens what it wrote.

    codes      (rows, M)     unsigned integers, or features (rows, D) float32
    times      (rows,)       seconds at which each token begins; absent where the first axis is not time
    positions  (rows, rank)  grid position of each token
    starts     (N + 1,)      file n has the rows starts[n] to starts[n + 1]; positions and starts are absent when pooled
    files      (N,)          names of the files
    header                   JSON: version, model, geometry, codebook sizes, rates

`.npz` is what numpy reads (`np.load(path)["codes"]`), uncompressed; in `.safetensors`, `files` and `header` are
metadata. `.parquet` has one row per file, for `datasets`, pandas, polars and DuckDB, the header in its schema:

    file       string                    name of the file
    tokens     int64                     T, how many tokens it has; absent when pooled
    codes      list<uint8[M]>            (T, M), or features list<float[D]>; pooled: float[D]
    times      list<double>              (T,) where the first axis is time
    positions  list<int32[rank]>         (T, rank)

All are written and read block by block, and reading runs no stored code. Of `.parquet` a few files are held, since a
file is one row there.
"""

from __future__ import annotations

import itertools
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError, quoted

Array = NDArray[Any]
COLUMNS = ("codes", "features", "times", "positions")
PARQUET_KEY = b"bridle"  # of the header in the schema's metadata
GROUP_BYTES = 16 * 2**20  # of a Parquet row group; one long file may be more
GROUP_FILES = 1024
READ_FILES = 16  # Parquet rows decoded at a time
SAFETENSORS_TYPES = {"u1": "U8", "u2": "U16", "u4": "U32", "i4": "I32", "i8": "I64", "f4": "F32", "f8": "F64"}


class Content(NamedTuple):
    """What is written: the rows of some files, one file after the other."""

    header: str  # JSON
    files: Sequence[str]
    counts: Sequence[int] | None  # rows of each file; None when pooled, which is one
    columns: dict[str, Array]  # by name, (rows, …)

    def arrays(self) -> dict[str, Array]:
        """The columns, and `starts` unless pooled."""
        if self.counts is None:
            return self.columns
        return {**self.columns, "starts": np.cumsum([0, *self.counts], dtype="<i8")}


class StoredArrays(NamedTuple):
    """What an open file holds."""

    header: str
    files: list[str]
    starts: NDArray[np.int64]  # (N + 1,) first row of each file, then the number of rows
    shapes: dict[str, tuple[int, ...]]  # of the columns
    # For a limit of rows: number of a file and columns of its next rows, read as they are asked for. A file without
    # rows has one block, without a limit every file has.
    blocks: Callable[[int | None], Iterator[tuple[int, dict[str, Array]]]]


def row_spans(starts: NDArray[np.int64], limit: int | None) -> Iterator[tuple[int, int, int]]:
    """Number of a file, first row and end of each of its blocks of at most `limit` rows."""
    for number, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        size = limit or max(1, end - begin)
        for row in range(begin, max(end, begin + 1), size):
            yield number, row, min(row + size, end)


class Writer(Protocol):
    """One file format."""

    def write(self, file: IO[bytes], content: Content) -> None:
        """Write a file, block by block."""

    def open(self, path: Path) -> AbstractContextManager[StoredArrays]:
        """Open a file that `write` wrote."""
        ...


class NpzWriter:
    """numpy's uncompressed archive of arrays."""

    def write(self, file: IO[bytes], content: Content) -> None:
        names, header = np.array(content.files, dtype=np.str_), np.array(content.header)
        # Uncompressed, and the same bytes for the same content.
        np.savez(file, **content.arrays(), files=names, header=header)  # type: ignore[arg-type]

    @contextmanager
    def open(self, path: Path) -> Iterator[StoredArrays]:
        with zipfile.ZipFile(path) as archive, ExitStack() as streams:
            shapes = {name.removesuffix(".npy"): _npy_shape(archive, name) for name in archive.namelist()}

            def whole(name: str) -> Array:
                with archive.open(f"{name}.npy") as stream:
                    array: Array = np.lib.format.read_array(stream, allow_pickle=False)
                return array

            def column(name: str) -> Callable[[int], Array]:
                stream = streams.enter_context(archive.open(f"{name}.npy"))
                shape, dtype = _npy_header(stream)
                size = math.prod(shape[1:]) * dtype.itemsize
                return lambda n: np.frombuffer(bytearray(stream.read(n * size)), dtype).reshape(n, *shape[1:])

            def blocks(limit: int | None) -> Iterator[tuple[int, dict[str, Array]]]:
                columns = {name: column(name) for name in COLUMNS if name in shapes}
                for number, begin, end in row_spans(starts, limit):
                    yield number, {name: read(end - begin) for name, read in columns.items()}

            header, files = str(whole("header")), [str(name) for name in whole("files")]
            starts = whole("starts") if "starts" in shapes else np.arange(len(files) + 1)
            yield StoredArrays(header, files, starts, shapes, blocks)


def _npy_shape(archive: zipfile.ZipFile, member: str) -> tuple[int, ...]:
    """The shape of an array in an archive; ValueError where it is compressed or has not the size its header says."""
    info = archive.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED:  # a small file could swell without end
        raise ValueError(f"{member} is compressed, which bridle never writes")
    with archive.open(member) as stream:
        shape, dtype = _npy_header(stream)
        if stream.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{member} has not the size its header says")
    return shape


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array in numpy's format, with the stream left at its first number."""
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"array format {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran or dtype.hasobject:
        raise ValueError("not an array of plain numbers in C order")
    return shape, dtype


class SafetensorsWriter:
    """safetensors, with names and header as metadata."""

    def write(self, file: IO[bytes], content: Content) -> None:
        metadata = {"files": json.dumps(content.files), "header": content.header}
        described: dict[str, object] = {"__metadata__": metadata}
        # The format wants offsets without gaps and readers want aligned numbers: wide types first.
        ordered = dict(sorted(content.arrays().items(), key=lambda named: -named[1].itemsize))
        at = 0
        for name, array in ordered.items():
            kind = SAFETENSORS_TYPES[array.dtype.str[1:]]
            described[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(described).encode()
        text = text.ljust(8 * math.ceil(len(text) / 8))
        file.write(len(text).to_bytes(8, "little") + text)
        for array in ordered.values():
            file.write(array.data)

    @contextmanager
    def open(self, path: Path) -> Iterator[StoredArrays]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                files = [str(name) for name in json.loads(metadata["files"])]
                columns = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                starts = file.get_tensor("starts") if "starts" in columns else np.arange(len(files) + 1)
                shapes = {name: tuple(column.get_shape()) for name, column in columns.items()}
                kept = {name: column for name, column in columns.items() if name in COLUMNS}

                def blocks(limit: int | None) -> Iterator[tuple[int, dict[str, Array]]]:
                    for number, begin, end in row_spans(starts, limit):
                        yield number, {name: column[begin:end] for name, column in kept.items()}

                yield StoredArrays(str(metadata["header"]), files, starts, shapes, blocks)
        except SafetensorError as error:
            raise ValueError(str(error)) from error


class ParquetWriter:
    """Apache Parquet, by pyarrow."""

    def write(self, file: IO[bytes], content: Content) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pooled = content.counts is None
        counts = [1] * len(content.files) if content.counts is None else content.counts
        kinds = {name: _kind(column, pooled) for name, column in content.columns.items()}
        named = {"file": pa.string(), **({} if pooled else {"tokens": pa.int64()}), **kinds}
        fields = [pa.field(name, kind, nullable=False) for name, kind in named.items()]
        schema = pa.schema(fields, metadata={PARQUET_KEY: content.header.encode()})
        row_bytes = sum(column[:1].nbytes for column in content.columns.values())
        first = row = 0
        with pq.ParquetWriter(file, schema) as writer:
            while first < len(content.files):
                some = _group(counts[first : first + GROUP_FILES], row_bytes)
                end = row + sum(some)
                arrays = [pa.array(content.files[first : first + len(some)], pa.string())]
                arrays += [] if pooled else [pa.array(some, pa.int64())]
                arrays += [_nested(column[row:end], some, pooled) for column in content.columns.values()]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                first, row = first + len(some), end

    @contextmanager
    def open(self, path: Path) -> Iterator[StoredArrays]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            pooled = "tokens" not in schema.names
            files = [str(name) for name in file.read(columns=["file"]).column(0).to_pylist()]
            counts = [1] * len(files) if pooled else file.read(columns=["tokens"]).column(0).to_numpy()
            starts = np.cumsum([0, *counts], dtype=np.int64)
            tails = {name: _row_shape(schema.field(name).type, pooled) for name in schema.names if name in COLUMNS}
            shapes = {name: (int(starts[-1]), *tail) for name, tail in tails.items()}

            def blocks(limit: int | None) -> Iterator[tuple[int, dict[str, Array]]]:
                rows = _parquet_rows(file, list(tails))
                for number, spans in itertools.groupby(row_spans(starts, limit), key=lambda span: span[0]):
                    first, count = starts[number], starts[number + 1] - starts[number]
                    row = {name: values.reshape(count, *tails[name]) for name, values in next(rows).items()}
                    for _, begin, end in spans:
                        yield number, {name: values[begin - first : end - first] for name, values in row.items()}

            yield StoredArrays((schema.metadata or {})[PARQUET_KEY].decode(), files, starts, shapes, blocks)


def _group(counts: Sequence[int], row_bytes: int) -> Sequence[int]:
    """The first of some files' numbers of rows that together reach the size of a row group, or all of them."""
    large = np.flatnonzero(np.cumsum(counts) * row_bytes >= GROUP_BYTES)
    return counts[: large[0] + 1] if len(large) else counts


def _kind(column: Array, pooled: bool) -> Any:
    import pyarrow as pa

    number = pa.from_numpy_dtype(column.dtype)
    row = number if column.ndim == 1 else pa.list_(number, column.shape[1])
    return row if pooled else pa.list_(row)


def _nested(rows: Array, counts: Sequence[int], pooled: bool) -> Any:
    """The rows of some files as one arrow array, without copying."""
    import pyarrow as pa

    values = pa.array(rows.reshape(-1))
    if rows.ndim == 2:
        values = pa.FixedSizeListArray.from_arrays(values, rows.shape[1])
    return values if pooled else pa.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), values)


def _row_shape(kind: Any, pooled: bool) -> tuple[int, ...]:
    """() where a row is a single number, else (numbers in a row,)."""
    row = kind if pooled else kind.value_type
    return (int(row.list_size),) if hasattr(row, "list_size") else ()


def _parquet_rows(file: Any, names: list[str]) -> Iterator[dict[str, Array]]:
    """The numbers of each row, flat, by column."""
    for batch in file.iter_batches(batch_size=READ_FILES, columns=names):
        for at in range(len(batch)):
            row = {name: batch.column(name)[at].values for name in names}
            while nested := [name for name, values in row.items() if hasattr(values.type, "value_type")]:
                row |= {name: row[name].flatten() for name in nested}
            # Copies: arrow's own numbers are read-only.
            yield {name: np.array(values.to_numpy(zero_copy_only=False)) for name, values in row.items()}


WRITERS: dict[str, Writer] = {".npz": NpzWriter(), ".safetensors": SafetensorsWriter(), ".parquet": ParquetWriter()}


def writer_of(path: Path) -> Writer:
    """The format that a file's ending names; UsageError where it is none, or needs a package that is missing."""
    if path.suffix not in WRITERS:
        raise UsageError(f"{quoted(path)}: expected an ending of {', '.join(WRITERS)}, or none, for a folder of parts.")
    if path.suffix == ".parquet":
        require_pyarrow()
    return WRITERS[path.suffix]


def require_pyarrow() -> None:
    """UsageError where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError('.parquet files need pyarrow; install it with `pip install "bridle[parquet]"`.') from error
