"""Commands about this machine: doctor and the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import Overrides, app, bench_app, make_precision_safe


@app.command()
def doctor() -> None:
    """Devices, codecs, bf16, threads, disk and versions: text for a bug report.

    Example:  bridle doctor
    """
    from bridle.doctor import examine

    for name, finding in examine():
        typer.echo(f"{name:<12} {finding}")


@bench_app.command("quantizer")
def bench_quantizer(
    out: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The small size and few repeats.")] = False,
) -> None:
    """The quantizer beside bare matrix products and other libraries, interleaved in one process.

    Example:  bridle bench quantizer --out quantizer.md
    """
    from bridle.bench import quantizer

    def tell(text: str) -> None:
        typer.echo(f"measuring {text}", err=True)

    table = quantizer.run(sizes=(8192,), repeats=3, tell=tell) if quick else quantizer.run(tell=tell)
    typer.echo(table.to_markdown())
    if out is not None:
        out.write_text(table.to_markdown(), encoding="utf-8")
        typer.echo(f"wrote {out}")


@bench_app.command("data")
def bench_data(
    recipe: Annotated[str, typer.Argument(help="A recipe name or a YAML file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each measurement.")] = 4.0,
) -> None:
    """Loading and augmentation beside the model's step: which one a run waits for, and how many workers it needs.

    Example:  bridle bench data cifar10-tiny data.root=cifar10 --out data.md
    """
    from bridle.config import load_config

    config = load_config(recipe, overrides or [])
    make_precision_safe(config.runtime.precision)
    from bridle.bench import data

    table = data.run(config, seconds=seconds, tell=lambda text: typer.echo(f"measuring {text}", err=True))
    typer.echo(table.to_markdown())
    if out is not None:
        out.write_text(table.to_markdown(), encoding="utf-8")
        typer.echo(f"wrote {out}")
