"""The `bridle` command. Heavy libraries are imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from bridle.errors import BridleError, DataError, Interrupted, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Self-supervised pretraining on audio, images and video with residual-quantization targets (BRIDLE).",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine, as ratios taken in one run.")
app.add_typer(bench_app, name="bench")
data_app = typer.Typer(no_args_is_help=True, help="Look at your data before training on it.")
app.add_typer(data_app, name="data")

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
    else:
        from bridle.train.runtime import peak_memory

        typer.echo(f"peak memory {peak_memory()}", err=True)
    show_results(out)


@app.command()
def probe(run: RunFolder, overrides: Overrides = None) -> None:
    """Linear or attentive probe of a frozen encoder, beside raw features and an untrained encoder; JSON and table.

    Data with folds is cross-validated; settings are chosen on training items only. probe.pool is mean, axis (one mean
    per place of a grid axis), class (the class token) or attentive; data.views=N looks at N parts of every item.

    Example:  bridle probe runs/c10 probe.pool=axis probe.axis=0
    """
    from bridle.evaluate.command import probe_run

    show_results(run, probe_run(run, overrides or []).name)


@app.command()
def knn(run: RunFolder, overrides: Overrides = None) -> None:
    """Weighted k-nearest neighbours on a run's frozen features, k chosen on validation items; JSON and table.

    Example:  bridle knn runs/c10 probe.items=5000
    """
    from bridle.evaluate.command import knn_run

    show_results(run, knn_run(run, overrides or []).name)


InputNames = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help="Files, folders, 'patterns', manifests (.csv .tsv .jsonl), - for stdin."),
]
ResultFile = Annotated[Path, typer.Option("--out", help="The result, .npz or .safetensors.")]
WindowBatch = Annotated[int, typer.Option(min=1, help="Windows that go through the network together.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result that exists.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]


@app.command()
def tokenize(
    run: RunFolder,
    inputs: InputNames,
    out: ResultFile,
    stages: Annotated[int | None, typer.Option(min=1, help="Only the first codebooks.")] = None,
    batch: WindowBatch = 16,
    overwrite: Overwrite = False,
    strict: Strict = False,
    device: Device = "auto",
) -> None:
    """Codes of files of any length, one row per token; an interrupted command goes on where it stopped.

    Example:  bridle tokenize runs/c10 photos/ --out codes.npz
    """
    from bridle.export.command import Options, tokenize_inputs
    from bridle.export.model import load

    options = Options(batch=batch, overwrite=overwrite, strict=strict)
    written = tokenize_inputs(load(run, device=device), inputs, out, stages=stages, options=options)
    show_written(written, reader="read_codes")


@app.command()
def embed(
    run: RunFolder,
    inputs: InputNames,
    out: ResultFile,
    pool: Annotated[str, typer.Option(help="none (a row per token), mean, axis or class (a row per file).")] = "none",
    axis: Annotated[int | None, typer.Option(min=0, help="With --pool axis, the grid axis that is kept.")] = None,
    layer: Annotated[int | None, typer.Option(min=1, help="Output of this block instead of the last.")] = None,
    batch: WindowBatch = 16,
    overwrite: Overwrite = False,
    strict: Strict = False,
    device: Device = "auto",
) -> None:
    """Features of files of any length, one row per token or per file; an interrupted command goes on where it stopped.

    Example:  bridle embed runs/c10 photos/ --out features.npz --pool mean
    """
    from bridle.export.command import Options, as_pooling, embed_inputs
    from bridle.export.model import load

    pooling = as_pooling(pool)
    options = Options(batch=batch, overwrite=overwrite, strict=strict)
    written = embed_inputs(load(run, device=device), inputs, out, layer=layer, pool=pooling, axis=axis, options=options)
    show_written(written, reader="read_features")


@app.command()
def finetune(
    run: RunFolder,
    overrides: Overrides = None,
    iteration: Annotated[
        int | None, typer.Option(min=1, help="Start from this iteration's encoder; the last one without it.")
    ] = None,
) -> None:
    """Train a run's encoder on labels, then score it once on the test split or over folds; JSON and table.

    Example:  bridle finetune runs/c10 finetune.epochs=10 finetune.augment.mixup=0.8
    """
    from bridle.config import read_config

    if (run / "config.yaml").is_file():
        make_precision_safe(read_config(run / "config.yaml", overrides or []).runtime.precision)
    from bridle.evaluate.finetune import finetune_run, read_json
    from bridle.report.finetuned import finetune_table

    command = f"bridle {shlex.join(sys.argv[1:])}"
    path = finetune_run(run, overrides or [], iteration=iteration, command=command)
    results = read_json(path)
    if (table := finetune_table(results)) is not None:
        console().print(table)
    typer.echo(f"wrote {path}")
    again = shlex.join(["bridle", "finetune", str(run), *(overrides or [])])
    scratch = any(entry["start"] == "scratch" for entry in results["evaluations"])
    typer.echo(
        f"Next:  bridle report {run}"
        if scratch
        else f"Next:  {again} finetune.from_scratch=true   ·   bridle report {run}"
    )


@app.command()
def codebooks(
    run: RunFolder,
    overrides: Overrides = None,
    iteration: Annotated[int | None, typer.Option(min=1, help="Only this iteration's tokenizer.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="At most so many samples; all without it.")] = None,
) -> None:
    """Codebook health: usage, entropy, information, steadiness and verdicts; JSON, table and figures.

    Example:  bridle codebooks runs/c10
    """
    import json

    from bridle.evaluate.examine import examine_run
    from bridle.report.health import codebook_table, verdict_lines, write_codebook_figures

    path = examine_run(run, overrides or [], iteration=iteration, items=items)
    evaluations, screen = json.loads(path.read_text(encoding="utf-8"))["evaluations"], console()
    for entry in evaluations:
        screen.print(codebook_table(entry))
        for line in verdict_lines(entry):
            screen.print(line)
        screen.print()
    written = write_codebook_figures(evaluations, run / "figures")
    typer.echo(f"wrote {path} and {len(written)} figures in {run / 'figures'}")
    typer.echo(f"Next:  bridle report {run}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run directories.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the first run without it.")] = None,
    samples: Annotated[bool, typer.Option(help="Show token maps and neighbours of a few of the run's samples.")] = True,
) -> None:
    """Write one self-contained HTML page about one or several runs.

    Example:  bridle report runs/c10 --out c10.html
    """
    from bridle.report.page import read_run, write_report

    found = [read_run(run) for run in runs]
    if samples:
        from bridle.report.tokens import gallery_of

        found = [summary._replace(gallery=gallery_of(run)) for summary, run in zip(found, runs, strict=True)]
    path = write_report(found, out or runs[0] / "report.html", title="bridle report")
    typer.echo(f"wrote {path}")


@app.command()
def doctor() -> None:
    """Devices, codecs, bf16, threads, disk and versions: text for a bug report.

    Example:  bridle doctor
    """
    from bridle.doctor import examine

    for name, finding in examine():
        typer.echo(f"{name:<12} {finding}")


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


def all_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def show_written(written: Any, *, reader: str) -> None:
    """What `tokenize` or `embed` wrote, what it could not read, and how to go on."""
    if written.failed:
        total = written.files + written.failed
        typer.echo(f"{written.failed} of {total} files could not be read; see {written.quarantine}", err=True)
    header, rows = written.header, f"{written.rows:,} rows"
    if header["kind"] == "codes":
        rows += f" of {len(header['codebook_sizes'])} codes, {header['bits_per_token']:g} bits each"
    if header.get("bits_per_second") is not None:
        rows += f", {header['bits_per_second']:,.0f} bits per second"
    typer.echo(f"wrote {written.out}: {written.files:,} files, {rows}")
    typer.echo(f"Next:  in Python, bridle.{reader}({str(written.out)!r})")


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
