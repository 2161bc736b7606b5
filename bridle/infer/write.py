"""`bridle tokenize` and `bridle embed`: many files in, codes or features out, in constant memory and resumable.

Everything is written as a folder of parts (`parts_folder`). A single file OUT is a folder OUT.parts with one part,
which is moved to OUT when it is done; the files that could not be read are then listed in OUT.quarantine.jsonl.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from bridle import distributed
from bridle.console import ProgressLine, clock, eta
from bridle.data.listing.columns import Lazy
from bridle.data.listing.items import Inputs, Item, Items, find_inputs
from bridle.data.loading.worker_pool import note_unprotected
from bridle.data.modality import settings_of
from bridle.errors import DataError, UsageError, quoted
from bridle.infer.features import FeatureSpec
from bridle.infer.files import Compute, MeanCollector, WindowValues, token_rows, values_of_items
from bridle.infer.formats import writer_of
from bridle.infer.header import FORMAT, Header, PartsIndex, StoredGeometry
from bridle.infer.model import BATCH, Model
from bridle.infer.parts_folder import QUARANTINE, Job, PartsFolder, PartsWriter, names_digest
from bridle.infer.prefetch import Ended
from bridle.infer.staging import Column
from bridle.machine import StopRequest

MEGABYTE = 2**20


class Options(NamedTuple):
    """How files are processed; none of them changes what is computed."""

    batch: int = BATCH
    overwrite: bool = False  # replace a result that exists, and discard an unfinished job that does not fit
    strict: bool = False  # stop at the first file that cannot be read
    workers: int = 0  # processes that decode ahead
    part_mb: int = 256  # of a folder's parts
    part_format: str = "npz"


class Written(NamedTuple):
    """What was written."""

    out: Path
    files: int
    rows: int
    failed: int
    quarantine: Path | None  # the list of files that could not be read
    header: Header


class Task(NamedTuple):
    """What is computed of every item, and the columns it is stored in."""

    compute: Compute
    columns: tuple[Column, ...]
    header: Header


def tokenize_inputs(
    model: Model,
    named: Sequence[str] | Inputs,
    out: Path,
    *,
    stages: int | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
    stdin: IO[bytes] | None = None,
) -> Written:
    """Write the codes of all inputs as a file or a folder of parts."""
    compute, sizes = model.codes_of(stages=stages), model.config.quantizer.sizes
    kind = np.min_scalar_type(max(sizes) - 1)
    sizes = sizes[:stages]
    columns = (Column("codes", kind.str.replace("|", "<"), len(sizes)), *_position_columns(model))
    bits, rate = sum(math.log2(size) for size in sizes), _tokens_per_second(model)
    header = _header(model, kind="codes").model_copy(
        update={
            "codebook_sizes": tuple(sizes),
            "bits_per_token": bits,
            "bits_per_second": None if rate is None else rate * bits,
        }
    )
    return _run(model, Task(compute, columns, header), named, out, options, progress or ProgressLine(), stdin)


def embed_inputs(
    model: Model,
    named: Sequence[str] | Inputs,
    out: Path,
    *,
    spec: FeatureSpec | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
    stdin: IO[bytes] | None = None,
) -> Written:
    """Write the features of all inputs as a file or a folder of parts; `spec` is by default that of the run's probe."""
    progress = progress or ProgressLine()
    if spec is None:
        spec = model.probe_spec
    elif spec.pool is not None and spec != model.probe_spec:
        progress.note(
            f"note: features are {spec.describe()}; this run's probe uses {model.probe_spec.describe()} (--pool probe)."
        )
    header = _header(model, kind="features").model_copy(update=spec._asdict())
    width = spec.width(model.encoder.width, model.geometry.grid)
    columns = (Column("features", "<f4", width), *(() if spec.pool else _position_columns(model)))
    return _run(model, Task(model.features_of(spec), columns, header), named, out, options, progress, stdin)


def _position_columns(model: Model) -> tuple[Column, ...]:
    positions = Column("positions", "<i4", model.geometry.rank)
    return (Column("times", "<f8"), positions) if model.reader.timed else (positions,)


