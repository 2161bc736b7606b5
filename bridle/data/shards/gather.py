"""Which files `bridle data shard` writes: those of one modality, in whatever layout they lie."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bridle.data.inspect.statistics import guess_modality
from bridle.data.listing.folders import files_below
from bridle.data.listing.layouts import find_listing, tell_layout
from bridle.data.listing.table import DataListing
from bridle.data.modality import Modality, all_extensions, file_modalities, file_modality
from bridle.errors import UsageError, quoted


class Gathered(NamedTuple):
    """A data set of files."""

    found: DataListing
    modality: Modality
    root: Path


def files_to_shard(path: Path, *, source: str | None) -> Gathered:
    """The files of a folder or manifest; without `source` they are of the commonest modality.

    Rows of a manifest that name files of another modality are left out when they are written, and listed as skipped.
    """
    if path.is_dir() and tell_layout(path) == "shards":
        raise UsageError(f"{quoted(path)} holds shards already; give the folder or the list of the files themselves.")
    modality = guess_modality(path) if source is None else file_modality(source, option="--source")
    found = find_listing(path, extensions=modality.extensions)
    if path.is_file():
        return Gathered(found, modality, path.parent)
    names = files_below(path, all_extensions(file_modalities())).names
    if left := sum(not name.lower().endswith(modality.extensions) for name in names):
        note = f"{left} files of {quoted(path)} are of another kind than {modality.name} and are left out."
        found = found._replace(notes=(*found.notes, note))
    return Gathered(found, modality, path)
