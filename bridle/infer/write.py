"""`bridle tokenize` and `bridle embed`: many files in, codes or features out, in constant memory and resumable.

Everything is written as a folder of parts (`parts_folder`). A single file OUT is a folder OUT.parts with one part,
which is moved to OUT when it is done; the files that could not be read are then listed in OUT.quarantine.jsonl.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bridle import distributed
from bridle.console import ProgressLine, clock, eta
from bridle.data.listing.columns import Chosen
from bridle.data.listing.items import Inputs, find_inputs
from bridle.data.loading.worker_pool import note_unprotected
from bridle.data.modality import settings_of
from bridle.errors import DataError, UsageError, quoted
from bridle.files import locked_folder
from bridle.infer.feature_spec import FeatureSpec, Pooled
from bridle.infer.file_rows import Collector, Compute, WindowValues, token_rows, values_of_items
from bridle.infer.formats import writer_of
from bridle.infer.model import BATCH, Model
from bridle.infer.parts_folder import QUARANTINE, Column, Job, PartsFolder, names_digest
from bridle.infer.read import FORMAT, Header, PartsIndex
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

    model: Model
    compute: Compute
    pooled: Pooled | None
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
    dtype = np.min_scalar_type(max(sizes) - 1).str.replace("|", "<")
    columns = (Column("codes", dtype, len(sizes[:stages])), *_position_columns(model))
    header = _header(model, kind="codes", codebook_sizes=sizes[:stages])
    return _run(Task(model, compute, None, columns, header), named, out, options, progress or ProgressLine(), stdin)


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
    progress, probe = progress or ProgressLine(), model.probe_spec
    spec = spec or probe
    if spec.pool is not None and spec != probe:
        progress.note(f"note: features are {spec.describe()}; this run's probe uses {probe.describe()} (--pool probe).")
    width = spec.width(model.encoder)
    columns = (Column("features", "<f4", width), *(() if spec.pool else _position_columns(model)))
    header = _header(model, kind="features", **spec._asdict())
    task = Task(model, model.features_of(spec), spec.layout(model.encoder), columns, header)
    return _run(task, named, out, options, progress, stdin)


def _position_columns(model: Model) -> tuple[Column, ...]:
    positions = Column("positions", "<i4", model.geometry.rank)
    return (Column("times", "<f8"), positions) if model.reader.timed else (positions,)


def _header(model: Model, **settings: Any) -> Header:
    """What is stored beside the rows; `settings` are those of codes or of features."""
    geometry, config, seconds = model.geometry, model.config, model.reader.frame_seconds
    rate = None if seconds is None else math.prod(geometry.grid[1:]) / (geometry.patch[0] * seconds)
    header: dict[str, Any] = {
        "format": FORMAT,
        "kind": settings.pop("kind"),
        "bridle": version("bridle"),
        "run": config.name,
        "model": model.fingerprint,
        "geometry": {"channels": geometry.channels, "input": geometry.input, "patch": geometry.patch},
        "grid": geometry.grid,
        "frame_seconds": seconds,
        "tokens_per_second": rate,
        # How files become frames, where that is a choice.
        **{name: section.model_dump(mode="json") for name, section in settings_of(config).items()},
        **settings,
    }
    if "codebook_sizes" in header:
        bits = sum(math.log2(size) for size in header["codebook_sizes"])
        header |= {"bits_per_token": bits, "bits_per_second": None if rate is None else rate * bits}
    return Header.model_validate(header)


def _run(
    task: Task,
    named: Sequence[str] | Inputs,
    out: Path,
    options: Options,
    progress: ProgressLine,
    stdin: IO[bytes] | None,
) -> Written:
    """Check what can be checked before anything is computed, find the inputs, and write them."""
    alone, is_folder = distributed.world_size() == 1, out.suffix == "" or out.is_dir()
    if not is_folder and not alone:
        raise UsageError(
            f"--out {quoted(out)} is a single file; several processes write a folder, such as --out codes."
        )
    part_format = f".{options.part_format}" if is_folder else out.suffix
    writer_of(out.with_suffix(part_format))
    if not is_folder and out.exists() and not options.overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    listed = (stdin or sys.stdin.buffer) if alone else None
    inputs = named if isinstance(named, Inputs) else find_inputs(named, reader=task.model.reader, stdin=listed)
    for note in inputs.notes:
        progress.note(note)
    job = Job(
        header=task.header,
        columns=task.columns,
        files=len(inputs.items),
        names=names_digest(inputs.items),
        part_format=part_format,
        part_bytes=options.part_mb * MEGABYTE if is_folder else None,
    )
    folder = PartsFolder(out if is_folder else out.with_name(f"{out.name}.parts"), inputs.items, job)
    index = _fill(task, folder, options, progress, publish=is_folder)
    quarantine = out / QUARANTINE if is_folder else _move(out, folder.folder, index)
    if not index.files:
        reason = json.loads(quarantine.read_text().splitlines()[0])["reason"]
        raise DataError(
            f"none of the {index.failed} files could be read; the reasons are in {quoted(quarantine)}, the first: "
            f"{reason}"
        )
    return Written(out, index.files, index.rows, index.failed, quarantine if index.failed else None, task.header)


def _fill(task: Task, folder: PartsFolder, options: Options, progress: ProgressLine, *, publish: bool) -> PartsIndex:
    """Compute all items that are not done, those of this rank by this process; returns the index."""
    rank, ranks = distributed.rank(), distributed.world_size()
    folder.state.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if rank == 0:  # one command at a time in a folder: rank 0 holds the lock for all
            stack.enter_context(locked_folder(folder.state))
        stop = stack.enter_context(StopRequest().listening())
        chunk = distributed.done_once(lambda: folder.prepare(ranks=ranks, overwrite=options.overwrite))
        folder.job = folder.job.model_copy(update={"chunk": chunk})
        if len(set(distributed.gather_json(folder.job.names))) > 1:  # a folder may change while ranks look
            raise DataError("the processes did not find the same files; let them rest, and run the command again.")
        left, done = folder.resume(rank, ranks)
        if options.strict and (failure := next(folder.failures(), None)) is not None:
            raise DataError(failure[1])  # found by an earlier command that was not strict
        if done:
            progress.note(f"continuing: {done} of {done + len(left)} files are done")
        with folder.open_files:
            compute_items(task, folder, left, options, progress, stop)
        distributed.barrier()
        found = distributed.done_once(lambda: folder.finish().model_dump(mode="json", exclude_unset=True))
        index = PartsIndex.model_validate(found)
        if publish:
            distributed.done_once(lambda: folder.publish_index(index))
    return index


def _move(out: Path, parts: Path, index: PartsIndex) -> Path:
    """Move the one part to `out`, and beside it the list of files that could not be read; returns the list's path."""
    quarantine = out.with_name(f"{out.name}.quarantine.jsonl")
    quarantine.unlink(missing_ok=True)  # of an earlier result
    if index.failed:
        (parts / QUARANTINE).replace(quarantine)
    if index.files:
        (parts / f"part-{0:08}{out.suffix}").replace(out)
    shutil.rmtree(parts, ignore_errors=True)
    return quarantine


