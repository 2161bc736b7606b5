"""Codes and features on disk, and the readers of them.

    codes      (rows, M)     unsigned integers, or features (rows, D) float32
    times      (rows,)       seconds at which each token begins; absent where the first axis is not time
    positions  (rows, rank)  place of each token in the grid
    starts     (N + 1,)      file n has the rows starts[n] to starts[n + 1]; positions and starts are absent when pooled
    files      (N,)          names of the files
    header                   JSON: version, model, geometry, codebook sizes, rates

`.npz` is what numpy reads (`np.load(path)["codes"]`), uncompressed; in `.safetensors`, `files` and `header` are
metadata; for `.parquet` see `parquet`. All are written and read block by block, and nothing in them is ever run. A
folder of such files is read as one, see `corpus`.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bridle.errors import DataError, UsageError, quoted
from bridle.files import sha256_of
from bridle.infer.files import FileCodes, FileFeatures
from bridle.infer.parquet import ParquetArrays, require_pyarrow
from bridle.infer.parts_folder import INDEX, read_index
from bridle.infer.writers import FORMAT, SUFFIXES

DAMAGE = (
    zipfile.BadZipFile,
    ValueError,
    KeyError,
    EOFError,
    IndexError,
    TypeError,
    AttributeError,
    NotImplementedError,
    OSError,  # a place in the archive that cannot be
    RecursionError,
    MemoryError,
    OverflowError,  # a number that no array holds
    TokenError,  # of numpy, in the header of an array
)

Array = NDArray[Any]
Named = tuple[str, dict[str, Array]]  # a file, and its columns


class StoredFile:
    """One file of codes or features: `header` says what it holds, `files` of which files."""

    def __init__(self, path: Path, *, kind: str) -> None:
        self.path, self.kind = path, kind
        if path.suffix not in SUFFIXES:
            raise UsageError(f"{quoted(path)}: expected a folder, or a file that ends in {' or '.join(SUFFIXES)}.")
        if not path.is_file():
            raise UsageError(f"{quoted(path)} does not exist; write it with `bridle tokenize` or `bridle embed`.")
        if path.suffix == ".parquet":
            require_pyarrow()
        with self._explained(), self._opened() as arrays:
            self.header: dict[str, Any] = json.loads(arrays.header)
            require_kind(self.header, path, kind)
            self.files: list[str] = arrays.files
            self.pooled = self.header.get("pool") is not None
            self.starts: NDArray[np.int64] = np.arange(len(self.files) + 1) if self.pooled else arrays.whole("starts")
            self.columns = [name for name in (kind, "times", "positions") if name in arrays.shapes]
            self._check(arrays.shapes)

    def rows(self) -> Iterator[Named]:
        """Name and columns of each file, read as they are asked for."""
        with self._explained(), self._opened() as arrays:
            streams = {name: arrays.stream(name) for name in self.columns}
            for name, count in zip(self.files, np.diff(self.starts).tolist(), strict=True):
                yield name, {column: read(count) for column, read in streams.items()}

    @contextmanager
    def _opened(self) -> Iterator[NpzArrays | SafeArrays | ParquetArrays]:
        with ExitStack() as stack:
            if self.path.suffix == ".parquet":
                yield ParquetArrays(self.path)
            elif self.path.suffix == ".npz":
                yield NpzArrays(stack.enter_context(zipfile.ZipFile(self.path)), stack)
            else:
                from safetensors import safe_open

                yield SafeArrays(stack.enter_context(safe_open(self.path, framework="numpy")))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Damage of any kind as one line."""
        from safetensors import SafetensorError

        try:
            yield
        except (*DAMAGE, SafetensorError) as error:
            raise DataError(
                f"{quoted(self.path)} is damaged, cut short, or not written by bridle ({type(error).__name__}: "
                f"{quoted(error)}); write it again with `bridle {'tokenize' if self.kind == 'codes' else 'embed'}`."
            ) from error

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if self.starts.shape != (len(self.files) + 1,) or self.starts[0] != 0 or (np.diff(self.starts) < 0).any():
            raise ValueError("starts do not fit the files")
        if len(shapes[self.kind]) != 2 or any(shapes[name][0] != self.starts[-1] for name in self.columns):
            raise ValueError("the arrays do not have the same number of rows")
        if not self.pooled and "positions" not in self.columns:
            raise ValueError("it does not say where its tokens are")


