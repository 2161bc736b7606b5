"""The commands of `bridle bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import Overrides, Recipe, make_precision_safe
from bridle.console import json_output
from bridle.errors import UsageError

bench_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure speed on this machine: quantizer, step, data.",
)
TableFile = Annotated[Path | None, typer.Option("--out", help="Also write the table to this Markdown file.")]


def _tell(text: str) -> None:
    typer.echo(f"measuring {text}", err=True)


def _show(table: str, out: Path | None) -> None:
    """Print a table, and write it to a file if one is named."""
    json_output.result("bench", table=table)
    typer.echo(table)
    if out is not None:
        out.write_text(table, encoding="utf-8")
        typer.echo(f"wrote {out}")


@bench_app.command("quantizer")
def bench_quantizer(
    out: TableFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small size, few repeats.")] = False,
) -> None:
    """Compare the quantizer with bare matrix products.

    Example:  bridle bench quantizer --out quantizer.md
    """
    from bench import quantizer

    _show(quantizer.run(sizes=(8192,), repeats=3, tell=_tell) if quick else quantizer.run(tell=_tell), out)
    typer.echo("With other libraries: python benchmarks/quantizer_libraries.py, in bridle's repository.")


@bench_app.command("data")
def bench_data(
    recipe: Recipe,
    overrides: Overrides = None,
    out: TableFile = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")] = 4.0,
) -> None:
    """Compare loading and augmentation with the model's step: the bottleneck, and how many workers to use.

    Example:  bridle bench data cifar10-tiny data.root=cifar10 --out data.md
    """
    from bridle.config import load_config

    config = load_config(recipe, overrides or [])
    make_precision_safe(config.runtime.precision)
    from bench import data

    _show(data.run(config, seconds=seconds, tell=_tell).to_markdown(), out)


@bench_app.command("step")
def bench_step(
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe name or YAML file, instead of --size and --modality.")
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="tiny, small or base; may be repeated.")] = None,
    modality: Annotated[list[str] | None, typer.Option(help="audio, image or video; may be repeated.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --recipe: batch size.")] = 8,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats; default: by model size.")] = None,
    out: TableFile = None,
) -> None:
    """Compare an encoder step with a plain one: ratios, memory, reused codes.

    Example:  bridle bench step --size tiny --modality image decoder.kind=cross mask.predict=0.25
    """
    from bridle.config import load_config

    config = None if recipe is None else load_config(recipe, overrides or [])
    from bench import step

    for name, given, known in (("--size", size, step.SIZES), ("--modality", modality, step.MODALITIES)):
        if wrong := [value for value in given or () if value not in known]:
            raise UsageError(f"{name} {wrong[0]!r}: expected one of {', '.join(known)}.")
    if config is not None:
        models = [step.Measured(" ".join([config.name, *(overrides or ())]), config, rows, repeats or 5)]
    else:
        sizes = size or (["tiny", "small"] if modality else step.SIZES)
        models = [step.chosen_model(m, s, repeats, overrides or ()) for s in sizes for m in modality or step.MODALITIES]
    _show(step.to_markdown(step.run(models, tell=_tell)), out)
