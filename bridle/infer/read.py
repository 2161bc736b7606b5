"""Readers of codes and features: `bridle.read_codes(path)` and `bridle.read_features(path)`.

A folder of parts is read as one; a single file is a folder of one part. See `formats` for what is stored.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from bridle.errors import DataError, UsageError, quoted
from bridle.files import sha256_of
from bridle.infer.files import FileCodes, FileFeatures
from bridle.infer.formats import StoredArrays, writer_of
from bridle.infer.header import Header, Kind, PartsIndex, read_record
from bridle.infer.parts_folder import INDEX, JOB

DAMAGE = (
    zipfile.BadZipFile,
    ValidationError,
    ValueError,
    KeyError,
    EOFError,
    IndexError,
    TypeError,
    AttributeError,
    NotImplementedError,
    OSError,  # an offset in the archive that cannot be
    RecursionError,
    MemoryError,
    OverflowError,  # a number that no array holds
    TokenError,  # of numpy, in the header of an array
)

Array = NDArray[Any]


class PartFile:
    """One file of codes or features."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.kind, self.writer = path, kind, writer_of(path)
        if not path.is_file():
            raise UsageError(f"{quoted(path)} does not exist; write it with `bridle tokenize` or `bridle embed`.")
        with self._one_line_errors(), self.writer.open(path) as arrays:
            self.header = Header.model_validate_json(arrays.header).require(path, kind)
            self.files: list[str] = arrays.files
            pooled = self.header.pooled
            self.starts: NDArray[np.int64] = np.arange(len(self.files) + 1) if pooled else arrays.starts()
            self.columns = [name for name in (kind, "times", "positions") if name in arrays.shapes]
            self._check(arrays)

    def rows(self) -> Iterator[tuple[str, dict[str, Array]]]:
        """Name and columns of each file, read as they are asked for."""
        with self._one_line_errors(), self.writer.open(self.path) as arrays:
            readers = {name: arrays.column(name) for name in self.columns}
            for name, count in zip(self.files, np.diff(self.starts).tolist(), strict=True):
                yield name, {column: read(count) for column, read in readers.items()}

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Damage of any kind as one line."""
        try:
            yield
        except DAMAGE as error:
            raise DataError(
                f"{quoted(self.path)} is damaged, cut short, or not written by bridle ({type(error).__name__}: "
                f"{quoted(error)}); write it again with `bridle {'tokenize' if self.kind == 'codes' else 'embed'}`."
            ) from error

    def _check(self, arrays: StoredArrays) -> None:
        shapes = arrays.shapes
        if self.starts.shape != (len(self.files) + 1,) or self.starts[0] != 0 or (np.diff(self.starts) < 0).any():
            raise ValueError("starts do not fit the files")
        if len(shapes[self.kind]) != 2 or any(shapes[name][0] != self.starts[-1] for name in self.columns):
            raise ValueError("the arrays do not have the same number of rows")
        if not self.header.pooled and "positions" not in self.columns:
            raise ValueError("the positions of its tokens are missing")


class Stored:
    """Codes or features on disk: `header` says what they are, `files` of which files."""

    kind: Kind

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.parts, self.hashes = [self.path], dict[Path, str]()
        self._count: int | None = None
        if not self.path.is_dir():
            self.header = PartFile(self.path, self.kind).header
            return
        index = read_index(self.path)
        self.header = index.header.require(self.path, self.kind)
        self._count = index.files
        files = {self.path / Path(note.file).name: note for note in index.parts if note.file is not None}
        self.parts = list(files)
        self.hashes = {file: note.sha256 for file, note in files.items() if note.sha256 is not None}

    def __len__(self) -> int:
        return len(self.files) if self._count is None else self._count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {len(self):,} files, model {self.header.run!r})"

    @cached_property
    def files(self) -> list[str]:
        """Names of all files, in order."""
        return [name for part in self._opened() for name in part.files]

    def rows(self) -> Iterator[tuple[str, dict[str, Array]]]:
        """Name and columns of each file, read as they are asked for."""
        for part in self._opened():
            self._check_hash(part.path)
            yield from part.rows()

    def _check_hash(self, path: Path) -> None:
        """Compare a part's SHA-256 when its rows are read for the first time."""
        wanted = self.hashes.pop(path, None)
        if wanted is not None and sha256_of(path) != wanted:
            raise DataError(
                f"{quoted(path)} is damaged: its SHA-256 is not the one in {quoted(self.path / INDEX)}; copy it again, "
                "or write the folder again."
            )

    def _opened(self) -> Iterator[PartFile]:
        for path in self.parts:
            part = PartFile(path, self.kind)
            if part.header != self.header:
                raise DataError(
                    f"{quoted(path)} was made by another job than {quoted(self.path)} says; write it again."
                )
            yield part


class CodesFile(Stored):
    """Iterates over (name, FileCodes)."""

    kind = "codes"

    def __iter__(self) -> Iterator[tuple[str, FileCodes]]:
        for name, found in self.rows():
            yield name, FileCodes(found["codes"], found.get("times"), found["positions"], name)


class FeaturesFile(Stored):
    """Iterates over (name, FileFeatures)."""

    kind = "features"

    def __iter__(self) -> Iterator[tuple[str, FileFeatures]]:
        for name, found in self.rows():
            z = found["features"][0] if self.header.pooled else found["features"]
            yield name, FileFeatures(z, found.get("times"), found.get("positions"), name)


def read_codes(path: str | Path) -> CodesFile:
    """The file or folder that `bridle tokenize` wrote: `for name, found in bridle.read_codes(path): found.codes`."""
    return CodesFile(path)


def read_features(path: str | Path) -> FeaturesFile:
    """The file or folder that `bridle embed` wrote: `for name, found in bridle.read_features(path): found.z`."""
    return FeaturesFile(path)


def read_index(folder: Path) -> PartsIndex:
    """The index of a finished folder, whose parts have the sizes that it says."""
    if not (folder / INDEX).exists():
        unfinished = (folder / JOB / "job.json").exists()
        what = (
            "is not finished; run the same command again"
            if unfinished
            else "holds no codes or features; give the folder that --out named"
        )
        raise UsageError(f"{quoted(folder)} {what}.")
    index = read_record(folder / INDEX, PartsIndex)
    for note in index.parts:
        if note.file is None:
            continue
        path = folder / Path(note.file).name
        size = path.stat().st_size if path.is_file() else None
        if size != note.bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {note.bytes}"
            raise DataError(f"{quoted(path)} {state}; copy it again, or write the folder again.")
    return index
