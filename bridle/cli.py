"""The `bridle` command. Heavy libraries are imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from bridle.errors import BridleError, Interrupted, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Self-supervised pretraining on audio, images and video with residual-quantization targets (BRIDLE).",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine, as ratios taken in one run.")
app.add_typer(bench_app, name="bench")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. encoder.depth=6.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, as --out named it.")]


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Options of every command; `main` reads --debug itself."""


@app.command()
def demo(
    modality: Annotated[str | None, typer.Option(help="audio, image or video; all three without it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("demo"),
) -> None:
    """The whole method in minutes on embedded data: VQ and RQ, two iterations, probe, codebook table, report.

    Example:  bridle demo --modality image
    """
    from bridle.demo import MODALITIES, run_demo

    if modality is not None and modality not in MODALITIES:
        raise UsageError(f"--modality {modality!r}: expected one of {', '.join(MODALITIES)}.")
    run_demo([modality] if modality else list(MODALITIES), seed=seed, out=out)


@app.command()
def recipes() -> None:
    """List the shipped recipes.

    Example:  bridle recipes
    """
    from rich.table import Table

    from bridle.config import load_config, recipe_names

    table = Table("recipe", "size", "input", "patch", "what", box=None, header_style="bold", pad_edge=False)
    for name in recipe_names():
        config = load_config(name)
        sizes = ("×".join(map(str, axis)) for axis in (config.geometry.input, config.geometry.patch))
        table.add_row(name, config.size, *sizes, config.summary)
    console().print(table)
    console().print("\nNext:  bridle show RECIPE   or   bridle pretrain RECIPE data.root=… --out runs/NAME")


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A recipe name or a YAML file.")], overrides: Overrides = None
) -> None:
    """Print a recipe with every value resolved, as YAML.

    Example:  bridle show cifar10-tiny quantizer=vq
    """
    from bridle.config import dump_config, load_config

    config = load_config(recipe, overrides or [])
    geometry = config.geometry.build()
    typer.echo(f"# grid {list(geometry.grid)} = {geometry.tokens} tokens of {geometry.patch_features} numbers")
    typer.echo(dump_config(config), nl=False)


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe name or a YAML file.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The run directory; the same command continues it.")] = Path("run"),
    max_steps: Annotated[int | None, typer.Option(min=1, help="Cap every phase at this many steps.")] = None,
) -> None:
    """Train encoder and tokenizer in turns (Algorithm 1); run the same command again to continue.

    Example:  bridle pretrain cifar10-tiny data.root=cifar10 --out runs/c10
    """
    from bridle.config import load_config

    changes = [*(overrides or []), *([f"max_steps={max_steps}"] if max_steps else [])]
    config = load_config(recipe, changes)
    make_precision_safe(config.runtime.precision)
    from bridle import api

    finished = api.is_finished(out, config)
    api.pretrain(config, out=out, command=f"bridle {shlex.join(sys.argv[1:])}")
    if finished:
        typer.echo(f"{out} is finished; nothing to do.")
    show_results(out)


@app.command()
def probe(run: RunFolder, overrides: Overrides = None) -> None:
    """Linear probe of a run's frozen encoder, beside raw features and an untrained encoder; JSON and table.

    Example:  bridle probe runs/c10 probe.pool=axis probe.axis=0
    """
    from bridle.evaluate.command import probe_run

    show_results(run, probe_run(run, overrides or []).name)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run directories.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the first run without it.")] = None,
) -> None:
    """Write one self-contained HTML page about one or several runs.

    Example:  bridle report runs/c10 --out c10.html
    """
    from bridle.report.page import read_run, write_report

    path = write_report([read_run(run) for run in runs], out or runs[0] / "report.html", title="bridle report")
    typer.echo(f"wrote {path}")


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


def make_precision_safe(precision: str) -> None:
    """Before torch is loaded: arrange that bf16 on this CPU cannot kill the process. A GPU run needs none of it."""
    from bridle.cpu import make_bf16_safe
    from bridle.errors import ConfigError

    if precision != "bf16":
        return
    try:
        typer.echo(make_bf16_safe(), err=True)
    except ConfigError as error:
        # Not the last word: with a GPU the CPU does not matter, and without one the run refuses for itself.
        typer.echo(f"note: {error}", err=True)


def show_results(run: Path, results: str = "results.json") -> None:
    """The results of a run as a table, then what was written and what to do next."""
    from bridle.report.runs import read_run
    from bridle.report.terminal import results_table

    screen = console()
    table = results_table([read_run(run, results=results)])
    if table is not None:
        screen.print(table)
    if (run / results).is_file():
        typer.echo(f"wrote {run / results}")
    typer.echo(f"Next:  bridle probe {run}   ·   bridle report {run}")


def console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def main() -> None:
    """Entry point: errors a user can mend are one line and an exit code, with --debug also a traceback."""
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=True)
    except BridleError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(error.exit_code)
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        typer.echo("stopped by Ctrl-C", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away; nothing can be said any more
        sys.exit(1)
    except OSError as error:
        if debug:
            traceback.print_exc()
        what = f"{error.filename or 'input/output'}: {error.strerror or error}"
        typer.echo(f"{what}. Free some space or mend permissions, then run the same command again.", err=True)
        sys.exit(74)
    except Exception as error:
        if debug:
            raise
        typer.echo(f"internal error: {type(error).__name__}: {error}", err=True)
        typer.echo(
            "This is a bug in bridle. Run again with --debug (bridle --debug …) and report it with `bridle doctor`.",
            err=True,
        )
        sys.exit(1)
