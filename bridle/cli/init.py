"""`bridle init`: look at a user's data and write a recipe for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.app import START, app
from bridle.console import counting, json_output, plain_table, screen
from bridle.errors import UsageError, quoted
from bridle.machine import usable_cores

if TYPE_CHECKING:
    from bridle.data.inspect.survey import Survey
    from bridle.propose import Proposal


@app.command(rich_help_panel=START)
def init(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="Your data: a folder of files, or a manifest.")],
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("recipe.yaml"),
    minutes: Annotated[float, typer.Option(min=0.01, help="CPU-minutes that training may take.")] = 8.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
) -> None:
    """Look at your data and write a recipe for it, with a reason for every choice.

    Example:  bridle init recordings/ --out recordings.yaml
    """
    from bridle.config import load_config
    from bridle.config.editor import HEADER
    from bridle.files import write_text

    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out {quoted(out)}: a recipe's name ends in .yaml.")
    if out.exists() and not force:
        raise UsageError(f"{quoted(out)} exists; choose another --out, or --force to replace it.")
    proposal = look_and_propose(path, minutes)
    show_survey(proposal.survey)
    typer.echo()
    show_choices(proposal)
    write_text(out, HEADER + proposal.to_yaml())
    load_config(out)  # what was written can be read
    chosen = {choice.key: choice.text for choice in proposal.choices}
    json_output.result("init", path=out, settings=chosen, warnings=proposal.warnings)
    typer.echo(f"wrote {out}")
    typer.echo(f"Next:  bridle pretrain {shlex.quote(str(out))} --out runs/{shlex.quote(proposal.config().name)}")


def look_and_propose(path: Path, minutes: float) -> Proposal:
    """Look at the data with a progress line, then choose."""
    from bridle.data.inspect.survey import survey_data
    from bridle.propose import propose

    if not path.exists():
        raise UsageError(f"{quoted(path)} does not exist; give the folder of your data, or a manifest.")
    with counting("looked at", "files") as tell:
        survey = survey_data(path, workers=usable_cores(), tell=tell)
    return propose(survey, minutes=minutes)


def show_survey(found: Survey) -> None:
    """What was seen."""
    from bridle.report.data_tables import classes_text

    def span(values: list[float], unit: str) -> str:
        low, middle, high = (f"{values[i]:,.2f}".removesuffix(".00") for i in (0, len(values) // 2, -1))
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit} (median {middle})"

    table = plain_table("data", "")
    table.add_row("files", f"{found.train:,} {found.modality.items}" + (f" in {found.folds} folds" * bool(found.folds)))
    table.add_row("test", "none" if found.test is None else f"{found.test:,}")
    table.add_row("labels", "none" if found.classes is None else classes_text(found.classes))
    table.add_row("looked at", f"{found.looked:,}, of which {len(found.bad):,} cannot be used")
    if found.seconds():
        table.add_row("lengths", span(found.seconds(), " s"))
    if any(facts.sounding is not None for facts in found.facts):
        table.add_row("silence", f"{100 * found.silence:.0f} % of the sound, at the ends of files")
    if found.rates():
        table.add_row("rates", ", ".join(f"{rate:,} Hz {count}×" for rate, count in found.rates().most_common(5)))
    axes = len(found.facts[0].shape or ())
    table.add_row("channels", span([float(n) for n in found.sizes(0)], ""))
    for axis, name in enumerate(("samples",) if axes == 2 else ("frames", "height", "width")[4 - axes :], start=1):
        table.add_row(name, span([float(n) for n in found.sizes(axis)], ""))
    screen().print(table)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)


def show_choices(proposal: Proposal) -> None:
    """The settings with their reasons, the cost on this machine, and warnings."""
    table = plain_table("setting", "value", "why")
    for choice in proposal.choices:
        if choice.reason:
            table.add_row(choice.key, choice.text, choice.reason)
    screen().print(table)
    cost = proposal.cost
    typer.echo(
        f"\ncost      about {cost.minutes:.1f} CPU-minutes of training here ({1000 * cost.step_seconds:.0f} ms a step, "
        f"{1000 * cost.load_seconds:.1f} ms to load an item); scoring comes on top"
    )
    for warning in proposal.warnings:
        screen().print(f"[yellow]warning[/]   {warning}", soft_wrap=True)
