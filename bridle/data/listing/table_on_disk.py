"""The rows of a data set on disk, so that a list of a hundred million files is read once and never becomes objects.

An index is a folder of columns (see `columns`), SPLIT.COLUMN.npy, and index.json, which is written last:

    names, ends              paths in one buffer, and where each ends
    labels[, label_ends]     positions in the classes
    starts, stops            seconds, where rows are parts of files
    folds                    for cross-validation
    of, offsets, sizes       of samples in shards: which shard, and where in it

It belongs to one state of one list, named by a key; with another key, or damaged, it does not count. It is published by
renaming a finished folder, so that a killed process leaves none that is half written. What such a process was making
lies beside, named by machine and process (NAME.MACHINE.PID.part, or .old for what it replaced); whoever builds next on
that machine removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridle.data.listing.columns import Column
from bridle.data.listing.table import DataListing, columns_of, listing_of
from bridle.errors import quoted
from bridle.files import fingerprint, remove_stale, replacing_folder, sha256_of, sha256_of_json

FORMAT = 3
FACTS = "index.json"
NAME = re.compile(r"(train|test)\.([a-z_]+)\.npy")  # split and column
VERIFIED = 128 * 2**20  # bytes; the content of larger indexes is only verified by `bridle data check`


class Stored(NamedTuple):
    """What became of an index that was looked for."""

    listing: DataListing | None
    why: str | None  # it is there but does not count


def indexed(*, places: Sequence[Path], key: str, root: Path, build: Callable[[], DataListing]) -> DataListing:
    """The data set stored at one of `places` under this key; else built, stored at the first that can be written to."""
    for place in places:
        if (found := read_index(place, key=key, root=root).listing) is not None:
            return found
    listing, why = build(), ""
    for place in places:
        try:
            return store_index(place, listing, key=key, root=root)
        except OSError as error:
            why = error.strerror or str(error)
    note = f"the index of {quoted(root)} cannot be stored ({why}), so that it is made at every start."
    return listing._replace(notes=(*listing.notes, note))


def store_index(place: Path, listing: DataListing, *, key: str, root: Path) -> DataListing:
    """Write an index to `place`, whole or not at all; returns the data set as it is read from there."""
    remove_stale(place)
    with replacing_folder(place, unique=True) as folder:
        shards: list[list[str]] = []
        for name, split in (("train", listing.train), ("test", listing.test)):
            columns = {} if split is None else dict(columns_of(split))
            if name == "train" and listing.folds is not None:
                columns["folds"] = listing.folds
            for column, values in columns.items():
                np.save(folder / f"{name}.{column}.npy", np.asarray(values))
            members = [] if split is None else getattr(split.paths, "shards", [])
            shards.append([shard.relative_to(root).as_posix() for shard in members])
        facts: dict[str, Any] = {
            "format": FORMAT,
            "key": key,
            "classes": listing.classes,
            "notes": listing.notes,
            "shards": shards,
            "files": {file.name: fingerprint(file) for file in sorted(folder.iterdir())},
        }
        (folder / FACTS).write_text(json.dumps({**facts, "digest": sha256_of_json(facts)}), encoding="utf-8")
    found = read_index(place, key=key, root=root)
    if found.listing is None:  # somebody else put another one there at the same moment
        raise OSError(f"{place}: {found.why or 'it vanished'}")
    return found.listing


def read_index(folder: Path, *, key: str, root: Path) -> Stored:
    """The index in a folder, if it is whole and has this key; it stays what it is if another one takes its place."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != FORMAT or facts["key"] != key:
            return Stored(None, "it belongs to another state of the data")
        if (damaged := damage(folder, facts)) is not None:
            return Stored(None, damaged)
        splits: dict[str, dict[str, Column]] = {"train": {}, "test": {}}
        for name in facts["files"]:
            split, column = NAME.fullmatch(name).groups()  # type: ignore[union-attr]  # AttributeError is caught below
            splits[split][column] = Column(folder / name)
        train, test = (
            listing_of(columns, root=root, shards=[root / shard for shard in shards]) if columns else None
            for columns, shards in zip(splits.values(), facts["shards"], strict=True)
        )
        classes = None if facts["classes"] is None else tuple(facts["classes"])
        folds, notes = splits["train"].get("folds"), tuple(facts["notes"])
        assert train is not None  # a data set has something to train on
        return Stored(DataListing(train, test, classes, folds, notes), None)
    except FileNotFoundError as error:
        missing = folder.is_dir()
        return Stored(None, f"{quoted(error.filename)} is missing" if missing else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Stored(None, f"{FACTS} cannot be read: {quoted(error)}")


def damage(folder: Path, facts: dict[str, Any], *, limit: int | None = VERIFIED) -> str | None:
    """What is wrong with the files of an index; content is compared up to `limit` bytes in all."""
    if facts.pop("digest", None) != sha256_of_json(facts):
        return f"{FACTS} is damaged"
    verified = limit is None or sum(stated["bytes"] for stated in facts["files"].values()) <= limit
    for name, stated in facts["files"].items():
        there = (folder / name).stat().st_size
        if there != stated["bytes"]:
            return f"{name} has {there} bytes instead of {stated['bytes']}"
        if verified and sha256_of(folder / name) != stated["sha256"]:
            return f"{name} is damaged"
    return None


def cache_place(target: Path) -> Path:
    """Where the index of a file or folder goes that cannot have it beside it."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(target))).hexdigest()[:16]
    return cache_home() / f"index-{name}"


def cache_home() -> Path:
    """The cache folder: in BRIDLE_CACHE, XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("BRIDLE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "bridle"
