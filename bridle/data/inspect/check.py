"""Every media file below a folder, or in a manifest, decoded by worker processes: which ones are bad, and why.

Rows of the report file, one JSON object per line, in the order of the files, wrong rates after all others:
    {"path": …, "finding": …, "detail": …}      one for each finding
    {"summary": {…}}                            the last line
"""

from __future__ import annotations

import csv
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridle.data.inspect.findings import UNUSABLE, CheckOptions, Facts, Finding
from bridle.data.inspect.inspection import inspect_file
from bridle.data.listing.columns import WHOLE, MemberList, MultiLabels, PathList
from bridle.data.listing.folders import files_below, printable
from bridle.data.listing.layouts import find_listing, holds_shards
from bridle.data.listing.manifest import MANIFESTS, manifest_rows
from bridle.data.listing.table import DataListing, as_tuple
from bridle.data.loading.watchdog import watched
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import (
    Modality,
    all_extensions,
    file_modalities,
    file_modality,
    find_modality,
    modality_of_file,
)
from bridle.data.shards.tar_member import Location, TarMember
from bridle.errors import DataError, UsageError, quoted
from bridle.files import replacing

EXAMPLES = 3  # files named for each finding

Tell = Callable[[int, int], None]  # files done, files in all


class Lengths(NamedTuple):
    """How long the sounds and videos are, in seconds."""

    shortest: float
    median: float
    longest: float
    total: float


class Report:
    """What a check found: counts that grow with every file; of a million files it keeps a few numbers each."""

    def __init__(self, paths: Sequence[Location]) -> None:
        self.paths = paths
        self.files: Counter[str] = Counter()  # by kind
        self.findings: Counter[str] = Counter()  # files with each finding
        self.examples: dict[str, list[tuple[str, str]]] = {}  # by finding: path and detail of the first files
        self.unusable: set[int] = set()  # files that pretraining would quarantine
        self.flagged: set[int] = set()  # files with any finding
        self.by_rate: dict[int, array[int]] = {}  # files by sample rate
        self.sizes: Counter[str] = Counter()  # files by width×height
        self.seconds = array("d")

    @property
    def rates(self) -> dict[int, int]:
        """Number of files by sample rate, most frequent first."""
        return dict(Counter({rate: len(files) for rate, files in self.by_rate.items()}).most_common())

    @property
    def lengths(self) -> Lengths | None:
        """Of the files that have a length."""
        return lengths_of(np.frombuffer(self.seconds)) if self.seconds else None

    def summary(self) -> dict[str, Any]:
        """The report without its examples, as JSON can hold it."""
        return {
            "files": self.files,
            "flagged": len(self.flagged),
            "unusable": len(self.unusable),
            "findings": dict(self.findings.most_common()),
            "rates": {str(rate): count for rate, count in self.rates.items()},
            "sizes": dict(self.sizes.most_common()),
            "seconds": None if self.lengths is None else self.lengths._asdict(),
        }

    def add(self, index: int, facts: Facts) -> tuple[Finding, ...]:
        """Count one file; returns its findings."""
        self.files[facts.kind] += 1
        if any(finding.name in UNUSABLE for finding in facts.findings):
            self.unusable.add(index)
        if facts.rate is not None:
            self.by_rate.setdefault(facts.rate, array("q")).append(index)
        if facts.size is not None:
            self.sizes[facts.size] += 1
        if facts.seconds is not None:
            self.seconds.append(facts.seconds)
        for finding in facts.findings:
            self._count(index, finding)
        return facts.findings

    def add_wrong_rates(self, rate: int | None) -> Iterator[tuple[int, Finding]]:
        """Files whose rate is not `rate`, or not the commonest one; known only when all files were seen."""
        if not self.by_rate:
            return
        right = rate or max(self.by_rate, key=lambda known: (len(self.by_rate[known]), known))
        wrong = sorted((index, other) for other, files in self.by_rate.items() if other != right for index in files)
        for index, other in wrong:
            finding = Finding("wrong rate", f"{other} Hz, expected {right} Hz")
            self._count(index, finding)
            yield index, finding

    def _count(self, index: int, finding: Finding) -> None:
        self.findings[finding.name] += 1
        self.flagged.add(index)
        examples = self.examples.setdefault(finding.name, [])
        if len(examples) < EXAMPLES:
            examples.append((self._short_name(index), finding.detail))

    def _short_name(self, index: int) -> str:
        """The path below the folder that is checked."""
        path = self.paths[index]
        if isinstance(self.paths, PathList) and isinstance(path, Path):
            return printable(path.relative_to(self.paths.root))
        return printable(path)


