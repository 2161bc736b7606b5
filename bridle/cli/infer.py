"""Commands that use a trained model on files: tokenize, embed, and from codes back to media."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bridle.cli.app import (
    USE,
    Device,
    Overrides,
    Overwrite,
    RunArgument,
    Strict,
    WindowBatch,
    app,
    codes_app,
    make_precision_safe,
    results_folder,
    show_written,
)
from bridle.console import is_first_process, json_output, screen
from bridle.errors import UsageError

InputNames = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="Files, folders, 'patterns', manifests (.csv .tsv .jsonl), tar shards; - reads paths from stdin.",
    ),
]
ResultFile = Annotated[
    Path, typer.Option("--out", help="Output: .npz, .safetensors or .parquet; without an ending, a folder of parts.")
]
Workers = Annotated[
    int,
    typer.Option(min=0, help="Decoder processes; 0 decodes in this process, unprotected. Same result."),
]
PartSize = Annotated[int, typer.Option(min=1, help="Megabytes per part of a folder.")]
PartFormat = Annotated[
    Literal["npz", "safetensors", "parquet"], typer.Option("--format", help="Format of the parts of a folder.")
]
Precision = Annotated[
    Literal["fp32", "bf16", "fp16"], typer.Option(help="Precision of the encoder; codes are always computed in fp32.")
]

PoolName = Annotated[
    str, typer.Option(help="probe (as in the run's probe), mean, axis, class, or none: one row per token.")
]
PoolAxis = Annotated[int | None, typer.Option(min=0, help="With --pool axis, the grid axis that is kept.")]
PoolDeviation = Annotated[bool, typer.Option("--deviation", help="With --pool mean or axis: also standard deviations.")]
Layer = Annotated[
    int | None, typer.Option(min=1, help="Block to take features from; default: the probe's, or the last.")
]


def feature_spec(model: Any, pool: str, axis: int | None, deviation: bool, layer: int | None) -> Any:
    """The features that the options of a command name."""
    known = ("probe", "none", "mean", "axis", "class")
    if pool not in known:
        raise UsageError(f"--pool {pool!r}: expected one of {', '.join(known)}.")
    return model.features(layer=layer, pool=None if pool == "none" else pool, axis=axis, deviation=deviation)


@contextmanager
def model_of_ranks(run: Path, device: str, precision: str) -> Iterator[Any]:
    """Join the processes that torchrun started, and load the model in each of them."""
    make_precision_safe(precision)
    from bridle import distributed
    from bridle.infer.arrays import DTYPES
    from bridle.infer.model import load

    with distributed.process_group(device=device):
        yield load(run, device=device, dtype=DTYPES[precision])


@app.command(rich_help_panel=USE)
def tokenize(
    run: RunArgument,
    inputs: InputNames,
    out: ResultFile,
    stages: Annotated[int | None, typer.Option(min=1, help="Only the first codebooks.")] = None,
    batch: WindowBatch = 16,
    workers: Workers = 1,
    part_mb: PartSize = 256,
    part_format: PartFormat = "npz",
    overwrite: Overwrite = False,
    strict: Strict = False,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Write the codes of files of any length, one row per token. The same command continues.

    Example:  bridle tokenize runs/c10 photos/ --out codes.npz

    A large corpus, with all cores:  torchrun --nproc-per-node 8 -m bridle tokenize runs/c10 photos/ --out codes
    """
    with model_of_ranks(run, device, precision) as model:
        from bridle.infer.write import Options, tokenize_inputs

        options = Options(batch, overwrite, strict, workers, part_mb, part_format)
        written = tokenize_inputs(model, inputs, out, stages=stages, options=options)
        show_written(written, command="tokenize", reader="read_codes")


@app.command(rich_help_panel=USE)
def embed(
    run: RunArgument,
    inputs: InputNames,
    out: ResultFile,
    pool: PoolName = "probe",
    axis: PoolAxis = None,
    deviation: PoolDeviation = False,
    layer: Layer = None,
    batch: WindowBatch = 16,
    workers: Workers = 1,
    part_mb: PartSize = 256,
    part_format: PartFormat = "npz",
    overwrite: Overwrite = False,
    strict: Strict = False,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Write features of files of any length, one row per file or per token (--pool none). The same command continues.

    Example:  bridle embed runs/c10 photos/ --out features.npz
    """
    with model_of_ranks(run, device, precision) as model:
        from bridle.infer.write import Options, embed_inputs

        options = Options(batch, overwrite, strict, workers, part_mb, part_format)
        spec = feature_spec(model, pool, axis, deviation, layer)
        written = embed_inputs(model, inputs, out, spec=spec, options=options)
        show_written(written, command="embed", reader="read_features")


@app.command(rich_help_panel=USE)
def detokenizer(
    run: RunArgument,
    overrides: Overrides = None,
    iteration: Annotated[int | None, typer.Option(min=1, help="Codes of this iteration instead of the last.")] = None,
) -> None:
    """Train a small network that turns codes back into inputs. The run's own networks do not change.

    Example:  bridle detokenizer runs/c10 detokenizer.steps=1000
    """
    from bridle.infer.detokenizer_command import detokenizer_run, reconstruction_table
    from bridle.runs.reconstruction import Reconstruction
    from bridle.runs.results import read_record

    result = detokenizer_run(results_folder(run), overrides or [], iteration=iteration)
    if not is_first_process():
        return
    found = read_record(Reconstruction, result)
    json_output.result("detokenizer", found, path=result)
    screen().print(reconstruction_table(found))
    typer.echo(f"wrote {result}")
    typer.echo(
        f"Next:  bridle tokenize {run} INPUT --out codes.npz   ·   bridle detokenize {run} codes.npz --out decoded"
    )


@app.command(rich_help_panel=USE)
def detokenize(
    run: RunArgument,
    codes: Annotated[Path, typer.Argument(metavar="CODES", help="What `bridle tokenize` wrote with this run.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the decoded files.")],
    stages: Annotated[int | None, typer.Option(min=1, help="Decode only the first codebooks.")] = None,
    iteration: Annotated[int | None, typer.Option(min=1, help="The tokenizer of this iteration.")] = None,
    clips: Annotated[Literal["mp4", "gif"], typer.Option("--format", help="Format of clips.")] = "mp4",
    device: Device = "auto",
) -> None:
    """Turn codes into pictures, sounds or clips: PNG, WAV, MP4 or GIF, or .npy for arrays.

    Example:  bridle detokenize runs/c10 codes.npz --out decoded --stages 2
    """
    from bridle.infer.detokenize_files import detokenize as detokenize_files
    from bridle.infer.model import load

    model = load(run, iteration=iteration, device=device)
    written = detokenize_files(model, codes, out, stages=stages, clips=clips)
    json_output.result("detokenize", path=out, files=len(written))
    typer.echo(f"wrote {len(written):,} files to {out}, the first one {written[0]}")


@codes_app.command("diff")
def codes_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="What `bridle tokenize` wrote.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same files, tokenized again.")],
) -> None:
    """Compare two files of codes: what share agrees, and at which stage they part.

    Files are paired by name; where no name is in both, by their paths below the common folder, then without endings.

    Example:  bridle codes diff codes-v1.npz codes-v2.npz
    """
    from bridle.infer.diff import diff_codes, diff_table

    found = diff_codes(old, new)
    json_output.result("codes diff", found)
    screen().print(diff_table(found))
    for line in found.lines():
        typer.echo(line)
