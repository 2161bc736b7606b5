"""The rows of a data set on disk, so that a list of a hundred million files is read once and never becomes objects.

An index is a folder of columns (see `columns`) and index.json, which is written last:

    SPLIT.names, SPLIT.ends              paths in one buffer, and where each ends
    SPLIT.labels[, SPLIT.label_ends]     positions in the classes
    SPLIT.starts, SPLIT.stops            seconds, where rows are parts of files
    SPLIT.folds                          for cross-validation
    SPLIT.of, SPLIT.offsets, SPLIT.sizes    of samples in shards: which shard, and where in it

It belongs to one state of one list, named by a key; with another key, or damaged, it does not count. It is published by
renaming a finished folder, so that a killed process leaves none that is half written. What such a process was making
lies beside, named by machine and process (NAME.MACHINE.PID.part, or .old for what it replaced); whoever builds next on
that machine removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridle.data.listing.columns import Column, MemberList
from bridle.data.listing.table import COLUMNS, DataListing, listing_of
from bridle.errors import quoted
from bridle.files import remove_stale, replacing_folder, sha256_of, sha256_of_json

FORMAT = 2
FACTS = "index.json"
SPLITS = ("train", "test", "val")
VERIFIED = 128 * 2**20  # bytes; the content of larger indexes is only verified by `bridle data check`


class Stored(NamedTuple):
    """What became of an index that was looked for."""

    listing: DataListing | None
    why: str | None  # it is there but does not count


def indexed(
    *, places: Sequence[Path], key: str, root: Path, build: Callable[[Path | None], DataListing]
) -> DataListing:
    """The data set stored at one of `places` under this key; else built, stored at the first that can be written to.

    `build` puts the columns into the folder that it is given, or keeps them in memory.
    """
    for place in places:
        if (found := read_index(place, key=key, root=root).listing) is not None:
            return found
    why = ""
    for place in places:
        try:
            return build_at(place, key=key, root=root, build=build)
        except OSError as error:
            why = error.strerror or str(error)
    listing = build(None)
    note = f"the index of {quoted(root)} cannot be stored ({why}), so that it is made at every start."
    return listing._replace(notes=(*listing.notes, note))


def build_at(place: Path, *, key: str, root: Path, build: Callable[[Path | None], DataListing]) -> DataListing:
    """Build in a folder beside `place`, then put it there."""
    remove_stale(place)
    with replacing_folder(place, unique=True) as part:
        write_facts(part, build(part), key=key, root=root)
    found = read_index(place, key=key, root=root)
    if found.listing is None:  # somebody else put another one there at the same moment
        raise OSError(f"{place}: {found.why or 'it vanished'}")
    return found.listing


def write_facts(folder: Path, listing: DataListing, *, key: str, root: Path) -> None:
    """Make the columns in a folder an index."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "classes": listing.classes,
        "notes": listing.notes,
        "shards": [
            [shard.relative_to(root).as_posix() for shard in split.paths.shards]
            if split is not None and isinstance(split.paths, MemberList)
            else []
            for split in (listing.train, listing.test)
        ],
        "files": {file.name: [file.stat().st_size, sha256_of(file)] for file in sorted(folder.iterdir())},
    }
    (folder / FACTS).write_text(json.dumps({**facts, "digest": sha256_of_json(facts)}), encoding="utf-8")


def read_index(folder: Path, *, key: str, root: Path) -> Stored:
    """The index in a folder, if it is whole and has this key.

    Its columns are mapped at once, so that they stay what they are if another index takes their place.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != FORMAT or facts["key"] != key:
            return Stored(None, "it belongs to another state of the data")
        if (damaged := damage(folder, facts)) is not None:
            return Stored(None, damaged)
        splits: dict[str, dict[str, Column]] = {"train": {}}  # and test, or val
        for name in facts["files"]:
            split, _, column = name.partition(".")
            if split not in SPLITS or column not in COLUMNS:
                return Stored(None, f"{quoted(name)} is no column of it")
            splits.setdefault(split, {})[column] = mapped = Column(folder / name)
            mapped.numbers()
        listings = [
            listing_of(columns, root=root, shards=[root / shard for shard in shards])
            for columns, shards in zip(splits.values(), facts["shards"], strict=False)
        ]
        classes = None if facts["classes"] is None else tuple(facts["classes"])
        test = listings[1] if len(listings) > 1 else None
        return Stored(
            DataListing(listings[0], test, classes, splits["train"].get("folds"), tuple(facts["notes"])), None
        )
    except FileNotFoundError as error:
        missing = folder.is_dir()
        return Stored(None, f"{quoted(error.filename)} is missing" if missing else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Stored(None, f"{FACTS} cannot be read: {quoted(error)}")


def damage(folder: Path, facts: dict[str, Any], *, limit: int | None = VERIFIED) -> str | None:
    """What is wrong with the files of an index; content is compared up to `limit` bytes in all."""
    stated = facts.pop("digest", None)
    if sha256_of_json(facts) != stated:
        return f"{FACTS} is damaged"
    verified = limit is None or sum(size for size, _ in facts["files"].values()) <= limit
    for name, (size, content) in facts["files"].items():
        there = (folder / name).stat().st_size
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
        if verified and sha256_of(folder / name) != content:
            return f"{name} is damaged"
    return None


def cache_place(target: Path) -> Path:
    """Where the index of a file or folder goes that cannot have it beside it; BRIDLE_CACHE names another folder."""
    given = os.environ.get("BRIDLE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    home = Path(given) if given else Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(os.path.abspath(target))).hexdigest()[:16]
    return home / "bridle" / f"index-{name}"
