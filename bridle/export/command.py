"""`bridle tokenize` and `bridle embed`: many files in, one file out, in constant memory, continued where it stopped.

Beside the result OUT there may be OUT.parts/ (while the work is not finished) and OUT.quarantine.jsonl (files that
could not be read, with the reason).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bridle.errors import DataError, UsageError, quoted
from bridle.export.codes import FORMAT, require_format, write_result
from bridle.export.files import Compute, Ended, Pool, Rows, name_of, rows_of_files
from bridle.export.inputs import Inputs, find_inputs
from bridle.export.model import BATCH, Model, Pooling
from bridle.export.parts import JOB, Column, Parts
from bridle.train.log import ProgressLine, clock
from bridle.train.runtime import StopRequest, locked


class Job(NamedTuple):
    """What is computed of every file."""

    compute: Compute
    columns: tuple[Column, ...]
    pool: Callable[[], Pool] | None
    header: dict[str, Any]


class Written(NamedTuple):
    """The result of a job."""

    out: Path
    files: int
    rows: int
    failed: int
    quarantine: Path | None  # the list of files that could not be read
    header: dict[str, Any]


class Options(NamedTuple):
    """How a job is carried out; none of them changes its result."""

    batch: int = BATCH
    overwrite: bool = False  # replace a result that exists, and forget an unfinished job that does not fit
    strict: bool = False  # stop at the first file that cannot be read


def tokenize_inputs(
    model: Model,
    named: Sequence[str],
    out: Path,
    *,
    stages: int | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
    stdin: IO[bytes] | None = None,
) -> Written:
    """Codes of all inputs as one file; see `codes` for what it holds."""
    sizes = model.config.quantizer.sizes[:stages]
    compute = model.codes_of(stages=stages)
    kind = np.min_scalar_type(max(model.config.quantizer.sizes) - 1)
    columns = (Column("codes", kind.str.replace("|", "<"), len(sizes)), *_places(model))
    bits = sum(math.log2(size) for size in sizes)
    header = _header(model, "codes", {"codebook_sizes": list(sizes), "bits_per_token": bits})
    rate = header["tokens_per_second"]
    header["bits_per_second"] = None if rate is None else rate * bits
    return _run(model, Job(compute, columns, None, header), named, out, options, progress, stdin)


def embed_inputs(
    model: Model,
    named: Sequence[str],
    out: Path,
    *,
    layer: int | None = None,
    pool: Pooling | None = None,
    axis: int | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
    stdin: IO[bytes] | None = None,
) -> Written:
    """Features of all inputs as one file: a row for every token, or pooled to one for every file."""
    compute = model.features_of(layer=layer, class_token=pool == "class")
    header = _header(model, "features", {"layer": layer, "pool": pool, "axis": axis})
    width = model.encoder.width
    if pool is None:
        columns = (Column("features", "<f4", width), *_places(model))
        return _run(model, Job(compute, columns, None, header), named, out, options, progress, stdin)

    def new_pool() -> Pool:
        return model.file_pool(pool, axis)

    first = new_pool()
    columns = (Column("features", "<f4", first.places * width),)
    header["axis"] = first.axis if first.places > 1 else None
    return _run(model, Job(compute, columns, new_pool, header), named, out, options, progress, stdin)


def as_pooling(word: str) -> Pooling | None:
    """The word of a command line as a way of pooling."""
    known: dict[str, Pooling | None] = {"none": None, "mean": "mean", "axis": "axis", "class": "class"}
    if word not in known:
        raise UsageError(f"--pool {quoted(word)}: expected one of {', '.join(known)}.")
    return known[word]


def _places(model: Model) -> tuple[Column, ...]:
    positions = Column("positions", "<i4", model.geometry.rank)
    return (positions,) if not model.reader.timed else (Column("times", "<f8"), positions)


def _header(model: Model, kind: str, more: Mapping[str, Any]) -> dict[str, Any]:
    geometry, seconds = model.geometry, model.reader.frame_seconds
    return {
        "format": FORMAT,
        "kind": kind,
        "bridle": version("bridle"),
        "run": model.config.name,
        "model": model.fingerprint,
        "geometry": {"channels": geometry.channels, "input": list(geometry.input), "patch": list(geometry.patch)},
        "grid": list(geometry.grid),
        "frame_seconds": seconds,
        "tokens_per_second": None if seconds is None else math.prod(geometry.grid[1:]) / (geometry.patch[0] * seconds),
        **_front(model),
        **more,
    }


def _front(model: Model) -> dict[str, Any]:
    """How files become frames, where that is a choice."""
    config = model.config
    sections = {"audio": config.audio, "video": config.video}
    return {name: section.model_dump(mode="json") for name, section in sections.items() if name == config.data.source}


def _run(
    model: Model,
    job: Job,
    named: Sequence[str],
    out: Path,
    options: Options,
    progress: ProgressLine | None,
    stdin: IO[bytes] | None,
) -> Written:
    require_format(out)
    if out.exists() and not options.overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    inputs = find_inputs(named, reader=model.reader, stdin=stdin or sys.stdin.buffer)
    progress = progress or ProgressLine()
    for note in inputs.notes:
        progress.note(note)
    folder = out.with_name(f"{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), StopRequest().listening() as stop:
        parts = _open_parts(folder, job, inputs, overwrite=options.overwrite)
        with parts:
            _work(model, job, inputs, parts, options, progress, stop)
        return _publish(out, job, parts)


def _open_parts(folder: Path, job: Job, inputs: Inputs, *, overwrite: bool) -> Parts:
    """The parts folder, new or as an earlier command left it, if that was about the same."""
    try:
        parts = Parts(folder, columns=job.columns, job=job.header)
        asked = {name_of(path): _stamp(path) for path in inputs.paths}
        for entry in parts.entries:
            if asked.get(entry.name) != entry.stamp:
                what = "has changed since" if entry.name in asked else "is no longer among the inputs"
                raise UsageError(
                    f"{quoted(folder)} holds an unfinished job, but its file {quoted(entry.name)} {what}; give "
                    "--overwrite to begin anew."
                )
    except UsageError:
        if not overwrite:
            raise
        for path in (folder / JOB, *folder.glob("*.jsonl"), *folder.glob("*.bin")):
            path.unlink(missing_ok=True)
        parts = Parts(folder, columns=job.columns, job=job.header)
    return parts


def _work(
    model: Model,
    job: Job,
    inputs: Inputs,
    parts: Parts,
    options: Options,
    progress: ProgressLine,
    stop: StopRequest,
) -> None:
    """Compute what the ledger does not have yet."""
    done = {entry.name for entry in parts.entries}
    left = [path for path in inputs.paths if name_of(path) not in done]
    bad = next((entry.reason for entry in parts.entries if entry.reason is not None), None)
    if bad is not None and options.strict:  # found by an earlier command that was not strict
        raise DataError(bad)
    if done:
        progress.note(f"continuing: {len(done)} of {len(inputs.paths)} files are done")
    pace = Pace(files=len(left), tokens_per_second=job.header["tokens_per_second"])
    pool = None if job.pool is None else job.pool()
    found = rows_of_files(left, reader=model.reader, geometry=model.geometry, compute=job.compute, batch=options.batch)
    for item in found:
        if isinstance(item, Rows):
            pace.rows += len(item.values)
            if pool is None:
                parts.add({job.columns[0].name: item.values, **_place_values(item)})
            else:
                pool.add(item)
        else:
            _finish_file(item, left[item.file], pool, parts, strict=options.strict)
            pool = None if job.pool is None else job.pool()
            pace.done += 1
        progress.show(pace.text(), pace.text(), final=pace.done == pace.files)
        stop.leave(f"{len(parts.entries)} of {len(inputs.paths)} files are done.")


def _place_values(rows: Rows) -> dict[str, Any]:
    return {"positions": rows.positions, **({} if rows.times is None else {"times": rows.times})}


def _finish_file(ended: Ended, path: Path, pool: Pool | None, parts: Parts, *, strict: bool) -> None:
    if ended.error is not None and strict:
        raise ended.error
    if ended.error is None and pool is not None:
        parts.add({"features": pool.mean()[None]})
    parts.finish(name_of(path), _stamp(path), reason=None if ended.error is None else str(ended.error))


def _publish(out: Path, job: Job, parts: Parts) -> Written:
    """Move the result to its place and say what could not be read."""
    failed = [entry for entry in parts.entries if entry.reason is not None]
    quarantine = out.with_name(f"{out.name}.quarantine.jsonl")
    quarantine.unlink(missing_ok=True)  # of an earlier result
    if failed:
        lines = (json.dumps({"path": entry.name, "reason": entry.reason}) + "\n" for entry in failed)
        quarantine.write_text("".join(lines), encoding="utf-8")
    readable = len(parts.entries) - len(failed)
    if readable == 0:
        parts.remove()
        raise DataError(
            f"none of the {len(failed)} files could be read; the reasons are in {quoted(quarantine)}, the first: "
            f"{failed[0].reason}"
        )
    write_result(out, parts, job.header, pooled=job.pool is not None)
    parts.remove()
    return Written(out, readable, parts.rows, len(failed), quarantine if failed else None, job.header)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and change time of a file; a missing one has its own."""
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


class Pace:
    """How far and how fast a job goes."""

    def __init__(self, *, files: int, tokens_per_second: float | None) -> None:
        self.files, self.done, self.rows = files, 0, 0
        self.tokens_per_second = tokens_per_second
        self.began = time.monotonic()

    def text(self) -> str:
        passed = max(time.monotonic() - self.began, 1e-9)
        shown = [f"{self.done}/{self.files} files", f"{self.done / passed:.1f} files/s"]
        if self.tokens_per_second is not None:
            seconds = self.rows / self.tokens_per_second  # of what was recorded
            shown.append(f"{clock(seconds)} read, {seconds / passed:.0f}× realtime")
        if 0 < self.done < self.files:
            shown.append(f"ETA {clock((self.files - self.done) * passed / self.done)}")
        return " · ".join(shown)
