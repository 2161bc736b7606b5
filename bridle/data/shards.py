"""Samples inside tar files ("shards"), found by scanning headers once and read by offset; nothing is ever unpacked.

Layout of a shard, as webdataset writes it: members that share a key (the name up to the first dot after the last slash)
belong together: KEY.jpg is the sample, KEY.cls (text) or KEY.json ({"label": …}) its label, a number or a name.

    ROOT/train/*.tar, ROOT/test/*.tar (or val/)                  train and test
    ROOT/train-*.tar, ROOT/test-*.tar (or val-*.tar) and so on   train and test by the beginning of the name
    ROOT/*.tar                                                   all train

Numbers are classes as they are, 0 to K − 1, their names in ROOT/classes.txt if it exists; names are numbered in sorted
order. Links, devices, absolute names and names with `..` are left aside and counted. Damage costs a training set the
samples behind it, and is noted; held-out shards must be whole.
"""

from __future__ import annotations

import json
import os
import tarfile
from array import array
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from bridle.data.folders import Lazy, PathList, existing_folder
from bridle.errors import DataError, UsageError, quoted

LARGEST_LABEL = 65_536  # bytes; a label file that is longer is something else
LARGEST_MEMBER = 2**48  # bytes; what claims more is damaged
MOST_CLASSES = 2**20
HELD_OUT = ("test", "val")
DAMAGE = (tarfile.TarError, ValueError, OverflowError, MemoryError)  # what tarfile says of impossible headers


class Member(NamedTuple):
    """Where the bytes of one sample lie."""

    shard: Path
    name: str  # inside the shard
    offset: int
    size: int

    @property
    def place(self) -> Path:
        """For messages: the name as if the shard were a folder."""
        return self.shard / self.name

    def read(self) -> bytes:
        """The bytes; DataError if the shard ends before they do."""
        try:
            with self.shard.open("rb") as file:
                # Asked of the file before memory is taken: a damaged header may claim any size.
                there = os.fstat(file.fileno()).st_size
                if self.offset + self.size > there:
                    raise DataError(
                        f"{quoted(self.place)} should end at byte {self.offset + self.size} of its shard, which has "
                        f"{there}; the shard is truncated. Copy it again."
                    )
                file.seek(self.offset)
                return file.read(self.size)
        except OSError as error:
            raise DataError(f"{quoted(self.place)} cannot be read: {error.strerror or error}.") from error


class MemberList(Lazy[Member]):
    """Members of many shards in flat arrays: about 20 bytes each and the name."""

    def __init__(self) -> None:
        self.shards: list[Path] = []
        self.names = PathList(Path())
        self.of, self.offsets, self.sizes = array("i"), array("q"), array("q")

    def append(self, shard: Path, name: str, offset: int, size: int) -> None:
        if not self.shards or self.shards[-1] != shard:
            self.shards.append(shard)
        self.names.append(name)
        self.of.append(len(self.shards) - 1)
        self.offsets.append(offset)
        self.sizes.append(size)

    def __len__(self) -> int:
        return len(self.of)

    def row(self, at: int) -> Member:
        name = os.fspath(self.names[at])
        return Member(self.shards[self.of[at]], name, self.offsets[at], self.sizes[at])


class ShardListing(NamedTuple):
    """The samples of one split."""

    paths: MemberList
    labels: Sequence[int] | None  # positions in the classes, None where unlabelled


class ShardSplits(NamedTuple):
    """The samples of a data set in shards."""

    train: ShardListing
    test: ShardListing | None
    classes: tuple[str, ...] | None
    folds: None
    notes: tuple[str, ...]


class Scanned(NamedTuple):
    """What the headers of one split's shards say."""

    members: MemberList
    labels: list[int | str | None]  # as written
    notes: list[str]  # what was left aside
    damage: list[str]  # where samples are lost


