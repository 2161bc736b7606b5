"""Which files `bridle data shard` writes: those of one kind, in whatever layout they lie."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from bridle.data.audio.decode import EXTENSIONS as SOUND_EXTENSIONS
from bridle.data.image.source import EXTENSIONS as IMAGE_EXTENSIONS
from bridle.data.inspect.inspection import KINDS
from bridle.data.listing.folders import existing_folder, walk
from bridle.data.listing.layouts import DataListing, find_data, tell_layout
from bridle.data.video.source import EXTENSIONS as VIDEO_EXTENSIONS
from bridle.errors import DataError, UsageError, quoted

ENDINGS = {"images": IMAGE_EXTENSIONS, "audio": SOUND_EXTENSIONS, "video": VIDEO_EXTENSIONS}
SOURCES = {"image": "images", "audio": "audio", "video": "video"}  # by kind of file


class Gathered(NamedTuple):
    """A data set of files."""

    found: DataListing
    source: str
    extensions: tuple[str, ...]
    root: Path


def files_to_shard(path: Path, *, source: str | None) -> Gathered:
    """The files of a folder or manifest; without `source` they are of the commonest kind."""
    if source is not None and source not in ENDINGS:
        raise UsageError(f"--source {quoted(source)}: expected {', '.join(ENDINGS)}.")
    if path.is_file():
        return listed_files(path, source)
    folder = existing_folder(path)
    if tell_layout(folder) == "shards":
        raise UsageError(f"{quoted(path)} holds shards already; give the folder or the list of the files themselves.")
    names: list[str] = []
    others = walk(folder, "", tuple(ending for endings in ENDINGS.values() for ending in endings), names, seen=set())
    source = source or commonest_source(names, path, others)
    found = find_data(root=str(folder), manifest=None, layout="auto", extensions=ENDINGS[source])
    if left := sum(not name.lower().endswith(ENDINGS[source]) for name in names):
        note = f"{left} files of {quoted(path)} are of another kind than {source} and are left out."
        found = found._replace(notes=(*found.notes, note))
    return Gathered(found, source, ENDINGS[source], folder)


def listed_files(manifest: Path, source: str | None) -> Gathered:
    """The files of a manifest; rows that name files of another kind are left out when they are written, and told."""
    found = find_data(root=None, manifest=str(manifest), layout="auto", extensions=())
    source = source or commonest_source([str(path) for path in found.train.paths[:1000]], manifest, 0)
    return Gathered(found, source, ENDINGS[source], manifest.parent)


def commonest_source(names: list[str], path: Path, others: int) -> str:
    counts = Counter(kind for name in names for kind, endings in KINDS.items() if name.lower().endswith(endings))
    if not counts:
        raise DataError(f"no pictures, sounds or videos in {quoted(path)} ({others} files of other kinds).")
    return SOURCES[counts.most_common(1)[0][0]]