def check_folder(
    path: Path,
    *,
    kind: str = "auto",
    rate: int | None = None,
    shortest: float = 0.1,
    frames: int = CheckOptions().frames,
    workers: int = 0,
    out: Path | None = None,
    tell: Tell | None = None,
) -> Report:
    """Check every media file below `path`, or listed in the manifest `path`; without `rate` the commonest is right.

    At least one worker: a file that makes its decoder crash is a finding, and not the end.
    """
    wanted = None if kind == "auto" else file_modality(kind, option="--kind")
    paths = find_media(path, wanted)
    other = wanted or commonest_modality(path.name for path in paths[:1000])
    look = partial(inspect_at, paths, other, wanted, CheckOptions(shortest, frames))
    report = Report(paths)
    with nullcontext() if out is None else out.open("w", encoding="utf-8") as file:

        def write(entry: dict[str, Any]) -> None:
            if file is not None:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                file.flush()  # what was found survives Ctrl-C

        found = map_in_order(look, range(len(paths)), workers=max(1, workers), records=(Facts, Finding))
        for index, facts in enumerate(found):
            for finding in report.add(index, facts):
                write(row(paths[index], finding))
            if tell is not None:
                tell(index + 1, len(paths))
        for index, finding in report.add_wrong_rates(rate):
            write(row(paths[index], finding))
        write({"summary": report.summary()})
    return report


def write_good(path: Path, report: Report, out: Path) -> int:
    """Write a manifest of the usable files of a data set with their labels, splits and folds; returns their number."""
    found = find_listing(path, extensions=commonest_modality(file.name for file in find_media(path)).extensions)
    label = "labels" if isinstance(found.train.labels, MultiLabels) else "label"
    folder, classes, rows = out.absolute().parent, found.classes or (), list[dict[str, object]]()
    bad = {report.paths[index] for index in report.unusable}
    for split, part in (("train", found.train), ("test", found.test)):
        for i, file in enumerate([] if part is None else part.paths):
            if part is None or not isinstance(file, Path) or file in bad:
                continue
            start, end = WHOLE if part.spans is None else part.spans[i]
            row: dict[str, object] = {"path": os.path.relpath(file.absolute(), folder), "split": split}
            if part.labels is not None:
                row[label] = ";".join(classes[number] for number in as_tuple(part.labels[i]))
            if found.folds is not None:
                row["fold"] = found.folds[i]
            rows.append(row if part.spans is None else row | {"start": start, "end": "" if end is None else end})
    with replacing(out) as temporary, temporary.open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def find_media(path: Path, wanted: Modality | None = None) -> Sequence[Location]:
    """The files to check: below a folder, in a manifest, in shards, or the one file itself; each once."""
    known = file_modalities() if wanted is None else (wanted,)
    endings, what = all_extensions(known), "media" if wanted is None else wanted.kind
    if holds_shards(path):
        return members_of(find_listing(path, extensions=endings))
    if path.is_file() and path.suffix.lower() in MANIFESTS:
        return listed_media(path, endings, what)
    if path.is_file():
        if not path.name.lower().endswith(endings):
            raise UsageError(f"{quoted(path)} is neither a manifest ({' '.join(MANIFESTS)}) nor a {what} file.")
        return [path]
    if not path.is_dir():
        raise UsageError(f"{quoted(path)} does not exist; give a folder of media files or a manifest.")
    _, names, others = files_below(path, endings)
    if not names:
        raise DataError(f"no {what} files in {quoted(path)} or its folders ({others} files of other kinds).")
    return PathList(path, names)


def members_of(found: DataListing) -> MemberList:
    """All samples of shards; rows that speak of the same one follow one another."""
    members, last = MemberList([]), None
    for part in (found.train, found.test):
        for member in () if part is None else part.paths:
            assert isinstance(member, TarMember)
            if last is None or member.shard != last.shard:
                members.shards.append(member.shard)
            if member != last:
                members.append(member.name, offset=member.offset, size=member.size)
            last = member
    return members


def listed_media(manifest: Path, endings: tuple[str, ...], what: str) -> Sequence[Path]:
    """The files of a manifest, whatever their split; those whose ending says nothing are taken for the wanted kind."""
    find_listing(manifest, extensions=())  # are its rows sound?
    named = dict.fromkeys(str(values["path"]).strip() for values, _ in manifest_rows(manifest))
    media = [name for name in named if name.lower().endswith(endings) or modality_of_file(name) is None]
    if not any(name.lower().endswith(endings) for name in media):
        raise DataError(f"no {what} files in {quoted(manifest)} ({len(named)} files of other kinds).")
    return [manifest.parent / name for name in media]


def commonest_modality(names: Iterable[str]) -> Modality:
    """The modality of most files, by the endings of their names."""
    found = Counter(own.name for name in names if (own := modality_of_file(name)) is not None)
    if not found:
        raise DataError(f"no {', '.join(known.items for known in file_modalities())} among the files; name a --recipe.")
    return find_modality(found.most_common(1)[0][0])


def inspect_at(
    paths: Sequence[Location], other: Modality, wanted: Modality | None, options: CheckOptions, index: int
) -> Facts:
    """File number `index`, in a worker: as one of the `wanted` modality, or by its ending, or else of `other`."""
    path = paths[index]
    modality = wanted or modality_of_file(path.name) or other
    try:
        with watched(path):
            return inspect_file(path, modality, options)
    except DataError as error:  # it made a worker crash, or hang
        return Facts(modality.kind).found("undecodable", str(error).removeprefix(f"{quoted(path)} ").rstrip("."))


def lengths_of(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> Lengths:
    return Lengths(float(seconds.min()), float(np.median(seconds)), float(seconds.max()), float(seconds.sum()))


def row(path: Location, finding: Finding) -> dict[str, Any]:
    return {"path": printable(path), "finding": finding.name, "detail": finding.detail}
