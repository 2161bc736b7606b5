"""Rows of a file list on their way into a data set: names, classes, spans and folds, packed.

A row costs its path and some fifty bytes, in memory or, of a long list, in files that are mapped (see `index`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.listing.columns import Growing, Numbers, Reals, renumbered
from bridle.data.listing.folders import Lazy, Listing, PathList
from bridle.data.sources import Labels
from bridle.errors import ConfigError, DataError, quoted


class Line(NamedTuple):
    """A line of a text file; becomes text only when a message needs it."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{quoted(self.file)} line {self.number}"


Span = tuple[float, float | None]  # start and end in seconds; None: to the end
WHOLE: Span = (0.0, None)


def span_text(span: Span) -> str:
    """A part of a file for messages; nothing for a whole one."""
    start, end = span
    return "" if span == WHOLE else f" [{start:g}–{'end' if end is None else f'{end:g}'} s]"


SPILL_EVERY = 1 << 17  # rows
Where = str | Line  # what begins a message about a row


class DataListing(NamedTuple):
    """The files of a data set: what is train and test, and what they are labelled with."""

    train: Listing
    test: Listing | None
    classes: tuple[str, ...] | None
    folds: Sequence[int] | None = None  # of every train file, for cross-validation
    notes: tuple[str, ...] = ()  # what a user should hear about how the list was read


class Several(Lazy[tuple[int, ...]]):
    """Any number of labels for each row."""

    def __init__(self, values: Numbers, ends: Numbers) -> None:
        self.values, self.ends = values, ends  # row i has values[ends[i] : ends[i + 1]]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def row(self, at: int) -> tuple[int, ...]:
        return tuple(self.values[self.ends[at] : self.ends[at + 1]].tolist())


class Spans(Lazy[Span]):
    """Start and end of each row; an end that is not a number stands for the end of the file."""

    def __init__(self, starts: Reals, ends: Reals) -> None:
        self.starts, self.ends = starts, ends

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, at: int) -> Span:
        end = self.ends[at]
        return self.starts[at], None if isnan(end) else end


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
    """The rows of one split, in columns; those of long lists go to files in `folder` as they grow."""

    def __init__(self, root: Path, *, split: str = "", folder: Path | None = None) -> None:
        def column(name: str, typecode: str) -> Growing:
            return Growing(typecode, None if folder is None else folder / f"{split}.{name}")

        self.root = root
        self.names, self.ends = column("names", "B"), column("ends", "q")
        self.values, self.value_ends = column("labels", "i"), column("label_ends", "q")  # see Several
        self.starts, self.stops = column("starts", "d"), column("stops", "d")
        self.folds = column("folds", "q")
        self.ends.append(0)
        self.value_ends.append(0)
        self.labelled: bool | None = None  # None until the first row tells
        self.folded: bool | None = None
        self.spanned = False  # starts and stops are filled in when the first row has some
        self.rows, self.length, self.label_count = 0, 0, 0  # rows, bytes of names, labels
        self.seen: set[int] = set()  # labels
        self.seen_folds: set[int] = set()

    def __len__(self) -> int:
        return self.rows

    def add(self, name: str, *, labels: Sequence[int] | None, span: Span, fold: int | None, where: Where) -> None:
        if self.labelled is None:
            self.labelled = labels is not None
        if self.labelled != (labels is not None):
            states = ("has no label", "have one") if self.labelled else ("has a label", "have none")
            raise DataError(f"{where} {states[0]}, the rows before it {states[1]}; label every row, or none.")
        if self.folded is None:
            self.folded = fold is not None
        if self.folded != (fold is not None):
            raise DataError(f"{where}: fold is {fold}; give a fold in every row, or in none.")
        try:
            encoded = os.fsencode(name)
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: path {quoted(name)} cannot be the name of a file.") from error
        self.names.add_bytes(encoded)
        self.length += len(encoded)
        self.ends.append(self.length)
        if labels:
            self.values.extend(labels)
            self.seen.update(labels)
            self.label_count += len(labels)
        self.value_ends.append(self.label_count)
        if fold is not None:
            self.folds.append(fold)
            self.seen_folds.add(fold)
        if self.spanned or span != WHOLE:
            self._add_span(span)
        self.rows += 1

    def _add_span(self, span: Span) -> None:
        if not self.spanned:
            self.spanned = True
            self.starts.extend(array("d", [WHOLE[0]]) * self.rows)
            self.stops.extend(array("d", [nan]) * self.rows)
        self.starts.append(span[0])
        self.stops.append(nan if span[1] is None else span[1])

    def spill(self) -> None:
        """Free the memory, if there are files to write to."""
        for column in (self.names, self.ends, self.values, self.value_ends, self.starts, self.stops, self.folds):
            column.spill()

    def listing(self, final: NDArray[np.int32] | None, *, several: bool) -> Listing:
        """The rows with their final class numbers."""
        labels: Labels | None = None
        if final is not None:
            values = renumbered(self.values.finish(), final)
            labels = Several(values, self.value_ends.finish()) if several else values
        paths = PathList.packed(self.root, buffer=self.names.finish(), ends=self.ends.finish())
        return Listing(paths, labels, Spans(self.starts.finish(), self.stops.finish()) if self.spanned else None)


