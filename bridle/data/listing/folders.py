"""Files of a data set in folders: what is train, what is test, and which class each file is.

    ROOT/train/CLASS/…, ROOT/test/CLASS/… (or val/)     train and test, labelled
    ROOT/train/…,       ROOT/test/…                     train and test, unlabelled
    ROOT/CLASS/…                                        all train, labelled
    ROOT/…                                              all train, unlabelled

Listings are recursive, sorted and deterministic; hidden files and folders are left out.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.data.listing.columns import PathList
from bridle.data.listing.table import DataListing, Listing
from bridle.data.shards.tar_member import Location
from bridle.errors import DataError, UsageError, quoted

TABLES = (".csv", ".tsv")  # endings of signals as text, and of lists of files


class FilesBelow(NamedTuple):
    """Files below one folder."""

    folder: Path
    names: list[str]  # relative to `folder`, sorted
    others: int  # files with other endings

    @property
    def labelled(self) -> bool:
        """Does every file lie in a subfolder, whose name is its class?"""
        return all(os.sep in name for name in self.names)

    def class_names(self) -> list[str]:
        """The class of each file."""
        return [name.split(os.sep, 1)[0] for name in self.names]


def files_below(folder: Path, extensions: Sequence[str]) -> FilesBelow:
    """All files below `folder` whose name ends in one of the extensions, whatever the case.

    Tables count where there is nothing else: beside other files they are lists of them.
    """
    names: list[str] = []
    others = _walk(folder, "", tuple(extension.lower() for extension in extensions), names, seen=set())
    if others_than_tables := [name for name in names if not name.lower().endswith(TABLES)]:
        names, others = others_than_tables, others + len(names) - len(others_than_tables)
    names.sort()
    return FilesBelow(folder, names, others)


def find_folders(root: Path, *, extensions: Sequence[str]) -> DataListing:
    """List the files with one of `extensions` (such as ".png") below `root` as train and test."""
    held_out = next((name for name in ("test", "val") if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        if held_out is not None:
            raise DataError(f"{quoted(root)} holds {held_out}/ but no train/; name the training folder 'train'.")
        return _numbered(_some_below(root, extensions), None)
    train = _some_below(root / "train", extensions)
    return _numbered(train, None if held_out is None else _some_below(root / held_out, extensions))


def existing_folder(root: str | os.PathLike[str]) -> Path:
    """`root` as a path, or a UsageError if it is not a folder."""
    root = Path(root)
    if not root.exists():
        raise UsageError(f"data.root {quoted(root)} does not exist; set data.root to the folder that holds the data.")
    if not root.is_dir():
        raise UsageError(f"data.root {quoted(root)} is a file; set data.root to the folder that holds it.")
    return root


def printable(path: Location) -> str:
    """The path as text that every file and terminal can take, also where a name is not valid UTF-8."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _numbered(train: FilesBelow, test: FilesBelow | None) -> DataListing:
    """Number the classes of train, and give test the same numbers."""
    notes = []
    if not train.labelled and any(os.sep in name for name in train.names):
        notes.append(f"files lie beside folders in {quoted(train.folder)}, so folder names are not taken as classes.")
    if train.labelled and test is not None and not test.labelled:
        notes.append(f"{quoted(test.folder)} has no class folders and is left out; scores come from a part of train.")
        test = None
    classes = tuple(sorted(set(train.class_names()))) if train.labelled else None
    number = {name: i for i, name in enumerate(classes or ())}
    if classes and test is not None and (unknown := sorted(set(test.class_names()) - set(classes))):
        raise DataError(
            f"{quoted(test.folder)} holds {len(unknown)} of its classes without files in {quoted(train.folder)}, "
            f"the first one {quoted(unknown[0])}; a class must be in train to be scored. Add it there or remove it."
        )
    listings = [
        Listing(
            PathList(found.folder, found.names),
            None if classes is None else array("i", (number[name] for name in found.class_names())),
        )
        for found in (train, test)
        if found is not None
    ]
    return DataListing(listings[0], listings[1] if test is not None else None, classes, notes=tuple(notes))


def _some_below(folder: Path, extensions: Sequence[str]) -> FilesBelow:
    """The files below `folder`, of which there must be some."""
    found = files_below(folder, extensions)
    if not found.names:
        raise DataError(
            f"no {' '.join(extensions)} files in {quoted(folder)} or its folders ({found.others} files of other kinds);"
            " set data.root to a folder that holds train/ and test/, class folders, or the files themselves."
        )
    return found


def _walk(folder: Path, prefix: str, wanted: tuple[str, ...], names: list[str], seen: set[tuple[int, int]]) -> int:
    """Append the wanted files below folder/prefix to `names`; returns how many files of other kinds lie there."""
    others = 0
    try:
        here = os.stat(folder / prefix)
        if (here.st_dev, here.st_ino) in seen:  # a link that leads back up would never end
            return 0
        seen = seen | {(here.st_dev, here.st_ino)}
        with os.scandir(folder / prefix) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            if entry.name.startswith("."):
                continue
            name = os.path.join(prefix, entry.name)
            if entry.is_dir():
                others += _walk(folder, name, wanted, names, seen)
            elif not entry.is_file() and (not entry.is_symlink() or os.path.exists(entry.path)):
                continue  # a pipe or device, or a link to one; a dangling link stays listed, to be reported as bad
            elif entry.name.lower().endswith(wanted):
                names.append(name)
            else:
                others += 1
    except OSError as error:
        where = error.filename or folder / prefix
        raise DataError(f"folder {quoted(where)} cannot be listed: {error.strerror}; mend its permissions.") from error
    return others
