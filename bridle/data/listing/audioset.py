"""AudioSet's lists over a folder of clips: what is listed, what is there, and its 527 classes.

    ROOT/class_labels_indices.csv          index, mid, display_name
    ROOT/NAME_segments.csv                 YTID, start, end, "mid,mid,…"; with comment lines (#) or a header row
    ROOT/…/<anything>YTID[_START[_END]].EXT     the clips, anywhere below ROOT; START in seconds or milliseconds

Segments named `eval` are test, the others train. Clips that are listed but not on disk are left out of the data set;
how many of which class those are is what `availability` reports, as the paper's table of available data does.
A file is either the listed segment itself, already cut out, or the sound of the whole video, of which the segment is
then read: told by the START in its name or, when it is loaded, by its length.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.data.audio.decode import open_track
from bridle.data.listing.columns import WHOLE, Lazy, Span
from bridle.data.listing.folders import files_below
from bridle.data.listing.manifest import Row, read_table, span_of
from bridle.data.listing.table import DataListing, Line, Listing, Numbering, Table
from bridle.data.shards.tar_member import Location
from bridle.errors import ConfigError, DataError, quoted

CLASSES = "class_labels_indices.csv"
COLUMNS = ("ytid", "start_seconds", "end_seconds", "positive_labels")
HELD_OUT = "eval"
SLACK = 1.0  # seconds by which a clip may be longer or shorter than its row says
ID_LENGTH = 11  # characters of a YouTube id
TIME = re.compile(r"_(\d+(?:\.\d+)?)$")


class SegmentShare(NamedTuple):
    """How much of a segment list is on disk."""

    segment: str
    listed: int
    found: int

    @property
    def share(self) -> float:
        return self.found / max(self.listed, 1)


class ClassShare(NamedTuple):
    """How many clips of a class are on disk, over all segment lists."""

    name: str
    listed: int
    found: int


class Availability(NamedTuple):
    """What of AudioSet is there."""

    segments: tuple[SegmentShare, ...]
    classes: tuple[ClassShare, ...]  # in the order of the class file


class Clip(NamedTuple):
    """One row of a segment list."""

    name: str | None  # path below ROOT; None if the clip is not on disk
    labels: tuple[str, ...]  # display names
    span: Span  # where the segment is, if the file should be the whole video
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
                table.add(clip.name, labels=clip.labels, split=split, span=clip.span, where=clip.where)
        notes.append(share_note(SegmentShare(segment, listed, found)))
    if not table.splits["train"]:
        raise DataError(f"none of the clips listed in {quoted(root)} is below it ({'; '.join(notes)}); put them there.")
    found_data = table.finish(*notes)
    train, test = found_data.train, found_data.test
    return found_data._replace(train=with_lengths(train), test=None if test is None else with_lengths(test))


def with_lengths(listing: Listing) -> Listing:
    """Rows whose files may be whole videos are looked at when they are loaded."""
    return listing if listing.spans is None else listing._replace(spans=ClipSpans(listing.paths, listing.spans))


class ClipSpans(Lazy[Span]):
    """The listed segment where a file is the whole video; all of a file that is the segment already."""

    def __init__(self, paths: Sequence[Location], listed: Sequence[Span]) -> None:
        self.paths, self.listed = paths, listed

    def __len__(self) -> int:
        return len(self.listed)

    def row(self, at: int) -> Span:
        start, end = self.listed[at]
        if end is None:
            return WHOLE
        try:
            with open_track(self.paths[at]) as track:
                seconds = track.length / track.rate
        except DataError:
            return WHOLE  # what is wrong with the file is told when it is loaded
        is_video = seconds > end - start + SLACK and seconds > end - SLACK
        return (start, end) if is_video else WHOLE


def availability(root: Path, *, extensions: Sequence[str]) -> Availability:
    """How many of the listed clips are on disk, for each segment list and each class."""
    classes, index = read_classes(root), ClipIndex(root, extensions)
    segments: list[SegmentShare] = []
    listed_in, found_in = Counter[str](), Counter[str]()
    for segment, file in segment_files(root).items():
        listed = found = 0
        for clip in clips(file, classes, index):
            listed, found = listed + 1, found + (clip.name is not None)
            listed_in.update(clip.labels)
            found_in.update(clip.labels if clip.name is not None else ())
        segments.append(SegmentShare(segment, listed, found))
    shares = tuple(ClassShare(name, listed_in[name], found_in[name]) for name in classes.names)
    return Availability(tuple(segments), shares)


def share_note(share: SegmentShare) -> str:
    return f"{share.segment}: {share.found} of {share.listed} listed clips found ({share.share:.1%})"


def segment_files(root: Path) -> dict[str, Path]:
    """Segment lists by name: balanced_train for balanced_train_segments.csv."""
    return {file.name.split("_segments")[0]: file for file in sorted(root.glob("*_segments*.csv"))}


def read_classes(root: Path) -> ClassFile:
    """The class file; classes in the order of their index."""
    file = root / CLASSES
    rows = list(read_table(file, required=("index", "mid", "display_name")))
    names = tuple(row.values["display_name"].strip() for row in rows)
    order = [row.values["index"].strip() for row in rows]
    if order != [str(i) for i in range(len(rows))] or len(set(names)) < len(names) or not rows:
        raise DataError(
            f"{quoted(file)}: expected rows with the indices 0, 1, 2, … and a name of its own for each class."
        )
    return ClassFile(file, names, {row.values["mid"].strip(): name for row, name in zip(rows, names, strict=True)})


class ClipIndex:
    """Files below a folder by YouTube id and start; the folder is walked once."""

    def __init__(self, root: Path, extensions: Sequence[str]) -> None:
        self.names = files_below(root, extensions).names
        self.numbers: dict[str, int] = {}
        for number, name in enumerate(self.names):
            for key in keys_of(name):
                self.numbers.setdefault(key, number)

    def cut_clip(self, ytid: str, start: float) -> str | None:
        """The file named by id and start."""
        keys = (f"{ytid}@{start:g}", f"{ytid}@{1000 * start:.0f}")
        return next((self.names[self.numbers[key]] for key in keys if key in self.numbers), None)

    def named(self, ytid: str) -> str | None:
        """The file named by its id alone."""
        number = self.numbers.get(ytid)
        return None if number is None else self.names[number]


def keys_of(name: str) -> Iterator[str]:
    """What a file may be looked up by: ID, or ID@START. Ids may hold _ and digits, so both readings are kept."""
    stem = os.path.basename(name).rpartition(".")[0]
    yield stem[-ID_LENGTH:]
    times: list[str] = []
    while (time := TIME.search(stem)) and len(times) < 2:
        stem = stem[: time.start()]
        times.insert(0, time.group(1))
        yield f"{stem[-ID_LENGTH:]}@{float(times[0]):g}" if float(times[0]) < 1e6 else f"{stem[-ID_LENGTH:]}@{times[0]}"


def clips(file: Path, classes: ClassFile, index: ClipIndex) -> Iterator[Clip]:
    """The rows of a segment list, each with its file."""
    for row in read_table(file, required=(), columns=COLUMNS, comment="#"):
        if row.values["ytid"].strip().upper() == "YTID":  # the header row of some copies
            continue
        start, end = span_of({"start": row.values["start_seconds"], "end": row.values["end_seconds"]}, row.where)
        ytid, labels = row.values["ytid"].strip(), tuple(class_names(row, classes))
        if cut := index.cut_clip(ytid, start):
            yield Clip(cut, labels, WHOLE, row.where)
        else:
            yield Clip(index.named(ytid), labels, (start, end), row.where)


def class_names(row: Row, classes: ClassFile) -> list[str]:
    names = []
    for mid in row.values["positive_labels"].split(","):
        name = classes.of_mid.get(mid.strip())
        if name is None:
            raise DataError(
                f"{row.where}: label {quoted(mid.strip())} is not in the class file {quoted(classes.file)}."
            )
        names.append(name)
    return list(dict.fromkeys(names))
