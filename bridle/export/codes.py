"""Codes and features on disk, and the readers of them.

    codes      (rows, M)     unsigned integers, or features (rows, D) float32
    times      (rows,)       seconds at which each token begins; absent where the first axis is not time
    positions  (rows, rank)  place of each token in the grid
    starts     (N + 1,)      file n has the rows starts[n] to starts[n + 1]; positions and starts are absent when pooled
    files      (N,)          names of the files
    header                   JSON: version, model, geometry, codebook sizes, rates

`.npz` is what numpy reads (`np.load(path)["codes"]`), uncompressed; in `.safetensors`, `files` and `header` are
metadata. Both are written and read block by block, and nothing in them is ever run.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import DataError, UsageError, quoted
from bridle.export.files import FileCodes, FileFeatures
from bridle.export.parts import Parts

FORMAT = 1
SUFFIXES = (".npz", ".safetensors")
SAFE_NAMES = {"u1": "U8", "u2": "U16", "u4": "U32", "i4": "I32", "i8": "I64", "f4": "F32", "f8": "F64"}
DAMAGE = (
    zipfile.BadZipFile,
    ValueError,
    KeyError,
    EOFError,
    IndexError,
    TypeError,
    AttributeError,
    NotImplementedError,
)

Array = NDArray[Any]


class Block(NamedTuple):
    """An array to be written, as bytes that come one after the other."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    content: Iterable[bytes]


def require_format(out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {quoted(out)}: expected a name that ends in {' or '.join(SUFFIXES)}.")


def write_result(out: Path, parts: Parts, header: Mapping[str, Any], *, pooled: bool) -> None:
    """Everything the parts hold as one file, which is there whole or not at all."""
    names = [entry.name for entry in parts.entries if entry.reason is None]
    blocks = [Block(c.name, np.dtype(c.dtype), c.shape(parts.rows), parts.blocks(c)) for c in parts.columns]
    if not pooled:
        starts = np.cumsum([0, *(entry.rows for entry in parts.entries if entry.reason is None)], dtype="<i8")
        blocks.append(Block("starts", starts.dtype, starts.shape, [starts.tobytes()]))
    temporary = out.with_name(f".{out.name}.tmp")
    write = _write_npz if out.suffix == ".npz" else _write_safetensors
    try:
        with temporary.open("wb") as file:
            write(file, blocks, names, json.dumps(header))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _write_npz(file: IO[bytes], blocks: list[Block], names: list[str], header: str) -> None:
    text = Block("header", np.dtype(f"<U{len(header)}"), (), [header.encode("utf-32-le")])
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for block in [*blocks, _names_block(names), text]:
            # ZipInfo's own date is 1980: the same content gives the same bytes.
            with archive.open(zipfile.ZipInfo(f"{block.name}.npy"), "w", force_zip64=True) as member:
                descr = np.lib.format.dtype_to_descr(block.dtype)
                described = {"descr": descr, "fortran_order": False, "shape": block.shape}
                np.lib.format.write_array_header_1_0(member, described)
                for content in block.content:
                    member.write(content)


def _names_block(names: list[str]) -> Block:
    """File names as numpy stores text, made one at a time: the longest one sets the size of all."""
    longest = max(map(len, names), default=1)
    content = (name.encode("utf-32-le").ljust(4 * longest, b"\0") for name in names)
    return Block("files", np.dtype(f"<U{longest}"), (len(names),), content)


def _write_safetensors(file: IO[bytes], blocks: list[Block], names: list[str], header: str) -> None:
    described: dict[str, Any] = {"__metadata__": {"files": json.dumps(names), "header": header}}
    at = 0
    # The format wants offsets without gaps and readers want aligned numbers: wide types first.
    ordered = sorted(blocks, key=lambda block: -block.dtype.itemsize)
    for block in ordered:
        end = at + math.prod(block.shape) * block.dtype.itemsize
        kind = SAFE_NAMES[block.dtype.str[1:]]
        described[block.name] = {"dtype": kind, "shape": list(block.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described).encode()
    text = text.ljust(8 * math.ceil(len(text) / 8))
    file.write(len(text).to_bytes(8, "little") + text)
    for block in ordered:
        for content in block.content:
            file.write(content)


class Stored:
    """A file of codes or features: `header` says what it holds, `files` of which files."""

    def __init__(self, path: str | Path, *, kind: str) -> None:
        self.path = Path(path)
        if self.path.suffix not in SUFFIXES:
            raise UsageError(f"{quoted(path)}: expected a file that ends in {' or '.join(SUFFIXES)}.")
        if not self.path.is_file():
            raise UsageError(f"{quoted(path)} does not exist; write it with `bridle tokenize` or `bridle embed`.")
        self.kind = kind
        with self._explained(), self._opened() as arrays:
            self.header: dict[str, Any] = json.loads(arrays.header)
            self._require_kind()
            self.files: list[str] = arrays.files
            self.pooled = self.header.get("pool") is not None
            self.starts: NDArray[np.int64] = np.arange(len(self.files) + 1) if self.pooled else arrays.whole("starts")
            self.columns = [name for name in (kind, "times", "positions") if name in arrays.shapes]
            self._check(arrays.shapes)

    def __len__(self) -> int:
        return len(self.files)

    def rows(self) -> Iterator[tuple[str, dict[str, Array]]]:
        """Name and columns of each file, read as they are asked for."""
        with self._explained(), self._opened() as arrays:
            streams = {name: arrays.stream(name) for name in self.columns}
            for name, count in zip(self.files, np.diff(self.starts).tolist(), strict=True):
                yield name, {column: read(count) for column, read in streams.items()}

    @contextmanager
    def _opened(self) -> Iterator[NpzArrays | SafeArrays]:
        with ExitStack() as stack:
            if self.path.suffix == ".npz":
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

    def _require_kind(self) -> None:
        if self.header["format"] > FORMAT:
            raise DataError(
                f"{quoted(self.path)} has format {quoted(self.header['format'])}, this bridle reads up to {FORMAT}; "
                "use a newer bridle."
            )
        if self.header["kind"] != self.kind:
            raise UsageError(
                f"{quoted(self.path)} holds {quoted(self.header['kind'])}, not {self.kind}; "
                f"read it with bridle.read_{'features' if self.kind == 'codes' else 'codes'}."
            )

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if self.starts.shape != (len(self.files) + 1,) or self.starts[0] != 0 or (np.diff(self.starts) < 0).any():
            raise ValueError("starts do not fit the files")
        if len(shapes[self.kind]) != 2 or any(shapes[name][0] != self.starts[-1] for name in self.columns):
            raise ValueError("the arrays do not have the same number of rows")


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
    """What `bridle tokenize` wrote: `for name, found in bridle.read_codes(path): found.codes, found.times`."""
    return CodesFile(path, kind="codes")


def read_features(path: str | Path) -> FeaturesFile:
    """What `bridle embed` wrote: `for name, found in bridle.read_features(path): found.z`."""
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