def _shared(train: Listing, test: Listing | None) -> int:
    """Whole files that are in both."""
    if test is None or train.spans is not None or test.spans is not None:
        return 0
    return len(set(train.paths) & set(test.paths))


class Table:
    """Collects the rows of a list; `finish` makes the data set of them."""

    def __init__(
        self,
        *,
        root: Path,
        file: Path,
        numbering: Numbering,
        several: bool = False,
        test_fold: int | None = None,
        folder: Path | None = None,  # where columns go that are not to be held in memory
    ) -> None:
        self.file, self.numbering, self.several, self.test_fold = file, numbering, several, test_fold
        self.splits = {name: Rows(root, split=name, folder=folder) for name in ("train", "test", "val")}
        self.in_memory = folder is None
        self.held_out = 0  # rows that say themselves that they are not for training

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
        if not name:
            raise DataError(f"{where}: the path is empty; give the file's path, or remove the row.")
        numbers = None if labels is None else [self.numbering.number(label, where) for label in labels]
        self.held_out += split != "train"
        if fold is not None and fold == self.test_fold:
            split = "test"
        rows = self.splits[split]
        rows.add(name, labels=numbers, span=span, fold=fold, where=where)
        if len(rows) % SPILL_EVERY == 0:
            rows.spill()

    def finish(self, *notes: str) -> DataListing:
        """Train and test with numbered classes."""
        said = list(notes)
        train, test = self.splits["train"], self._held_out(said)
        self._check_folds()
        if not train:
            raise DataError(f"{quoted(self.file)} lists no files to train on.")
        if train.labelled and test is not None and not test.labelled:
            said.append(f"the test rows of {quoted(self.file)} have no labels and are left out.")
            test = None
        classes, final = self.numbering.settled() if train.labelled else (None, None)
        if classes is not None and test is not None:
            self._check_classes(train, test, list(self.numbering.numbers), said)
        folds = train.folds.finish() if self.test_fold is None and train.folded else None
        to_train = train.listing(final, several=self.several)
        to_test = None if test is None else test.listing(final, several=self.several)
        if self.in_memory and (shared := _shared(to_train, to_test)):
            said.append(
                f"{shared} of the test files of {quoted(self.file)} are also for training: scores are too good."
            )
        return DataListing(to_train, to_test, classes, folds, notes=tuple(said))

    def _held_out(self, notes: list[str]) -> Rows | None:
        test, val = self.splits["test"], self.splits["val"]
        if test and val:
            notes.append(f"{quoted(self.file)} has test and val rows; the {len(val)} val rows are left out.")
        return test or val or None

    def _check_folds(self) -> None:
        """Is the fold to hold out there?"""
        if self.test_fold is None:
            return
        if self.held_out:
            raise ConfigError(
                f"data.test_fold: {quoted(self.file)} says itself which rows are for testing; "
                "set data.test_fold=null, or remove the split column."
            )
        if not self.splits["test"]:
            folds = sorted(self.splits["train"].seen_folds)
            seen = f"has the folds {', '.join(map(str, folds))}" if folds else "has no folds"
            raise ConfigError(f"data.test_fold: {self.test_fold} given, but {quoted(self.file)} {seen}.")

    def _check_classes(self, train: Rows, test: Rows, names: list[str], notes: list[str]) -> None:
        """A class that is never shown in training cannot be scored; where a label file declares it, that is told."""
        unknown = sorted(test.seen - train.seen)
        if not unknown:
            return
        what = (
            f"{len(unknown)} classes of the test rows have no row in train, the first one {quoted(names[unknown[0]])}"
        )
        if self.numbering.names is None:
            raise DataError(f"{quoted(self.file)}: {what}; a class must be in train to be scored. Add or remove rows.")
        notes.append(f"{quoted(self.file)}: {what}.")


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
