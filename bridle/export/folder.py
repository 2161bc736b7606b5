"""A trained model as a folder that others can load: written whole or not at all, checked before it is trusted.

    model.safetensors   encoder.* and tokenizer.*, by the names of the networks; nothing of decoder or optimizer
    config.yaml         the resolved config, without paths of the machine it was trained on
    config.json         format, origin (iteration, phase), geometry, what was measured, licence of the data
    README.md           the model card; not in the manifest, because people are meant to edit it
    detokenizer/iterR/  where one is trained: config, errors and its checkpoint, which has a manifest of its own
    *.onnx, *.pt2       graphs, where asked for
    modeling_bridle.py  and a processor's config, where asked for: for transformers, see auto_files
    manifest.json       size and SHA-256 of the others: `files` are checked on loading, `graphs` can be left out

It is read like a checkpoint that holds only some of a run's networks (`parts`), so a command that takes a run also
takes such a folder. Reading it runs no code.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor

from bridle.config import Config, dump_config
from bridle.errors import CheckpointError, NonFiniteError, UsageError, quoted
from bridle.export.auto_files import auto_settings, write_auto_files
from bridle.export.card import model_card
from bridle.export.trained import FORMAT, Trained
from bridle.files import fingerprint, replacing_folder, write_json
from bridle.models.build import named_state
from bridle.runs.checkpoint import EXPORTED, MANIFEST
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RATE, RESULT

WEIGHTS, SETTINGS, CARD = "model.safetensors", "config.yaml", "README.md"
LOADED = (WEIGHTS, SETTINGS, EXPORTED, MANIFEST)  # what loading needs


class GraphNote(TypedDict):
    """What config.json says of the file of a graph."""

    inputs: list[str]
    output: str
    check: str  # how far it agrees with torch


WriteGraphs = Callable[[Path], Mapping[str, GraphNote]]  # writes files of graphs into a folder


def write_folder(
    out: Path,
    trained: Trained,
    *,
    half: bool = False,
    overwrite: bool = False,
    graph_writers: Sequence[WriteGraphs] = (),
    auto: bool = False,
) -> Trained:
    """Write the folder `out`, with `auto` also for transformers; returns the model as the folder holds it."""
    require_free(out, overwrite=overwrite)
    trained = as_stored(trained, half=half)
    try:
        with replacing_folder(out, unique=True) as temporary:
            trained = _fill(temporary, trained, half=half, graph_writers=graph_writers, auto=auto)
    except OSError as error:
        raise CheckpointError(
            f"{quoted(out)} could not be written ({error.strerror or error}); nothing is left of it. Free some space "
            "or choose another --out."
        ) from error
    return trained


def _fill(
    temporary: Path, trained: Trained, *, half: bool, graph_writers: Sequence[WriteGraphs], auto: bool
) -> Trained:
    """Write all files of the folder, the manifest last."""
    tensors = {
        name: (value.half() if half and _is_halved(name, value) else value).detach().contiguous()
        for name, value in named_state(trained.modules()).items()
    }
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / SETTINGS).write_text(dump_config(trained.config), encoding="utf-8")
    shutil.copymode(temporary / SETTINGS, temporary / WEIGHTS)  # safetensors makes files that only we may read
    graphs: dict[str, GraphNote] = {}
    for write in graph_writers:
        graphs |= write(temporary)
    trained = trained._replace(facts=trained.facts._replace(graphs=graphs))
    if auto:
        write_auto_files(temporary, trained.config)
    write_json(temporary / EXPORTED, description(trained) | (auto_settings(trained.config) if auto else {}))
    (temporary / CARD).write_text(model_card(trained), encoding="utf-8")
    if trained.detokenizer is not None:
        copy_detokenizer(RunFolder(trained.detokenizer), RunFolder(temporary).detokenizer(trained.facts.iteration).path)
    files, checked = (
        {name: fingerprint(temporary / name) for name in names} for names in ((WEIGHTS, SETTINGS, EXPORTED), graphs)
    )
    write_json(temporary / MANIFEST, {"format": FORMAT, "files": files, "graphs": checked})
    return trained


def copy_detokenizer(detokenizer: RunFolder, out: Path) -> None:
    """Copy the last checkpoint of a detokenizer, what was measured of it, and its config without paths."""
    ends = detokenizer.encoder_checkpoints(ends=True)
    if not ends:
        raise CheckpointError(f"{detokenizer}: its checkpoint is missing; delete the folder and train it again.")
    shutil.copytree(ends[-1], RunFolder(out).checkpoints / ends[-1].name)
    (out / SETTINGS).write_text(dump_config(without_paths(detokenizer.config())), encoding="utf-8")
    for name in (RESULT, RATE):
        if (detokenizer.path / name).is_file():
            shutil.copyfile(detokenizer.path / name, out / name)


def require_free(out: Path, *, overwrite: bool) -> None:
    """UsageError if something is in the way that is not to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / EXPORTED).is_file() or not (out / MANIFEST).is_file():
        raise UsageError(f"{quoted(out)} exists and is not an exported model; choose another --out.")
    if not overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")


def description(trained: Trained) -> dict[str, object]:
    """What config.json says."""
    geometry, config = trained.config.geometry, trained.config
    kind = "trained" if trained.own_tokenizer is not None and trained.own_tokenizer.is_trained else "cold start"
    return {
        "format": FORMAT,
        "model_type": "bridle",
        "library_name": "bridle",
        "bridle": version("bridle"),
        "name": config.name,
        "geometry": geometry.model_dump(mode="json"),
        "tokenizer": None if trained.own_tokenizer is None else kind,
        "parameters": trained.parameter_counts(),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in trained.facts._asdict().items()},
    }


def without_paths(config: Config) -> Config:
    """A copy of the config without paths of this machine; a weights file keeps its name."""
    data = config.data.model_copy(update={"root": None, "manifest": None})
    weights = config.encoder.weights
    encoder = config.encoder.model_copy(update={"weights": None if weights is None else PurePath(weights).name})
    return config.model_copy(update={"data": data, "encoder": encoder})


def as_stored(trained: Trained, *, half: bool) -> Trained:
    """A copy on the CPU whose weights are exactly those that will be read back."""
    encoder, tokenizer = copy.deepcopy((trained.encoder, trained.own_tokenizer))
    stored = Trained(
        encoder.cpu(),
        None if tokenizer is None else tokenizer.cpu(),
        without_paths(trained.config),
        trained.facts,
        detokenizer=trained.detokenizer,
    )
    for parameter in (p for module in stored.modules().values() for p in module.parameters()):
        if parameter.dtype in (torch.float16, torch.bfloat16):  # it was loaded so; what is stored is --half's to say
            parameter.data = parameter.data.float()
    for name, value in named_state(stored.modules()).items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"nothing exported: {name} holds values that are not finite.")
        if half and _is_halved(name, value):
            rounded = value.half()
            if not bool(torch.isfinite(rounded).all()):
                raise UsageError(f"{name} holds values beyond the range of float16; export without --half.")
            with torch.no_grad():
                value.copy_(rounded)
    return stored._replace(facts=stored.facts._replace(half=half))


def _is_halved(name: str, value: Tensor) -> bool:
    """Codebooks keep their precision: a code that moves a little changes which one is nearest."""
    return value.dtype == torch.float32 and ".quantizer." not in name
