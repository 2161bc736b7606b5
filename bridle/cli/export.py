"""Commands that carry a model out of bridle and into it: export, convert, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import Overrides, RunFolder, app

Replace = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


Iteration = Annotated[int | None, typer.Option(min=1, help="The model after this iteration; else the last one.")]
Onnx = Annotated[bool, typer.Option("--onnx", help="Also encoder.onnx and tokenizer.onnx, compared with torch.")]
Program = Annotated[bool, typer.Option("--program", help="Also encoder.pt2 and tokenizer.pt2 of torch.export.")]
Half = Annotated[bool, typer.Option("--half", help="Weights in float16: half the size; codebooks stay float32.")]
Licence = Annotated[str | None, typer.Option("--data-licence", help="The licence of the data, for the model card.")]
Folder = Annotated[Path, typer.Option("--out", help="The folder to write.")]


@app.command()
def export(
    run: RunFolder,
    out: Folder,
    iteration: Iteration = None,
    onnx: Onnx = False,
    program: Program = False,
    half: Half = False,
    data_licence: Licence = None,
    overwrite: Replace = False,
) -> None:
    """Write a model as a folder of safetensors with a model card, for others to load; optionally as ONNX.

    Example:  bridle export runs/c10 --out models/c10 --onnx --data-licence "CC BY 4.0"
    """
    from bridle.export.command import export_model
    from bridle.infer.model import load

    model = load(run, iteration=iteration, device="cpu")
    licensed = model.trained(data_licence=data_licence)
    written = export_model(licensed, out, onnx=onnx, program=program, half=half, overwrite=overwrite)
    typer.echo(f"wrote {out}: {', '.join(written)}")
    if data_licence is None and model.facts.data_licence is None:
        typer.echo(f"The licence of the data is not stated: give --data-licence, or edit {out / 'README.md'}.")
    typer.echo(f"Next:  bridle embed {out} FILES --out features.npz   ·   in Python, bridle.load({str(out)!r})")


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint of torch (.pth .pt .bin .ckpt).")],
    out: Annotated[Path, typer.Option("--out", help="The .safetensors file to write.")],
    key: Annotated[str | None, typer.Option(help="Where in the file the weights are, e.g. model or state.ema.")] = None,
    overwrite: Replace = False,
) -> None:
    """Turn a pickled checkpoint from elsewhere into safetensors; tensors are taken, anything that could run is refused.

    Example:  bridle convert mae_pretrain_vit_base.pth --out mae.safetensors
    """
    from bridle.export.convert import convert_file

    found = convert_file(file, out, key=key, overwrite=overwrite)
    typer.echo(f"wrote {out}: {found.describe()}")
    typer.echo(f"Next:  bridle import {out} --out models/{out.stem}")


@app.command("import")
def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ViT in safetensors: timm, MAE, AudioMAE, VideoMAE.")],
    out: Folder,
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="image, audio, video or another recipe; told by the file.")] = None,
    data_licence: Licence = None,
    overwrite: Replace = False,
) -> None:
    """Read the weights of a ViT from elsewhere into our encoder and write a folder that `embed` and runs can use.

    Example:  bridle import mae.safetensors --out models/mae geometry.input=[224,224]
    """
    from bridle.export.vit_import import import_vit

    given, licence = overrides or [], data_licence
    found = import_vit(file, out, recipe=recipe, overrides=given, data_licence=licence, overwrite=overwrite)
    for line in found.lines:
        typer.echo(line)
    typer.echo(f"wrote {out}")
    typer.echo(f"Next:  bridle embed {out} FILES --out features.npz")
    typer.echo(f"or     bridle pretrain {out}/config.yaml encoder.weights={out} data.root=FOLDER --out runs/mine")
