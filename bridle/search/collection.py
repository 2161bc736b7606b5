"""The items of a collection: where they are, whether they have changed, and their labels.

An item is a file, a part of a file, or a member of a tar file; see `bridle.infer.inputs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.data.listing.layouts import DataListing, find_data, tell_layout
from bridle.data.listing.table import WHOLE, Span
from bridle.data.shards.reader import find_shards
from bridle.data.shards.tar_member import Member
from bridle.data.sources import Reader
from bridle.errors import BridleError, DataError, quoted
from bridle.files import replacing
from bridle.infer.inputs import MANIFESTS, Item

BLOCK = 2**20  # bytes compared at a time


class IndexedItem(NamedTuple):
    """An item as it was when it was indexed."""

    item: Item
    stamp: tuple[int, int]  # size and change time of its file
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.item.name

    def relative_to(self, base: Path) -> IndexedItem:
        """The same item with relative paths taken from `base` instead of the working directory."""
        place = self.item.place
        there = base / place if isinstance(place, Path) else place._replace(shard=base / place.shard)
        return self._replace(item=self.item._replace(place=there))

    def is_file(self, query: Path) -> bool:
        """Is the query this item, or a file with the same content?"""
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
    """Labels by absolute path and time span, and notes for the user."""

    known: dict[tuple[str, Span], tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def of(self, item: Item) -> tuple[str, ...]:
        return self.known.get((os.path.abspath(item.path), item.span), ())


def find_labels(named: Sequence[str], *, reader: Reader) -> Labels:
    """Labels of class folders, lists, manifests and shards; files without any have none."""
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
        for split in (listing.train, listing.test):
            if split is None or split.labels is None:
                continue
            spans = split.spans or (WHOLE for _ in split.labels)
            for path, label, span in zip(split.paths, split.labels, spans, strict=True):
                numbers = (label,) if isinstance(label, int) else label
                known[os.path.abspath(str(path)), span] = tuple(str(classes[n]) for n in numbers)
    return Labels(known, tuple(notes))


def _listing(named: Path, reader: Reader) -> DataListing | None:
    """The listing of a folder or manifest; None for a single file or a pattern."""
    if named.suffix.lower() in MANIFESTS and named.is_file():
        return find_data(root=None, manifest=str(named), layout="auto", extensions=reader.extensions)
    if not named.is_dir():
        return None
    if tell_layout(named) == "shards":
        return find_shards(named, extensions=reader.extensions)
    return find_data(root=str(named), manifest=None, layout="auto", extensions=reader.extensions)


def write_items(file: Path, items: Iterable[IndexedItem]) -> None:
    """Write one line per item; what is not ASCII is escaped, so that any path survives."""
    with replacing(file) as temporary, temporary.open("w", encoding="ascii") as out:
        for item, stamp, labels in items:
            place, (start, end) = item
            line: dict[str, object] = {"stamp": stamp, "labels": labels}
            if isinstance(place, Member):
                line |= {"path": os.fspath(place.shard), "member": place[1:]}
            else:
                line |= {"path": os.fspath(place)}
            line |= {} if item.span == WHOLE else {"start": start, "end": end}
            out.write(json.dumps(line) + "\n")


def read_items(file: Path) -> Iterator[IndexedItem]:
    """The items that `write_items` wrote; ValueError, KeyError or TypeError where a line is not one of them."""
    with file.open(encoding="ascii") as lines:
        for line in lines:
            found = json.loads(line)
            path = Path(str(found["path"]))
            name, offset, size = found.get("member", ("", 0, 0))
            place = Member(path, str(name), int(offset), int(size)) if "member" in found else path
            end = found.get("end")
            span = (float(found["start"]), None if end is None else float(end)) if "start" in found else WHOLE
            bytes_, changed = found["stamp"]
            yield IndexedItem(Item(place, span), (int(bytes_), int(changed)), tuple(map(str, found["labels"])))
