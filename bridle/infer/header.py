"""What is stored as JSON beside codes and features: the header of every file, and the index of a folder of parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridle.errors import DataError, UsageError, quoted
from bridle.infer.features import Pool

FORMAT = 1
Kind = Literal["codes", "features"]
Count = Annotated[int, Field(ge=0, le=sys.maxsize, strict=True)]


class StoredGeometry(BaseModel):
    """Geometry of the model's input."""

    channels: int
    input: tuple[int, ...]
    patch: tuple[int, ...]


class Header(BaseModel):
    """What a file of codes or features holds and which model made it.

    Settings of the front end (`audio`, `video`) are kept under the name of their section, see `front_end`.
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
    layer: int | None = None  # of features
    pool: Pool | None = None
    axis: int | None = None
    deviation: bool = False

    @property
    def pooled(self) -> bool:
        """Does a file have one row instead of one per token?"""
        return self.pool is not None

    @property
    def front_end(self) -> dict[str, object]:
        """Settings that turn files into frames, by the name of their config section."""
        return dict(self.model_extra or {})

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
    try:
        return record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, RecursionError) as error:
        reason = str(error).splitlines()[-1].strip() if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{quoted(path)} is damaged or not what bridle writes there ({quoted(reason)}); write the folder again."
        ) from error