def compute_items(
    task: Task, folder: PartsFolder, left: Sequence[int], options: Options, progress: ProgressLine, stop: StopRequest
) -> None:
    """Compute the items with the numbers `left` in order and give their rows to the folder."""
    if options.workers == 0:
        note_unprotected()
    model, name, header = task.model, task.columns[0].name, task.header
    began, done, tokens = time.monotonic(), 0, 0
    mean = Collector(model.reader, model.geometry, task.pooled)
    items = Chosen(folder.items, np.asarray(left, dtype=np.int64))
    for event in values_of_items(
        items, reader=model.reader, compute=task.compute, batch=options.batch, workers=options.workers
    ):
        number = left[event.item]
        if isinstance(event, WindowValues):
            tokens += model.geometry.tokens if event.window.valid is None else int(event.window.valid.sum())
            if header.pool is not None:
                mean.add(event)
            else:
                rows = token_rows(event, model.reader, model.geometry)
                times = {} if rows.times is None else {"times": rows.times}
                folder.add(number, {name: rows.values, "positions": rows.positions, **times})
        else:
            if event.error is not None and options.strict:
                raise event.error
            if event.error is None and header.pool is not None:
                folder.add(number, {name: mean.rows().values[None]})
            folder.finish_item(number, None if event.error is None else str(event.error))
            mean = Collector(model.reader, model.geometry, task.pooled)
            done += 1
        text = progress_text(done, len(left), tokens, header.tokens_per_second, time.monotonic() - began)
        progress.show(text, text, final=done == len(left))
        stop.leave(f"{done} of {len(left)} files are done.")


def progress_text(done: int, files: int, tokens: int, tokens_per_second: float | None, passed: float) -> str:
    """Files done, how fast, and how much faster than they last."""
    passed = max(passed, 1e-9)
    shown = [f"{done}/{files} files", f"{done / passed:.1f} files/s"]
    if tokens_per_second is not None:
        seconds = tokens / tokens_per_second  # of what was recorded
        shown.append(f"{clock(seconds)} read, {seconds / passed:.0f}× realtime")
    if 0 < done < files:
        shown.append(eta(done, files, passed))
    return " · ".join(shown)
