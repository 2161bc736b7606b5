"""Samples inside tar files ("shards"), found by an index or by scanning headers, read by offset, never unpacked.

Layout of a shard, as webdataset writes it: members that share a key (the name up to the first dot after the last slash)
belong together: KEY.jpg is the sample, KEY.cls (text) or KEY.json ({"label": …}) its label, a number or a name;
{"labels": […]} is a multilabel sample. {"rows": [{"label": …, "start": …, "end": …, "fold": …}, …]} makes one sample
of each row: parts of a recording in seconds, folds for cross-validation.

    ROOT/train/*.tar, ROOT/test/*.tar (or val/)                  train and test
    ROOT/train-*.tar, ROOT/test-*.tar (or val-*.tar) and so on   train and test by the first word of the name
    ROOT/*.tar                                                   all train
    ROOT/train-{000..012}.tar                                    these files, likewise

Arrow files of Hugging Face datasets are shards too (`arrow_file`): ROOT/train/*.arrow, ROOT/*.arrow as `save_to_disk`
writes them, and NAME-train.arrow, NAME-test.arrow, by the last word, as `load_dataset` does.

Numbers are classes as they are, 0 to K − 1, their names in ROOT/classes.txt if it exists; names are numbered in sorted
order. Links, devices, absolute names and names with `..` are left aside and counted. Damage costs a training set the
samples behind it, and is noted; held-out shards must be whole.

ROOT/index, which `bridle data shard` writes, spares the scan as long as the shards are those it was made of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.listing.address import is_pattern, shard_paths
from bridle.data.listing.columns import MemberList
from bridle.data.listing.table import DataListing, Rows, hold_out, read_label_file
from bridle.data.listing.table_on_disk import FORMAT, cache_place, indexed, read_index
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.shards.scan import ARROW, SHARDS, Contents, Label, ShardRow, ShardSample, scan_shard
from bridle.errors import ConfigError, DataError, UsageError, quoted
from bridle.files import sha256_of_json, stamp

INDEX = "index"
LARGE = 2**30  # bytes of shards from which on the result of a scan is kept
MOST_CLASSES = 2**20
HELD_OUT = {
    **dict.fromkeys(("test", "eval", "evaluation"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}


class ShardFiles(NamedTuple):
    """The shards of a data set, sorted."""

    root: Path
    train: list[Path]
    test: list[Path]
    notes: tuple[str, ...] = ()


def find_shards(
    root: Path,
    *,
    extensions: Sequence[str],
    test_fold: int | None = None,
    columns: Sequence[str] | None = None,
) -> DataListing:
    """The members with one of `extensions` (such as ".jpg") in the shards of `root`, with their labels.

    `columns` of Arrow files are the input and the label.
    """
    files = split_shards(root)
    root = files.root
    if columns is not None and all(file.suffix != ARROW for file in (*files.train, *files.test)):
        raise ConfigError(f"data.columns: {list(columns)} given, but the tar files of {quoted(root)} have no columns.")
    declared, key = (root / "classes.txt").is_file(), shards_key(files, extensions, columns)
    stored = read_index(root / INDEX, key=key, root=root)
    if stored.listing is not None:
        return hold_out(stored.listing, test_fold, root, declared=declared)
    build = partial(scan_shards, files, extensions, columns)
    if sum(stamp(file)[0] for file in (*files.train, *files.test)) < LARGE:
        found = build()
    else:
        times = [stamp(file) for file in (*files.train, *files.test)]
        found = indexed(places=[cache_place(root)], key=sha256_of_json([key, times]), root=root, build=build)
    if stored.why is not None:
        note = f"the index of {quoted(root)} is not used ({stored.why}); the shards were scanned instead."
        found = found._replace(notes=(*found.notes, note))
    return hold_out(found, test_fold, root, declared=declared)


def shards_key(files: ShardFiles, extensions: Sequence[str], columns: Sequence[str] | None = None) -> str:
    """Names the state of the shards: what they are called and how long they are. Copies have the same."""
    listed = [[file.relative_to(files.root).as_posix(), stamp(file)[0]] for file in (*files.train, *files.test)]
    names = files.root / "classes.txt"
    classes = names.read_bytes().hex() if names.is_file() else None
    return sha256_of_json([FORMAT, listed, sorted(extensions), classes, *(columns or ())])


def split_shards(root: Path) -> ShardFiles:
    """The shards of train and of the held-out part, in a folder or named by a pattern."""
    notes: list[str] = []
    named: list[Path] | None = None
    if is_pattern(root):
        root, named = shard_paths(root)
    if named is None and (root / "train").is_dir():
        held_out = next((root / name for name in ("test", "val", "validation") if (root / name).is_dir()), None)
        train, test = listed(root / "train"), [] if held_out is None else listed(held_out)
    else:
        by_split: dict[str, list[Path]] = {"train": [], "test": [], "val": []}
        for path in listed(root) if named is None else named:
            by_split[split_of(path, root)].append(path)
        train, test = by_split["train"], by_split["test"] or by_split["val"]
        if by_split["test"] and by_split["val"]:
            notes.append(f"{quoted(root)} has test and val shards; the {len(by_split['val'])} val shards are left out.")
        if doubtful := next((path for path in train if HELD_OUT.keys() & set(words(path))), None):
            notes.append(f"{quoted(doubtful.name)} is trained on; to hold it out, let its name begin with test or val.")
        if test and not train:
            raise DataError(f"{quoted(root)} holds {test[0].name} but no training shards; name them train-….tar.")
    if not train:
        packed = any(root.rglob("*.tar.*"))
        raise UsageError(
            f"no .tar or .arrow files in {quoted(root)} or its train/; "
            + ("compressed ones cannot be read by offset: decompress them." if packed else "set data.root elsewhere.")
        )
    return ShardFiles(root, train, test, tuple(notes))


def split_of(path: Path, root: Path) -> str:
    """train, test or val: by the first word of a name below `root`, of an Arrow file of `load_dataset` by the last."""
    below = path.relative_to(root)
    parts = words(Path(below.parts[0]))
    if path.suffix == ARROW and len(below.parts) == 1:
        parts = words(Path(re.sub(r"-\d+-of-\d+", "", path.stem)))[::-1]
    return HELD_OUT.get(parts[0], "train")


def first_names(root: Path, extensions: Sequence[str]) -> list[str]:
    """Names of the samples in the first shard, which tell what kind of data this is."""
    contents = scan_shard(split_shards(root).train[0], extensions=extensions)
    if isinstance(contents, DataError):
        raise contents
    return [sample.name for sample in contents.samples]


def words(path: Path) -> list[str]:
    """The words of a name: those of a-test-000001.tar are a and test."""
    return re.findall(r"[a-z]+", path.name.lower().removesuffix(".tar")) or [""]


def listed(folder: Path) -> list[Path]:
    """The shards of a folder; what `datasets` keeps of computed columns (cache-….arrow) is none."""
    return sorted(
        path for path in folder.iterdir() if path.suffix in SHARDS and not path.name.startswith((".", "cache-"))
    )


class ShardRows(Rows):
    """The samples of one split, shard by shard, before classes have numbers."""

    def __init__(self, numbers: dict[Label, int]) -> None:
        self.members = MemberList([])
        super().__init__(self.members)
        self.numbers = numbers  # of the labels, in the order they come; shared by all splits
        self.first: dict[int, str] = {}  # where each of these was first seen
        self.notes: list[str] = []
        self.damage: list[str] = []
        self.unlabelled = 0
        self.multilabel = False
        self.classes: tuple[str, ...] | None = None  # names of class numbers that the shards themselves tell

    def add_shard(self, shard: Path, contents: Contents) -> None:
        self.members.shards.append(shard)
        self.notes += contents.notes
        self.damage += contents.damage
        self.classes = self.classes or contents.classes
        self.multilabel = self.multilabel or contents.multilabel
        for name, offset, size, row in contents.samples:
            where = quoted(shard / name)
            labels = [self.numbers.setdefault(label, len(self.numbers)) for label in row.labels or ()]
            for label in labels:
                self.first.setdefault(label, where)
            self.unlabelled += row.labels is None
            self.add(name, labels=labels, span=row.span, fold=row.fold, where=where, offset=offset, size=size)


def scan_shards(
    files: ShardFiles, extensions: Sequence[str], columns: Sequence[str] | None = None, *, workers: int = 0
) -> DataListing:
    """What the headers and labels of all shards say."""
    root = files.root
    numbers: dict[Label, int] = {}
    collected: list[ShardRows] = []
    scan = partial(scan_shard, extensions=tuple(extensions), columns=columns)
    for shards in (files.train, files.test):
        collected.append(ShardRows(numbers))
        results = map_in_order(scan, shards, workers=workers, records=(Contents, ShardSample, ShardRow))
        for shard, contents in zip(shards, results, strict=True):
            if isinstance(contents, DataError):
                raise contents
            collected[-1].add_shard(shard, contents)
    train, test = collected[0], collected[1] if files.test else None
    if not train:
        raise DataError(
            f"no {' '.join(extensions)} members in the {len(files.train)} shard(s) of {quoted(root)}, the first one "
            f"{quoted(files.train[0].name)}; {' '.join(train.damage + train.notes) or 'they are empty.'}"
        )
    if test is not None and test.damage:
        raise DataError(f"{test.damage[0]} Scores need every held-out sample: copy the shard again.")
    notes = [*files.notes, *train.damage, *train.notes, *(test.notes if test else [])]
    if 0 < train.unlabelled < len(train):
        notes.append(f"{train.unlabelled} of {len(train)} training samples have no label, so none is used.")
    if not train.unlabelled and test is not None and test.unlabelled:
        notes.append("the held-out shards have samples without a label and are left out; scores come from train.")
        test = None
    classes, final = (None, None) if train.unlabelled else number_classes(root, train, test)
    multilabel = train.multilabel or (test is not None and test.multilabel)
    to_train, folds = train.finish(final, multilabel=multilabel)
    to_test = None if test is None else test.finish(final, multilabel=multilabel)[0]
    return DataListing(to_train, to_test, classes, folds, tuple(dict.fromkeys(notes)))


def number_classes(root: Path, train: ShardRows, test: ShardRows | None) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The classes in order (by classes.txt, the shards' own names, by number, or by name), and the position among them
    of each label, by the number it was given when it was first seen."""
    classes = read_label_file(root).names or train.classes
    seen = [label for label, number in train.numbers.items() if number in train.first]
    numbered = classes is not None or all(isinstance(label, int) for label in seen)
    if classes is None and numbered:
        last = max((int(label) for label in seen), default=0)
        if last >= MOST_CLASSES:
            raise DataError(f"{quoted(root)}: label {last} is no class number; classes are numbered from 0.")
        classes = tuple(map(str, range(last + 1)))
    elif classes is None:
        classes = tuple(sorted(set(map(str, seen))))
    positions = {name: i for i, name in enumerate(classes)}
    final = np.zeros(len(train.numbers), dtype=np.int32)
    for label, given in train.numbers.items():
        where = train.first.get(given) or (None if test is None else test.first.get(given))
        at = label if numbered and isinstance(label, int) else positions.get(str(label), -1)
        if where is not None and not 0 <= at < len(classes):  # else only seen in what is left out
            raise DataError(
                f"{where} has the label {quoted(label)}, which is none of the {len(classes)} classes of "
                f"{quoted(root)}; a class must be in train or in classes.txt."
            )
        final[given] = at if where is not None else 0
    return classes, final
