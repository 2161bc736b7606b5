"""A folder of parts: codes or features of any number of items, by any number of processes, resumable.

    DIR/part-00000512.npz             the rows of items that follow one another, the first of them number 512
    DIR/index.json                    the header and all parts in order; written when everything is done
    DIR/quarantine.jsonl              items that could not be read, with the reason
    DIR/job/job.json                  until then: what is computed, of which items, and in which chunks
    DIR/job/part-00000512/            columns (until the part is written) and ledger of a part, see `staging`
    DIR/job/part-00000512.json        the note that makes a part count, written last

Items are cut into chunks of equal length, and chunk c belongs to rank c mod the number of ranks. Since a part never
leaves its chunk, another number of ranks continues the same parts.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bridle import failpoints
from bridle.data.listing.items import Item, Items
from bridle.errors import DataError, UsageError, quoted
from bridle.files import json_line, locked_folder, replacing, sha256_of, write_json, write_text
from bridle.infer.formats import writer_of
from bridle.infer.header import Header, PartNote, PartsIndex, read_record
from bridle.infer.staging import LEDGER, Column, StagedPart, read_ledger

JOB, INDEX, QUARANTINE = "job", "index.json", "quarantine.jsonl"
LONGEST_CHUNK = 4096  # items
CHUNKS_PER_RANK = 8  # at least, where there are enough items, so that no rank waits long for another


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
        mine, theirs = self._settings(), other._settings()
        return [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]

    def _settings(self) -> dict[str, object]:
        return {**self.header.model_dump(), **self.model_dump(exclude={"header", "chunk"})}


def names_digest(items: Items) -> str:
    """16 hex digits that change with the items or their order."""
    names = hashlib.sha256()
    for item in items:
        names.update(item.name.encode() + b"\0")
    return names.hexdigest()[:16]


class PartsFolder:
    """The folder of one job."""

    def __init__(self, folder: Path, items: Items, job: Job) -> None:
        self.folder, self.items, self.job = folder, items, job
        self.state = folder / JOB  # what is needed until the index is there

    @contextmanager
    def locked(self, rank: int) -> Iterator[None]:
        """One command at a time in a folder: rank 0 holds the lock for all."""
        self.state.mkdir(parents=True, exist_ok=True)
        if rank > 0:
            yield
            return
        with locked_folder(self.state):
            yield

    def prepare(self, *, ranks: int, overwrite: bool) -> int:
        """Begin or continue the job; returns the items of a chunk. Called by one process for all."""
        stored = self.state / "job.json"
        if overwrite and ((self.folder / INDEX).exists() or (stored.exists() and self._misfit() is not None)):
            self.clear()
        if (self.folder / INDEX).exists():
            raise UsageError(
                f"{quoted(self.folder)} exists and is finished; give --overwrite to replace it, or another --out."
            )
        if not stored.exists():
            if any(path.name not in (JOB, QUARANTINE) for path in self.folder.iterdir()):
                raise UsageError(f"{quoted(self.folder)} holds something else; give another --out, or remove it.")
            write_json(stored, self.job.model_copy(update={"chunk": self._chunk(ranks)}).model_dump(mode="json"))
        elif (changed := self._changed_settings()) is not None:
            raise UsageError(changed)
        return read_record(stored, Job).chunk

    def _chunk(self, ranks: int) -> int:
        if self.job.part_bytes is None:
            return max(len(self.items), 1)
        share = math.ceil(len(self.items) / (ranks * CHUNKS_PER_RANK)) if ranks > 1 else LONGEST_CHUNK
        return min(max(share, 1), LONGEST_CHUNK)

    def _misfit(self) -> str | None:
        """Why the unfinished job cannot be continued."""
        return self._changed_settings() or next(filter(None, map(self._changed_item, self._firsts())), None)

    def _changed_settings(self) -> str | None:
        changed = self.job.differences(read_record(self.state / "job.json", Job))
        if not changed:
            return None
        what = "files" if "names" in changed else changed[0]
        return (
            f"{quoted(self.folder)} holds an unfinished job with another {what}; run that command again to finish it, "
            "or give --overwrite to start over."
        )

    def _changed_item(self, first: int) -> str | None:
        for number, (entry, _) in enumerate(read_ledger(self.staged(first) / LEDGER), start=first):
            if self.items[number].stamp() != entry.stamp:
                return (
                    f"{quoted(self.folder)} holds an unfinished job, but {quoted(entry.name)} has changed since; give "
                    "--overwrite to start over."
                )
        return None

    def clear(self) -> None:
        """Remove a job and its result, and nothing else."""
        (self.folder / INDEX).unlink(missing_ok=True)
        for path in (*self.folder.glob("part-*"), self.folder / QUARANTINE, *self.state.glob("*.json")):
            path.unlink(missing_ok=True)
        for path in self.state.glob("part-*/"):
            shutil.rmtree(path)

    def chunks(self, rank: int, ranks: int) -> Iterator[range]:
        """The items of a rank."""
        chunk = self.job.chunk
        for start in range(rank * chunk, len(self.items), ranks * chunk):
            yield range(start, min(start + chunk, len(self.items)))

    def resume(self, chunk: range) -> tuple[int, int]:
        """The first item of a chunk that is not done, and the first of the part that it belongs to."""
        first = chunk.start
        while first < chunk.stop:
            if not self.staged(first).exists():
                break
            if (changed := self._changed_item(first)) is not None:
                raise UsageError(changed)
            note = self.note(first)
            if note is None:
                with locked_folder(self.staged(first)):
                    part = self.open_part(first)
                    if first + part.items < chunk.stop and not self.is_full(part):
                        return first + part.items, first
                    note = self.publish(first, part)
            first = note.end
        return first, first

    def failures(self) -> Iterator[tuple[str, str]]:
        """Name and reason of the items that could not be read so far."""
        for first in self._firsts():
            for entry, _ in read_ledger(self.staged(first) / LEDGER):
                if entry.reason is not None:
                    yield entry.name, entry.reason

    def _firsts(self) -> list[int]:
        return sorted(int(path.name.removeprefix("part-")) for path in self.state.glob("part-*/"))

    def staged(self, first: int) -> Path:
        return self.state / f"part-{first:08}"

    def open_part(self, first: int) -> StagedPart:
        return StagedPart(self.staged(first), self.job.columns)

    def is_full(self, part: StagedPart) -> bool:
        return self.job.part_bytes is not None and part.size >= self.job.part_bytes

    def note(self, first: int) -> PartNote | None:
        """The note of a part that counts."""
        path = self.state / f"part-{first:08}.json"
        return read_record(path, PartNote) if path.exists() else None

    def publish(self, first: int, part: StagedPart) -> PartNote:
        """Write a part in its format and make it count; its rows are then removed from the staged columns."""
        file = self.folder / f"part-{first:08}{self.job.part_format}"
        files = sum(1 for _ in part.readable())
        if files:
            write_part(file, part, self.job.header)
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
        part.remove_columns()
        return note

    def finish(self) -> PartsIndex:
        """The index of all parts; the items that could not be read are listed in quarantine.jsonl."""
        notes, first = list[PartNote](), 0
        while first < len(self.items):
            note = self.note(first)
            if note is None:
                raise DataError(f"{quoted(self.folder)} lacks the part of item {first}; run the same command again.")
            notes.append(note)
            first = note.end
        failed = list(self.failures())
        if failed:
            lines = "".join(json_line({"path": name, "reason": reason}) for name, reason in failed)
            write_text(self.folder / QUARANTINE, lines)
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


def write_part(out: Path, part: StagedPart, header: Header) -> None:
    """Write a part as one file, which is there whole or not at all."""
    with replacing(out) as temporary, temporary.open("wb") as file:
        writer_of(out).write(file, part, header)


class PartsWriter:
    """Takes the rows of items in order, and cuts them into parts."""

    def __init__(self, folder: PartsFolder, begun: Mapping[int, int]) -> None:
        """`begun` names, for items that continue a part, the first item of that part."""
        self.folder, self.begun = folder, begun
        self.open_files = ExitStack()
        self.part: StagedPart | None = None
        self.first = 0

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Append rows of item `number`, by column."""
        self._part_of(number).add(values)

    def finish(self, number: int, item: Item, reason: str | None) -> None:
        """Item `number` is done, or could not be read."""
        part, job = self._part_of(number), self.folder.job
        part.finish(item.name, item.stamp(), reason=reason)
        end = min((number // job.chunk + 1) * job.chunk, len(self.folder.items))
        if number + 1 == end or self.folder.is_full(part):
            with self.open_files.pop_all():
                self.folder.publish(self.first, part)
            self.part = None

    def close(self) -> None:
        self.open_files.close()

    def _part_of(self, number: int) -> StagedPart:
        """The part of an item, opened when its first row comes."""
        if self.part is None:
            self.first = self.begun.get(number, number)
            self.folder.staged(self.first).mkdir(exist_ok=True)
            self.open_files.enter_context(locked_folder(self.folder.staged(self.first)))
            self.part = self.open_files.enter_context(self.folder.open_part(self.first))
        return self.part
