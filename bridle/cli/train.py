"""Commands that train: demo, pretrain, ablate, finetune, and the recipes they start from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import (
    EVALUATE,
    START,
    TRAIN,
    On,
    Overrides,
    Recipe,
    RunArgument,
    app,
    make_precision_safe,
    results_folder,
    show_results,
    show_verdict,
)
from bridle.console import is_first_process, json_output, screen
from bridle.errors import UsageError


@app.command(rich_help_panel=START)
def demo(
    modality: Annotated[str | None, typer.Option(help="audio, image or video; default: all three.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Images alone, without VQ.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of the method; the second doubles the time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("demo"),
) -> None:
    """Pretrain on embedded data in minutes and compare few-label accuracy.

    Compared are raw input, untrained encoder, the same network trained on the labels alone, VQ and RQ.

    Example:  bridle demo --quick
    """
    from bridle.grid.demo import MODALITIES, QUICK, run_demo

    if modality is not None and modality not in MODALITIES:
        raise UsageError(f"--modality {modality!r}: expected one of {', '.join(MODALITIES)}.")
    if quick and modality not in (None, QUICK):
        raise UsageError(f"--quick runs {QUICK} alone; leave out --quick for --modality {modality}.")
    chosen = [QUICK] if quick else [modality] if modality else list(MODALITIES)
    run_demo(chosen, seed=seed, out=out, quick=quick, iterations=iterations)


@app.command(rich_help_panel=START)
def recipes() -> None:
    """List the shipped recipes.

    Example:  bridle recipes
    """
    from bridle.config import load_config, recipe_names
    from bridle.console import plain_table

    table = plain_table("recipe", "size", "input", "patch", "what")
    for name in recipe_names():
        config = load_config(name)
        sizes = ("×".join(map(str, axis)) for axis in (config.geometry.input, config.geometry.patch))
        table.add_row(name, config.size, *sizes, config.summary)
        json_output.result("recipes", recipe=name, size=config.size, summary=config.summary)
    screen().print(table)
    screen().print("\nNext:  bridle show RECIPE   or   bridle pretrain RECIPE data.root=… --out runs/NAME")


@app.command(rich_help_panel=START)
def show(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print every setting of a recipe as YAML.

    Example:  bridle show cifar10-tiny quantizer=vq
    """
    from bridle.config import dump_config, load_config

    config = load_config(recipe, overrides or [])
    geometry = config.geometry.build()
    json_output.result("show", config)
    typer.echo(f"# grid {list(geometry.grid)} = {geometry.tokens} tokens of {geometry.patch_features} numbers")
    typer.echo(dump_config(config), nl=False)


@app.command(rich_help_panel=TRAIN)
def pretrain(
    recipe: Annotated[
        str, typer.Argument(help="A recipe name, a YAML file, or your data: a folder or a manifest, as `bridle init`.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Run directory; the same command continues it.")] = Path("run"),
    max_steps: Annotated[int | None, typer.Option(min=1, help="Cap every phase at this many steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Your data without a recipe: CPU-minutes of training; default 8.")
    ] = None,
) -> None:
    """Train encoder and tokenizer in turns (Algorithm 1). Run the same command again to continue.

    Example:  bridle pretrain cifar10-tiny data.root=cifar10 --out runs/c10
              bridle pretrain recordings/ --out runs/recordings
    """
    from bridle.config import is_data, load_config

    changes = [*(overrides or []), *([f"max_steps={max_steps}"] if max_steps else [])]
    if is_data(recipe):
        from bridle.propose import choose_config

        config = choose_config(Path(recipe), out, changes, minutes=minutes)
    else:
        config = load_config(recipe, changes)
        make_precision_safe(config.runtime.precision)
    from bridle import api

    finished = api.pretrain(config, out=out, command=f"bridle {shlex.join(sys.argv[1:])}")
    if finished.was_finished and is_first_process():
        typer.echo(f"{out} is finished; nothing to do.")
    elif is_first_process():
        from bridle.machine import peak_memory

        typer.echo(f"peak memory {peak_memory()}", err=True)
    show_results(out, command="pretrain")


@app.command(rich_help_panel=EVALUATE)
def finetune(
    run: RunArgument,
    overrides: Overrides = None,
    iteration: Annotated[
        int | None, typer.Option(min=1, help="Start from this iteration's encoder; default: the last.")
    ] = None,
    on: On = None,
) -> None:
    """Train a run's encoder with labels and score it once on the test split or over folds.

    --on RECIPE fine-tunes on another data set, with the recipe's settings: RUN/finetune-RECIPE.json.

    Example:  bridle finetune runs/c10 finetune.epochs=10 finetune.augment.mixup=0.8
              bridle finetune runs/as2m --on esc50 data.root=PATH
    """
    from bridle.config import load_config
    from bridle.runs.folder import RunFolder

    run = results_folder(run)
    if RunFolder(run).exists():
        settings = RunFolder(run).config(overrides or []) if on is None else load_config(on, overrides or [])
        make_precision_safe(settings.runtime.precision)
    from bridle.evaluate.finetune import finetune_run
    from bridle.report.tables import finetune_table
    from bridle.runs.results import read_results

    command = f"bridle {shlex.join(sys.argv[1:])}"
    path = finetune_run(run, overrides or [], iteration=iteration, on=on, command=command)
    if not is_first_process():
        return
    results = read_results(path)
    json_output.result("finetune", results, path=path)
    if (table := finetune_table(results)) is not None:
        screen().print(table)
    show_verdict(run, results)
    typer.echo(f"wrote {path}")
    again = shlex.join(["bridle", "finetune", str(run), *(["--on", on] if on else []), *(overrides or [])])
    scratch = any(entry.start == "scratch" for entry in results.evaluations)
    typer.echo(
        f"Next:  bridle report {run}"
        if scratch
        else f"Next:  {again} finetune.from_scratch=true   ·   bridle report {run}"
    )


@app.command(rich_help_panel=EVALUATE)
def ablate(
    recipe: Recipe,
    overrides: Overrides = None,
    table: Annotated[str, typer.Option(help="Name of a table, or a YAML file; see docs/evaluating.md.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1",
    out: Annotated[Path | None, typer.Option(help="Folder for runs and table; default: ablations/TABLE.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time; default: number of cores.")] = None,
    on: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="'RECIPE k=v …'", help="Also evaluate every row on this data; may be repeated."),
    ] = None,
) -> None:
    """Train a grid of runs over seeds and compare them in one table. The same command continues it.

    Example:  bridle ablate cifar10-tiny data.root=cifar10 --table attribution --seeds 0,1
              bridle ablate audioset2m data.root=AS --table table1 --seeds 0 --on 'esc50 data.root=ESC'
    """
    from bridle.grid.ablation import run_grid
    from bridle.grid.table_file import read_grid

    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {seeds!r}: expected whole numbers separated by commas, such as 0,1.") from None
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise UsageError(f"--seeds {seeds!r}: every seed once, from 0 on.")
    grid = read_grid(table)
    folder = out or Path("ablations") / grid.name
    if grid.every_iteration:
        from bridle.grid.every_iteration import fill_every_iteration

        path = fill_every_iteration(recipe, overrides or [], grid, seeds=numbers, out=folder, jobs=jobs, on=on or [])
    elif on:
        raise UsageError(f"--on: the table {grid.name!r} reads one score a run; it is for tables with every_iteration.")
    else:
        path = run_grid(recipe, overrides or [], grid, seeds=numbers, out=folder, jobs=jobs)
    json_output.result("ablate", path=path)
    typer.echo(f"Next:  bridle report {path.parent / 'runs'}/*")
