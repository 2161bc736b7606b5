"""A list of files with what is known about them: CSV, TSV or JSONL, told by the extension.

Columns (keys of a record): `path`, relative to the manifest's folder or to data.root, or absolute; optional `start` and
`end` in seconds inside the file; `label`, or `labels` (many: a JSON list, or separated by ; or |); `split` (train,
test or val); `fold` (a whole number). Other columns are left aside. A file `classes.txt` beside the manifest fixes the
classes and their order; without it they are the labels seen, sorted.

A long list is read once: its rows are kept in an index beside it (see `table_on_disk`), which workers map into memory.

A listed file that does not exist is not an error here: it is reported when it is loaded, like any other bad file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.table import DataListing, Line, Table, Where, hold_out, is_count, read_label_file
from bridle.data.listing.table_on_disk import FORMAT, cache_place, indexed
from bridle.errors import DataError, UsageError, quoted
from bridle.files import sha256_of_json, stamp

DELIMITERS = {".csv": ",", ".tsv": "\t"}
RECORDS = (".jsonl", ".ndjson")
MANIFESTS = (*DELIMITERS, *RECORDS)
LARGE = 4 * 2**20  # bytes of a list from which on it is indexed
SPLITS = {
    **dict.fromkeys(("", "train", "training"), "train"),
    **dict.fromkeys(("test", "eval", "evaluation"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}


class Row(NamedTuple):
    """One row of a list: text by column, or what a JSON record holds."""

    values: dict[str, Any]
    where: Line


def read_manifest(file: Path, *, base: Path | None, test_fold: int | None = None) -> DataListing:
    """The files a manifest names; relative paths start at `base`, or at the manifest's folder."""
    if file.suffix.lower() not in MANIFESTS or not file.is_file():
        wrong = "does not exist or is not a file" if not file.is_file() else "is not a .csv, .tsv or .jsonl file"
        raise UsageError(f"data.manifest {quoted(file)} {wrong}; set data.manifest to your list.")
    root, classes = base or file.parent, file.parent / "classes.txt"
    build = partial(parse_manifest, file, root)
    if file.stat().st_size < LARGE:
        found = build()
    else:
        key = sha256_of_json([FORMAT, "manifest", stamp(file), stamp(classes)])
        found = indexed(places=index_places(file), key=key, root=root, build=build)
    return hold_out(found, test_fold, file, declared=classes.is_file())


def index_places(file: Path) -> list[Path]:
    """Where the index of a long list may lie: beside it, or in the cache."""
    return [file.with_name(f".{file.name}.index"), cache_place(file)]


def parse_manifest(file: Path, root: Path) -> DataListing:
    """Read every row."""
    table = Table(root=root, file=file, numbering=read_label_file(file.parent))
    kind: str | None = None  # `label` or `labels`: the first row that is labelled decides
    empty = True
    for values, where in manifest_rows(file):
        empty = False
        if kind is None and ("label" in values or "labels" in values):
            kind = "labels" if "labels" in values else "label"
            table.multilabel = kind == "labels"
        split = values.get("split") or ""
        if not isinstance(split, str) or split.strip().lower() not in SPLITS:
            raise DataError(f"{where}: split is {quoted(split)}; expected train, test or val.")
        table.add(
            path_of(values, where),
            where=where,
            labels=labels_of(values, multilabel=table.multilabel, where=where),
            split=SPLITS[split.strip().lower()],
            span=span_of(values, where),
            fold=fold_of(values, where),
        )
    if empty:
        raise DataError(f"{quoted(file)} lists no files; expected a header and one row for each file.")
    return table.finish()


def manifest_rows(file: Path) -> Iterator[Row]:
    """The rows of a manifest as they are written."""
    return json_rows(file) if file.suffix.lower() in RECORDS else read_table(file, required=("path",))


def path_of(values: Mapping[str, object], where: Where) -> str:
    """The file of a row, as it is written."""
    path = values.get("path")
    if not isinstance(path, str) or not path.strip():
        raise DataError(
            f"{where} has no path (it has: {quoted(', '.join(values))}); give it in 'path', or remove the row."
        )
    return path.strip()


