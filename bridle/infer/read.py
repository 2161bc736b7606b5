"""What is stored beside codes and features, and their readers: `bridle.read_codes(path)`, `bridle.read_features(path)`.

A folder of parts is read as one; a single file is a folder of one part. See `formats` for the arrays.
"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridle.errors import DataError, UsageError, quoted
from bridle.files import sha256_of
from bridle.infer.feature_spec import Pool
from bridle.infer.file_rows import FileCodes, FileFeatures
from bridle.infer.formats import COLUMNS, writer_of

FORMAT = 1
JOB, INDEX = "job", "index.json"  # of a folder of parts
Array = NDArray[Any]
Kind = Literal["codes", "features"]
Count = Annotated[int, Field(ge=0, le=sys.maxsize, strict=True)]
DAMAGE = (
    *(zipfile.BadZipFile, ValidationError, ValueError, KeyError, EOFError, IndexError, TypeError, AttributeError),
    *(NotImplementedError, RecursionError, MemoryError, OverflowError),
    OSError,  # an offset in the archive that cannot be
    TokenError,  # of numpy, in the header of an array
)


@contextmanager
def one_line_errors(path: Path, remedy: str) -> Iterator[None]:
    """Damage of any kind as a DataError of one line."""
    try:
        yield
    except DAMAGE as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(
            f"{quoted(path)} is damaged, cut short, or not written by bridle ({type(error).__name__}: "
            f"{quoted(reason)}); {remedy}."
        ) from error


class StoredGeometry(BaseModel):
    """Geometry of the model's input."""

    channels: int
    input: tuple[int, ...]
    patch: tuple[int, ...]


