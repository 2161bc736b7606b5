"""Every item behind the words of a command: files, folders, patterns, manifests, tar shards, or paths on stdin.

An item is a file, a part of a file (a manifest's `start` and `end`), or a member of a tar file. Its name in results:

    photos/cat.jpg                  a file
    talks/monday.wav#t=60,75.5      from second 60 to 75.5 of it; `#t=60` to its end
    shards/train-0000.tar/cat.jpg   a member, as if the shard were a folder
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from bridle.data.listing.address import is_pattern, local_path, shard_paths
from bridle.data.listing.columns import WHOLE, Lazy, PathList, Span, Spans
from bridle.data.listing.folders import files_below, printable
from bridle.data.listing.manifest import MANIFESTS, manifest_rows, path_of, span_of
from bridle.data.shards.scan import SHARDS, Contents, scan_shard
from bridle.data.shards.tar_member import Location, TarMember
from bridle.data.sources import Reader, Window
from bridle.errors import DataError, UsageError, quoted
from bridle.files import stamp


class Item(NamedTuple):
    """Something that has rows of its own in the result."""

    location: Location
    span: Span = WHOLE

    @property
    def name(self) -> str:
        """How it is called in results."""
        start, end = self.span
        part = "" if self.span == WHOLE else f"#t={start:g}" + ("" if end is None else f",{end:g}")
        return printable(self.path) + part

    @property
    def path(self) -> Path:
        """Its file, or the path of a member as if its shard were a folder."""
        return self.location.path if isinstance(self.location, TarMember) else self.location

    def stamp(self) -> tuple[int, int]:
        """Size and change time of its file, which show whether it is still the same."""
        return stamp(self.location.shard if isinstance(self.location, TarMember) else self.location)

    def windows(self, reader: Reader) -> Iterator[Window]:
        """What the reader makes of it; DataError or OSError if it cannot be read."""
        if isinstance(self.location, Path) and self.location.suffix.lower() in SHARDS:
            damage = " ".join(scanned(self.location, reader).damage)
            raise DataError(damage or f"{quoted(self.location)} was damaged before.")
        if self.span == WHOLE:
            return reader.windows(self.location)
        if not reader.timed:
            raise UsageError(f"{quoted(self.name)} is a part in seconds, but this model's files have no time axis.")
        return reader.windows(self.location, self.span)


class Items(Lazy[Item]):
    """Items in flat arrays, 24 bytes each and the name: a million Path objects would be copied into workers."""

    NAMES = (*PathList.NAMES, *Spans.NAMES)

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__()
        self.names = PathList(Path(), columns=self.columns)
        self.spans = Spans(self.columns)
        for item in items:
            self.append(item)

    def append(self, item: Item) -> None:
        location, span = item
        # Of a member: its shard, name, offset and size, with NUL between them.
        self.names.append("\0".join(map(str, location)) if isinstance(location, TarMember) else os.fspath(location))
        self.spans.append(span)

    def row(self, at: int) -> Item:
        path, *member = os.fspath(self.names[at]).split("\0")
        if not member:
            return Item(Path(path), self.spans[at])
        name, offset, size = member
        return Item(TarMember(Path(path), name, int(offset), int(size)), self.spans[at])


class Inputs(NamedTuple):
    """What to read, each item once, in the order in which they were named."""

    items: Items
    notes: tuple[str, ...] = ()  # what a user should hear about how they were found


def find_inputs(named: Sequence[str], *, reader: Reader, stdin: IO[bytes] | None) -> Inputs:
    """The items behind the words of a command line.

    Files of a manifest or of standard input ("-") are taken as they are: one that is missing or unreadable then shows
    when it is read, like any other bad file of a long list. What is named on the command line itself must exist.
    """
    items, notes, seen = Items(), list[str](), set[str]()
    repeated = 0
    for name in named:
        for item in named_items(name, reader, stdin, notes):
            key = item.name
            if key in seen:
                repeated += 1
                continue
            seen.add(key)
            items.append(item)
    if repeated:
        notes.append(f"{repeated} files are named more than once; each is read once.")
    if not len(items):
        raise DataError("there is nothing to read: no file is named.")
    return Inputs(items, tuple(notes))


def named_items(name: str, reader: Reader, stdin: IO[bytes] | None, notes: list[str]) -> Iterator[Item]:
    """The items behind one word."""
    if name == "-":
        if stdin is None:
            raise UsageError("- stands for standard input, which several processes cannot share; write a manifest.")
        yield from (Item(Path(os.fsdecode(line))) for raw in stdin if (line := raw.rstrip(b"\r\n")))
        return
    path, endings = local_path(name), (*reader.extensions, *SHARDS)
    if path.is_file() and path.suffix.lower() in MANIFESTS:
        yield from in_manifest(path, reader)
        return
    if path.is_dir():
        _, names, others = files_below(path, endings)
        files = [path / below for below in names]
        if not files:
            raise DataError(
                f"no {' '.join(reader.extensions)} files in {quoted(path)} or its folders ({others} files of other "
                "kinds); this model reads no others."
            )
        if others:
            notes.append(f"left out in {quoted(path)}: {others} of other kinds.")
    elif is_pattern(path) and not path.exists():
        files = shard_paths(path)[1]
    elif path.exists() or not glob.has_magic(name):
        if path.suffix.lower() not in SHARDS or not path.is_file():
            require_readable(path, reader)
        files = [path]
    else:
        matching = map(Path, sorted(glob.glob(name, recursive=True)))
        files = [file for file in matching if file.name.lower().endswith(endings) and not file.is_dir()]
        if not files:
            raise UsageError(f"{quoted(name)} matches no {' '.join(reader.extensions)} file, which this model reads.")
    for file in files:
        yield from whole_or_members(file, reader, notes)


def whole_or_members(path: Path, reader: Reader, notes: list[str]) -> Iterator[Item]:
    """A file, or what a tar file holds; one that is damaged also counts as an item, which then cannot be read."""
    if path.suffix.lower() not in SHARDS:
        yield Item(path)
        return
    found = scanned(path, reader)
    notes += found.notes
    for name, offset, size, row in found.samples:
        yield Item(TarMember(path, name, offset, size), row.span if reader.timed else WHOLE)
    if found.damage:
        yield Item(path)
    elif not found.samples:
        raise DataError(f"{quoted(path)} holds no {' '.join(reader.extensions)} members; this model reads no others.")


def scanned(shard: Path, reader: Reader) -> Contents:
    """What a tar file holds; one whose labels cannot be read counts as damaged."""
    found = scan_shard(shard, extensions=reader.extensions)
    return Contents([], damage=(str(found),)) if isinstance(found, DataError) else found


def in_manifest(file: Path, reader: Reader) -> Iterator[Item]:
    """All files, or parts of files, that a manifest names, whatever their split and label."""
    for values, where in manifest_rows(file):
        span = span_of(values, where)
        if span != WHOLE and not reader.timed:
            raise UsageError(
                f"{where} gives a start or end in seconds, but this model reads {' '.join(reader.extensions)} files, "
                "which have no time axis; leave them out."
            )
        yield Item(file.parent / path_of(values, where), span)


def require_readable(path: Path, reader: Reader) -> None:
    """UsageError for a path that is wrong, before anything is read."""
    if path.is_dir():
        raise UsageError(f"{quoted(path)} is a folder; give a file, or use `bridle tokenize` or `bridle embed` on it.")
    if not path.exists():
        raise UsageError(f"{quoted(path)} does not exist; check the path.")
    if not path.name.lower().endswith(reader.extensions):
        raise UsageError(f"{quoted(path)} is not of a kind this model reads; it reads {' '.join(reader.extensions)}.")