class Naming(NamedTuple):
    """The classes, and whether a number is a position among them (or a name made of digits)."""

    classes: tuple[str, ...]
    numbered: bool


def find_shards(root: str | os.PathLike[str], *, extensions: Sequence[str]) -> ShardSplits:
    """The members with one of `extensions` (such as ".jpg") in the shards of `root`, with their labels."""
    root = existing_folder(root)
    train_files, test_files = split_shards(root)
    train = scan(train_files, extensions)
    test = scan(test_files, extensions) if test_files else None
    if not len(train.members):
        raise DataError(
            f"no {' '.join(extensions)} members in the {len(train_files)} shard(s) of {quoted(root)}, "
            f"the first one {quoted(train_files[0].name)}; {' '.join(train.damage + train.notes) or 'they are empty.'}"
        )
    if test is not None and test.damage:
        raise DataError(f"{test.damage[0]} Scores need every held-out sample: copy the shard again.")
    notes = [*train.damage, *train.notes, *(test.notes if test else [])]
    if (unlabelled := train.labels.count(None)) and unlabelled < len(train.labels):
        notes.append(f"{unlabelled} of {len(train.labels)} training samples have no label, so none is used.")
    if unlabelled:
        held_out = ShardListing(test.members, None) if test else None
        return ShardSplits(ShardListing(train.members, None), held_out, None, None, tuple(notes))
    if test is not None and None in test.labels:
        notes.append("the held-out shards have samples without a label and are left out; scores come from train.")
        test = None
    naming = name_classes(root, train.labels)
    held_out = None if test is None else ShardListing(test.members, number(test, naming, root))
    labelled = ShardListing(train.members, number(train, naming, root))
    return ShardSplits(labelled, held_out, naming.classes, None, tuple(notes))


def split_shards(root: Path) -> tuple[list[Path], list[Path]]:
    """The shards of train and of the held-out part, sorted."""
    if (root / "train").is_dir():
        held_out = next((root / name for name in HELD_OUT if (root / name).is_dir()), None)
        train, test = listed(root / "train"), [] if held_out is None else listed(held_out)
    else:
        files = listed(root)
        test = [path for path in files if path.name.startswith(HELD_OUT)]
        train = [path for path in files if path not in test]
        if test and not train:
            raise DataError(f"{quoted(root)} holds {test[0].name} but no training shards; name them train-….tar.")
    if not train:
        packed = any(root.rglob("*.tar.*"))
        raise UsageError(
            f"no .tar files in {quoted(root)} or its train/; "
            + ("compressed ones cannot be read by offset: decompress them." if packed else "set data.root elsewhere.")
        )
    return train, test


def listed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))


def scan(shards: Sequence[Path], extensions: Sequence[str]) -> Scanned:
    """Members and labels of the shards, in the order in which they lie there."""
    found = Scanned(MemberList(), [], [], [])
    for shard in shards:
        try:
            with tarfile.open(shard, "r:", errors="surrogateescape") as archive, shard.open("rb") as file:
                scan_shard(shard, archive, file, extensions, found)
        except DAMAGE as error:
            found.damage.append(f"{quoted(shard)} cannot be read as a tar file: {quoted(error)}.")
        except OSError as error:
            found.damage.append(f"{quoted(shard)} cannot be read: {error.strerror or error}.")
    return found


