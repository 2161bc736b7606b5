"""The items of a collection: where they are, whether they changed, and what they are labelled with.

An item is a file, a part of a file, or a member of a tar file; see `bridle.infer.inputs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridle.data.listing.layouts import DataListing, find_data, tell_layout
from bridle.data.listing.table import WHOLE, Span
from bridle.data.shards.reader import find_shards
from bridle.data.shards.tar_member import Member
from bridle.data.sources import Reader
from bridle.errors import BridleError, DataError, quoted
from bridle.files import replacing
from bridle.infer.inputs import MANIFESTS, Item

Stamp = tuple[int, int]  # size and change time
BLOCK = 2**20  # bytes compared at a time


class Entry(NamedTuple):
    """An item as it was when it was indexed."""

    item: Item
    stamp: Stamp
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.item.name

    def seen_from(self, base: Path) -> Entry:
        """The same item for a process that was started in another folder than `base`."""
        place = self.item.place
        there = base / place if isinstance(place, Path) else place._replace(shard=base / place.shard)
        return self._replace(item=self.item._replace(place=there))

    def is_file(self, query: Path) -> bool:
        """Is the query this very item, or a file with the same content? An item that is gone is not."""
        place, span = self.item
        if span != WHOLE:
            return False
        if isinstance(place, Path) and os.path.abspath(place) == os.path.abspath(query):
            return True
        size = self.stamp[0] if isinstance(place, Path) else place.size
        try:
            if size != os.stat(query).st_size:
                return False
            if isinstance(place, Member):
                return place.read() == query.read_bytes()
            return _same_content(place, query)
        except (OSError, DataError):
            return False


def _same_content(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while (block := first.read(BLOCK)) == second.read(BLOCK):
            if not block:
                return True
    return False


class Labels(NamedTuple):
    """Labels by absolute path and part, and what a user should hear about them."""

    known: dict[tuple[str, Span], tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def of(self, item: Item) -> tuple[str, ...]:
        return self.known.get((os.path.abspath(item.path), item.span), ())


def find_labels(named: Sequence[str], *, reader: Reader) -> Labels:
    """Labels of class folders, lists, manifests and shards; a collection that is no data set has none."""
    known: dict[tuple[str, Span], tuple[str, ...]] = {}
    notes = []
    for name in named:
        try:
            listing = _listing(Path(name), reader)
        except BridleError as error:
            notes.append(f"no labels were found in {quoted(name)}: {error}")
            continue
        if listing is None:
            continue
        classes = listing.classes or ()
        for part in (listing.train, listing.test):
            if part is None or part.labels is None:
                continue
            spans = part.spans or (WHOLE for _ in part.labels)
            for path, label, span in zip(part.paths, part.labels, spans, strict=True):
                numbers = (label,) if isinstance(label, int) else label
                known[os.path.abspath(str(path)), span] = tuple(str(classes[n]) for n in numbers)
    return Labels(known, tuple(notes))


def _listing(named: Path, reader: Reader) -> DataListing | None:
    """What a folder or list says about its files; nothing of a single file or a pattern."""
    if named.suffix.lower() in MANIFESTS and named.is_file():
        return find_data(root=None, manifest=str(named), layout="auto", extensions=reader.extensions)
    if not named.is_dir():
        return None
    if tell_layout(named) == "shards":
        return find_shards(named, extensions=reader.extensions)
    return find_data(root=str(named), manifest=None, layout="auto", extensions=reader.extensions)


def write_entries(file: Path, entries: Iterable[Entry]) -> None:
    """One line each; whatever is not ASCII is escaped, so that any path survives. Whole or not at all."""
    with replacing(file) as temporary, temporary.open("w", encoding="ascii") as out:
        out.writelines(json.dumps(_plain(entry)) + "\n" for entry in entries)


def read_entries(file: Path) -> Iterator[Entry]:
    """ValueError, KeyError or TypeError where the file is not one of ours."""
    with file.open(encoding="ascii") as lines:
        for line in lines:
            yield _entry(json.loads(line))


def _plain(entry: Entry) -> dict[str, Any]:
    place, (start, end) = entry.item
    where: dict[str, Any] = (
        {"path": os.fspath(place)}
        if isinstance(place, Path)
        else {
            "path": os.fspath(place.shard),
            "member": [place.name, place.offset, place.size],
        }
    )
    span = {} if entry.item.span == WHOLE else {"start": start, "end": end}
    return {**where, **span, "stamp": entry.stamp, "labels": entry.labels}


def _entry(line: dict[str, Any]) -> Entry:
    place: Path | Member = Path(str(line["path"]))
    if "member" in line:
        name, offset, size = line["member"]
        place = Member(Path(str(line["path"])), str(name), int(offset), int(size))
    end = line.get("end")
    span = (float(line["start"]), None if end is None else float(end)) if "start" in line else WHOLE
    size, changed = line["stamp"]
    return Entry(Item(place, span), (int(size), int(changed)), tuple(str(label) for label in line["labels"]))