def _tokens_per_second(model: Model) -> float | None:
    geometry, seconds = model.geometry, model.reader.frame_seconds
    return None if seconds is None else math.prod(geometry.grid[1:]) / (geometry.patch[0] * seconds)


def _header(model: Model, **settings: str) -> Header:
    geometry, config = model.geometry, model.config
    # How files become frames, where that is a choice.
    front_end = {name: section.model_dump(mode="json") for name, section in settings_of(config).items()}
    return Header.model_validate(
        {
            "format": FORMAT,
            **settings,
            "bridle": version("bridle"),
            "run": config.name,
            "model": model.fingerprint,
            "geometry": StoredGeometry(channels=geometry.channels, input=geometry.input, patch=geometry.patch),
            "grid": geometry.grid,
            "frame_seconds": model.reader.frame_seconds,
            "tokens_per_second": _tokens_per_second(model),
            **front_end,
        }
    )


def _run(
    model: Model,
    task: Task,
    named: Sequence[str] | Inputs,
    out: Path,
    options: Options,
    progress: ProgressLine,
    stdin: IO[bytes] | None,
) -> Written:
    """Check what can be checked before anything is computed, find the inputs, and write them."""
    alone = distributed.world_size() == 1
    is_folder = out.suffix == "" or out.is_dir()
    if not is_folder and not alone:
        raise UsageError(
            f"--out {quoted(out)} is a single file; several processes write a folder, such as --out codes."
        )
    writer_of(out.with_suffix(f".{options.part_format}") if is_folder else out)
    if not is_folder and out.exists() and not options.overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    listed = (stdin or sys.stdin.buffer) if alone else None
    inputs = named if isinstance(named, Inputs) else find_inputs(named, reader=model.reader, stdin=listed)
    for note in inputs.notes:
        progress.note(note)
    job = Job(
        header=task.header,
        columns=task.columns,
        files=len(inputs.items),
        names=names_digest(inputs.items),
        part_format=f".{options.part_format}" if is_folder else out.suffix,
        part_bytes=options.part_mb * MEGABYTE if is_folder else None,
    )
    folder = PartsFolder(out if is_folder else out.with_name(f"{out.name}.parts"), inputs.items, job)
    index = _fill(model, task, folder, options, progress, publish=is_folder)
    return _published(out, folder, index) if is_folder else _moved(out, folder, index)


def _fill(
    model: Model, task: Task, folder: PartsFolder, options: Options, progress: ProgressLine, *, publish: bool
) -> PartsIndex:
    """Compute all items that are not done, those of this rank by this process."""
    rank, ranks = distributed.rank(), distributed.world_size()
    with folder.locked(rank), StopRequest().listening() as stop:
        chunk = distributed.done_once(lambda: folder.prepare(ranks=ranks, overwrite=options.overwrite))
        folder.job = folder.job.model_copy(update={"chunk": chunk})
        if len(set(distributed.gather_json(folder.job.names))) > 1:  # a folder may change while ranks look
            raise DataError("the processes did not find the same files; let them rest, and run the command again.")
        left, begun = array("q"), dict[int, int]()
        for items in folder.chunks(rank, ranks):
            number, begun_at = folder.resume(items)
            left.extend(range(number, items.stop))
            begun[number] = begun_at
        if options.strict and (failure := next(folder.failures(), None)) is not None:
            raise DataError(failure[1])  # found by an earlier command that was not strict
        share = sum(len(items) for items in folder.chunks(rank, ranks))
        if share > len(left):
            progress.note(f"continuing: {share - len(left)} of {share} files are done")
        writer = PartsWriter(folder, begun)
        try:
            compute_items(model, task, SomeItems(folder.items, left), writer, options, progress, stop)
        finally:
            writer.close()
        distributed.barrier()
        index = PartsIndex.model_validate(
            distributed.done_once(lambda: folder.finish().model_dump(mode="json", exclude_unset=True))
        )
        if publish:
            distributed.done_once(lambda: folder.publish_index(index))
    return index


