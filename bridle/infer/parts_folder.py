"""A folder of parts: codes or features of any number of items, by any number of processes, resumable.

    DIR/part-00000512.npz               the rows of items that follow one another, the first of them number 512
    DIR/index.json                      the header and all parts in order; written when everything is done
    DIR/quarantine.jsonl                items that could not be read, with the reason
    DIR/job/job.json                    until then: what is computed, of which items, and in which chunks
    DIR/job/part-00000512/NAME.bin      the rows of column NAME, as numpy stores them, until the part is written
    DIR/job/part-00000512/ledger.jsonl  one line per finished item: name, size and change time, rows, why it failed
    DIR/job/part-00000512.json          the note that makes a part count, written last

An item counts when its line is in the ledger; rows behind the last line are cut off when the work continues. Items are
cut into chunks of equal length, and chunk c belongs to rank c mod the number of ranks. Since a part never leaves its
chunk, another number of ranks continues the same parts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import BaseModel

from bridle import failpoints
from bridle.data.listing.items import Item, Items
from bridle.errors import DataError, UsageError, quoted
from bridle.files import json_line, locked_folder, replacing, sha256_of, write_json, write_text
from bridle.infer.formats import Array, Content, writer_of
from bridle.infer.read import INDEX, JOB, Header, PartNote, PartsIndex, read_record

QUARANTINE, LEDGER = "quarantine.jsonl", "ledger.jsonl"
LONGEST_CHUNK = 4096  # items
CHECK_ROWS = 65_536  # whose checksums are computed together
CHUNKS_PER_RANK = 8  # at least, where there are enough items, so that no rank waits long for another


class Column(NamedTuple):
    """One array of the result: (rows,), or (rows, width)."""

    name: str
    dtype: str  # as numpy writes it, "<i4"
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * (self.width or 1)


class LedgerEntry(NamedTuple):
    """A finished item."""

    name: str
    stamp: tuple[int, int]  # size and change time of its file, which show whether it is still the same
    rows: int
    reason: str | None = None  # why it could not be read


def read_ledger(path: Path) -> Iterator[tuple[LedgerEntry, int]]:
    """The entries of a ledger and the byte at which each ends, up to a line that a crash cut short."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                found = json.loads(line)
                size, changed = found["stamp"]
                entry = LedgerEntry(found["name"], (size, changed), found["rows"], found["reason"])
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield entry, end


def prefix_checks(codes: Array) -> tuple[int, ...]:
    """CRC-32 of codes (rows, M): of the first stage, of the first two, …, of all."""
    checks = [0] * codes.shape[1]
    for begin in range(0, len(codes), CHECK_ROWS):
        some = codes[begin : begin + CHECK_ROWS]
        for stages in range(1, codes.shape[1] + 1):
            checks[stages - 1] = zlib.crc32(np.ascontiguousarray(some[:, :stages]).data, checks[stages - 1])
    return tuple(checks)


