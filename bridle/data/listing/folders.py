"""Files of a data set in folders: what is train, what is test, and which class each file is.

    ROOT/train/CLASS/…, ROOT/test/CLASS/… (or val/)     train and test, labelled
    ROOT/train/…,       ROOT/test/…                     train and test, unlabelled
    ROOT/CLASS/…                                        all train, labelled
    ROOT/…                                              all train, unlabelled

Listings are recursive, sorted and deterministic; hidden files and folders are left out.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from bridle.data.listing.columns import Numbers
from bridle.data.sources import Labels
from bridle.errors import DataError, UsageError, quoted

if TYPE_CHECKING:
    from bridle.data.shards.tar_member import Place

Item = TypeVar("Item")


class Lazy(Sequence[Item], ABC):
    """A sequence that makes its items when they are asked for; a subclass says how long it is and what row i is."""

    @abstractmethod
    def row(self, at: int) -> Item:
        """Item `at`, counted from 0 and inside."""

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        places = range(len(self))[at]  # counts from the end and refuses what is outside, as lists do
        return self.row(places) if isinstance(places, int) else [self.row(place) for place in places]


class PathList(Lazy[Path]):
    """Paths below one root, packed into one buffer: a million Path objects would be copied into every worker."""

    def __init__(self, root: Path, names: Iterable[str] = ()) -> None:
        self.root = root
        self.ends: Numbers = array("q", [0])
        self.buffer: bytearray | Numbers = bytearray()
        for name in names:
            self.append(name)

    @classmethod
    def packed(cls, root: Path, *, buffer: Numbers, ends: Numbers) -> PathList:
        """Of names that lie in a buffer already; name i ends where name i + 1 begins."""
        paths = cls(root)
        paths.buffer, paths.ends = buffer, ends
        return paths

    def append(self, name: str) -> None:
        """Add a path relative to the root, or an absolute one."""
        assert isinstance(self.buffer, bytearray) and isinstance(self.ends, array)  # a finished index does not grow
        self.buffer += os.fsencode(name)
        self.ends.append(len(self.buffer))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def row(self, at: int) -> Path:
        return self.root / os.fsdecode(bytes(self.buffer[self.ends[at] : self.ends[at + 1]]))


class Listing(NamedTuple):
    """The files of one split."""

    paths: Sequence[Place]
    labels: Labels | None  # positions in the classes, None where unlabelled
    spans: Sequence[tuple[float, float | None]] | None = None  # start and end in seconds; None: whole files


class FolderSplits(NamedTuple):
    """The files of a data set."""

    train: Listing
    test: Listing | None
    classes: tuple[str, ...] | None
    notes: tuple[str, ...] = ()  # what a user should hear about how the folder was read


class Found(NamedTuple):
    """Files below one folder, before classes have numbers."""

    folder: Path
    names: list[str]  # relative to `folder`, sorted
    labelled: bool  # every file lies in a subfolder, whose name is its class

    def class_names(self) -> list[str]:
        return [name.split(os.sep, 1)[0] for name in self.names]


def find_splits(root: str | os.PathLike[str], *, extensions: Sequence[str]) -> FolderSplits:
    """List the files with one of `extensions` (such as ".png") below `root` as train and test."""
    root = existing_folder(root)
    held_out = next((name for name in ("test", "val") if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        if held_out is not None:
            raise DataError(f"{quoted(root)} holds {held_out}/ but no train/; name the training folder 'train'.")
        return split(find_files(root, extensions), None)
    train = find_files(root / "train", extensions)
    return split(train, None if held_out is None else find_files(root / held_out, extensions))


def existing_folder(root: str | os.PathLike[str]) -> Path:
    """`root` as a path, or a UsageError if it is not a folder."""
    root = Path(root)
    if not root.exists():
        raise UsageError(f"data.root {quoted(root)} does not exist; set data.root to the folder that holds the data.")
    if not root.is_dir():
        raise UsageError(f"data.root {quoted(root)} is a file; set data.root to the folder that holds it.")
    return root


def split(train: Found, test: Found | None) -> FolderSplits:
    """Number the classes of train, and give test the same numbers."""
    notes = []
    if not train.labelled and any(os.sep in name for name in train.names):
        notes.append(f"files lie beside folders in {quoted(train.folder)}, so folder names are not taken as classes.")
    if train.labelled and test is not None and not test.labelled:
        notes.append(f"{quoted(test.folder)} has no class folders and is left out; scores come from a part of train.")
        test = None
    if not train.labelled:
        held_out = None if test is None else Listing(PathList(test.folder, test.names), None)
        return FolderSplits(Listing(PathList(train.folder, train.names), None), held_out, None, tuple(notes))
    classes = tuple(sorted(set(train.class_names())))
    number = {name: i for i, name in enumerate(classes)}
    if test is not None and (unknown := sorted(set(test.class_names()) - set(classes))):
        raise DataError(
            f"{quoted(test.folder)} holds {len(unknown)} of its classes without files in {quoted(train.folder)}, "
            f"the first one {quoted(unknown[0])}; a class must be in train to be scored. Add it there or remove it."
        )

    def listing(found: Found) -> Listing:
        labels = array("i", (number[name] for name in found.class_names()))
        return Listing(PathList(found.folder, found.names), labels)

    return FolderSplits(listing(train), None if test is None else listing(test), classes, tuple(notes))


def find_files(folder: Path, extensions: Sequence[str]) -> Found:
    """All files below `folder` with one of the extensions, whatever the case."""
    wanted = tuple(extension.lower() for extension in extensions)
    names: list[str] = []
    others = walk(folder, "", wanted, names, seen=set())
    if not names:
        raise DataError(
            f"no {' '.join(wanted)} files in {quoted(folder)} or its folders ({others} files of other kinds); "
            "set data.root to a folder that holds train/ and test/, class folders, or the files themselves."
        )
    names.sort()
    return Found(folder, names, labelled=all(os.sep in name for name in names))


def walk(folder: Path, prefix: str, wanted: tuple[str, ...], names: list[str], seen: set[tuple[int, int]]) -> int:
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
                others += walk(folder, name, wanted, names, seen)
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


def printable(path: Place) -> str:
    """The path as text that every file and terminal can take, also where a name is not valid UTF-8."""
    return str(path).encode("utf-8", "backslashreplace").decode()