def _published(out: Path, folder: PartsFolder, index: PartsIndex) -> Written:
    """The result of a folder."""
    quarantine = out / QUARANTINE
    if not index.files:
        raise DataError(f"none of the {index.failed} files could be read; the reasons are in {quoted(quarantine)}.")
    return Written(out, index.files, index.rows, index.failed, quarantine if index.failed else None, folder.job.header)


def _moved(out: Path, folder: PartsFolder, index: PartsIndex) -> Written:
    """Move the one part to `out`, and beside it the list of files that could not be read."""
    quarantine = out.with_name(f"{out.name}.quarantine.jsonl")
    quarantine.unlink(missing_ok=True)  # of an earlier result
    first = next(folder.failures(), None)
    if index.failed:
        (folder.folder / QUARANTINE).replace(quarantine)
    if index.files:
        (folder.folder / f"part-{0:08}{out.suffix}").replace(out)
    shutil.rmtree(folder.folder, ignore_errors=True)
    if not index.files:
        raise DataError(
            f"none of the {index.failed} files could be read; the reasons are in {quoted(quarantine)}, the first: "
            f"{first[1] if first else ''}"
        )
    return Written(out, index.files, index.rows, index.failed, quarantine if index.failed else None, folder.job.header)


class SomeItems(Lazy[Item]):
    """The items with these numbers."""

    def __init__(self, items: Items, numbers: Sequence[int]) -> None:
        self.items, self.numbers = items, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, at: int) -> Item:
        return self.items[self.numbers[at]]


def compute_items(
    model: Model,
    task: Task,
    items: SomeItems,
    writer: PartsWriter,
    options: Options,
    progress: ProgressLine,
    stop: StopRequest,
) -> None:
    """Compute items in order and give their rows to the writer."""
    if options.workers == 0:
        note_unprotected()
    rate = ProgressRate(files=len(items), tokens_per_second=task.header.tokens_per_second)
    name, pooled = task.columns[0].name, task.header.pooled
    mean = MeanCollector(model.geometry, task.header.axis)
    events = values_of_items(
        items, reader=model.reader, compute=task.compute, batch=options.batch, workers=options.workers
    )
    for event in events:
        if isinstance(event, WindowValues):
            rate.tokens += model.geometry.tokens if event.window.valid is None else int(event.window.valid.sum())
            if pooled:
                mean.add(event)
            else:
                rows = token_rows(event, model.reader, model.geometry)
                times = {} if rows.times is None else {"times": rows.times}
                writer.add(items.numbers[event.item], {name: rows.values, "positions": rows.positions, **times})
        else:
            _finish_item(event, items, mean if pooled else None, writer, strict=options.strict)
            mean = MeanCollector(model.geometry, task.header.axis)
            rate.done += 1
        progress.show(rate.text(), rate.text(), final=rate.done == rate.files)
        stop.leave(f"{rate.done} of {rate.files} files are done.")


def _finish_item(
    ended: Ended, items: SomeItems, mean: MeanCollector | None, writer: PartsWriter, *, strict: bool
) -> None:
    if ended.error is not None and strict:
        raise ended.error
    number = items.numbers[ended.item]
    if ended.error is None and mean is not None:
        writer.add(number, {"features": mean.mean()[None]})
    writer.finish(number, items[ended.item], None if ended.error is None else str(ended.error))


class ProgressRate:
    """Files and tokens done, and how fast."""

    def __init__(self, *, files: int, tokens_per_second: float | None) -> None:
        self.files, self.done, self.tokens = files, 0, 0
        self.tokens_per_second = tokens_per_second
        self.began = time.monotonic()

    def text(self) -> str:
        passed = max(time.monotonic() - self.began, 1e-9)
        shown = [f"{self.done}/{self.files} files", f"{self.done / passed:.1f} files/s"]
        if self.tokens_per_second is not None:
            seconds = self.tokens / self.tokens_per_second  # of what was recorded
            shown.append(f"{clock(seconds)} read, {seconds / passed:.0f}× realtime")
        if 0 < self.done < self.files:
            shown.append(eta(self.done, self.files, passed))
        return " · ".join(shown)