def scan_shard(
    shard: Path, archive: tarfile.TarFile, file: BinaryIO, extensions: Sequence[str], found: Scanned
) -> None:
    """Add the samples of one shard to `found`. Only headers and labels are read."""
    wanted = tuple(extension.lower() for extension in extensions)
    written: dict[str, int | str] = {}  # key -> label
    keys: list[str] = []
    refused = others = 0
    while (member := following(shard, archive, file, found)) is not None:
        archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every header in memory
        name, path = member.name, PurePosixPath(member.name)
        if not member.isfile() or member.issparse() or path.is_absolute() or ".." in path.parts:
            refused += not member.isdir()
            continue
        stem, dot, extension = path.name.partition(".")
        key = name[: len(name) - len(dot + extension)]
        kind = (dot + extension).lower()
        if kind in wanted and stem:
            found.members.append(shard, name, member.offset_data, member.size)
            keys.append(key)
        elif kind in (".cls", ".json") and stem:
            label = read_label(file, member, shard)
            if label is not None:
                written[key] = label
        else:
            others += 1
    found.labels.extend(written.get(key) for key in keys)
    if refused:
        found.notes.append(f"{refused} member(s) of {quoted(shard)} are links, devices or lead outside; left aside.")
    if others:
        found.notes.append(f"{others} member(s) of {quoted(shard)} are neither samples nor labels; left aside.")


def following(shard: Path, archive: tarfile.TarFile, file: BinaryIO, found: Scanned) -> tarfile.TarInfo | None:
    """The next header, or None at the end; damage ends a shard too, and a note says what was not reached."""
    try:
        member = archive.next()
    except DAMAGE:
        member = None
    if member is not None and 0 <= member.size < LARGEST_MEMBER:  # a negative size would lead back, and in circles
        return member
    end = archive.offset
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(0, min(end, size)))
    block = file.read(tarfile.BLOCKSIZE)
    if member is not None or end > size or block.strip(b"\0"):  # a sound shard ends with zeros, or just ends
        at = max(0, min(end, size))
        found.damage.append(f"{quoted(shard)} is damaged at byte {at} of {size}; samples after it are lost.")
    return None


def read_label(file: BinaryIO, member: tarfile.TarInfo, shard: Path) -> int | str | None:
    """The label that KEY.cls or KEY.json holds; None for a JSON without one."""
    place = quoted(shard / member.name)
    if member.size > LARGEST_LABEL:
        if member.name.lower().endswith(".json"):
            return None  # notes about the sample, too long to be read for each
        raise DataError(f"{place} holds {member.size} bytes; a label is a number or a name.")
    file.seek(member.offset_data)
    body = file.read(member.size)
    try:
        text = body.decode("utf-8")
        label = json.loads(text).get("label") if member.name.lower().endswith(".json") else text.strip()
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{place} cannot be read as a label: {quoted(error)}. Write it again as UTF-8 text.") from error
    if isinstance(label, str) and label:
        return int(label) if label.isascii() and label.isdigit() else label
    if label is None or (isinstance(label, int) and not isinstance(label, bool)):
        return label
    raise DataError(f"{place} holds the label {quoted(label)}; expected a whole number or a name.")


def name_classes(root: Path, labels: Sequence[int | str | None]) -> Naming:
    """The classes in order: by classes.txt, by number, or by name."""
    listing = root / "classes.txt"
    if listing.is_file():
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
        return Naming(tuple(line.strip() for line in lines if line.strip()), numbered=True)
    if all(isinstance(label, int) for label in labels):
        highest = max(int(label or 0) for label in labels)
        if highest >= MOST_CLASSES:
            raise DataError(f"{quoted(root)}: label {highest} is no class number; classes are numbered from 0.")
        return Naming(tuple(str(i) for i in range(highest + 1)), numbered=True)
    return Naming(tuple(sorted({str(label) for label in labels})), numbered=False)


def number(scanned: Scanned, naming: Naming, root: Path) -> array[int]:
    """The position of every label in the classes."""
    places = {name: i for i, name in enumerate(naming.classes)}
    numbers = array("i")
    for i, label in enumerate(scanned.labels):
        at = label if naming.numbered and isinstance(label, int) else places.get(str(label), -1)
        if not 0 <= at < len(naming.classes):
            raise DataError(
                f"{quoted(scanned.members[i].place)} has the label {quoted(label)}, which is none of the "
                f"{len(naming.classes)} classes of {quoted(root)}; a class must be in train or in classes.txt."
            )
        numbers.append(at)
    return numbers
