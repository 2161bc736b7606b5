"""Commands about this machine: doctor and the benchmarks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import MACHINE, app
from bridle.console import json_output
from bridle.errors import ConfigError, UsageError

PACKAGES = ("torch", "numpy", "safetensors", "pydantic")
EXTRAS = ("pillow", "soundfile", "soxr", "av", "scikit-learn", "scipy", "matplotlib", "tensorboard", "faiss-cpu")


@app.command(rich_help_panel=MACHINE)
def doctor() -> None:
    """Print devices, codecs, bf16, threads, disk and versions, for a bug report.

    Example:  bridle doctor
    """
    found = list(examine())
    json_output.result("doctor", dict(found))
    for name, finding in found:
        typer.echo(f"{name:<12} {finding}")


@app.command(rich_help_panel=MACHINE)
def schema(
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file instead; editors look beside a recipe.")
    ] = None,
) -> None:
    """Print the JSON schema of recipes and config files, for editors and programs.

    Example:  bridle schema --out bridle-schema.json
    """
    import json

    from bridle.config.editor import recipe_schema
    from bridle.files import write_text

    found = json.dumps(recipe_schema(), indent=1)
    if out is None:
        json_output.result("schema", recipe_schema())
        typer.echo(found)
        return
    write_text(out, found + "\n")
    json_output.result("schema", path=out)
    typer.echo(f"wrote {out}")


def examine() -> Iterator[tuple[str, str]]:
    """Name and finding of each fact; bf16 is tried before torch is loaded."""
    from bridle.files import free_bytes
    from bridle.machine import make_bf16_safe

    installed = {found.name.lower(): found.version for found in metadata.distributions()}

    def versions(names: Sequence[str]) -> str:
        return ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in names)

    yield "bridle", installed["bridle"]
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", versions(PACKAGES)
    yield "extras", versions(EXTRAS)
    try:
        yield "bf16 (CPU)", make_bf16_safe()
    except ConfigError as error:
        yield "bf16 (CPU)", str(error)
    import torch

    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
    yield "devices", ", ".join([*gpus, f"cpu ({torch.backends.cpu.get_cpu_capability()})"])
    yield "threads", f"torch {torch.get_num_threads()}, cores {os.cpu_count()}"
    yield "codecs", codecs()
    yield "disk", f"{free_bytes(Path()) / 1e9:.1f} GB free in the current folder"


def codecs() -> str:
    """The formats that the installed decoders read."""
    found = list[str]()
    if find_spec("PIL"):
        from PIL import features

        found.append("images " + "/".join(name for name in ("jpg", "zlib", "webp") if features.check(name)))
    if find_spec("soundfile"):
        import soundfile

        known = soundfile.available_formats()
        found.append("sound " + "/".join(name for name in ("WAV", "FLAC", "OGG", "MP3") if name in known))
    if find_spec("av"):
        import av

        known = av.codecs_available
        found.append("video " + "/".join(name for name in ("h264", "vp9", "mpeg4", "gif") if name in known))
    return "; ".join(found) or 'none installed (pip install "bridle[audio,image,video]")'


FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command("bench", context_settings=FORWARDED, rich_help_panel=MACHINE)
def bench(context: typer.Context) -> None:
    """Measure speed on this machine: quantizer, step, data. Works from a source checkout.

    Example:  bridle bench step --size tiny --modality image
    """
    folder = Path(__file__).parents[2] / "benchmarks"
    if not (folder / "bench").is_dir():
        raise UsageError("bridle bench is not installed: get bridle's repository and `pip install -e` it from there.")
    sys.path.insert(0, str(folder))
    from bench.commands import bench_app  # type: ignore[import-not-found]  # outside the package

    bench_app(context.args or ["--help"], prog_name="bridle bench", standalone_mode=False)
