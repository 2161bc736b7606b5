"""Are the shards of a folder still what was written? Sizes, SHA-256 and index are compared with shards.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bridle.data.listing.table_on_disk import FACTS, damage
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import all_extensions, file_modalities
from bridle.data.shards.reader import INDEX, split_shards
from bridle.data.shards.scan import scan_shard
from bridle.data.shards.writer import MANIFEST
from bridle.errors import DataError, quoted
from bridle.files import sha256_of

Tell = Callable[[int, int], None]  # shards done, shards in all


class Fault(NamedTuple):
    """Something wrong with a shard, the index or the list of shards."""

    path: str
    detail: str


class ShardCheck(NamedTuple):
    """What a check of shards found."""

    shards: int
    samples: int
    verified: bool  # checksums were compared; shards of other programs have none
    faults: list[Fault]
    notes: tuple[str, ...] = ()


def check_shards(root: Path, *, workers: int = 0, tell: Tell | None = None) -> ShardCheck:
    """Read every shard of a folder once, from end to end where its checksum is known, else its headers."""
    files = split_shards(root)
    root = files.root
    names = [file.relative_to(root).as_posix() for file in (*files.train, *files.test)]
    facts = read_shards_manifest(root)
    stated = {} if facts is None else {str(row["name"]): row for row in facts["shards"]}
    every = sorted({*names, *stated})
    faults: list[Fault] = []
    samples, notes = 0, list(files.notes)
    looks = map_in_order(partial(look_at, root, stated), every, workers=workers)
    for done, (name, (count, wrong, said)) in enumerate(zip(every, looks, strict=True), start=1):
        samples += count
        notes += said
        faults += (Fault(name, fault) for fault in wrong)
        if facts is not None and name not in stated:
            faults.append(Fault(name, f"it is not listed in {MANIFEST}"))
        if tell is not None:
            tell(done, len(every))
    if (damaged := index_fault(root, expected=facts is not None)) is not None:
        faults.append(Fault(f"{INDEX}/{FACTS}", damaged))
    return ShardCheck(len(every), samples, facts is not None, faults, tuple(notes))


def look_at(root: Path, stated: dict[str, dict[str, Any]], name: str) -> tuple[int, list[str], list[str]]:
    """Samples, faults and notes of one shard, in a worker."""
    if name not in stated:
        contents = scan_shard(root / name, extensions=all_extensions(file_modalities()))
        if isinstance(contents, DataError):
            return 0, [str(contents)], []
        return len(contents.samples), list(contents.damage), list(contents.notes)
    row, faults = stated[name], []
    try:
        size = (root / name).stat().st_size
        if size != row["bytes"]:
            faults = [f"it has {size} bytes instead of {row['bytes']}"]
        elif (found := sha256_of(root / name)) != row["sha256"]:
            faults = [f"its content changed: SHA-256 is {found}"]
    except OSError as error:
        faults = [f"it cannot be read: {error.strerror or error}"]
    return row["samples"], faults, []


def index_fault(root: Path, *, expected: bool) -> str | None:
    """What is wrong with the index; shards of other programs need none."""
    file = root / INDEX / FACTS
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        return damage(root / INDEX, facts, limit=None)
    except FileNotFoundError as error:
        return f"{quoted(error.filename)} is missing" if expected else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {quoted(error)}"


def read_shards_manifest(root: Path) -> dict[str, Any] | None:
    """What `bridle data shard` wrote about a folder; None for shards of other programs."""
    file, advice = root / MANIFEST, "Run the bridle data shard that made it again."
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        good = all({"name", "samples", "bytes", "sha256"} <= row.keys() for row in facts["shards"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{quoted(file)} cannot be read: {quoted(error)}. {advice}") from error
    if not good:
        raise DataError(f"{quoted(file)} does not state name, samples, bytes and sha256 of every shard. {advice}")
    return dict(facts)
