"""Writes tar shards from any data set of files; see `reader` for reading them.

    OUT/train-000000.tar, …, OUT/test-000000.tar, …    samples in the order of the data set, labels beside them
    OUT/classes.txt                                    names of the classes, by number
    OUT/index/                                         every sample's place and label, so that nothing need be scanned
    OUT/shards.json                                    written last: counts, sizes and SHA-256 of all shards
    OUT/skipped.jsonl                                  files that could not be read, and why; only if there are any

Bytes depend on the files alone: no times, owners or process numbers go into a shard. A finished shard has a record in
OUT/.records, so that the same command goes on where a killed one stopped, and rewrites only what has changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bridle.data.inspect.statistics import guess_modality
from bridle.data.listing.folders import files_below
from bridle.data.listing.layouts import find_listing, holds_shards
from bridle.data.listing.table import DataListing, Listing
from bridle.data.listing.table_on_disk import FORMAT, store_index
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import Modality, all_extensions, file_modalities, file_modality
from bridle.data.shards.packing import pack, rows_of
from bridle.data.shards.reader import INDEX, scan_shards, shards_key, split_shards
from bridle.data.shards.tar_member import byte_count
from bridle.errors import DataError, UsageError, quoted
from bridle.files import locked as locked_file
from bridle.files import replacing, sha256_of, sha256_of_json, stamp, write_json

MANIFEST = "shards.json"
RECORDS = ".records"
SKIPPED = "skipped.jsonl"
SAMPLE_OVERHEAD = 2048  # bytes: headers, padding and a label

Tell = Callable[[int, int], None]  # samples done, samples in all


class Job(NamedTuple):
    """One shard to be written: its name, and which rows of the split go into it."""

    split: str
    number: int
    rows: range

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06d}.tar"


class Record(NamedTuple):
    """What a finished shard holds."""

    name: str
    split: str
    samples: int  # rows
    renamed: int  # samples whose key is not their name
    bytes: int
    sha256: str
    digest: str  # of all that went into it
    skipped: list[list[str]]  # path and reason


class Written(NamedTuple):
    """What a data set became."""

    out: Path
    shards: int
    kept: int  # of these, from an earlier run
    samples: dict[str, int]  # by split
    skipped: int
    renamed: int
    bytes: int
    notes: tuple[str, ...]


class Shards:
    """Everything that a worker needs to write any shard of a data set; `known` are those of an earlier run, by name."""

    def __init__(
        self, *, found: DataListing, root: Path, out: Path, extensions: Sequence[str], known: dict[str, Record]
    ) -> None:
        self.splits: dict[str, Listing] = {"train": found.train}
        if found.test is not None:
            self.splits["test"] = found.test
        self.folds, self.root, self.out, self.extensions, self.known = found.folds, root, out, tuple(extensions), known

    def write(self, job: Job) -> Record | OSError:
        """Write a shard, unless it is there already; an error of the disk is returned, or a worker would hide it."""
        try:
            folds = self.folds if job.split == "train" else None
            groups = list(rows_of(self.splits[job.split], job.rows, folds=folds, root=self.root))
            wanted = sha256_of_json([FORMAT, self.extensions, [group.facts() for group in groups]])
            target, known = self.out / job.name, self.known.get(job.name)
            if known is not None and known.digest == wanted and stamp(target)[0] == known.bytes:
                return known
            with replacing(target) as part:
                with part.open("wb") as file:
                    packed = pack(groups, file, extensions=self.extensions)
                record = Record(
                    name=job.name,
                    split=job.split,
                    bytes=part.stat().st_size,
                    sha256=sha256_of(part),
                    digest=wanted,
                    **packed._asdict(),
                )
                # In this order a kill leaves no shard without a record, and no record beside an older shard.
                target.unlink(missing_ok=True)
                write_json(self.out / RECORDS / f"{job.name}.json", record._asdict())
            return record
        except OSError as error:
            return error


class Gathered(NamedTuple):
    """A data set of files."""

    found: DataListing
    modality: Modality
    root: Path


def files_to_shard(path: Path, *, source: str | None) -> Gathered:
    """The files of a folder or manifest; without `source` they are of the commonest modality.

    Rows of a manifest that name files of another modality are left out when they are written, and listed as skipped.
    """
    if holds_shards(path):
        raise UsageError(f"{quoted(path)} holds shards already, which training reads as they are.")
    modality = guess_modality(path) if source is None else file_modality(source, option="--source")
    found = find_listing(path, extensions=modality.extensions)
    if path.is_file():
        return Gathered(found, modality, path.parent)
    names = files_below(path, all_extensions(file_modalities())).names
    if left := sum(not name.lower().endswith(modality.extensions) for name in names):
        note = f"{left} files of {quoted(path)} are of another kind than {modality.name} and are left out."
        found = found._replace(notes=(*found.notes, note))
    return Gathered(found, modality, path)


def write_shards(
    found: DataListing,
    *,
    source: str,
    extensions: Sequence[str],
    root: Path,
    out: Path,
    shard_mb: int = 256,
    workers: int = 0,
    tell: Tell | None = None,
) -> Written:
    """Write a data set of files as shards into `out`; what an earlier run finished is kept."""
    check_classes(found.classes)
    with locked(out):
        known = known_records(out)
        shards = Shards(found=found, root=root, out=out, extensions=extensions, known=known)
        jobs = [job for split, listing in shards.splits.items() for job in plan(split, listing, shard_mb << 20)]
        records: list[Record] = []
        done, total = 0, sum(len(job.rows) for job in jobs)
        tell = tell or (lambda done, total: None)
        if total > 1:
            tell(1, total)  # the clock starts
        for record in map_in_order(shards.write, jobs, workers=workers, records=(Record,)):
            if isinstance(record, OSError):
                raise record
            done += record.samples + len(record.skipped)
            records.append(record)
            tell(min(done, total - 1), total)
        check_held_out(records)
        samples = finish(records, found, source=source, extensions=extensions, out=out, workers=workers)
        tell(total, total)
    return Written(
        out=out,
        shards=len(records),
        kept=sum(known.get(record.name) == record for record in records),
        samples=samples,
        skipped=sum(len(record.skipped) for record in records),
        renamed=sum(record.renamed for record in records),
        bytes=sum(record.bytes for record in records),
        notes=found.notes,
    )


def plan(split: str, listing: Listing, limit: int) -> Iterator[Job]:
    """Rows of a split cut into shards of about `limit` bytes; rows that follow one another in a file stay together."""
    first, size, number, last = 0, 0, 0, None
    for at, path in enumerate(listing.paths):
        if path == last:
            continue
        last, more = path, max(byte_count(path), 0) + SAMPLE_OVERHEAD
        if size and size + more > limit:
            yield Job(split, number, range(first, at))
            first, size, number = at, 0, number + 1
        size += more
    yield Job(split, number, range(first, len(listing.paths)))


def known_records(out: Path) -> dict[str, Record]:
    """Shards that an earlier run finished, also one that was killed."""
    found: dict[str, Record] = {}
    rows: list[Any] = []
    for file in (out / MANIFEST, *sorted((out / RECORDS).glob("*.json"))):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            rows += values["shards"] if file.name == MANIFEST else [values]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # what cannot be read is written again
    for row in rows:
        if isinstance(row, dict) and set(row) == set(Record._fields):
            found[row["name"]] = Record(**row)
    return found


def check_classes(classes: Sequence[str] | None) -> None:
    """Can every class be a line of classes.txt?"""
    odd = next(
        (name for name in classes or () if not name or name != name.strip() or name.splitlines() != [name]), None
    )
    if odd is not None:
        raise DataError(f"the class {quoted(odd)} cannot be a line of classes.txt; rename it.")


def check_held_out(records: Sequence[Record]) -> None:
    """Scores need every sample, so that held-out files may not be missing."""
    bad = [row for record in records if record.split == "test" for row in record.skipped]
    if bad:
        raise DataError(
            f"{len(bad)} held-out files cannot be read, the first one {quoted(bad[0][0])}: {bad[0][1]}. Scores need "
            "all of them: mend or unlist them and run the same command again; finished shards are kept."
        )


def finish(
    records: Sequence[Record], found: DataListing, *, source: str, extensions: Sequence[str], out: Path, workers: int
) -> dict[str, int]:
    """Class names, index, list of skipped files, and the manifest at last; leftovers of other states are removed.

    Returns the number of samples of each split.
    """
    for name in known_records(out).keys() - {record.name for record in records}:
        (out / Path(name).name).unlink(missing_ok=True)
    if found.classes is None:
        (out / "classes.txt").unlink(missing_ok=True)
    else:
        (out / "classes.txt").write_text("".join(f"{name}\n" for name in found.classes), encoding="utf-8")
    skipped = [
        {"path": path, "shard": record.name, "reason": why} for record in records for path, why in record.skipped
    ]
    (out / SKIPPED).unlink(missing_ok=True)
    if skipped:
        (out / SKIPPED).write_text("".join(json.dumps(row) + "\n" for row in skipped), encoding="utf-8")
    files = split_shards(out)
    listing = scan_shards(files, extensions, workers=workers)
    store_index(out / INDEX, listing, key=shards_key(files, extensions), root=out)
    samples: dict[str, int] = {}
    for record in records:
        samples[record.split] = samples.get(record.split, 0) + record.samples
    facts = {
        "format": FORMAT,
        "source": source,
        "samples": samples,
        "classes": None if found.classes is None else len(found.classes),
        "skipped": len(skipped),
        "shards": [record._asdict() for record in records],
    }
    write_json(out / MANIFEST, facts)
    shutil.rmtree(out / RECORDS, ignore_errors=True)
    return samples


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder for one process alone; other people's files in it are respected."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {quoted(out)} is a file; give a folder.")
    out.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing shards to {quoted(out)}; wait for it, or stop it."
    with locked_file(out / f"{RECORDS}.lock", busy=busy):
        ours = known_records(out)  # only now: who writes adds shards between one look and the next
        foreign = next((file.name for file in sorted(out.glob("*.tar")) if file.name not in ours), None)
        if foreign is not None:
            raise UsageError(
                f"{quoted(out)} holds {quoted(foreign)}, which is not of this command; give another --out."
            )
        (out / RECORDS).mkdir(exist_ok=True)
        yield