class Stored:
    """What a file or a folder of parts holds: `header` says what it is, `files` of which files."""

    def __init__(self, path: str | Path, *, kind: str) -> None:
        self.path, self.kind = Path(path), kind
        if self.path.is_dir():
            index = read_index(self.path)
            self.header: dict[str, Any] = index.header
            require_kind(self.header, self.path, kind)
            self.parts, self.hashes = index.parts, index.hashes
            self._count: int | None = index.files
        else:
            self.header = StoredFile(self.path, kind=kind).header
            self.parts, self.hashes, self._count = [self.path], {}, None
        self.pooled = self.header.get("pool") is not None

    def __len__(self) -> int:
        return len(self.files) if self._count is None else self._count

    @cached_property
    def files(self) -> list[str]:
        """Names of all files, in order."""
        return [name for part in self._opened() for name in part.files]

    def rows(self) -> Iterator[Named]:
        """Name and columns of each file, read as they are asked for."""
        for part in self._opened():
            self._check_hash(part.path)
            yield from part.rows()

    def _check_hash(self, path: Path) -> None:
        """A part is checked when its rows are read for the first time; a flipped bit in a number has no other sign."""
        wanted = self.hashes.pop(path, None)
        if wanted is not None and sha256_of(path) != wanted:
            raise DataError(
                f"{quoted(path)} is damaged: its SHA-256 is not the one in {quoted(self.path / INDEX)}; copy it again, "
                "or write the folder again."
            )

    def _opened(self) -> Iterator[StoredFile]:
        for path in self.parts:
            part = StoredFile(path, kind=self.kind)
            if part.header != self.header:
                raise DataError(
                    f"{quoted(path)} was made by another job than {quoted(self.path)} says; write it again."
                )
            yield part


def require_kind(header: Mapping[str, Any], path: Path, kind: str) -> None:
    """Is this what was asked for, in a format that is known?"""
    if header["format"] > FORMAT:
        raise DataError(
            f"{quoted(path)} has format {quoted(header['format'])}, this bridle reads up to {FORMAT}; "
            "use a newer bridle."
        )
    if header["kind"] != kind:
        raise UsageError(
            f"{quoted(path)} holds {quoted(header['kind'])}, not {kind}; "
            f"read it with bridle.read_{'features' if kind == 'codes' else 'codes'}."
        )


class CodesFile(Stored):
    """Iterates over (name, FileCodes)."""

    def __iter__(self) -> Iterator[tuple[str, FileCodes]]:
        for name, found in self.rows():
            yield name, FileCodes(found["codes"], found.get("times"), found["positions"], name)


class FeaturesFile(Stored):
    """Iterates over (name, FileFeatures)."""

    def __iter__(self) -> Iterator[tuple[str, FileFeatures]]:
        for name, found in self.rows():
            z = found["features"][0] if self.pooled else found["features"]
            yield name, FileFeatures(z, found.get("times"), found.get("positions"), name)


def read_codes(path: str | Path) -> CodesFile:
    """The file or folder that `bridle tokenize` wrote: `for name, found in bridle.read_codes(path): found.codes`."""
    return CodesFile(path, kind="codes")


def read_features(path: str | Path) -> FeaturesFile:
    """The file or folder that `bridle embed` wrote: `for name, found in bridle.read_features(path): found.z`."""
    return FeaturesFile(path, kind="features")


class NpzArrays:
    """Arrays of an .npz without pickles, the large ones row by row."""

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
        self.header = str(self.whole("header"))
        self.files = [str(name) for name in self.whole("files")]

    def whole(self, name: str) -> Array:
        with self.archive.open(f"{name}.npy") as stream:
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        return array

    def stream(self, name: str) -> Callable[[int], Array]:
        """read(count) gives the next rows."""
        member = self.stack.enter_context(self.archive.open(f"{name}.npy"))
        shape, dtype = _npy_header(member)
        row = math.prod(shape[1:])

        def read(count: int) -> Array:
            content = member.read(count * row * dtype.itemsize)
            if len(content) != count * row * dtype.itemsize:
                raise EOFError("an array ends early")
            return np.frombuffer(bytearray(content), dtype=dtype).reshape(count, *shape[1:])

        return read


class SafeArrays:
    """Arrays of a .safetensors file, the large ones row by row."""

    def __init__(self, file: Any) -> None:
        self.file = file
        metadata = file.metadata() or {}
        self.header = str(metadata["header"])
        self.files = [str(name) for name in json.loads(metadata["files"])]
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def whole(self, name: str) -> Array:
        array: Array = self.file.get_tensor(name)
        return array

    def stream(self, name: str) -> Callable[[int], Array]:
        """read(count) gives the next rows."""
        content, at = self.file.get_slice(name), 0

        def read(count: int) -> Array:
            nonlocal at
            rows: Array = content[at : at + count]
            at += count
            return rows

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
