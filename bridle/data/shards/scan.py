"""What one tar shard holds, by its headers and the labels among its members; see `reader` for the layout."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.manifest import fold_of, span_of
from bridle.errors import DataError, quoted

Label = int | str

ARROW = ".arrow"
SHARDS = {".tar": "a tar", ARROW: "an Arrow"}  # files that hold samples, by ending

LARGEST_LABEL = 65_536  # bytes; a label file that is longer is something else
LARGEST_ROWS = 2**24  # bytes of a JSON member that is read
LARGEST_MEMBER = 2**48  # bytes; what claims more is damaged
DAMAGE = (tarfile.TarError, ValueError, OverflowError, MemoryError)  # what tarfile says of impossible headers


class ShardRow(NamedTuple):
    """What is known of one sample."""

    labels: tuple[Label, ...] | None = None  # as written; None: unlabelled
    span: Span = WHOLE
    fold: int | None = None


class ShardSample(NamedTuple):
    """One sample and where its bytes lie."""

    name: str
    offset: int
    size: int
    row: ShardRow


class Contents(NamedTuple):
    """What the headers of one shard say."""

    samples: list[ShardSample]
    multilabel: bool = False  # does any sample have a list of labels
    notes: tuple[str, ...] = ()  # what was left aside
    damage: tuple[str, ...] = ()  # where samples are lost
    classes: tuple[str, ...] | None = None  # names of class numbers, where the shard has them


class Note(NamedTuple):
    """What the label member of a key says."""

    rows: tuple[ShardRow, ...]
    multilabel: bool = False


def scan_shard(shard: Path, *, extensions: Sequence[str], columns: Sequence[str] | None = None) -> Contents | DataError:
    """The samples of a shard in the order in which they lie there; a label that is none is returned as the error.

    `columns` of Arrow files are the input and the label, see `arrow_file`.
    """
    try:
        if shard.suffix.lower() == ARROW:
            from bridle.data.shards.arrow_file import scan_arrow

            return scan_arrow(shard, extensions=extensions, columns=columns)
        with tarfile.open(shard, "r:", errors="surrogateescape") as archive, shard.open("rb") as file:
            return Scan(shard, archive, file, extensions).run()
    except DataError as error:  # a worker that raises it would lose its form
        return error
    except DAMAGE as error:
        return Contents(
            [], damage=(f"{quoted(shard)} cannot be read as {SHARDS[shard.suffix.lower()]} file: {quoted(error)}.",)
        )
    except OSError as error:
        return Contents([], damage=(f"{quoted(shard)} cannot be read: {error.strerror or error}.",))


class Scan:
    """One walk through the headers of a shard. Only headers and labels are read."""

    def __init__(self, shard: Path, archive: tarfile.TarFile, file: BinaryIO, extensions: Sequence[str]) -> None:
        self.shard, self.archive, self.file = shard, archive, file
        self.wanted = tuple(extension.lower() for extension in extensions)
        self.damage: list[str] = []

    def run(self) -> Contents:
        members: list[tuple[str, str, int, int]] = []  # key, name, offset, size
        notes: dict[str, Note] = {}
        refused = others = 0
        while (member := self._following()) is not None:
            self.archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every header in memory
            path = PurePosixPath(member.name)
            if not member.isfile() or member.issparse() or path.is_absolute() or ".." in path.parts:
                refused += not member.isdir()
                continue
            stem, dot, extension = path.name.partition(".")
            key = member.name[: len(member.name) - len(dot + extension)]
            kind = (dot + extension).lower()
            if kind in self.wanted and stem:
                members.append((key, member.name, member.offset_data, member.size))
            elif kind in (".cls", ".json") and stem:
                note = self._note(member, json_text=kind == ".json")
                if note is not None:
                    notes[key] = merged(notes[key], note) if key in notes else note
            else:
                others += 1
        unknown, shard = Note((ShardRow(),)), quoted(self.shard)
        samples = [
            ShardSample(name, offset, size, row)
            for key, name, offset, size in members
            for row in notes.get(key, unknown).rows
        ]
        said = [f"{refused} member(s) of {shard} are links, devices or lead outside; left aside."] if refused else []
        said += [f"{others} member(s) of {shard} are neither samples nor labels; left aside."] if others else []
        multilabel = any(note.multilabel for note in notes.values())
        return Contents(samples, multilabel, tuple(said), tuple(self.damage))

    def _following(self) -> tarfile.TarInfo | None:
        """The next header, or None at the end; damage ends a shard too, and a note says what was not reached."""
        try:
            member = self.archive.next()
        except DAMAGE:
            member = None
        if member is not None and 0 <= member.size < LARGEST_MEMBER:  # a negative size would lead back, and in circles
            return member
        end = self.archive.offset
        size = self.file.seek(0, os.SEEK_END)
        at = max(0, min(end, size))
        self.file.seek(at)
        block = self.file.read(tarfile.BLOCKSIZE)
        if member is not None or end > size or block.strip(b"\0"):  # a sound shard ends with zeros, or just ends
            self.damage.append(f"{quoted(self.shard)} is damaged at byte {at} of {size}; samples after it are lost.")
        return None

    def _note(self, member: tarfile.TarInfo, *, json_text: bool) -> Note | None:
        """What KEY.cls or KEY.json says; None for a JSON without labels and rows."""
        place = quoted(self.shard / member.name)
        if member.size > (LARGEST_ROWS if json_text else LARGEST_LABEL):
            if json_text:
                return None  # something about the sample, too long to be read for each
            raise DataError(f"{place} holds {member.size} bytes; a label is a number or a name.")
        self.file.seek(member.offset_data)
        body = self.file.read(member.size)
        try:
            text = body.decode("utf-8")
            values = json.loads(text) if json_text else {"label": text.strip()}
            values.get("label")
        except (ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{place} cannot be read as a label: {quoted(error)}. Write it again as UTF-8 text."
            ) from error
        return read_note(values, place)


def read_note(values: dict[str, Any], place: str) -> Note | None:
    """Labels, spans and folds of a key, as written."""
    if isinstance(rows := values.get("rows"), list) and rows and all(isinstance(row, dict) for row in rows):
        read = tuple(ShardRow(labels_of(row, place), span_of(row, place), fold_of(row, place)) for row in rows)
        return Note(read, multilabel=any("labels" in row for row in rows))
    if values.get("label") is None and values.get("labels") is None:
        return None
    return Note((ShardRow(labels_of(values, place)),), multilabel=values.get("labels") is not None)


def labels_of(values: dict[str, Any], place: str) -> tuple[Label, ...] | None:
    many, one = values.get("labels"), values.get("label")
    if many is None:
        return None if one is None else (label_of(one, place),)
    if not isinstance(many, list):
        raise DataError(f"{place} holds the labels {quoted(many)}; expected a list of numbers or names.")
    return tuple(dict.fromkeys(label_of(label, place) for label in many))


def label_of(label: object, place: str) -> Label:
    if isinstance(label, str) and label:
        return int(label) if label.isascii() and label.isdigit() and len(label) < 19 else label
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    raise DataError(f"{place} holds the label {quoted(label)}; expected a whole number or a name.")


def merged(first: Note, second: Note) -> Note:
    """A label in KEY.cls and rows in KEY.json complete one another; of two labels the later one counts."""
    long, short = (first, second) if len(first.rows) > 1 or first.rows[0][1:] != (WHOLE, None) else (second, first)
    label = short.rows[0].labels
    rows = tuple(row if row.labels is not None else row._replace(labels=label) for row in long.rows)
    return Note(rows, first.multilabel or second.multilabel)
