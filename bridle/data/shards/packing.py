"""Files and their labels as the bytes of a tar shard, the same bytes whenever and wherever they are written.

A sample is KEY.EXT. Its key is its path without the ending; dots and what is not printable become `_`, because a key
ends at its first dot; a key that is taken gets -2, -3, … Where that changes a name, KEY.json keeps it under "name".
One label is KEY.cls, its number; any number are {"labels": […]} in KEY.json; parts and folds are {"rows": […]} there.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from bridle.data.listing.columns import WHOLE
from bridle.data.listing.folders import printable
from bridle.data.listing.table import Listing
from bridle.data.shards.tar_member import open_regular
from bridle.errors import DataError, quoted
from bridle.files import stamp

LONGEST_KEY = 200  # characters
BLOCK = 1 << 20  # bytes copied at a time


class Group(NamedTuple):
    """A file, and what the rows say that speak of it."""

    path: Path
    name: str  # below the data set's root; of files outside only the last part
    rows: list[dict[str, Any]]  # label or labels, start, end, fold; as KEY.json has them

    def facts(self) -> list[Any]:
        """What the bytes of the sample depend on."""
        return [printable(self.path), printable(Path(self.name)), stamp(self.path), self.rows]


class Packed(NamedTuple):
    """What went into a shard."""

    samples: int
    renamed: int
    skipped: list[list[str]]  # path and reason


class SkippedError(Exception):
    """Why a file is left out."""


def rows_of(listing: Listing, rows: range, *, folds: Sequence[int] | None, root: Path) -> Iterator[Group]:
    """The files of some rows; rows that follow one another and name the same file belong together."""
    group: Group | None = None
    for at in rows:
        path = listing.paths[at]
        assert isinstance(path, Path)  # shards are not made of shards
        row = row_facts(listing, at, None if folds is None else folds[at])
        if group is not None and group.path == path:
            group.rows.append(row)
            continue
        if group is not None:
            yield group
        group = Group(path, name_below(path, listing, root), [row])
    if group is not None:
        yield group


def row_facts(listing: Listing, at: int, fold: int | None) -> dict[str, Any]:
    """What KEY.json may say of a row."""
    facts: dict[str, Any] = {}
    label = None if listing.labels is None else listing.labels[at]
    if label is not None:
        facts |= {"labels": list(label)} if isinstance(label, tuple) else {"label": label}
    start, end = WHOLE if listing.spans is None else listing.spans[at]
    if (start, end) != WHOLE:
        facts |= {"start": start} if end is None else {"start": start, "end": end}
    return facts if fold is None else {**facts, "fold": fold}


def name_below(path: Path, listing: Listing, root: Path) -> str:
    """The path below its list's folder, or below the data set's; where that is elsewhere, the name alone."""
    for above in (getattr(listing.paths, "root", root), root):
        if path.is_relative_to(above):
            return path.relative_to(above).as_posix()
    return path.name


def pack(groups: Iterable[Group], file: BinaryIO, *, extensions: Sequence[str]) -> Packed:
    """Write the files and their labels as a tar file; files that cannot be read are left out and named."""
    taken: set[str] = set()
    samples = renamed = 0
    skipped: list[list[str]] = []
    for group in groups:
        ending = Path(group.name).suffix
        key = free_key(group.name, taken)
        begin = file.tell()
        try:
            if ending.lower() not in extensions:
                raise SkippedError(f"its name does not end in {' '.join(extensions)}")
            add_file(file, f"{key}{ending}", group.path)
        except SkippedError as error:
            file.seek(begin)
            file.truncate()
            skipped += [[printable(group.path), str(error)]] * len(group.rows)
            continue
        taken.add(key)
        for kind, content in notes_of(group, renamed=f"{key}{ending}" != group.name):
            add_entry(file, f"{key}.{kind}", len(content))
            file.write(content)
            pad(file, len(content))
        samples, renamed = samples + len(group.rows), renamed + (f"{key}{ending}" != group.name)
    file.write(bytes(2 * tarfile.BLOCKSIZE))
    return Packed(samples, renamed, skipped)


def free_key(name: str, taken: set[str]) -> str:
    """The key of a file; no other sample of the shard has it."""
    parts = os.path.splitext(name)[0].split("/")
    key = "/".join("".join(c if c.isprintable() and c not in ".\\" else "_" for c in part) or "_" for part in parts)
    key = key[-LONGEST_KEY:].lstrip("/")
    if key not in taken:
        return key
    return next(f"{key}-{n}" for n in range(2, len(taken) + 3) if f"{key}-{n}" not in taken)


def notes_of(group: Group, *, renamed: bool) -> Iterator[tuple[str, bytes]]:
    """Endings and contents of the members beside a sample."""
    first = group.rows[0]
    if "label" in first and all(row.get("label") == first["label"] for row in group.rows):
        yield "cls", str(first["label"]).encode()
    facts: dict[str, Any] = {}
    if len(group.rows) > 1 or first.keys() - {"label", "labels"}:
        facts["rows"] = group.rows
    elif "labels" in first:
        facts["labels"] = first["labels"]
    if renamed:
        facts["name"] = printable(Path(group.name))
    if facts:
        yield "json", json.dumps(facts, ensure_ascii=False).encode()


def add_file(file: BinaryIO, name: str, path: Path) -> None:
    """Header and content of a file; SkippedError if it cannot be read to its end."""
    try:
        source = open_regular(path)
    except DataError as error:
        raise SkippedError(str(error).removeprefix(f"{quoted(path)} ").rstrip(".")) from error
    except OSError as error:
        raise SkippedError(error.strerror or str(error)) from error
    with source:
        size = os.fstat(source.fileno()).st_size
        add_entry(file, name, size)
        left = size
        while left:
            try:
                block = source.read(min(BLOCK, left))
            except OSError as error:
                raise SkippedError(error.strerror or str(error)) from error
            if not block:
                raise SkippedError(f"it ends after {size - left} of {size} bytes")
            file.write(block)
            left -= len(block)
    pad(file, size)


def add_entry(file: BinaryIO, name: str, size: int) -> None:
    """The header of a member, free of times and owners."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    file.write(entry.tobuf(tarfile.PAX_FORMAT))


def pad(file: BinaryIO, size: int) -> None:
    """Members begin at multiples of a block."""
    file.write(bytes(-size % tarfile.BLOCKSIZE))
