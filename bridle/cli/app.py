"""The root of the command line: what commands share, and how errors reach the user."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridle.console import QUIET, is_first_process, json_output, screen
from bridle.errors import BridleError, ConfigError, Interrupted, UsageError

if TYPE_CHECKING:
    from bridle.runs.results import Results

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Self-supervised pretraining on audio, images and video with residual-quantization targets (BRIDLE).",
)
# Headings of `bridle --help`.
START, TRAIN, EVALUATE = "Start", "Train", "Evaluate"
USE, SHARE, MACHINE = "Use codes and features", "Share", "Machine"

data_app = typer.Typer(no_args_is_help=True, help="Check, measure and pack your data: check, stats, shard.")
app.add_typer(data_app, name="data", rich_help_panel=START)
codes_app = typer.Typer(no_args_is_help=True, help="Compare files of codes: diff.")
app.add_typer(codes_app, name="codes", rich_help_panel=USE)

Recipe = Annotated[str, typer.Argument(help="A recipe name or a YAML file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]
WindowBatch = Annotated[int, typer.Option(min=1, help="Windows per batch.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as encoder.depth=6.")
]
RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run directory, an exported folder, digits-tiny, or owner/name on the hub."),
]


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        import bridle

        typer.echo(f"bridle {bridle.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results as JSON, one object per line; works after a command too.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress and no notes; works after a command too.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="Python file that registers a modality, tokenizer or scorer. May be given several times."),
    ] = None,
) -> None:
    """Load the plugins; `main` reads --debug, --json and --quiet itself."""
    from bridle.plugins import load_plugins, name_plugins

    name_plugins(plugin or [])
    load_plugins()


def make_precision_safe(precision: str) -> None:
    """Before torch is loaded: arrange that bf16 on this CPU cannot kill the process. A GPU run needs none of it."""
    from bridle.machine import make_bf16_safe

    if precision != "bf16":
        return
    try:
        typer.echo(make_bf16_safe(), err=True)
    except ConfigError as error:
        # Not the last word: with a GPU the CPU does not matter, and without one the run refuses for itself.
        typer.echo(f"note: {error}", err=True)


def results_folder(run: Path) -> Path:
    """The folder for a run's results; a model given by name is copied to models/NAME first."""
    if run.exists():
        return run
    from bridle.export.hub import folder_to_work_in

    folder = folder_to_work_in(run)
    if is_first_process():
        typer.echo(f"{run} is the name of a model: its results go to {folder}", err=True)
    return folder


On = Annotated[
    str | None,
    typer.Option("--on", metavar="RECIPE", help="Evaluate on this recipe's data set instead of the run's own."),
]


def show_results(
    run: Path, results: str = "results.json", *, command: str, overrides: Sequence[str] = (), on: str | None = None
) -> None:
    """The results that `command` wrote as a table, then what was written and what to do next, on the same data."""
    from bridle.report.runs import read_run
    from bridle.report.tables import few_shot_table, results_table

    if not is_first_process():
        return
    terminal = screen()
    found = read_run(run, results=results)
    json_output.result(command, found.results, path=run / results)
    for table in (results_table([found]), few_shot_table(found.results)):
        if table is not None:
            terminal.print(table)
    show_verdict(run, found.results)
    show_left_out(found.results)
    if (run / results).is_file():
        typer.echo(f"wrote {run / results}")
    where = [] if on is None else ["--on", on]
    data = [change for change in overrides if change.startswith("data.")]
    other = shlex.join(["bridle", "knn" if results.startswith("probe") else "probe", str(run), *where, *data])
    typer.echo(f"Next:  {other}   ·   {shlex.join(['bridle', 'report', str(run)])}")


def show_left_out(results: Results) -> None:
    """Items of the last evaluation that could not be read."""
    scores = results.evaluations[-1].scores if results.evaluations else None
    if scores is not None and scores.left_out:
        first = ", ".join(scores.left_out[:3]) + (", …" if len(scores.left_out) > 3 else "")
        typer.echo(f"{len(scores.left_out)} items cannot be read and were not scored: {first}")


