"""Commands that use a trained model on files: tokenize and embed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import RunFolder, app, show_written

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
