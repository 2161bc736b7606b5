"""Rows of a file list on their way into a data set: names, classes, spans and folds, packed.

A row costs its path and some fifty bytes, in memory or, of a long list, in files that are mapped (`table_on_disk`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.listing.columns import WHOLE, Chosen, Columns, Lazy, MemberList, MultiLabels, PathList, Span, Spans
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Labels
from bridle.errors import ConfigError, DataError, quoted


class Line(NamedTuple):
    """A line of a text file; becomes text only when a message needs it."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{quoted(self.file)} line {self.number}"


Where = str | Line  # what begins a message about a row
COMPARED = 100_000  # rows; of longer lists nobody looks for files that are both in train and test


def span_text(span: Span) -> str:
    """A part of a file for messages; nothing for a whole one."""
    start, end = span
    return "" if span == WHOLE else f" [{start:g}–{'end' if end is None else f'{end:g}'} s]"


class Listing(NamedTuple):
    """The items of one split."""

    paths: Sequence[Location]
    labels: Labels | None = None  # positions in the classes, None where unlabelled
    spans: Sequence[Span] | None = None  # start and end in seconds; None: whole files


class DataListing(NamedTuple):
    """The files of a data set: what is train and test, and what they are labelled with."""

    train: Listing
    test: Listing | None
    classes: tuple[str, ...] | None
    folds: Sequence[int] | None = None  # of every train file, for cross-validation
    notes: tuple[str, ...] = ()  # what a user should hear about how the list was read


class Numbering:
    """Numbers of class names: those of a label file, or in the order they come, to be sorted when all are known."""

    def __init__(self, names: Sequence[str] | None, *, file: Path | None = None) -> None:
        self.numbers = {name: i for i, name in enumerate(names or ())}
        self.names = None if names is None else tuple(names)
        self.file = file
        # Where classes are called 1, 2, 3, a label 0 is a mistake and not the first of them.
        self.by_position = not any(is_count(name) for name in self.numbers)

    def number(self, name: str, where: Where) -> int:
        """The number of a class; a label file may also be referred to by position, if its names are not numbers."""
        number = self.numbers.get(name)
        if number is not None:
            return number
        if self.names is None:
            return self.numbers.setdefault(name, len(self.numbers))
        if self.by_position and is_count(name) and int(name) < len(self.names):
            return int(name)
        raise DataError(
            f"{where}: label {quoted(name)} is not among the {len(self.names)} of the label file {quoted(self.file)}; "
            "correct it, or add it there."
        )

    def settled(self) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """All names in their final order, and the final number for each number given so far."""
        if self.names is not None:
            return self.names, np.arange(len(self.names), dtype=np.int32)
        numeric = all(is_count(name) for name in self.numbers)
        classes = sorted(self.numbers, key=int) if numeric else sorted(self.numbers)
        final = np.empty(len(classes), dtype=np.int32)
        final[[self.numbers[name] for name in classes]] = np.arange(len(classes), dtype=np.int32)
        return tuple(classes), final


class Rows:
    """The rows of one split, in columns."""

    def __init__(self, paths: PathList | MemberList) -> None:
        self.paths, self.labels, self.spans, self.folds = paths, MultiLabels(), Spans(), array("q")
        self.labelled = self.folded = self.spanned = False  # the first row tells; spans: any row
        self.seen: set[int] = set()  # labels

    def __len__(self) -> int:
        return len(self.paths)

    def add(
        self, name: str, *, labels: Sequence[int] | None, span: Span, fold: int | None, where: Where, **member: int
    ) -> None:
        """One file, or one member of the last of the shards (then with its offset and size)."""
        if not self:
            self.labelled, self.folded = labels is not None, fold is not None
        if self.labelled != (labels is not None):
            states = ("has no label", "have one") if self.labelled else ("has a label", "have none")
            raise DataError(f"{where} {states[0]}, the rows before it {states[1]}; label every row, or none.")
        if self.folded != (fold is not None):
            raise DataError(f"{where}: fold is {fold}; give a fold in every row, or in none.")
        try:
            self.paths.append(name, **member)
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: path {quoted(name)} cannot be the name of a file.") from error
        self.labels.append(labels or ())
        self.seen.update(labels or ())
        self.spans.append(span)
        self.spanned = self.spanned or span != WHOLE
        if fold is not None:
            self.folds.append(fold)

    def finish(self, final: NDArray[np.int32] | None, *, multilabel: bool) -> tuple[Listing, Sequence[int] | None]:
        """The rows with their final class numbers (None: without labels), and their folds."""
        labels: Labels | None = None
        if final is not None:
            given = self.labels.columns
            numbers = array("i", final[np.asarray(given["labels"])].astype(np.intc).tobytes())
            labels = MultiLabels({**given, "labels": numbers}) if multilabel else numbers
        listing = Listing(self.paths, labels, self.spans if self.spanned else None)
        return listing, self.folds if self.folded else None


def columns_of(listing: Listing) -> Columns:
    """The columns that a listing is made of, by name."""
    parts = [part.columns for part in listing if isinstance(part, Lazy)]
    single = {} if listing.labels is None or isinstance(listing.labels, Lazy) else {"labels": listing.labels}
    return {name: column for part in (*parts, single) for name, column in part.items()}


