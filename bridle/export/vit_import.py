"""`bridle import`: the weights of a ViT from elsewhere as an exported folder, whose encoder gives features at once.

What the file tells (width, depth, patch, channels, class token, number of positions) becomes the config; the rest is
the recipe's, and overrides have the last word. There is no tokenizer: `bridle pretrain` with encoder.weights=FOLDER
makes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from bridle.config import Config, load_config
from bridle.data.modality import file_modalities
from bridle.errors import UsageError, quoted
from bridle.export.folder import require_free, write_folder
from bridle.export.trained import Facts, Trained
from bridle.models.build import build_encoder
from bridle.models.vit_names import first_names
from bridle.models.vit_weights import USUAL_HEAD, VitShape, load_vit, vit_shape


class Imported(NamedTuple):
    """A folder that was written, and what to say of it."""

    trained: Trained
    recipe: str
    lines: tuple[str, ...]


def import_vit(
    path: Path,
    out: Path,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    data_licence: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Read a ViT and write the folder `out`."""
    require_free(out, overwrite=overwrite)
    shape = vit_shape(path)
    if not shape.learned_elsewhere:
        raise UsageError(f"{quoted(path)} is an export of bridle already; use it as it is.")
    recipe = recipe or recipe_of(shape)
    config = config_of(shape, path, recipe, overrides)
    if config.data.mean is None or config.data.std is None:
        raise UsageError(
            f"recipe {quoted(recipe)} does not say how inputs are normalised; give data.mean=[…] and data.std=[…] as "
            "the model was trained with."
        )
    encoder = build_encoder(config)
    started = load_vit(encoder, path)
    notes = [f"{started.taken} tensors taken", *started.notes]
    notes += [f"not in the file: {first_names(started.missing)}"] if started.missing else []
    notes += [f"not used: {first_names(started.unused)}"] if started.unused else []
    imported = {"file": path.name, "sha256": started.sha256, "notes": notes}
    facts = Facts(iteration=1, phase="encoder", parts=("encoder",), data_licence=data_licence, imported=imported)
    trained = write_folder(out, Trained(encoder, None, config, facts), overwrite=overwrite)
    return Imported(trained, recipe, (*notes, *lines_of(trained.config, recipe)))


def recipe_of(shape: VitShape) -> str:
    """The recipe that a file's patches call for; one with as many channels comes first."""
    fitting = [
        (modality.vit_input.channels is None, modality.kind)
        for modality in file_modalities()
        if modality.vit_input is not None
        and modality.vit_input.axes == len(shape.patch)
        and modality.vit_input.channels in (None, shape.channels)
    ]
    if not fitting:
        raise UsageError(f"no modality has patches with {len(shape.patch)} axes as this file has; give --recipe.")
    return min(fitting)[1]


def config_of(shape: VitShape, path: Path, recipe: str, overrides: Sequence[str]) -> Config:
    """The recipe with the sizes found in the file, then the user's overrides."""
    heads = shape.width // USUAL_HEAD if shape.width % USUAL_HEAD == 0 else 1
    # How published ViTs are fed that read such files; recipes of a data set say it themselves.
    usual = next((modality.vit_input for modality in file_modalities() if modality.kind == recipe), None)
    from_file = [
        # In quotes: a file called 123 or true is not a number.
        f'name="{path.stem}"' if path.stem.replace("-", "").replace("_", "").isalnum() else "name=imported",
        f"geometry.channels={shape.channels}",
        f"geometry.patch={list(shape.patch)}",
        f"geometry.input={list(input_of(shape, None if usual is None else usual.bands))}",
        f"encoder.width={shape.width}",
        f"encoder.depth={shape.depth}",
        f"encoder.heads={heads}",
        f"encoder.mlp_ratio={shape.hidden / shape.width}",
        f"encoder.class_token={'true' if shape.class_token else 'false'}",
        *(() if usual is None else (f"data.mean={list(usual.mean)}", f"data.std={list(usual.std)}")),
    ]
    return load_config(recipe, [*from_file, f"encoder.weights={json.dumps(path.name)}", *overrides])


def input_of(shape: VitShape, bands: int | None) -> tuple[int, ...]:
    """The size of input that the file's positions are for, or else a usual one; `bands` is its last size if known."""
    patch, count = shape.patch, shape.positions
    if bands is not None:
        bands //= patch[1]
        rows = count // bands if count is not None and count % bands == 0 else 64
        return rows * patch[0], bands * patch[1]
    side = isqrt(count) if count is not None and isqrt(count) ** 2 == count else 224 // patch[-1]
    square = side * patch[-2], side * patch[-1]
    return square if len(patch) == 2 else (8 * patch[0], *square)


def lines_of(config: Config, recipe: str) -> list[str]:
    """What a user should check, line by line."""
    geometry, encoder = config.geometry, config.encoder
    size, patch = ("×".join(map(str, sizes)) for sizes in (geometry.input, geometry.patch))
    shown = [", ".join(f"{value:.4g}" for value in values or ()) for values in (config.data.mean, config.data.std)]
    return [
        f"encoder: width {encoder.width}, {encoder.depth} blocks, {encoder.heads} heads (encoder.heads=N if not so)",
        f"input: {geometry.channels} channels, {size} in patches of {patch} (geometry.input=[…] for another size)",
        f"normalisation: mean {shown[0]}, std {shown[1]} (data.mean=[…] data.std=[…] if it was trained with others); "
        f"files are read as recipe {recipe!r} reads them",
    ]