class StagedPart:
    """A part being written: columns and ledger in `folder`, which may hold the beginning of the same part already."""

    def __init__(self, folder: Path, columns: tuple[Column, ...]) -> None:
        """Count the finished items whose rows are all stored: a power cut can lose rows that the ledger knows."""
        self.folder, self.columns = folder, columns
        self.items = self.rows = 0  # finished items, and their rows
        self.unfinished_rows = self.ledger_bytes = 0
        self.files: dict[str, BinaryIO] = {}  # while they are open
        paths = {column: folder / f"{column.name}.bin" for column in columns}
        stored = min((path.stat().st_size if path.exists() else 0) // c.row_bytes for c, path in paths.items())
        for entry, end in read_ledger(folder / LEDGER):
            if self.rows + entry.rows > stored:
                break
            self.rows, self.items, self.ledger_bytes = self.rows + entry.rows, self.items + 1, end

    @property
    def size(self) -> int:
        """Bytes of the finished rows."""
        return self.rows * sum(column.row_bytes for column in self.columns)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open its files for more items, behind the finished ones."""
        sizes = {column.name: self.rows * column.row_bytes for column in self.columns}
        with ExitStack() as stack:
            for name, size in {**sizes, LEDGER: self.ledger_bytes}.items():
                path = self.folder / (name if name == LEDGER else f"{name}.bin")
                self.files[name] = stack.enter_context(path.open("ab"))
                self.files[name].truncate(size)
            yield

    def add(self, values: Mapping[str, Array]) -> None:
        """Append rows of the item being written, by column."""
        for column in self.columns:
            self.files[column.name].write(np.ascontiguousarray(values[column.name], dtype=column.dtype).data)
        self.unfinished_rows += len(values[self.columns[0].name])

    def finish(self, item: Item, reason: str | None) -> None:
        """End the item being written; with a reason it could not be read, and its rows are dropped."""
        for column in self.columns:
            self.files[column.name].flush()
            if reason is not None:
                self.files[column.name].truncate(self.rows * column.row_bytes)
        entry = LedgerEntry(item.name, item.stamp(), self.unfinished_rows if reason is None else 0, reason)
        self.rows, self.items, self.unfinished_rows = self.rows + entry.rows, self.items + 1, 0
        failpoints.hit("export.before_ledger")
        self.ledger_bytes += self.files[LEDGER].write(json_line(entry._asdict()).encode())
        self.files[LEDGER].flush()
        failpoints.hit("export.file_done")

    def content(self, header: Header) -> Content:
        """All finished rows, mapped and not read; OSError if a file is shorter than the ledger says."""
        columns: dict[str, Array] = {}
        for name, dtype, width in self.columns:
            path, shape = self.folder / f"{name}.bin", (self.rows, *(() if width is None else (width,)))
            if path.stat().st_size < math.prod(shape) * np.dtype(dtype).itemsize:
                raise OSError(f"{path} is shorter than its ledger says")
            columns[name] = np.memmap(path, dtype, "r", shape=shape) if self.rows else np.zeros(shape, dtype)
        entries = [entry for entry, end in read_ledger(self.folder / LEDGER) if end <= self.ledger_bytes]
        readable = [entry for entry in entries if entry.reason is None]
        counts = [entry.rows for entry in readable] if header.pool is None else None
        if "codes" in columns:
            header = header.model_copy(update={"checks": prefix_checks(columns["codes"])})
        return Content(header.to_json(), [entry.name for entry in readable], counts, columns)


class Job(BaseModel):
    """job.json: what a command must have in common with the one it continues."""

    header: Header
    columns: tuple[Column, ...]
    files: int
    names: str  # digest of the items' names
    part_format: str  # file ending of the parts
    part_bytes: int | None  # at which a part ends; None: one part holds everything
    chunk: int = 0  # items; set by the first command

    def differences(self, other: Job) -> list[str]:
        """Names of the settings in which two jobs differ."""
        mine, theirs = (
            {**job.header.model_dump(), **job.model_dump(exclude={"header", "chunk"})} for job in (self, other)
        )
        return [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]


def names_digest(items: Items) -> str:
    """16 hex digits that change with the items or their order."""
    names = hashlib.sha256()
    for item in items:
        names.update(item.name.encode() + b"\0")
    return names.hexdigest()[:16]


class PartsFolder:
    """The folder of one job; takes the rows of items in order, and cuts them into parts."""

    def __init__(self, folder: Path, items: Items, job: Job) -> None:
        self.folder, self.items, self.job = folder, items, job
        self.state = folder / JOB  # what is needed until the index is there
        self.begun: dict[int, int] = {}  # for items that continue a part, the first item of that part
        self.part: StagedPart | None = None  # being written
        self.first = 0  # its first item
        self.open_files = ExitStack()

    def prepare(self, *, ranks: int, overwrite: bool) -> int:
        """Begin or continue the job; returns the items of a chunk. Called by one process for all."""
        stored, index = self.state / "job.json", self.folder / INDEX
        if overwrite and (index.exists() or (stored.exists() and self._misfit(self._firsts()) is not None)):
            self._clear()
        if index.exists():
            raise UsageError(
                f"{quoted(self.folder)} exists and is finished; give --overwrite to replace it, or another --out."
            )
        if not stored.exists():
            if any(path.name not in (JOB, QUARANTINE) for path in self.folder.iterdir()):
                raise UsageError(f"{quoted(self.folder)} holds something else; give another --out, or remove it.")
            write_json(stored, self.job.model_copy(update={"chunk": self._chunk(ranks)}).model_dump(mode="json"))
        elif (changed := self._misfit()) is not None:
            raise UsageError(changed)
        return read_record(stored, Job).chunk

    def _chunk(self, ranks: int) -> int:
        if self.job.part_bytes is None:
            return max(len(self.items), 1)
        share = math.ceil(len(self.items) / (ranks * CHUNKS_PER_RANK)) if ranks > 1 else LONGEST_CHUNK
        return min(max(share, 1), LONGEST_CHUNK)

    def _misfit(self, firsts: Iterable[int] = ()) -> str | None:
        """Why the unfinished job cannot be continued: its settings, or files of the parts `firsts`, are others now."""
        if changed := self.job.differences(read_record(self.state / "job.json", Job)):
            what = "files" if "names" in changed else changed[0]
            return (
                f"{quoted(self.folder)} holds an unfinished job with another {what}; run that command again to finish "
                "it, or give --overwrite to start over."
            )
        for first in firsts:
            for number, (entry, _) in enumerate(read_ledger(self._staged(first) / LEDGER), start=first):
                if self.items[number].stamp() != entry.stamp:
                    return (
                        f"{quoted(self.folder)} holds an unfinished job, but {quoted(entry.name)} has changed since; "
                        "give --overwrite to start over."
                    )
        return None

    def _clear(self) -> None:
        """Remove a job and its result, and nothing else."""
        (self.folder / INDEX).unlink(missing_ok=True)
        for path in (*self.folder.glob("part-*"), self.folder / QUARANTINE, *self.state.glob("*.json")):
            path.unlink(missing_ok=True)
        for path in self.state.glob("part-*/"):
            shutil.rmtree(path)

    def resume(self, rank: int, ranks: int) -> tuple[array[int], int]:
        """Numbers of the items of a rank that are not done, and how many are."""
        left, done, chunk = array("q"), 0, self.job.chunk
        for start in range(rank * chunk, len(self.items), ranks * chunk):
            stop = min(start + chunk, len(self.items))
            number = self._resume_chunk(start, stop)
            left.extend(range(number, stop))
            done += number - start
        return left, done

    def _resume_chunk(self, first: int, stop: int) -> int:
        """The first item of a chunk that is not done; a part that only lacks its note is published."""
        while first < stop and self._staged(first).exists():
            if (changed := self._misfit([first])) is not None:
                raise UsageError(changed)
            note = self._note(first)
            if note is None:
                with locked_folder(self._staged(first)):
                    part = StagedPart(self._staged(first), self.job.columns)
                    if first + part.items < stop and not self._is_full(part):
                        self.begun[first + part.items] = first
                        return first + part.items
                    note = self._publish(first, part)
            first = note.end
        return first

    def _firsts(self) -> list[int]:
        return sorted(int(path.name.removeprefix("part-")) for path in self.state.glob("part-*/"))

    def _staged(self, first: int) -> Path:
        return self.state / f"part-{first:08}"

    def _note(self, first: int) -> PartNote | None:
        path = self.state / f"part-{first:08}.json"
        return read_record(path, PartNote) if path.exists() else None

    def _is_full(self, part: StagedPart) -> bool:
        return self.job.part_bytes is not None and part.size >= self.job.part_bytes

    def failures(self) -> Iterator[tuple[str, str]]:
        """Name and reason of the items that could not be read so far."""
        for first in self._firsts():
            for entry, _ in read_ledger(self._staged(first) / LEDGER):
                if entry.reason is not None:
                    yield entry.name, entry.reason

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Append rows of item `number`, by column."""
        self._part_of(number).add(values)

    def finish_item(self, number: int, reason: str | None) -> None:
        """Item `number` is done, or could not be read."""
        part, chunk = self._part_of(number), self.job.chunk
        part.finish(self.items[number], reason)
        if number + 1 in ((number // chunk + 1) * chunk, len(self.items)) or self._is_full(part):
            with self.open_files.pop_all():
                self._publish(self.first, part)
            self.part = None

    def _part_of(self, number: int) -> StagedPart:
        """The part of an item, opened when its first row comes."""
        if self.part is None:
            self.first = self.begun.get(number, number)
            staged = self._staged(self.first)
            staged.mkdir(exist_ok=True)
            self.open_files.enter_context(locked_folder(staged))
            self.part = StagedPart(staged, self.job.columns)
            self.open_files.enter_context(self.part.opened())
        return self.part

    def _publish(self, first: int, part: StagedPart) -> PartNote:
        """Write a part in its format and make it count; its rows are then removed from the staged columns."""
        file = self.folder / f"part-{first:08}{self.job.part_format}"
        content = part.content(self.job.header)
        files = len(content.files)
        if files:
            with replacing(file) as temporary, temporary.open("wb") as out:
                writer_of(file).write(out, content)
        failpoints.hit("export.before_note")
        note = PartNote(
            first=first,
            end=first + part.items,
            file=file.name if files else None,
            bytes=file.stat().st_size if files else 0,
            sha256=sha256_of(file) if files else None,
            files=files,
            rows=part.rows,
        )
        write_json(self.state / f"part-{first:08}.json", note.model_dump(mode="json"))
        failpoints.hit("export.after_note")
        for path in part.folder.glob("*.bin"):
            path.unlink()
        return note

    def finish(self) -> PartsIndex:
        """The index of all parts; the items that could not be read are listed in quarantine.jsonl."""
        notes, first = list[PartNote](), 0
        while first < len(self.items):
            note = self._note(first)
            if note is None:
                raise DataError(f"{quoted(self.folder)} lacks the part of item {first}; run the same command again.")
            notes.append(note)
            first = note.end
        failed = [json_line({"path": name, "reason": reason}) for name, reason in self.failures()]
        if failed:
            write_text(self.folder / QUARANTINE, "".join(failed))
        else:
            (self.folder / QUARANTINE).unlink(missing_ok=True)
        files, rows = sum(note.files for note in notes), sum(note.rows for note in notes)
        return PartsIndex(header=self.job.header, files=files, rows=rows, failed=len(failed), parts=notes)

    def publish_index(self, index: PartsIndex) -> None:
        """Write index.json, which makes the folder readable, and remove the state of the job."""
        if index.files:
            failpoints.hit("export.before_index")
            write_json(self.folder / INDEX, index.model_dump(mode="json", exclude_unset=True))
        shutil.rmtree(self.state, ignore_errors=True)
