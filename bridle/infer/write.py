"""`bridle tokenize` and `bridle embed`: many files in, one file or a folder of parts out, in constant memory.

Beside a file OUT there may be OUT.parts/ (while the work is not finished) and OUT.quarantine.jsonl (files that could
not be read, with the reason). A folder has all that inside, see `corpus`. Either is continued where it stopped.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bridle import distributed
from bridle.console import ProgressLine
from bridle.data.modality import settings_of
from bridle.errors import DataError, UsageError, quoted
from bridle.files import locked_folder
from bridle.infer import parts_folder as corpora
from bridle.infer.columns import JOB, Column, Parts
from bridle.infer.files import Pool
from bridle.infer.inputs import Inputs, find_inputs
from bridle.infer.job import MEGABYTE, Chosen, Job, OneFile, Options, refuse_failed, work
from bridle.infer.model import Model, Pooling
from bridle.infer.parts_folder import Corpus, PartsWriter
from bridle.infer.writers import FORMAT, require_format, write_result
from bridle.machine import StopRequest

__all__ = ["Options", "Written", "as_pooling", "embed_inputs", "tokenize_inputs"]


class Written(NamedTuple):
    """The result of a job."""

    out: Path
    files: int
    rows: int
    failed: int
    quarantine: Path | None  # the list of files that could not be read
    header: dict[str, Any]


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
    named: Sequence[str] | Inputs,
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
    return {name: section.model_dump(mode="json") for name, section in settings_of(model.config).items()}


def _run(
    model: Model,
    job: Job,
    named: Sequence[str] | Inputs,
    out: Path,
    options: Options,
    progress: ProgressLine | None,
    stdin: IO[bytes] | None,
) -> Written:
    alone = distributed.world_size() == 1
    folder = out.suffix == "" or out.is_dir()
    if not folder and not alone:
        raise UsageError(
            f"--out {quoted(out)} is a single file; several processes write a folder, such as --out codes."
        )
    require_format(out.with_suffix(f".{options.part_format}") if folder else out)
    if not folder and out.exists() and not options.overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    inputs = (
        named
        if isinstance(named, Inputs)
        else find_inputs(named, reader=model.reader, stdin=(stdin or sys.stdin.buffer) if alone else None)
    )
    progress = progress or ProgressLine()
    for note in inputs.notes:
        progress.note(note)
    return (_into_folder if folder else _into_file)(model, job, inputs, out, options, progress)


def _into_file(model: Model, job: Job, inputs: Inputs, out: Path, options: Options, progress: ProgressLine) -> Written:
    """All items as one file."""
    folder = out.with_name(f"{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder), StopRequest().listening() as stop:
        parts = _open_parts(folder, job, inputs, overwrite=options.overwrite)
        refuse_failed([entry.reason for entry in parts.entries], strict=options.strict)
        done = {entry.name for entry in parts.entries}
        left = array("q", (n for n, item in enumerate(inputs.items) if item.name not in done))
        _tell_done(len(done), len(inputs.items), progress)
        with parts:
            work(model, job, Chosen(inputs.items, left), OneFile(parts), options, progress, stop)
        return _publish(out, job, parts)


def _into_folder(
    model: Model, job: Job, inputs: Inputs, out: Path, options: Options, progress: ProgressLine
) -> Written:
    """All items as a folder of parts, those of this rank by this process."""
    rank, ranks = distributed.rank(), distributed.world_size()
    corpus = Corpus(
        folder=out,
        items=inputs.items,
        columns=job.columns,
        header=job.header,
        pooled=job.pool is not None,
        suffix=f".{options.part_format}",
        part_bytes=options.part_mb * MEGABYTE,
        stretch=1,
    )
    with corpora.first_in(corpus, rank), StopRequest().listening() as stop:
        stretch = distributed.done_once(lambda: corpora.prepare(corpus, ranks=ranks, overwrite=options.overwrite))
        corpus = corpus._replace(stretch=stretch)
        _require_same_items(corpus)
        left, begun = _left_in_folder(corpus, rank, ranks, strict=options.strict)
        _tell_done(len(inputs.items) // ranks - len(left), len(inputs.items) // ranks, progress)
        writer = PartsWriter(corpus, begun)
        try:
            work(model, job, Chosen(inputs.items, left), writer, options, progress, stop)
        finally:
            writer.close()
        distributed.barrier()
        totals = corpora.Totals(*distributed.done_once(lambda: list(corpora.finish(corpus))))
    return _written(out, out / corpora.QUARANTINE, job, totals)


def _open_parts(folder: Path, job: Job, inputs: Inputs, *, overwrite: bool) -> Parts:
    """The parts folder, new or as an earlier command left it, if that was about the same."""
    try:
        parts = Parts(folder, columns=job.columns, job=job.header)
        asked = {item.name: item.stamp() for item in inputs.items}
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


def _written(out: Path, quarantine: Path, job: Job, totals: corpora.Totals) -> Written:
    if not totals.files:
        raise DataError(f"none of the {totals.failed} files could be read; the reasons are in {quoted(quarantine)}.")
    listed = quarantine if totals.failed else None
    return Written(out, totals.files, totals.rows, totals.failed, listed, job.header)


def _tell_done(done: int, total: int, progress: ProgressLine) -> None:
    if done > 0:
        progress.note(f"continuing: {done} of {total} files are done")


def _require_same_items(corpus: Corpus) -> None:
    """Have all ranks found the same items? A folder may change while they look."""
    mine = corpus.described()["names"]
    if len(set(distributed.gather_json(mine))) > 1:
        raise DataError("the processes did not find the same files; let the corpus rest, and run the command again.")


def _left_in_folder(corpus: Corpus, rank: int, ranks: int, *, strict: bool) -> tuple[array[int], dict[int, int]]:
    """The items of this rank that are not done, and for those that continue a part the first item of that part."""
    left, begun = array("q"), dict[int, int]()
    for stretch in corpus.stretches(rank, ranks):
        number, first = corpora.resume(corpus, stretch)
        left.extend(range(number, stretch.stop))
        begun[number] = first
    if strict:
        refuse_failed(list(corpora.reasons(corpus)), strict=True)
    return left, begun
