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

from bridle.data.listing.columns import Column, MemberList, MultiLabels, PathList, Spans
from bridle.data.listing.table import DataListing, Listing
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Labels
from bridle.errors import quoted
from bridle.files import remove_stale, replacing_folder, sha256_of, sha256_of_json

FORMAT = 1
FACTS = "index.json"
VERIFIED = 128 * 2**20  # bytes; the content of larger indexes is only verified by `bridle data check`
SPLITS = ("train", "test")
TYPECODES = {"names": "B", "labels": "i", "of": "i", "starts": "d", "stops": "d"}  # "q" for the others


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
    train = split_facts(listing.train, root)
    test = None if listing.test is None else split_facts(listing.test, root)
    wanted = columns_of(train) + ([] if test is None else columns_of(test))
    if listing.folds is not None:
        wanted.append(f"{train['prefix']}.folds")
    for file in list(folder.iterdir()):
        if file.name not in wanted:
            file.unlink()
    facts: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "classes": listing.classes,
        "folds": listing.folds is not None,
        "notes": listing.notes,
        "train": train,
        "test": test,
        "files": {name: [(folder / name).stat().st_size, sha256_of(folder / name)] for name in sorted(wanted)},
    }
    (folder / FACTS).write_text(json.dumps({**facts, "digest": sha256_of_json(facts)}), encoding="utf-8")


def split_facts(listing: Listing, root: Path) -> dict[str, Any]:
    """What the columns of a split do not say themselves."""
    members = listing.paths if isinstance(listing.paths, MemberList) else None
    names = listing.paths if members is None else members.names
    assert isinstance(names, PathList)
    assert isinstance(names.ends, Column)  # built in a folder
    return {
        "prefix": names.ends.file.name.partition(".")[0],  # what is held out may be called val
        "labelled": listing.labels is not None,
        "multilabel": isinstance(listing.labels, MultiLabels),
        "spanned": listing.spans is not None,
        "shards": None if members is None else [shard.relative_to(root).as_posix() for shard in members.shards],
    }


def columns_of(split: dict[str, Any]) -> list[str]:
    """The files of a split."""
    names = ["names", "ends"]
    names += ["labels"] if split["labelled"] else []
    names += ["label_ends"] if split["multilabel"] else []
    names += ["starts", "stops"] if split["spanned"] else []
    names += ["of", "offsets", "sizes"] if split["shards"] is not None else []
    return [f"{split['prefix']}.{name}" for name in names]


def read_index(folder: Path, *, key: str, root: Path) -> Stored:
    """The index in a folder, if it is whole and has this key."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != FORMAT or facts["key"] != key:
            return Stored(None, "it belongs to another state of the data")
        if (damaged := damage(folder, facts)) is not None:
            return Stored(None, damaged)
        train, test = (None if facts[name] is None else read_split(folder, facts[name], root) for name in SPLITS)
        assert train is not None
        classes = None if facts["classes"] is None else tuple(facts["classes"])
        folds = Column(folder / f"{facts['train']['prefix']}.folds", "q") if facts["folds"] else None
        return Stored(DataListing(train, test, classes, folds, tuple(facts["notes"])), None)
    except FileNotFoundError as error:
        missing = folder.is_dir()
        return Stored(None, f"{quoted(error.filename)} is missing" if missing else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def read_split(folder: Path, split: dict[str, Any], root: Path) -> Listing:
    """One split. Its columns are mapped at once, so that they stay what they are if another index takes their place."""

    def column(name: str) -> Column:
        found = Column(folder / f"{split['prefix']}.{name}", TYPECODES.get(name, "q"))
        found.numbers()
        return found

    shards = split["shards"]
    names = PathList.packed(root if shards is None else Path(), buffer=column("names"), ends=column("ends"))
    paths: Sequence[Location] = names
    if shards is not None:
        columns = {"shard_of": column("of"), "offsets": column("offsets"), "sizes": column("sizes")}
        paths = MemberList([root / shard for shard in shards], names=names, **columns)
    labels: Labels | None = None
    if split["labelled"]:
        labels = MultiLabels(column("labels"), column("label_ends")) if split["multilabel"] else column("labels")
    return Listing(paths, labels, Spans(column("starts"), column("stops")) if split["spanned"] else None)


def cache_place(target: Path) -> Path:
    """Where the index of a file or folder goes that cannot have it beside it; BRIDLE_CACHE names another folder."""
    given = os.environ.get("BRIDLE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    home = Path(given) if given else Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(os.path.abspath(target))).hexdigest()[:16]
    return home / "bridle" / f"index-{name}"