def labels_of(values: Mapping[str, object], *, multilabel: bool, where: Where) -> Sequence[str] | None:
    """The names of a row's classes, None if it is unlabelled."""
    wanted, other = ("labels", "label") if multilabel else ("label", "labels")
    if other in values:
        raise DataError(f"{where} has {other!r} where this list has {wanted!r}; use one of them in all rows.")
    given = values.get(wanted)
    if given is None or (given == "" and not multilabel):
        return None
    return label_names(given, where) if multilabel else [label_name(given, where)]


def label_names(given: object, where: Where) -> list[str]:
    """Several labels: a list, or text with a JSON list or parts between ; or |."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise DataError(f"{where}: labels {quoted(given)} begin like a JSON list but are none.") from error
    if isinstance(given, list):
        return list(dict.fromkeys(label_name(name, where) for name in given))
    parts = re.split(r"[;|]", label_name(given, where))
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def label_name(given: object, where: Where) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise DataError(f"{where}: label is {quoted(given)}; expected text or a whole number.")
    return str(given).strip()


def span_of(values: Mapping[str, object], where: Where) -> Span:
    """Start and end in seconds."""
    if "start" not in values and "end" not in values:
        return WHOLE
    start, end = (seconds_of(values.get(name), name, where) for name in ("start", "end"))
    if end is not None and end <= (start or 0.0):
        raise DataError(f"{where}: end {end:g} is not after start {start or 0.0:g}; both are seconds inside the file.")
    return start or 0.0, end


def seconds_of(given: object, name: str, where: Where) -> float | None:
    if given is None or (isinstance(given, str) and not given.strip()):
        return None
    try:
        seconds = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not isfinite(seconds) or seconds < 0:
        raise DataError(f"{where}: {name} is {quoted(given)}; expected seconds, a number from 0.")
    return seconds


def fold_of(values: Mapping[str, object], where: Where) -> int | None:
    given = values.get("fold")
    if given is None or given == "":
        return None
    if not is_count(str(given).strip()):
        raise DataError(f"{where}: fold is {quoted(given)}; expected a whole number from 0.")
    return int(str(given))


def json_rows(file: Path) -> Iterator[Row]:
    """The objects of a JSONL file, one on each line."""
    for number, line in enumerate(text_lines(file), start=1):
        if not line.strip():
            continue
        where = Line(file, number)
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {quoted(error)}; expected one record on each line.") from error
        if not isinstance(values, dict):
            raise DataError(f'{where} is not a record; expected something like {{"path": "a.wav"}}.')
        yield Row(values, where)


def read_table(
    file: Path, *, required: Sequence[str], columns: Sequence[str] | None = None, comment: str | None = None
) -> Iterator[Row]:
    """Rows of a CSV or TSV file by column name (lower case); the first row names the columns unless `columns` does."""
    lines = (line if comment is None or not line.startswith(comment) else "\n" for line in text_lines(file))
    reader = csv.reader(lines, delimiter=DELIMITERS.get(file.suffix.lower(), ","), skipinitialspace=True, strict=True)
    names = None if columns is None else list(columns)
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{quoted(file)} line {reader.line_num} cannot be read as a table: {error}.") from error
        if not any(fields):
            continue
        where = Line(file, reader.line_num)
        if names is None:
            names = [field.strip().lower() for field in fields]
            if missing := [name for name in required if name not in names]:
                raise DataError(
                    f"{quoted(file)} has no column {' or '.join(map(repr, missing))}; its first row, which names the "
                    f"columns, reads {quoted(', '.join(names))}."
                )
            if twice := [name for name in names if name and names.count(name) > 1]:
                raise DataError(f"{quoted(file)} has two columns {quoted(twice[0])}; rename one of them.")
        elif len(fields) != len(names):
            raise DataError(f"{where} has {len(fields)} fields; expected {len(names)} ({', '.join(names)[:80]}).")
        else:
            yield Row(dict(zip(names, fields, strict=True)), where)


def text_lines(file: Path) -> Iterator[str]:
    """Lines of a text file; bytes that are not UTF-8 are kept as file names keep them."""
    try:
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and "\0" in line:
                    raise DataError(f"{quoted(file)} is not UTF-8 text (UTF-16?); save it as UTF-8.")
                yield line
    except OSError as error:
        raise DataError(f"{quoted(file)} cannot be read: {error.strerror}.") from error