class Header(BaseModel):
    """What a file of codes or features holds and which model made it.

    Settings of the front end (`audio`, `video`) are kept under the name of their section.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: Count
    kind: Kind
    bridle: str = ""  # version that wrote it
    run: str = ""  # name of the run's config
    model: str = ""  # fingerprint of weights and settings
    geometry: StoredGeometry | None = None
    grid: tuple[int, ...] = ()
    frame_seconds: float | None = None
    tokens_per_second: float | None = None
    codebook_sizes: tuple[int, ...] = ()  # of codes
    bits_per_token: float | None = None
    bits_per_second: float | None = None
    checks: tuple[int, ...] = ()  # of a file of codes: CRC-32 of the first stage, of the first two, …, rows in order
    layer: int | Literal["all", "stem"] | None = None  # of features
    pool: Pool | None = None  # one row per file instead of one per token
    axis: int | None = None
    deviation: bool = False

    def to_json(self) -> str:
        """The fields that were set, in their order."""
        return json.dumps(self.model_dump(mode="json", exclude_unset=True))

    def require(self, path: Path, kind: str) -> Self:
        """This header; an error if it is of another kind, or of a format that this version does not know."""
        if self.format > FORMAT:
            raise DataError(
                f"{quoted(path)} has format {self.format}, this bridle reads up to {FORMAT}; use a newer bridle."
            )
        if self.kind != kind:
            raise UsageError(f"{quoted(path)} holds {self.kind!r}, not {kind}; read it with bridle.read_{self.kind}.")
        return self


class PartNote(BaseModel):
    """A part that counts: items `first` to before `end`, and the file that holds their rows."""

    first: Count
    end: Count
    file: str | None  # None where no item could be read
    bytes: Count
    sha256: str | None
    files: Count
    rows: Count


class PartsIndex(BaseModel):
    """index.json of a finished folder."""

    header: Header
    files: Count
    rows: Count
    failed: Count
    parts: list[PartNote]


Record = TypeVar("Record", bound=BaseModel)


def read_record(path: Path, record: type[Record]) -> Record:
    """A JSON file as the type that was written; DataError if it is something else."""
    with one_line_errors(path, "write the folder again"):
        return record.model_validate_json(path.read_bytes())


class PartFile:
    """One file of codes or features."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.writer = path, writer_of(path)
        self.remedy = f"write it again with `bridle {'tokenize' if kind == 'codes' else 'embed'}`"
        if not path.is_file():
            raise UsageError(f"{quoted(path)} does not exist; write it with `bridle tokenize` or `bridle embed`.")
        with one_line_errors(path, self.remedy), self.writer.open(path) as arrays:
            header = Header.model_validate_json(arrays.header).require(path, kind)
            self.checks = header.checks
            self.header = Header.model_validate(header.model_dump(exclude={"checks"}, exclude_unset=True))
            self.files, starts, shapes = arrays.files, arrays.starts, arrays.shapes
            if starts.shape != (len(self.files) + 1,) or starts[0] != 0 or (np.diff(starts) < 0).any():
                raise ValueError("starts do not fit the files")
            if len(shapes[kind]) != 2 or any(shapes[name][0] != starts[-1] for name in COLUMNS if name in shapes):
                raise ValueError("the arrays do not have the same number of rows")
            if self.header.pool is None and "positions" not in shapes:
                raise ValueError("the positions of its tokens are missing")

    def blocks(self, limit: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """Number of a file and columns of its next `limit` rows (None: all), read as they are asked for.

        DataError if codes are out of range, and after the last ones if they are not those that were written.
        """
        check, token, before = 0, 0, 0  # token: how many of file `before` were read
        with one_line_errors(self.path, self.remedy), self.writer.open(self.path) as arrays:
            for number, columns in arrays.blocks(limit):
                if self.header.kind == "codes":
                    codes, token = columns["codes"], token if number == before else 0
                    where = f"{quoted(self.path)}: {quoted(self.files[number])}"
                    require_codes(codes, self.header.codebook_sizes, where, first=token)
                    token, before = token + len(codes), number
                if self.checks:
                    check = zlib.crc32(np.ascontiguousarray(columns["codes"]).data, check)
                yield number, columns
        if self.checks and self.checks[len(self.header.codebook_sizes) - 1 :][:1] != (check,):
            raise DataError(
                f"{quoted(self.path)}: a stage or some codes are missing or were changed; {self.remedy}, or take "
                "`checks` out of its header if you changed them on purpose."
            )


def require_codes(codes: Array, sizes: tuple[int, ...], where: str, *, first: int) -> None:
    """DataError unless codes (T, M) of the tokens from `first` are codes of codebooks of these sizes."""
    if codes.dtype.kind not in "ui" or codes.shape[1:] != (len(sizes),):
        raise DataError(
            f"{where}: expected whole numbers of {len(sizes)} stages, got {codes.dtype} {list(codes.shape)}; tokenize "
            "the file again."
        )
    wrong = (codes < 0) | (codes >= np.array(sizes, dtype=np.int64))
    if wrong.any():
        token, stage = (int(n) for n in np.argwhere(wrong)[0])
        raise DataError(
            f"{where}: code {codes[token, stage]} of stage {stage + 1} at token {first + token} is not below its "
            f"codebook's size, {sizes[stage]}; tokenize the file again."
        )


class Stored:
    """Codes or features on disk: `header` says what they are, `files` of which files."""

    kind: Kind

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.parts, self.hashes = [self.path], dict[Path, str | None]()
        self._count: int | None = None
        if not self.path.is_dir():
            self.header = PartFile(self.path, self.kind).header
            return
        index = read_index(self.path)
        self.header = index.header.require(self.path, self.kind)
        self._count = index.files
        self.hashes = {self.path / Path(note.file).name: note.sha256 for note in index.parts if note.file is not None}
        self.parts = list(self.hashes)

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
        for part in self._intact():
            yield from ((part.files[number], columns) for number, columns in part.blocks())

    def blocks(self, limit: int | None) -> Iterator[tuple[int, dict[str, Array]]]:
        """Number of a file and columns of its next `limit` rows; a file without rows has one block."""
        first = 0
        for part in self._intact():
            yield from ((first + number, columns) for number, columns in part.blocks(limit))
            first += len(part.files)

    def _intact(self) -> Iterator[PartFile]:
        """The parts; the SHA-256 of each is compared the first time."""
        for part in self._opened():
            wanted = self.hashes.pop(part.path, None)
            if wanted is not None and sha256_of(part.path) != wanted:
                raise DataError(
                    f"{quoted(part.path)} is damaged: its SHA-256 is not the one in {quoted(self.path / INDEX)}; copy "
                    "it again, or write the folder again."
                )
            yield part

    def _opened(self) -> Iterator[PartFile]:
        for path in self.parts:
            part = PartFile(path, self.kind)
            if part.header != self.header:
                raise DataError(f"{quoted(path)} was made by another job than {quoted(self.path)}; write it again.")
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
            z = found["features"] if self.header.pool is None else found["features"][0]
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
        what = "is not finished; run the same command again" if unfinished else "holds no codes or features"
        raise UsageError(f"{quoted(folder)} {what}.")
    index = read_record(folder / INDEX, PartsIndex)
    for note in index.parts:
        path = folder / Path(note.file or "").name
        size = path.stat().st_size if path.is_file() else None
        if note.file is not None and size != note.bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {note.bytes}"
            raise DataError(f"{quoted(path)} {state}; copy it again, or write the folder again.")
    return index
