"""Commands that share models: export, convert, import."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import SHARE, Overrides, Overwrite, RunArgument, app
from bridle.console import json_output

Iteration = Annotated[int | None, typer.Option(min=1, help="The model after this iteration; default: the last.")]
Onnx = Annotated[bool, typer.Option("--onnx", help="Also write encoder.onnx and tokenizer.onnx, compared with torch.")]
Program = Annotated[bool, typer.Option("--program", help="Also write encoder.pt2 and tokenizer.pt2 (torch.export).")]
Waveform = Annotated[bool, typer.Option("--waveform", help="Graphs take a waveform in place of log-mel features.")]
Auto = Annotated[bool, typer.Option("--transformers", help="Also what AutoModel.from_pretrained needs to load it.")]
Half = Annotated[bool, typer.Option("--half", help="Weights in float16: half the size; codebooks stay float32.")]
Licence = Annotated[str | None, typer.Option("--data-licence", help="The licence of the data, for the model card.")]
Web = Annotated[bool, typer.Option("--web", help="Also a static page that shows codes of files: index.html.")]
Runtime = Annotated[Path | None, typer.Option(help="onnxruntime-web for --web: a folder, or `npm pack`'s archive.")]
Folder = Annotated[Path, typer.Option("--out", help="The folder to write.")]


@app.command(rich_help_panel=SHARE)
def export(
    run: RunArgument,
    out: Folder,
    iteration: Iteration = None,
    onnx: Onnx = False,
    program: Program = False,
    waveform: Waveform = False,
    half: Half = False,
    transformers: Auto = False,
    web: Web = False,
    runtime: Runtime = None,
    data_licence: Licence = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model as a folder with safetensors and a model card; optionally as ONNX.

    Example:  bridle export runs/c10 --out models/c10 --onnx --data-licence "CC BY 4.0"
    """
    from bridle.export.onnx import export_model
    from bridle.infer.model import load

    model = load(run, iteration=iteration, device="cpu")
    licensed = model.trained(data_licence=data_licence)
    write = partial(export_model, licensed, out, onnx=onnx, program=program, waveform=waveform)
    written = write(half=half, overwrite=overwrite, auto=transformers, web=web, runtime=runtime)
    json_output.result("export", path=out, files=list(written))
    typer.echo(f"wrote {out}: {', '.join(written)}")
    if data_licence is None and model.facts.data_licence is None:
        typer.echo(f"The licence of the data is not stated: give --data-licence, or edit {out / 'README.md'}.")
    if web:
        typer.echo(f"Page:  python -m http.server --bind 127.0.0.1 --directory {out}   ·   open http://127.0.0.1:8000")
    typer.echo(f"Next:  bridle embed {out} FILES --out features.npz   ·   in Python, bridle.load({str(out)!r})")


@app.command(rich_help_panel=SHARE)
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint of torch (.pth .pt .bin .ckpt).")],
    out: Annotated[Path, typer.Option("--out", help="The .safetensors file to write.")],
    key: Annotated[str | None, typer.Option(help="Key of the weights in the file, such as model or state.ema.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a pickled checkpoint to safetensors. Only tensors and plain values are accepted.

    Example:  bridle convert mae_pretrain_vit_base.pth --out mae.safetensors
    """
    from bridle.export.convert import convert_file

    found = convert_file(file, out, key=key, overwrite=overwrite)
    json_output.result("convert", found, path=out)
    typer.echo(f"wrote {out}: {found.describe()}")
    typer.echo(f"Next:  bridle import {out} --out models/{out.stem}")


@app.command("import", rich_help_panel=SHARE)
def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ViT in safetensors: timm, MAE, AudioMAE, VideoMAE.")],
    out: Folder,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="image, audio, video or another recipe; default: guessed from the file.")
    ] = None,
    data_licence: Licence = None,
    overwrite: Overwrite = False,
) -> None:
    """Import a ViT (timm, MAE, AudioMAE, VideoMAE) as a model folder for `embed` and `pretrain`.

    Example:  bridle import mae.safetensors --out models/mae geometry.input=[224,224]
    """
    from bridle.export.vit_import import import_vit

    given, licence = overrides or [], data_licence
    found = import_vit(file, out, recipe=recipe, overrides=given, data_licence=licence, overwrite=overwrite)
    json_output.result("import", path=out, recipe=found.recipe, settings=found.lines)
    for line in found.lines:
        typer.echo(line)
    typer.echo(f"wrote {out}")
    typer.echo(f"Next:  bridle embed {out} FILES --out features.npz")
    typer.echo(f"or     bridle pretrain {out}/config.yaml encoder.weights={out} data.root=FOLDER --out runs/mine")
