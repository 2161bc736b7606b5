"""AudioSet's lists over a folder of clips: what is listed, what is there, and its 527 classes.

    ROOT/class_labels_indices.csv          index, mid, display_name
    ROOT/NAME_segments.csv                 YTID, start, end, "mid,mid,…"; with comment lines (#) or a header row
    ROOT/…/<anything>YTID[_START[_END]].EXT     the clips, anywhere below ROOT; START in seconds or milliseconds

Segments named `eval` are test, the others train. Clips that are listed but not on disk are left out of the data set;
how many of which class those are is what `availability` reports, as the paper's table of available data does.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.data.listing.folders import files_below
from bridle.data.listing.manifest import read_table, span_of
from bridle.data.listing.table import DataListing, Line, Numbering, Table
from bridle.errors import ConfigError, DataError, quoted

CLASSES = "class_labels_indices.csv"
COLUMNS = ("ytid", "start_seconds", "end_seconds", "positive_labels")
HELD_OUT = "eval"
ID_LENGTH = 11  # characters of a YouTube id
TIME = re.compile(r"_(\d+(?:\.\d+)?)$")


class Share(NamedTuple):
    """How many clips of a segment list, or of a class over all lists, are on disk."""

    name: str
    listed: int
    found: int

    @property
    def share(self) -> float:
        return self.found / max(self.listed, 1)


class Availability(NamedTuple):
    """What of AudioSet is there."""

    segments: tuple[Share, ...]
    classes: tuple[Share, ...]  # in the order of the class file


class Clip(NamedTuple):
    """One row of a segment list."""

    name: str | None  # path below ROOT; None if the clip is not on disk
    labels: tuple[str, ...]  # display names
    where: Line


class ClassFile(NamedTuple):
    """The classes, and the name for each machine id."""

    file: Path
    names: tuple[str, ...]
    of_mid: dict[str, str]


def has_audioset(root: Path) -> bool:
    """Does the folder hold AudioSet's class file and at least one segment list?"""
    return (root / CLASSES).is_file() and bool(segment_files(root))


def find_audioset(root: Path, *, extensions: Sequence[str], segments: Sequence[str] | None = None) -> DataListing:
    """The clips on disk; `segments` names the lists that make up train (None: all but eval)."""
    files, classes = segment_files(root), read_classes(root)
    unknown = [name for name in segments or () if name not in files]
    if unknown or not files:
        raise ConfigError(
            f"data.segments: {quoted(root)} has the segment lists {', '.join(files) or '(none)'}; "
            f"{quoted(unknown[0]) if unknown else 'a file like balanced_train_segments.csv'} is not there."
        )
    chosen = [name for name in files if name != HELD_OUT] if segments is None else list(dict.fromkeys(segments))
    held_out = [HELD_OUT] if HELD_OUT in files and HELD_OUT not in chosen else []
    index = ClipIndex(root, extensions)
    table = Table(root=root, file=root, numbering=Numbering(classes.names, file=classes.file), multilabel=True)
    notes = []
    for segment in chosen + held_out:
        listed = found = 0
        for clip in clips(files[segment], classes, index):
            listed += 1
            if clip.name is not None:
                found += 1
                split = "test" if segment in held_out else "train"
                table.add(clip.name, labels=clip.labels, split=split, where=clip.where)
        share = Share(segment, listed, found).share
        notes.append(f"{segment}: {found} of {listed} listed clips found ({share:.1%})")
    if not table.splits["train"]:
        raise DataError(f"none of the clips listed in {quoted(root)} is below it ({'; '.join(notes)}); put them there.")
    return table.finish(*notes)


def availability(root: Path, *, extensions: Sequence[str]) -> Availability:
    """How many of the listed clips are on disk, for each segment list and each class."""
    classes, index = read_classes(root), ClipIndex(root, extensions)
    segments: list[Share] = []
    listed_in, found_in = Counter[str](), Counter[str]()
    for segment, file in segment_files(root).items():
        listed = found = 0
        for clip in clips(file, classes, index):
            listed, found = listed + 1, found + (clip.name is not None)
            listed_in.update(clip.labels)
            found_in.update(clip.labels if clip.name is not None else ())
        segments.append(Share(segment, listed, found))
    return Availability(tuple(segments), tuple(Share(name, listed_in[name], found_in[name]) for name in classes.names))


def segment_files(root: Path) -> dict[str, Path]:
    """Segment lists by name: balanced_train for balanced_train_segments.csv."""
    return {file.name.split("_segments")[0]: file for file in sorted(root.glob("*_segments*.csv"))}


def read_classes(root: Path) -> ClassFile:
    """The class file; classes in the order of their index."""
    file = root / CLASSES
    rows = [row.values for row in read_table(file, required=("index", "mid", "display_name"))]
    names = tuple(row["display_name"].strip() for row in rows)
    order = [row["index"].strip() for row in rows]
    if order != [str(i) for i in range(len(rows))] or len(set(names)) < len(names) or not rows:
        raise DataError(
            f"{quoted(file)}: expected rows with the indices 0, 1, 2, … and a name of its own for each class."
        )
    return ClassFile(file, names, {row["mid"].strip(): name for row, name in zip(rows, names, strict=True)})


class ClipIndex:
    """Files below a folder by YouTube id and start; the folder is walked once."""

    def __init__(self, root: Path, extensions: Sequence[str]) -> None:
        self.names: dict[str, str] = {}  # by ID and by ID@START; both, because ids may hold _ and digits
        for name in files_below(root, extensions).names:
            for key in keys_of(name):
                self.names.setdefault(key, name)

    def find(self, ytid: str, start: float) -> str | None:
        """The file named by id and start, or by id alone."""
        keys = (f"{ytid}@{start:g}", f"{ytid}@{1000 * start:.0f}", ytid)
        return next((self.names[key] for key in keys if key in self.names), None)


def keys_of(name: str) -> Iterator[str]:
    """What a file may be looked up by: ID, or ID@START."""
    stem = os.path.basename(name).rpartition(".")[0]
    yield stem[-ID_LENGTH:]
    for _ in range(2):  # START, or START and END
        if time := TIME.search(stem):
            stem, first = stem[: time.start()], time.group(1)
            yield f"{stem[-ID_LENGTH:]}@{float(first):g}" if float(first) < 1e6 else f"{stem[-ID_LENGTH:]}@{first}"


def clips(file: Path, classes: ClassFile, index: ClipIndex) -> Iterator[Clip]:
    """The rows of a segment list, each with its file."""
    for values, where in read_table(file, required=(), columns=COLUMNS, comment="#"):
        ytid = values["ytid"].strip()
        if ytid.upper() == "YTID":  # the header row of some copies
            continue
        mids = [mid.strip() for mid in values["positive_labels"].split(",")]
        if unknown := [mid for mid in mids if mid not in classes.of_mid]:
            raise DataError(f"{where}: label {quoted(unknown[0])} is not in the class file {quoted(classes.file)}.")
        start, _ = span_of({"start": values["start_seconds"], "end": values["end_seconds"]}, where)
        yield Clip(index.find(ytid, start), tuple(dict.fromkeys(classes.of_mid[mid] for mid in mids)), where)
