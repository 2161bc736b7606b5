"""The items of a collection: where they are, whether they have changed, and their labels.

An item is a file, a part of a file, or a member of a tar file; see `bridle.data.listing.items`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.items import Item
from bridle.data.listing.layouts import find_listing
from bridle.data.listing.manifest import MANIFESTS
from bridle.data.listing.table import as_tuple
from bridle.data.shards.tar_member import TarMember
from bridle.data.sources import Reader
from bridle.errors import BridleError, DataError, quoted
from bridle.files import replacing

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
        location = self.item.location
        there = base / location if isinstance(location, Path) else location._replace(shard=base / location.shard)
        return self._replace(item=self.item._replace(location=there))

    def is_file(self, query: Path) -> bool:
        """Is the query this item, or a file with the same content?"""
        location, span = self.item
        if span != WHOLE:
            return False
        if isinstance(location, Path) and os.path.abspath(location) == os.path.abspath(query):
            return True
        size = self.stamp[0] if isinstance(location, Path) else location.size
        try:
            if size != os.stat(query).st_size:
                return False
            if isinstance(location, TarMember):
                return location.read() == query.read_bytes()
            return _same_content(location, query)
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
        path = Path(name)
        if not path.is_dir() and not (path.is_file() and path.suffix.lower() in MANIFESTS):
            continue  # a single file, or a pattern
        try:
            listing = find_listing(path, extensions=reader.extensions)
        except BridleError as error:
            notes.append(f"no labels were found in {quoted(name)}: {error}")
            continue
        classes = listing.classes or ()
        for split in (listing.train, listing.test):
            if split is None or split.labels is None:
                continue
            spans = split.spans or (WHOLE for _ in split.labels)
            for location, label, span in zip(split.paths, split.labels, spans, strict=True):
                known[os.path.abspath(str(location)), span] = tuple(str(classes[n]) for n in as_tuple(label))
    return Labels(known, tuple(notes))


def write_items(file: Path, items: Iterable[IndexedItem]) -> None:
    """Write one line per item; what is not ASCII is escaped, so that any path survives."""
    with replacing(file) as temporary, temporary.open("w", encoding="ascii") as out:
        for item, stamp, labels in items:
            location, (start, end) = item
            line: dict[str, object] = {"stamp": stamp, "labels": labels}
            if isinstance(location, TarMember):
                line |= {"path": os.fspath(location.shard), "member": location[1:]}
            else:
                line |= {"path": os.fspath(location)}
            line |= {} if item.span == WHOLE else {"start": start, "end": end}
            out.write(json.dumps(line) + "\n")


def read_items(file: Path) -> Iterator[IndexedItem]:
    """The items that `write_items` wrote; ValueError, KeyError or TypeError where a line is not one of them."""
    with file.open(encoding="ascii") as lines:
        for line in lines:
            found = json.loads(line)
            path = Path(str(found["path"]))
            name, offset, size = found.get("member", ("", 0, 0))
            location = TarMember(path, str(name), int(offset), int(size)) if "member" in found else path
            end = found.get("end")
            span = (float(found["start"]), None if end is None else float(end)) if "start" in found else WHOLE
            bytes_, changed = found["stamp"]
            yield IndexedItem(Item(location, span), (int(bytes_), int(changed)), tuple(map(str, found["labels"])))