def listing_of(columns: Columns, *, root: Path, shards: Sequence[Path]) -> Listing:
    """The rows of columns, by name; they are members of `shards` where there are some."""
    paths = MemberList(shards, columns) if shards else PathList(root, columns=columns)
    labels = MultiLabels(columns) if "label_ends" in columns else columns.get("labels")
    return Listing(paths, labels, Spans(columns) if "starts" in columns else None)


class Table:
    """Collects the rows of a list; `finish` makes the data set of them."""

    def __init__(self, *, root: Path, file: Path, numbering: Numbering, multilabel: bool = False) -> None:
        self.file, self.numbering, self.multilabel = file, numbering, multilabel
        self.splits = {name: Rows(PathList(root)) for name in ("train", "test", "val")}

    def add(
        self,
        name: str,
        *,
        where: Where,
        labels: Sequence[str] | None = None,
        split: str = "train",
        span: Span = WHOLE,
        fold: int | None = None,
    ) -> None:
        """One row; `where` begins an error message about it."""
        numbers = None if labels is None else [self.numbering.number(label, where) for label in labels]
        self.splits[split].add(name, labels=numbers, span=span, fold=fold, where=where)

    def finish(self, *notes: str) -> DataListing:
        """Train and test with numbered classes."""
        said = list(notes)
        train, test, val = self.splits["train"], self.splits["test"] or None, self.splits["val"] or None
        if test and val:
            said.append(f"{quoted(self.file)} has test and val rows; the {len(val)} val rows are left out.")
        test = test or val
        if not train:
            raise DataError(f"{quoted(self.file)} lists no files to train on.")
        if train.labelled and test is not None and not test.labelled:
            said.append(f"the test rows of {quoted(self.file)} have no labels and are left out.")
            test = None
        classes, final = self.numbering.settled() if train.labelled else (None, None)
        if classes is not None and test is not None:
            names = list(self.numbering.numbers)
            unseen = sorted(names[number] for number in test.seen - train.seen)
            said += check_classes(unseen, self.file, declared=self.numbering.names is not None)
        to_train, folds = train.finish(final, multilabel=self.multilabel)
        to_test = None if test is None else test.finish(final, multilabel=self.multilabel)[0]
        if to_test and len(train) < COMPARED and not (to_train.spans or to_test.spans):
            shared = len(set(to_train.paths) & set(to_test.paths))
            note = f"{shared} of the test files of {quoted(self.file)} are also for training: scores are too good."
            said += [note] if shared else []
        return DataListing(to_train, to_test, classes, folds, notes=tuple(said))


def check_classes(unseen: Sequence[str], file: Path, *, declared: bool) -> list[str]:
    """Classes of test items that no train item has cannot be scored: an error, or a note where a file declares them."""
    if not unseen:
        return []
    what = f"{len(unseen)} classes of the test rows have no row in train, the first one {quoted(unseen[0])}"
    if not declared:
        raise DataError(f"{quoted(file)}: {what}; a class must be in train to be scored. Add or remove rows.")
    return [f"{quoted(file)}: {what}."]


def hold_out(found: DataListing, test_fold: int | None, file: Path, *, declared: bool) -> DataListing:
    """The same data with one of its folds as the test split; unchanged for None."""
    if test_fold is None:
        return found
    if found.test is not None:
        raise ConfigError(
            f"data.test_fold: {quoted(file)} says itself which items are for testing; set data.test_fold=null."
        )
    folds = np.empty(0, np.int64) if found.folds is None else np.asarray(found.folds)
    if test_fold not in folds:
        listed = ", ".join(map(str, np.unique(folds)))
        seen = f"has the folds {listed}" if listed else "has no folds"
        raise ConfigError(f"data.test_fold: {test_fold} given, but {quoted(file)} {seen}.")
    rows = np.flatnonzero(folds != test_fold), np.flatnonzero(folds == test_fold)
    if not len(rows[0]):
        raise DataError(f"{quoted(file)} lists no files to train on outside fold {test_fold}.")
    train, test = (
        Listing(*(None if column is None else Chosen(column, chosen) for column in found.train))  # type: ignore[arg-type]
        for chosen in rows
    )
    notes = list(found.notes)
    if found.classes is not None:
        seen_in = [{one for label in part.labels or () for one in as_tuple(label)} for part in (train, test)]
        notes += check_classes([found.classes[n] for n in sorted(seen_in[1] - seen_in[0])], file, declared=declared)
    return found._replace(train=train, test=test, folds=None, notes=tuple(notes))


def as_tuple(label: int | tuple[int, ...]) -> tuple[int, ...]:
    """The labels of an item that has one or any number of them."""
    return label if isinstance(label, tuple) else (label,)


def read_label_file(folder: Path) -> Numbering:
    """Class names of FOLDER/classes.txt, one on each line; without such a file the rows' own labels are collected."""
    file = folder / "classes.txt"
    if not file.is_file():
        return Numbering(None)
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"label file {quoted(file)} cannot be read: {error}.") from error
    while names and not names[-1]:
        names.pop()
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if not names or twice is not None:
        why = "is empty" if not names else f"has {quoted(twice)} twice"
        raise DataError(f"label file {quoted(file)} {why}; write one class name on each line.")
    return Numbering(names, file=file)


def is_count(text: str) -> bool:
    """Is this a whole number from 0, of a size that a list can have?"""
    return text.isascii() and text.isdecimal() and len(text) <= 9
