"""File formats of codes and features: a `Writer` writes one part and opens what it wrote.

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

All are written and read block by block, and reading runs no stored code.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError, quoted
from bridle.infer.header import Header
from bridle.infer.staging import Column, StagedPart

Array = NDArray[Any]
ReadRows = Callable[[int], Array]  # number of rows -> the next rows of a column
PARQUET_KEY = b"bridle"  # of the header in the schema's metadata
GROUP_BYTES = 16 * 2**20  # of a Parquet row group; one long file may be more
GROUP_FILES = 1024
READ_FILES = 16  # Parquet rows decoded at a time
SAFETENSORS_TYPES = {"u1": "U8", "u2": "U16", "u4": "U32", "i4": "I32", "i8": "I64", "f4": "F32", "f8": "F64"}


class StoredArrays(Protocol):
    """The arrays of an open file; columns are read in order, a file's rows at a time."""

    header: str  # JSON
    files: list[str]
    shapes: dict[str, tuple[int, ...]]  # of the columns

    def starts(self) -> NDArray[np.int64]:
        """(N + 1,) first row of each file, then the number of rows."""
        ...

    def column(self, name: str) -> ReadRows:
        """A function that reads the next rows of a column."""
        ...


class Writer(Protocol):
    """One file format."""

    def require_installed(self) -> None:
        """Raise UsageError where a package is missing that this format needs."""
        ...

    def write(self, file: IO[bytes], part: StagedPart, header: Header) -> None:
        """Write all finished rows of a part, block by block."""
        ...

    def open(self, path: Path) -> AbstractContextManager[StoredArrays]:
        """Open a file that `write` wrote."""
        ...


def part_arrays(part: StagedPart, header: Header) -> dict[str, Array]:
    """The columns of a part, mapped from disk, and `starts` unless it is pooled."""
    arrays = {column.name: part.column(column) for column in part.columns}
    if not header.pooled:
        counts = np.fromiter((entry.rows for entry in part.readable()), dtype="<i8")
        arrays["starts"] = np.concatenate([np.zeros(1, "<i8"), np.cumsum(counts, dtype="<i8")])
    return arrays


class NpzWriter:
    """numpy's uncompressed archive of arrays."""

    def require_installed(self) -> None:
        """numpy is always there."""

    def write(self, file: IO[bytes], part: StagedPart, header: Header) -> None:
        names = np.array([entry.name for entry in part.readable()], dtype=np.str_)
        arrays = {**part_arrays(part, header), "files": names, "header": np.array(header.to_json())}
        np.savez(file, **arrays)  # type: ignore[arg-type]  # uncompressed, and the same bytes for the same content

    @contextmanager
    def open(self, path: Path) -> Iterator[NpzArrays]:
        with ExitStack() as stack:
            yield NpzArrays(stack.enter_context(zipfile.ZipFile(path)), stack)


class NpzArrays:
    """Arrays of an .npz without pickles, the columns row by row."""

    def __init__(self, archive: zipfile.ZipFile, stack: ExitStack) -> None:
        self.archive, self.stack = archive, stack
        self.shapes: dict[str, tuple[int, ...]] = {}
        for member in archive.namelist():
            if archive.getinfo(member).compress_type != zipfile.ZIP_STORED:  # a small file could swell without end
                raise ValueError(f"{member} is compressed, which bridle never writes")
            with archive.open(member) as stream:
                shape, dtype = _npy_header(stream)
                if stream.tell() + math.prod(shape) * dtype.itemsize != archive.getinfo(member).file_size:
                    raise ValueError(f"{member} has not the size its header says")
            self.shapes[member.removesuffix(".npy")] = shape
        self.header = str(self._whole("header"))
        self.files = [str(name) for name in self._whole("files")]

    def starts(self) -> NDArray[np.int64]:
        return self._whole("starts")

    def _whole(self, name: str) -> Array:
        with self.archive.open(f"{name}.npy") as stream:
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        return array

    def column(self, name: str) -> ReadRows:
        member = self.stack.enter_context(self.archive.open(f"{name}.npy"))
        shape, dtype = _npy_header(member)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize

        def read(count: int) -> Array:
            content = member.read(count * row_bytes)
            if len(content) != count * row_bytes:
                raise EOFError("an array ends early")
            return np.frombuffer(bytearray(content), dtype=dtype).reshape(count, *shape[1:])

        return read


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

    def require_installed(self) -> None:
        """safetensors is always there."""

    def write(self, file: IO[bytes], part: StagedPart, header: Header) -> None:
        names = json.dumps([entry.name for entry in part.readable()])
        described: dict[str, object] = {"__metadata__": {"files": names, "header": header.to_json()}}
        # The format wants offsets without gaps and readers want aligned numbers: wide types first.
        ordered = dict(sorted(part_arrays(part, header).items(), key=lambda named: -named[1].itemsize))
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
    def open(self, path: Path) -> Iterator[SafetensorsArrays]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                yield SafetensorsArrays(file)
        except SafetensorError as error:
            raise ValueError(str(error)) from error


