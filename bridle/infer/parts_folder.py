"""A folder of parts: codes or features of a corpus of any size, by any number of processes, which can be stopped.

    DIR/part-00000512.npz             the rows of items that follow one another, the first of them number 512
    DIR/index.json                    the header and all parts in order; it is there when everything is done
    DIR/quarantine.jsonl              items that could not be read, with the reason
    DIR/job/job.json                  until then: what is computed, of which items, and how they are cut into stretches
    DIR/job/part-00000512.parts/      a part in the making, see `parts`
    DIR/job/part-00000512.json        a note about a part, written last: how far it goes, and what could not be read

Items are cut into stretches of equal length, and stretch s is the work of rank s mod the number of ranks. Since a part
never leaves its stretch, another number of ranks continues the same parts. A part counts when its note is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bridle import failpoints
from bridle.errors import DataError, UsageError, quoted
from bridle.files import locked_folder, read_json, read_lines, replacing, sha256_of, write_json
from bridle.infer.columns import LEDGER, Column, Entry, Parts
from bridle.infer.inputs import Item, Items
from bridle.infer.writers import write_result
from bridle.runs.checkpoint import is_count

JOB, INDEX, QUARANTINE = "job", "index.json", "quarantine.jsonl"
LONGEST_STRETCH = 4096  # items
STRETCHES_PER_RANK = 8  # at least, where there are enough items, so that no rank waits long for another


class Index(NamedTuple):
    """A finished folder."""

    header: dict[str, Any]
    parts: list[Path]
    files: int
    hashes: dict[Path, str]  # SHA-256 of the parts


class Corpus(NamedTuple):
    """The folder, and what goes into it."""

    folder: Path
    items: Items
    columns: tuple[Column, ...]
    header: Mapping[str, Any]
    pooled: bool
    suffix: str  # of the parts' format
    part_bytes: int  # at which a part ends; a single file may be more
    stretch: int  # items

    def described(self) -> dict[str, Any]:
        """What a command must have in common with the one it continues."""
        names = hashlib.sha256()
        for item in self.items:
            names.update(item.name.encode() + b"\0")
        return {
            **self.header,
            "columns": self.columns,
            "files": len(self.items),
            "names": names.hexdigest()[:16],
            "part_format": self.suffix,
            "part_bytes": self.part_bytes,
        }

    def stretches(self, rank: int, ranks: int) -> Iterator[range]:
        """The items of a rank."""
        for start in range(rank * self.stretch, len(self.items), ranks * self.stretch):
            yield range(start, min(start + self.stretch, len(self.items)))

    def end_of(self, number: int) -> int:
        """The end of the stretch that holds an item."""
        return min((number // self.stretch + 1) * self.stretch, len(self.items))

    @property
    def job(self) -> Path:
        """What is needed until the index is there."""
        return self.folder / JOB

    def parts_at(self, first: int) -> Path:
        return self.job / f"part-{first:08}.parts"

    def open_parts(self, first: int) -> Parts:
        return Parts(self.parts_at(first), columns=self.columns, job=self.header)

    def note(self, first: int) -> dict[str, Any] | None:
        """What is known of a part that counts."""
        path = self.job / f"part-{first:08}.json"
        return read_object(path) if path.exists() else None

    def publish(self, first: int, parts: Parts) -> None:
        """Make a part count, then clear away what it was made of."""
        file = self.folder / f"part-{first:08}{self.suffix}"
        files = sum(1 for _ in parts.readable())
        if files:
            write_result(file, parts, self.header, pooled=self.pooled)
        failpoints.hit("export.before_note")
        note = {
            "first": first,
            "end": first + len(parts.entries),
            "file": file.name if files else None,
            "bytes": file.stat().st_size if files else 0,
            "sha256": sha256_of(file) if files else None,
            "files": files,
            "rows": parts.rows,
            "entries": [[entry.name, *entry.stamp, entry.reason] for entry in parts.entries],
        }
        write_json(self.job / f"part-{first:08}.json", note)
        failpoints.hit("export.after_note")
        parts.remove()

    def check(self, entries: list[Entry], first: int) -> None:
        """Are finished items still what they were?"""
        for number, entry in enumerate(entries, start=first):
            if (entry.name, entry.stamp) != (self.items[number].name, self.items[number].stamp()):
                raise UsageError(
                    f"{quoted(self.folder)} holds an unfinished job, but {quoted(entry.name)} has changed since; give "
                    "--overwrite to begin anew."
                )


def prepare(corpus: Corpus, *, ranks: int, overwrite: bool) -> int:
    """Begin or continue the job in its folder; how many items make a stretch. For one process of them all."""
    folder, job = corpus.folder, corpus.job / "job.json"
    if overwrite:
        clear(folder)
    if (folder / INDEX).exists():
        raise UsageError(f"{quoted(folder)} exists and is finished; give --overwrite to replace it, or another --out.")
    if not job.exists() and any(path.name not in (JOB, QUARANTINE) for path in folder.iterdir()):
        raise UsageError(f"{quoted(folder)} holds something else; give another --out, or remove it.")
    described = json.loads(json.dumps(corpus.described()))
    if not job.exists():
        share = LONGEST_STRETCH if ranks == 1 else math.ceil(len(corpus.items) / (ranks * STRETCHES_PER_RANK))
        write_json(job, {**described, "stretch": min(share, LONGEST_STRETCH)})
    before = read_object(job)
    changed = [key for key in described if before.get(key) != described[key]]
    if changed:
        what = "files" if "names" in changed else changed[0]
        raise UsageError(
            f"{quoted(folder)} holds an unfinished job with another {what}; run that command again to finish it, or "
            "give --overwrite to begin anew."
        )
    return int(before["stretch"])


def clear(folder: Path) -> None:
    """Remove a job and its result, if there is one, and nothing else."""
    if (folder / JOB / "job.json").exists() or (folder / INDEX).exists():
        (folder / INDEX).unlink(missing_ok=True)
        for path in (*folder.glob("part-*"), *folder.glob(f"{JOB}/part-*.json"), folder / QUARANTINE):
            path.unlink(missing_ok=True)
        for path in folder.glob(f"{JOB}/part-*.parts"):
            shutil.rmtree(path)
        (folder / JOB / "job.json").unlink(missing_ok=True)


def resume(corpus: Corpus, stretch: range) -> tuple[int, int]:
    """The first item of a stretch that is not done, and the first of the part that it belongs to."""
    first = stretch.start
    while first < stretch.stop:
        note = corpus.note(first)
        if note is not None:
            entries = [Entry(name, (size, time), 0, reason) for name, size, time, reason in note["entries"]]
            corpus.check(entries, first)
            shutil.rmtree(corpus.parts_at(first), ignore_errors=True)
            first = int(note["end"])
            continue
        if not corpus.parts_at(first).exists():
            break
        with locked_folder(corpus.parts_at(first)):
            parts = corpus.open_parts(first)
            corpus.check(parts.entries, first)
            done = first + len(parts.entries)
            if done < stretch.stop and parts.size < corpus.part_bytes:
                return done, first
            corpus.publish(first, parts)  # only this was missing
            first = done
    return first, first


def reasons(corpus: Corpus) -> Iterator[str]:
    """Why items that are done could not be read."""
    for path in sorted(corpus.job.glob("part-*.json")):
        yield from (reason for *_, reason in read_object(path)["entries"] if reason is not None)
    for path in sorted(corpus.job.glob(f"part-*.parts/{LEDGER}")):
        yield from (row["reason"] for row in read_lines(path) if row["reason"] is not None)


class PartsWriter:
    """Takes the rows of items in order, and cuts them into parts."""

    def __init__(self, corpus: Corpus, begun: Mapping[int, int]) -> None:
        """`begun` names, for items that continue a part, the first item of that part."""
        self.corpus, self.begun = corpus, begun
        self.open = ExitStack()
        self.parts: Parts | None = None
        self.first = 0

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        self._at(number).add(values)

    def finish(self, number: int, item: Item, reason: str | None) -> None:
        parts = self._at(number)
        parts.finish(item.name, item.stamp(), reason=reason)
        if number + 1 == self.corpus.end_of(number) or parts.size >= self.corpus.part_bytes:
            with self.open.pop_all():
                self.corpus.publish(self.first, parts)
            self.parts = None

    def close(self) -> None:
        self.open.close()

    def _at(self, number: int) -> Parts:
        """The part of an item, opened when its first row comes."""
        if self.parts is None:
            self.first = self.begun.get(number, number)
            self.corpus.parts_at(self.first).mkdir(exist_ok=True)
            self.open.enter_context(locked_folder(self.corpus.parts_at(self.first)))
            self.parts = self.open.enter_context(self.corpus.open_parts(self.first))
        return self.parts


class Totals(NamedTuple):
    """A finished corpus in numbers."""

    files: int
    rows: int
    failed: int


def finish(corpus: Corpus) -> Totals:
    """Write the index once all parts count."""
    folder, notes = corpus.folder, list[dict[str, Any]]()
    first = failed = 0
    with replacing(folder / QUARANTINE) as temporary, temporary.open("w", encoding="utf-8") as list_:
        while first < len(corpus.items):
            note = corpus.note(first)
            if note is None:
                raise DataError(f"{quoted(folder)} lacks the part of item {first}; run the same command again.")
            for name, _, _, reason in note.pop("entries"):
                if reason is not None:
                    failed += 1
                    list_.write(json.dumps({"path": name, "reason": reason}) + "\n")
            notes.append(note)
            first = int(note["end"])
    if not failed:
        (folder / QUARANTINE).unlink()
    totals = Totals(sum(note["files"] for note in notes), sum(note["rows"] for note in notes), failed)
    if totals.files:
        failpoints.hit("export.before_index")
        write_json(folder / INDEX, {"header": corpus.header, **totals._asdict(), "parts": notes})
    shutil.rmtree(corpus.job, ignore_errors=True)
    return totals


def read_index(folder: Path) -> Index:
    """The parts of a finished folder, in order."""
    if not (folder / INDEX).exists():
        what = (
            "is not finished; run the same command again"
            if (folder / JOB / "job.json").exists()
            else "holds no codes or features; give the folder that --out named"
        )
        raise UsageError(f"{quoted(folder)} {what}.")
    found = read_object(folder / INDEX)
    try:
        header, files = dict(found["header"]), int(found["files"])
        notes = [
            (folder / Path(note["file"]).name, int(note["bytes"]), note.get("sha256"))  # the first ones had no hash
            for note in found["parts"]
            if note["file"] is not None
        ]
        missing = {"format", "kind"} - header.keys()
        if missing:
            raise ValueError(f"no {sorted(missing)[0]}")
        if not is_count(header["format"]) or not is_count(found["files"]) or files > sys.maxsize:
            raise ValueError("its format or its number of files is no whole number")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{quoted(folder / INDEX)} is not an index that bridle wrote ({quoted(error)}).") from error
    for path, size, _ in notes:
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            state = "is missing" if there is None else f"has {there} bytes instead of {size}"
            raise DataError(f"{quoted(path)} {state}; copy it again, or write the folder again.")
    hashes = {path: str(sha256) for path, _, sha256 in notes if sha256 is not None}
    return Index(header, [path for path, *_ in notes], files, hashes)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of ours."""
    return read_json(path, error=DataError, remedy="write the folder again")


@contextmanager
def first_in(corpus: Corpus, rank: int) -> Iterator[None]:
    """One command at a time in a folder: rank 0 holds the lock for all."""
    corpus.job.mkdir(parents=True, exist_ok=True)
    if rank > 0:
        yield
        return
    with locked_folder(corpus.job):
        yield
