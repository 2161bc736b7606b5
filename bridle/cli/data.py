"""Commands that look at data before training, and write it as shards: data check, data stats and data shard."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.app import Overrides, data_app
from bridle.console import counting, json_output, screen
from bridle.errors import DataError, UsageError
from bridle.machine import usable_cores

if TYPE_CHECKING:
    from bridle.data.inspect.check import Report

DataPath = Annotated[
    str, typer.Argument(metavar="PATH", help="A data folder, a manifest, or an address of one (s3://…, hf://…).")
]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes; default: all cores.")]


def processes(workers: int | None) -> int:
    """The number of processes that --workers asks for."""
    return usable_cores() if workers is None else workers


@data_app.command("check")
def data_check(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A folder of media files, a manifest, one file, shards, or an address."),
    ],
    out: Annotated[Path | None, typer.Option(help="Also write every finding to this JSONL file.")] = None,
    kind: Annotated[
        str, typer.Option(help="Only files of this kind: audio (also of videos), image, video, signal.")
    ] = "auto",
    rate: Annotated[int | None, typer.Option(min=1, help="Expected sample rate; default: the most common one.")] = None,
    shortest: Annotated[float, typer.Option(min=0.0, help="Files shorter than this many seconds are too short.")] = 0.1,
    frames: Annotated[int, typer.Option(min=1, help="Frames to decode of each video.")] = 300,
    workers: Workers = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 65 if any file cannot be used.")] = False,
    write_manifest: Annotated[
        Path | None, typer.Option(help="Write a CSV manifest of the usable files with their labels and splits.")
    ] = None,
) -> None:
    """Decode every file and list those that are damaged, empty, silent, clipped, too short or unusual.

    Of tar shards that `bridle data shard` wrote, checksums are verified instead.

    Example:  bridle data check recordings/ --out findings.jsonl
    """
    from bridle.data.inspect.check import check_folder, write_good
    from bridle.data.listing.address import local_path
    from bridle.data.listing.layouts import holds_shards

    folder = local_path(path)
    if holds_shards(folder):
        if write_manifest is not None:
            raise UsageError("--write-manifest: files inside shards cannot be listed; check the folder they are of.")
        if show_shard_check(folder, path, out=out, workers=processes(workers), strict=strict):
            return
    count = processes(workers)
    with counting("checked", "files") as tell:
        report = check_folder(
            folder, kind=kind, rate=rate, shortest=shortest, frames=frames, workers=count, out=out, tell=tell
        )
    show_check(report)
    if out is not None:
        typer.echo(f"wrote {out}")
    if write_manifest is not None:
        typer.echo(f"wrote {write_manifest}: {write_good(folder, report, write_manifest):,} usable files")
    if len(report.paths) > 1:
        typer.echo(f"Next:  bridle data stats {shlex.quote(path)}")
    if strict and report.unusable:
        raise typer.Exit(DataError.exit_code)


def show_check(report: Report) -> None:
    """Print what a check has found."""
    from bridle.report.data_tables import check_lines, findings_table

    counts = {"files": len(report.paths), "unusable": len(report.unusable), "flagged": len(report.flagged)}
    json_output.result("data check", **counts, findings=dict(report.findings), kinds=dict(report.files))
    if (table := findings_table(report)) is not None:
        screen().print(table)
        typer.echo()
    for line in check_lines(report):
        typer.echo(line)


@data_app.command("stats")
def data_stats(
    path: DataPath,
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="How to read it; default: guessed from the files.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Items to measure.")] = 2048,
    workers: Workers = None,
) -> None:
    """Print items, classes, lengths, mean and standard deviation of a data set.

    Example:  bridle data stats recordings/ --recipe audio geometry.input=[512,128]
    """
    from bridle.config import load_config
    from bridle.data.inspect.statistics import guess_modality, measure_data, own_settings
    from bridle.data.listing.address import is_pattern, local_path
    from bridle.report.data_tables import availability_table, statistics_lines

    folder = local_path(path)
    modality = None if recipe else guess_modality(folder)
    name = modality.own_recipe[0] if modality else str(recipe)
    settings = own_settings(folder, modality) if modality else []
    is_list = folder.is_file() and not is_pattern(folder)
    settings += [*(overrides or []), f"data.manifest={path}" if is_list else f"data.root={path}"]
    config = load_config(name, settings)
    with counting("measured", "items") as tell:
        found = measure_data(config, limit=limit, workers=processes(workers), tell=tell)
    json_output.result("data stats", found, recipe=name)
    typer.echo(f"recipe    {name}{'' if recipe else ' (by the names of the files)'}")
    for line in statistics_lines(found):
        typer.echo(line)
    if (table := availability_table(found)) is not None:
        screen().print(table)
    command = ["bridle", "pretrain", name, *settings, *found.overrides(), "--out", "runs/NAME"]
    typer.echo(f"Next:  {shlex.join(command)}")


def show_shard_check(folder: Path, path: str, *, out: Path | None, workers: int, strict: bool) -> bool:
    """`data check` for a folder of shards that was given as `path`; False if their samples are still to be decoded."""
    from bridle.data.shards.verify import check_shards
    from bridle.files import json_line

    with counting("checked", "shards") as tell:
        found = check_shards(folder, workers=workers, tell=tell)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    for fault in found.faults:
        typer.echo(f"{fault.path}: {fault.detail}")
    typer.echo(f"shards    {found.shards:,} ({found.samples:,} samples)")
    sound = "checksums and index agree" if found.verified else "headers are valid (no checksums: no shards.json)"
    typer.echo(f"verdict   {f'{len(found.faults)} faults' if found.faults else sound}")
    if not found.verified and not found.faults:
        return False
    json_output.result("data check", found)
    if out is not None:
        lines = [json_line({"path": one.path, "finding": "damaged", "detail": one.detail}) for one in found.faults]
        summary = {"shards": found.shards, "samples": found.samples, "faults": len(found.faults)}
        out.write_text("".join([*lines, json_line({"summary": summary})]), encoding="utf-8")
        typer.echo(f"wrote {out}")
    if found.faults:
        typer.echo("Next:  copy the shards again, or repeat the bridle data shard command; good ones are kept.")
        if strict:
            raise typer.Exit(DataError.exit_code)
    else:
        typer.echo(f"Next:  bridle data stats {shlex.quote(path)}")
    return True


@data_app.command("shard")
def data_shard(
    path: DataPath,
    out: Annotated[Path, typer.Option(help="Folder for the shards; the same command continues.")],
    source: Annotated[
        str | None, typer.Option(help="images, audio, video or signals; default: guessed from the files.")
    ] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="Approximate megabytes per shard.")] = 256,
    workers: Workers = None,
) -> None:
    """Pack a data set into tar shards (webdataset layout) with an index and SHA-256.

    Example:  bridle data shard photos/ --out photo-shards --shard-mb 64
    """
    from bridle.data.listing.address import local_path
    from bridle.data.shards.writer import SKIPPED, files_to_shard, write_shards

    todo = files_to_shard(local_path(path), source=source)
    for note in todo.found.notes:
        typer.echo(f"note: {note}", err=True)
    with counting("wrote", "samples") as tell:
        done = write_shards(
            todo.found,
            source=todo.modality.name,
            extensions=todo.modality.extensions,
            root=todo.root,
            out=out,
            shard_mb=shard_mb,
            workers=processes(workers),
            tell=tell,
        )
    json_output.result("data shard", done, kind=todo.modality.name)
    parts = ", ".join(f"{count:,} {split}" for split, count in done.samples.items())
    typer.echo(f"wrote {out}: {done.shards:,} shards, {done.bytes / 1e6:,.1f} MB, {parts} ({todo.modality.name})")
    if done.kept:
        typer.echo(f"{done.kept:,} of the shards were there already and are kept")
    if done.renamed:
        typer.echo(f"{done.renamed:,} samples have another key than their name, which is in their .json")
    if done.skipped:
        typer.echo(f"{done.skipped:,} files could not be read; see {out / SKIPPED}", err=True)
    recipe = shlex.join(todo.modality.own_recipe)
    typer.echo(f"Next:  bridle pretrain {recipe} data.root={shlex.quote(str(out))} --out runs/NAME")
