"""`bridle export`: a model as a folder, with the graphs that were asked for."""

from __future__ import annotations

from pathlib import Path

from bridle.console import ProgressLine
from bridle.export.folder import CARD, LOADED, as_stored, require_free, write_folder
from bridle.export.load import Trained
from bridle.export.onnx import onnx_files, program_files


def export_model(
    trained: Trained,
    out: Path,
    *,
    onnx: bool = False,
    program: bool = False,
    half: bool = False,
    overwrite: bool = False,
    progress: ProgressLine | None = None,
) -> list[str]:
    """Write the folder and return the names of its files."""
    require_free(out, overwrite=overwrite)  # before minutes are spent on graphs
    progress = progress or ProgressLine()
    stored = as_stored(trained, half=half)
    extras = [onnx_files(stored, progress)] if onnx else []
    extras += [program_files(stored, progress)] if program else []
    written = write_folder(out, stored, half=half, overwrite=overwrite, extras=extras)
    return [*LOADED, CARD, *written.facts.graphs]
