"""Commands that evaluate a run: probe, knn, codebooks, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import EVALUATE, On, Overrides, RunArgument, app, results_folder, show_results
from bridle.console import is_first_process, json_output, screen
from bridle.errors import UsageError

NoCache = Annotated[bool, typer.Option("--no-cache", help="Do not use the feature cache in RUN/cache.")]


@app.command(rich_help_panel=EVALUATE)
def probe(
    run: RunArgument,
    overrides: Overrides = None,
    shots: Annotated[
        str | None, typer.Option(help="Few-shot probe with so many labels per class, such as 1,5,10.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="logistic (default), sgd or adamw.")] = None,
    loss: Annotated[str | None, typer.Option(help="ce or bce, for --head sgd or adamw.")] = None,
    on: On = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Probe every kept checkpoint: accuracy by CPU minutes.")
    ] = False,
    no_cache: NoCache = False,
) -> None:
    """Train a classifier on frozen features and score it, beside raw input and an untrained encoder.

    Data with folds is cross-validated. Settings are chosen on training items only.

    probe.pool: mean, axis (one mean per position of a grid axis), class or attentive.
    probe.layer=N: features of block N; all: of every block. data.views=N: average of N windows per item.
    --on RECIPE: probe on another data set; writes RUN/probe-RECIPE.json.

    Example:  bridle probe runs/c10 probe.pool=axis probe.axis=0 --shots 1,5,10
              bridle probe runs/as2m --on audioset20k data.root=PATH
    """
    from bridle.evaluate.probe_command import probe_run

    run = results_folder(run)
    given = {"shots": None if shots is None else f"[{shots}]", "head": head, "loss": loss}
    changes = [f"probe.{key}={value}" for key, value in given.items() if value is not None]
    changes += ["probe.cache_mb=0"] if no_cache else []
    if curve and on is not None:
        raise UsageError("--curve is over a run's own data; leave out --on.")
    if curve:
        from bridle.evaluate.probe_command import curve_run

        show_curve(run, curve_run(run, [*(overrides or []), *changes]))
        return
    path = probe_run(run, [*(overrides or []), *changes], on=on)
    show_results(run, path.name, command="probe", overrides=overrides or [], on=on)


def show_curve(run: Path, path: Path) -> None:
    """Print one line per point and draw the figure."""
    from bridle.report.curves import curve_of, curve_table, write_curves
    from bridle.runs.results import read_results

    if not is_first_process():
        return
    found = read_results(path)
    json_output.result("probe --curve", found, path=path)
    screen().print(curve_table(found))
    drawn = write_curves({run.name: [curve_of(found)]}, run / "figures" / "probe-curve")
    typer.echo(f"wrote {path}" + "".join(f" and {file}" for file in drawn))
    if not drawn:
        typer.echo("no figure: it needs two points, and a run that notes CPU time (costs.jsonl)")


@app.command(rich_help_panel=EVALUATE)
def knn(run: RunArgument, overrides: Overrides = None, on: On = None, no_cache: NoCache = False) -> None:
    """Score frozen features with k nearest neighbours, k chosen on validation items; also retrieval mAP.

    Example:  bridle knn runs/c10 probe.items=5000
    """
    from bridle.evaluate.probe_command import knn_run

    run = results_folder(run)
    changes = [*(overrides or []), *(["probe.cache_mb=0"] if no_cache else [])]
    show_results(run, knn_run(run, changes, on=on).name, command="knn", overrides=overrides or [], on=on)


@app.command(rich_help_panel=EVALUATE)
def codebooks(
    run: RunArgument,
    overrides: Overrides = None,
    iteration: Annotated[int | None, typer.Option(min=1, help="Only this iteration's tokenizer.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="At most so many samples; default: all.")] = None,
    reconstruct: Annotated[
        bool, typer.Option("--reconstruct", help="What decoding loses by number of stages, beside JPEG, Opus, MP3.")
    ] = False,
) -> None:
    """Check the codebooks: usage, entropy, information, stability, advice; table and figures.

    --reconstruct decodes held-out items with the run's detokenizer instead (`bridle detokenizer RUN` trains one).

    Example:  bridle codebooks runs/c10
              bridle codebooks runs/c10 --reconstruct
    """
    if reconstruct:
        show_reconstruction(results_folder(run), overrides or [], iteration=iteration, items=items)
        return
    from bridle.evaluate.codebooks.command import examine_run
    from bridle.report.plots import write_codebook_figures
    from bridle.report.tables import codebook_table, verdict_lines
    from bridle.runs.results import read_results

    run = results_folder(run)
    path = examine_run(run, overrides or [], iteration=iteration, items=items)
    evaluations, terminal = read_results(path).evaluations, screen()
    json_output.result("codebooks", read_results(path), path=path)
    for entry in evaluations:
        terminal.print(codebook_table(entry))
        for line in verdict_lines(entry):
            terminal.print(line)
        terminal.print()
    written = write_codebook_figures(evaluations, run / "figures")
    typer.echo(f"wrote {path} and {len(written)} figures in {run / 'figures'}")
    typer.echo(f"Next:  bridle report {run}")


def show_reconstruction(run: Path, overrides: list[str], *, iteration: int | None, items: int | None) -> None:
    """Measure rate and distortion and print one table for every iteration."""
    from bridle.evaluate.codebooks.command import reconstruct_run
    from bridle.report.reconstruction import rate_table
    from bridle.runs.reconstruction import RateDistortion
    from bridle.runs.results import read_record

    written, terminal = reconstruct_run(run, overrides, iteration=iteration, items=items), screen()
    for path in written:
        found = read_record(RateDistortion, path)
        json_output.result("codebooks --reconstruct", found, path=path)
        terminal.print(rate_table(found))
        typer.echo(f"wrote {path}")
    typer.echo(f"Next:  bridle report {run}")


@app.command(rich_help_panel=EVALUATE)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run directories.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: report.html in the first run.")] = None,
    samples: Annotated[bool, typer.Option(help="Show token maps and neighbours of some samples.")] = True,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    Example:  bridle report runs/c10 --out c10.html
    """
    from bridle.report.page import write_report
    from bridle.report.runs import read_run

    runs = [results_folder(run) for run in runs]
    found = [read_run(run) for run in runs]
    if samples:
        from bridle.report.token_maps import gallery_of

        found = [summary._replace(gallery=gallery_of(run)) for summary, run in zip(found, runs, strict=True)]
    path = write_report(
        found,
        out or runs[0] / "report.html",
        title=f"bridle report: {', '.join(run.folder for run in found[:3])}{' …' * (len(found) > 3)}",
    )
    json_output.result("report", path=path)
    typer.echo(f"wrote {path}")