def show_verdict(run: Path, results: Results) -> None:
    """Whether the features beat the baselines, and what to try where they do not."""
    from bridle.evaluate.verdict import judge_results
    from bridle.report.tables import verdict_text
    from bridle.runs.folder import RunFolder

    try:
        verdict = judge_results(results, RunFolder(run).config())
    except (ConfigError, UsageError):
        verdict = judge_results(results)
    for line in [] if verdict is None else verdict_text(verdict):
        screen().print(line.replace("RUN", str(run)))


def show_written(written: Any, *, command: str, reader: str) -> None:
    """What tokenize or embed wrote, what it could not read, and how to go on; printed by the first process."""
    if not is_first_process():
        return
    if written.failed:
        total = written.files + written.failed
        typer.echo(f"{written.failed} of {total} files could not be read; see {written.quarantine}", err=True)
    json_output.result(command, written)
    header, rows = written.header, f"{written.rows:,} rows"
    if header.kind == "codes":
        rows += f" of {len(header.codebook_sizes)} codes, {header.bits_per_token:g} bits each"
    if header.bits_per_second is not None:
        rows += f", {header.bits_per_second:,.0f} bits per second"
    typer.echo(f"wrote {written.out}: {written.files:,} files, {rows}")
    typer.echo(f"Next:  in Python, bridle.{reader}({str(written.out)!r})")


SHARED_COMMANDS = frozenset({"pretrain", "finetune", "probe", "knn", "tokenize", "embed"})


def say_last(text: str) -> None:
    """Print why the command ends; of several processes only the first to fail does, with its rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        typer.echo(text, err=True)
        return
    from bridle.distributed import speaks_first

    if speaks_first():
        typer.echo(f"rank {os.environ.get('RANK', '?')}: {text}", err=True)


def explain_options(words: Sequence[str]) -> None:
    """Name the setting of a config that was written as an option a command does not have: --device cuda."""
    from bridle.config.load import setting_named

    command: Any = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    known = {option for parameter in command.params for option in parameter.opts}
    for word, value in zip(words, [*words[1:], "…"], strict=True):
        option, _, given = word.partition("=")
        key = setting_named(option[2:].replace("-", "_")) if option.startswith("--") and option not in known else None
        if key is not None:
            typer.echo(f"{option}: settings are written KEY=VALUE: {key}={given or value}", err=True)


def take_flags() -> set[str]:
    """Take --json and --quiet out of the command line, wherever they stand, and return those that were there."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = {"--json", "--quiet"}.intersection(sys.argv[1:end])
    sys.argv[:end] = [word for word in sys.argv[:end] if word not in given]
    return given


def run_command() -> None:
    """Run the command that was typed; where its options are wrong, also say which of them are settings."""
    flags = take_flags()
    if "--quiet" in flags:
        os.environ[QUIET] = "1"
    try:
        with json_output.active() if "--json" in flags else nullcontext():
            app(standalone_mode=True)
    except SystemExit as ended:
        if ended.code == 2:
            explain_options(sys.argv[1:])
        raise
    finally:
        os.environ.pop(QUIET, None)


def main() -> None:
    """Entry point: errors a user can mend are one line and an exit code, with --debug also a traceback."""
    debug = "--debug" in sys.argv
    if SHARED_COMMANDS.isdisjoint(sys.argv[1:]):
        if not is_first_process():
            return  # the other commands are one process's work, however many torchrun started
        os.environ.pop("WORLD_SIZE", None)  # which must not wait for the others, nor may what it starts
    try:
        run_command()
    except (BridleError, Interrupted) as error:
        if debug and isinstance(error, BridleError):
            traceback.print_exc()
        say_last(f"{type(error).__name__}: {error}" if isinstance(error, BridleError) else str(error))
        sys.exit(error.exit_code)
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
        say_last(f"{what}. Free some space or mend permissions, then run the same command again.")
        sys.exit(74)
    except Exception as error:
        if debug:
            raise
        say_last(
            f"internal error: {type(error).__name__}: {error}\n"
            "This is a bug in bridle. Run again with --debug (bridle --debug …) and report it with `bridle doctor`."
        )
        sys.exit(1)