class SafetensorsArrays:
    """Arrays of a .safetensors file, the columns row by row."""

    def __init__(self, file: Any) -> None:
        self.file = file
        metadata = file.metadata() or {}
        self.header = str(metadata["header"])
        self.files = [str(name) for name in json.loads(metadata["files"])]
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def starts(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.file.get_tensor("starts")
        return found

    def column(self, name: str) -> ReadRows:
        content, at = self.file.get_slice(name), 0

        def read(count: int) -> Array:
            nonlocal at
            rows: Array = content[at : at + count]
            at += count
            return rows

        return read


class ParquetWriter:
    """Apache Parquet, by pyarrow."""

    def require_installed(self) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise UsageError('.parquet files need pyarrow; install it with `pip install "bridle[parquet]"`.') from error

    def write(self, file: IO[bytes], part: StagedPart, header: Header) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pooled = header.pooled
        fields = [pa.field("file", pa.string(), nullable=False)]
        fields += [] if pooled else [pa.field("tokens", pa.int64(), nullable=False)]
        fields += [pa.field(column.name, _kind(column, pooled), nullable=False) for column in part.columns]
        schema = pa.schema(fields, metadata={PARQUET_KEY: header.to_json().encode()})
        with pq.ParquetWriter(file, schema) as writer:
            columns = [part.column(column) for column in part.columns]
            for names, counts, first in _groups(part):
                arrays = [pa.array(names, pa.string())]
                arrays += [] if pooled else [pa.array(counts, pa.int64())]
                arrays += [_nested(column[first : first + sum(counts)], counts, pooled) for column in columns]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    @contextmanager
    def open(self, path: Path) -> Iterator[ParquetArrays]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            yield ParquetArrays(file)


def _groups(part: StagedPart) -> Iterator[tuple[list[str], list[int], int]]:
    """Names, numbers of rows and the first row of some files at a time."""
    row_bytes = sum(column.row_bytes for column in part.columns)
    names, counts, first = list[str](), list[int](), 0
    for entry in part.readable():
        names.append(entry.name)
        counts.append(entry.rows)
        if len(names) == GROUP_FILES or sum(counts) * row_bytes >= GROUP_BYTES:
            yield names, counts, first
            names, counts, first = [], [], first + sum(counts)
    if names:
        yield names, counts, first


def _kind(column: Column, pooled: bool) -> Any:
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(column.dtype))
    row = number if column.width is None else pa.list_(number, column.width)
    return row if pooled else pa.list_(row)


def _nested(rows: Array, counts: list[int], pooled: bool) -> Any:
    """The rows of some files as one arrow array, without copying."""
    import pyarrow as pa

    values = pa.array(rows.reshape(-1))
    if rows.ndim == 2:
        values = pa.FixedSizeListArray.from_arrays(values, rows.shape[1])
    return values if pooled else pa.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), values)


class ParquetArrays:
    """The arrays of a Parquet file as those of other formats are read, the columns row by row."""

    def __init__(self, file: Any) -> None:
        self.file = file
        schema = file.schema_arrow
        self.header = (schema.metadata or {})[PARQUET_KEY].decode()
        self.files = [str(name) for name in file.read(columns=["file"]).column(0).to_pylist()]
        self.pooled = "tokens" not in schema.names
        rows = int(self.starts()[-1])
        self.widths = {name: self._width(schema.field(name).type) for name in schema.names[1:] if name != "tokens"}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: (rows,) if width is None else (rows, width) for name, width in self.widths.items()
        }

    def starts(self) -> NDArray[np.int64]:
        if self.pooled:
            return np.arange(len(self.files) + 1)
        counts = self.file.read(columns=["tokens"]).column(0).to_numpy()
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def column(self, name: str) -> ReadRows:
        values, width = self._values(name), self.widths[name]

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

    def _width(self, kind: Any) -> int | None:
        """Numbers in a row; None where it is a single one."""
        row = kind if self.pooled else kind.value_type
        return int(row.list_size) if hasattr(row, "list_size") else None


WRITERS: dict[str, Writer] = {".npz": NpzWriter(), ".safetensors": SafetensorsWriter(), ".parquet": ParquetWriter()}


def writer_of(path: Path) -> Writer:
    """The format that a file's ending names; UsageError where it is none, or needs a package that is missing."""
    if path.suffix not in WRITERS:
        raise UsageError(
            f"{quoted(path)}: expected a name that ends in {', '.join(WRITERS)}, or one without an ending, which is a "
            "folder of parts."
        )
    WRITERS[path.suffix].require_installed()
    return WRITERS[path.suffix]
