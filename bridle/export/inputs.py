"""What a command is asked to read: files, folders, patterns, manifests, or a list of paths on standard input."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from bridle.data.folders import walk
from bridle.data.manifest import DELIMITERS, RECORDS, Record, Row, json_records, read_table, span_of
from bridle.data.sources import Reader
from bridle.errors import DataError, UsageError, quoted

MANIFESTS = (*DELIMITERS, *RECORDS)


class Inputs(NamedTuple):
    """The files to read, each once, in the order in which they were named."""

    paths: list[Path]
    notes: tuple[str, ...] = ()  # what a user should hear about how they were found


def find_inputs(named: Sequence[str], *, reader: Reader, stdin: IO[bytes]) -> Inputs:
    """The files behind the words of a command line.

    Files of a manifest or of standard input ("-") are taken as they are: one that is missing or unreadable then shows
    when it is read, like any other bad file of a long list. What is named on the command line itself must exist.
    """
    found: list[Path] = []
    notes: list[str] = []
    for name in named:
        if name == "-":
            found += (Path(os.fsdecode(line)) for raw in stdin if (line := raw.rstrip(b"\r\n")))
        elif Path(name).is_dir():
            found += in_folder(Path(name), reader)
        elif Path(name).exists() and Path(name).suffix.lower() in MANIFESTS:
            found += in_manifest(Path(name))
        elif Path(name).exists() or not glob.has_magic(name):
            require_readable(Path(name), reader)
            found.append(Path(name))
        else:
            found += by_pattern(name, reader)
    once = list(dict.fromkeys(found))
    if len(once) < len(found):
        notes.append(f"{len(found) - len(once)} files are named more than once; each is read once.")
    if not once:
        raise DataError("there is nothing to read: no file is named.")
    return Inputs(once, tuple(notes))


def in_folder(folder: Path, reader: Reader) -> list[Path]:
    """All files of the reader's kinds below a folder, sorted; hidden ones are left out."""
    names: list[str] = []
    others = walk(folder, "", reader.extensions, names, seen=set())
    if not names:
        raise DataError(
            f"no {' '.join(reader.extensions)} files in {quoted(folder)} or its folders ({others} files of other "
            "kinds); this model reads no others."
        )
    return [folder / name for name in sorted(names)]


def by_pattern(pattern: str, reader: Reader) -> list[Path]:
    """Files of the reader's kinds that match a pattern; `**` stands for any number of folders."""
    matching = (Path(name) for name in sorted(glob.glob(pattern, recursive=True)))
    paths = [path for path in matching if is_readable(path, reader) and not path.is_dir()]
    if not paths:
        raise UsageError(f"{quoted(pattern)} matches no {' '.join(reader.extensions)} file, which this model reads.")
    return paths


def in_manifest(file: Path) -> Iterable[Path]:
    """All files that a manifest names, whatever their split and label."""
    kind = file.suffix.lower()
    rows: Iterable[Record | Row]
    rows = json_records(file) if kind in RECORDS else read_table(file, required=("path",))
    for values, where in rows:
        path = values.get("path")
        if not isinstance(path, str) or not path.strip():
            raise DataError(f"{where} has no path; give each file's path in 'path'.")
        if span_of(values, where) != (0.0, None):
            raise UsageError(
                f"{where} gives a start or end, but whole files are read here; cut the file, or leave it out."
            )
        yield file.parent / path.strip()


def is_readable(path: Path, reader: Reader) -> bool:
    """Is this the name of a file of a kind the reader knows?"""
    return path.name.lower().endswith(tuple(extension.lower() for extension in reader.extensions))


def require_readable(path: Path, reader: Reader) -> None:
    """UsageError for a path that is wrong, before anything is read."""
    if path.is_dir():
        raise UsageError(f"{quoted(path)} is a folder; give a file, or use `bridle tokenize` or `bridle embed` on it.")
    if not path.exists():
        raise UsageError(f"{quoted(path)} does not exist; check the path.")
    if not is_readable(path, reader):
        raise UsageError(f"{quoted(path)} is not of a kind this model reads; it reads {' '.join(reader.extensions)}.")
