"""Commands that find similar files and hand codes to language models: index, search, sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bridle.cli.app import USE, Device, Overwrite, RunArgument, Strict, WindowBatch, app
from bridle.cli.infer import Layer, PoolAxis, PoolDeviation, PoolName, Workers, feature_spec
from bridle.console import json_output, plain_table, screen
from bridle.errors import UsageError


@app.command(rich_help_panel=USE)
def index(
    run: RunArgument,
    corpus: Annotated[
        list[str],
        typer.Argument(metavar="CORPUS...", help="Files, folders, 'patterns' or manifests (.csv .tsv .jsonl)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the index; the same command updates it.")],
    pool: PoolName = "probe",
    axis: PoolAxis = None,
    deviation: PoolDeviation = False,
    layer: Layer = None,
    batch: WindowBatch = 16,
    workers: Workers = 1,
    overwrite: Overwrite = False,
    strict: Strict = False,
    device: Device = "auto",
) -> None:
    """Index a collection for `bridle search`. Only new and changed files are computed.

    Example:  bridle index runs/c10 photos/ --out photos-index
    """
    from bridle.infer.model import load
    from bridle.infer.write import Options
    from bridle.search.index import update_index

    if pool == "none":
        raise UsageError("--pool none: an index keeps one vector for a file; choose probe, mean, axis or class.")
    options = Options(batch=batch, overwrite=overwrite, strict=strict, workers=workers)
    model = load(run, device=device)
    spec = feature_spec(model, pool, axis, deviation, layer)
    found = update_index(model, run, corpus, out, spec=spec, options=options)
    for path in found.failed:
        typer.echo(f"some files could not be read; see {path}", err=True)
    json_output.result("index", found, path=out)
    typer.echo(f"wrote {out}: {found.files:,} files, {found.added:,} added, {found.removed:,} removed")
    typer.echo(f"Next:  bridle search {out} FILE --html hits.html   ·   bridle search {out} --evaluate")


@app.command(rich_help_panel=USE)
def search(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An index written by `bridle index`.")],
    queries: Annotated[list[Path] | None, typer.Argument(metavar="[QUERY]...", help="Files to search for.")] = None,
    by: Annotated[str, typer.Option(help="features or codes.")] = "features",
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with pictures or sounds.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Score the search with the labels: mAP.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="With --evaluate, number of queries at most.")] = 1000,
    run: Annotated[Path | None, typer.Option(help="The model, if its folder was moved.")] = None,
    device: Device = "auto",
) -> None:
    """Find the files of an index that are most similar to a file.

    Example:  bridle search photos-index cat.jpg -k 5 --html hits.html
    """
    from bridle.search.query import open_index

    if bool(queries) == evaluate:
        raise UsageError("give a file to search for, or --evaluate to score the search with the labels.")
    if by not in ("features", "codes"):
        raise UsageError(f"--by {by!r}: expected features or codes.")
    opened = open_index(folder, run=run, device=device)
    if evaluate:
        _evaluate(opened, samples)
        return
    found = []
    for query in queries or []:
        found.append(opened.search(query, by="codes" if by == "codes" else "features", k=k))
        _show_hits(found[-1])
        hits = [{"score": hit.score, "file": hit.entry.name, "labels": hit.entry.labels} for hit in found[-1].hits]
        json_output.result("search", query=str(query), by=by, hits=hits)
    if html is not None:
        from bridle.search.page import write_page

        typer.echo(f"wrote {write_page(opened, found, html)}")


def _show_hits(found: Any) -> None:
    from rich.text import Text

    from bridle.data.listing.folders import printable

    terminal = screen()
    terminal.print(Text(f"like {printable(found.query)}, by {found.by}"))
    table = plain_table("score", "file", "label")
    for hit in found.hits:
        # As plain text: a name with brackets is no markup.
        table.add_row(f"{hit.score:.3f}", Text(hit.entry.name), Text(", ".join(hit.entry.labels)))
    terminal.print(table)
    if found.itself:
        terminal.print(
            f"left out: {found.itself} file{'s' if found.itself > 1 else ''} with the query's path or content"
        )


def _evaluate(opened: Any, samples: int) -> None:
    from bridle.search.evaluate import evaluate_search, write_scores

    measured = evaluate_search(opened, queries=samples)
    table = plain_table("by", "mAP %", "95 %", "first hit %", "chance mAP %")
    for one in measured:
        json_output.result("search --evaluate", one)
        low, high = (f"{100 * end:.1f}" for end in one.interval)
        shares = (one.mean_average_precision, one.precision_at_1, one.chance)
        score, first, chance = (f"{100 * share:.1f}" for share in shares)
        table.add_row(one.by, score, f"{low}–{high}", first, chance)
    screen().print(table)
    typer.echo(f"{measured[0].queries:,} queries among {measured[0].files:,} files")
    typer.echo(f"wrote {write_scores(opened, measured)}")


@app.command(rich_help_panel=USE)
def sequences(
    codes: Annotated[list[Path], typer.Argument(metavar="CODES...", help="Files that `bridle tokenize` wrote.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    pattern: Annotated[str, typer.Option(help="interleaved, delayed or stage1; see docs/using.md.")] = "interleaved",
    context: Annotated[
        int | None, typer.Option(min=2, help="Also pack all files into blocks of this many ids.")
    ] = None,
    file_format: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    overwrite: Overwrite = False,
) -> None:
    """Write codes as token ids for a language model: `input_ids` per file, packed blocks, vocabulary.

    Example:  bridle sequences codes.npz --out sequences --pattern delayed --context 512
    """
    from bridle.infer.sequences import write_sequences

    written = write_sequences(
        codes, out, pattern=pattern, context=context, file_format=file_format, overwrite=overwrite
    )
    json_output.result("sequences", written, path=out)
    blocks = f", {written.blocks:,} blocks of {context}" if context else ""
    typer.echo(f"wrote {out}: {written.files:,} files, {written.ids:,} ids of {written.vocab_size:,}{blocks}")
    kind = "json" if file_format == "jsonl" else file_format
    files = str(out / f"sequences.{file_format}")
    typer.echo(f"Next:  in Python, datasets.load_dataset({kind!r}, data_files={files!r})")
