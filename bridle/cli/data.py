"""Commands that look at data before training: data check and data stats."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import Overrides, all_cores, console, data_app
from bridle.errors import DataError


@data_app.command("check")
def data_check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of media files, a manifest, or one file.")],
    out: Annotated[Path | None, typer.Option(help="Also write every finding to this JSONL file.")] = None,
    kind: Annotated[str, typer.Option(help="Only audio (also of videos), image or video files.")] = "auto",
    rate: Annotated[int | None, typer.Option(min=1, help="The right sample rate; the commonest without it.")] = None,
    shortest: Annotated[float, typer.Option(min=0.0, help="Seconds below which a file is too short.")] = 0.1,
    frames: Annotated[int, typer.Option(min=1, help="Frames of each video that are decoded.")] = 300,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; all cores without it.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 65 if any file cannot be used.")] = False,
) -> None:
    """Decode every file and list what is undecodable, empty, silent, clipped, too short, not finite or odd.

    Example:  bridle data check recordings/ --out findings.jsonl
    """
    from bridle.data.check import check_folder
    from bridle.report.datasets import check_lines, findings_table, following

    with following("checked", "files") as tell:
        report = check_folder(
            path,
            kind=kind,
            rate=rate,
            shortest=shortest,
            frames=frames,
            workers=all_cores() if workers is None else workers,
            out=out,
            tell=tell,
        )
    if (table := findings_table(report)) is not None:
        console().print(table)
        typer.echo()
    for line in check_lines(report):
        typer.echo(line)
    if out is not None:
        typer.echo(f"wrote {out}")
    if report.total > 1:
        typer.echo(f"Next:  bridle data stats {shlex.quote(str(path))}")
    if strict and report.unusable:
        raise typer.Exit(DataError.exit_code)


@data_app.command("stats")
def data_stats(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A data folder or a manifest.")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="How to read it; guessed from the files without it.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Items that are measured.")] = 2048,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; all cores without it.")] = None,
) -> None:
    """Items, classes and lengths of a data set, and its mean and standard deviation as data.mean and data.std.

    Example:  bridle data stats recordings/ --recipe audio geometry.input=[512,128]
    """
    from bridle.config import load_config
    from bridle.data.statistics import guess_recipe, measure_data
    from bridle.report.datasets import availability_table, following, statistics_lines

    name = recipe or guess_recipe(path)
    where = f"data.manifest={path}" if path.is_file() else f"data.root={path}"
    config = load_config(name, [*(overrides or []), where])
    with following("measured", "items") as tell:
        found = measure_data(config, limit=limit, workers=all_cores() if workers is None else workers, tell=tell)
    typer.echo(f"recipe    {name}{'' if recipe else ' (by the names of the files)'}")
    for line in statistics_lines(found):
        typer.echo(line)
    if (table := availability_table(found)) is not None:
        console().print(table)
    command = ["bridle", "pretrain", name, *(overrides or []), where, *found.overrides(), "--out", "runs/NAME"]
    typer.echo(f"Next:  {shlex.join(command)}")
