"""What bridle writes itself and reads again: checkpoints, models, codes, sequences, indexes; and foreign weights."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import SMALL
from PIL import Image
from safetensors.torch import save_file

import bridle
from bridle.config import dump_config, load_config
from bridle.console import ProgressLine
from bridle.data.listing.manifest import parse_manifest
from bridle.data.listing.table_on_disk import read_index as read_rows_index
from bridle.data.listing.table_on_disk import store_index
from bridle.errors import DataError
from bridle.export.convert import convert_file
from bridle.files import fingerprint, sha256_of, sha256_of_json
from bridle.infer.model import Model
from bridle.infer.read import read_codes
from bridle.infer.sequences import read_sequences, write_sequences
from bridle.infer.write import Options, tokenize_inputs
from bridle.models.build import build_encoder, build_nets
from bridle.models.vit_weights import load_vit, vit_shape
from bridle.report.page import write_report
from bridle.report.runs import read_run
from bridle.runs.checkpoint import load, load_latest, publish
from bridle.search.index import update_index
from bridle.search.query import open_index
from bridle.seeding import generator
from bridle.train.algorithm1 import step_of
from soak.specimens import Specimen, rows_of

# What a folder of the package says of its model serves as the results of a run.
RELEASED = Path(bridle.__file__).parent / "released" / "digits-tiny" / "config.json"
NAME = "p0000-iter1-encoder-00000001"  # of a checkpoint
FOREIGN = "file.safetensors"


@cache
def model() -> Model:
    """Networks that were not trained, with started codebooks: small enough to be written thousands of times."""
    config = load_config("digits-tiny", [*SMALL, "data.mean=[0.3]", "data.std=[0.4]"])
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    latents = torch.randn(600, config.quantizer.width, generator=generator("latents"))
    nets.tokenizer.quantizer.start_codebooks(latents, generator=generator("start"))
    return Model(nets, config, device=torch.device("cpu"))


def quiet() -> ProgressLine:
    return ProgressLine(io.StringIO())


@cache
def pictures() -> dict[str, bytes]:
    found = {}
    for i in range(6):
        content = io.BytesIO()
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (16, 16)).astype(np.uint8)).save(content, "PNG")
        found[f"{i}.png"] = content.getvalue()
    return found


@contextmanager
def corpus() -> Iterator[Path]:
    """A folder of pictures."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in pictures().items():
            (Path(name) / file).write_bytes(content)
        yield Path(name)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file, if it still is one; sums in one that is none cannot be made right."""
    try:
        value = json.loads(path.read_text())
        change(value)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return
    path.write_text(json.dumps(value))


def sign_manifest(folder: Path) -> None:
    """The sizes and sums of the files as they are, in a checkpoint or an exported model."""

    def change(manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            size = (folder / name).stat().st_size
            manifest["files"][name] = {"bytes": size, "sha256": sha256_of(folder / name)}

    change_json(folder / "manifest.json", change)


def write_checkpoint(folder: Path) -> None:
    tensors = {"model": {"w": torch.arange(30.0), "v": torch.zeros(2, 3)}, "ages": {"a": torch.arange(4)}}
    state = {"phase_index": 0, "phase": "encoder", "iteration": 1, "finished": False, "norms_start": [[1.0]]}
    progress = {"step": 1, "skipped": 0, "skipped_in_a_row": 0}
    publish(folder, NAME, tensors, {**state, "progress": progress, "made_with": {}}, keep=1)


def read_checkpoint(folder: Path) -> None:
    step_of(load(folder / NAME))
    load_latest(folder)


def write_codes(out: Path) -> None:
    with corpus() as named:
        tokenize_inputs(model(), [str(named)], out, options=Options(workers=0), progress=quiet())


def codes(ending: str) -> Specimen:
    return Specimen(
        lambda folder: write_codes(folder / f"codes.{ending}"),
        lambda folder: list(read_codes(folder / f"codes.{ending}")),
    )


def sign_parts(folder: Path) -> None:
    """The sums of the parts as they are, in a folder of codes."""

    def change(index: dict[str, Any]) -> None:
        for note in index["parts"]:
            path = folder / "codes" / note["file"]
            note.update(bytes=path.stat().st_size, sha256=sha256_of(path))

    change_json(folder / "codes" / "index.json", change)


def write_some_sequences(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_codes(Path(name) / "codes.npz")
        write_sequences([Path(name) / "codes.npz"], folder / "sequences", context=32, progress=quiet())


def read_some_sequences(folder: Path) -> None:
    stored = read_sequences(folder / "sequences")
    list(stored)
    np.array(stored.blocks())


def write_search(folder: Path) -> None:
    with corpus() as named:
        update_index(model(), "small", [str(named)], folder / "index", options=Options(workers=0), progress=quiet())
        (folder / "query.png").write_bytes(pictures()["0.png"])


def read_search(folder: Path) -> None:
    index = open_index(folder / "index")
    index.__dict__["model"] = model()
    index.search(folder / "query.png", k=3)
    index.search(folder / "query.png", by="codes", k=3)


def write_rows(folder: Path) -> None:
    """The rows of a long list on disk."""
    with (folder / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "labels", "start", "end", "fold"])
        table.writerows([f"ä/{i}.wav", f"c{i % 5};d", i / 4, i / 4 + 1, i % 3] for i in range(9))
    store_index(folder / "rows", parse_manifest(folder / "list.csv", folder), key="k", root=folder)


def read_stored_rows(folder: Path) -> None:
    """One that does not count is made anew from the list."""
    stored = read_rows_index(folder / "rows", key="k", root=folder)
    if stored.listing is None:
        raise DataError(str(stored.why))
    rows_of(stored.listing)


def sign_rows(folder: Path) -> None:
    def change(facts: dict[str, Any]) -> None:
        for name in facts["files"]:
            facts["files"][name] = fingerprint(folder / "rows" / name)
        facts.pop("digest")
        facts["digest"] = sha256_of_json(facts)

    change_json(folder / "rows" / "index.json", change)


def write_run(folder: Path) -> None:
    """What `bridle report` looks at."""
    said = json.loads(RELEASED.read_text())
    results = {"name": "x", "title": "x", "method": "RQ", "baselines": said["baselines"]}
    (folder / "results.json").write_text(json.dumps({**results, "evaluations": [said["evaluation"]]}))
    rows = [
        {"phase_index": 0, "phase": "iter1-encoder", "step": n, "loss": 1 / n, "grad_norm": 1.0, "learning_rate": 1e-3}
        for n in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(dump_config(model().config))
    (folder / "quarantine.jsonl").write_text(json.dumps({"path": "a.wav", "reason": "b", "phase": "c"}) + "\n")


def write_vit(folder: Path) -> None:
    """An encoder as other libraries name its parts."""
    shapes = {"patch_embed.proj": (16, 1, 4, 4), "norm": (16,), **{f"blocks.0.norm{i}": (16,) for i in (1, 2)}}
    shapes |= {"blocks.0.attn.qkv": (48, 16), "blocks.0.attn.proj": (16, 16)}
    shapes |= {"blocks.0.mlp.fc1": (64, 16), "blocks.0.mlp.fc2": (16, 64)}
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    save_file({**tensors, "pos_embed": torch.zeros(1, 17, 16), "cls_token": torch.zeros(1, 1, 16)}, folder / FOREIGN)


def read_vit(folder: Path) -> None:
    vit_shape(folder / FOREIGN)
    small = ["encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.mlp_ratio=4"]
    load_vit(build_encoder(load_config("digits-tiny", small)), folder / FOREIGN)


def write_pickled(folder: Path) -> None:
    torch.save({"model": {"w": torch.arange(30.0), "v": torch.zeros(2, 3)}, "epoch": 3}, folder / "file.pth")


STORED: dict[str, Specimen] = {
    "checkpoint": Specimen(write_checkpoint, read_checkpoint, ("latest",), lambda folder: sign_manifest(folder / NAME)),
    "exported model": Specimen(
        lambda folder: model().save_pretrained(folder / "model"),
        lambda folder: bridle.load(folder / "model", device="cpu"),
        ("README.md",),
        lambda folder: sign_manifest(folder / "model"),
    ),
    **{f"codes {ending}": codes(ending) for ending in ("npz", "safetensors", "parquet")},
    "codes folder": Specimen(
        lambda folder: write_codes(folder / "codes"), lambda folder: list(read_codes(folder / "codes")), (), sign_parts
    ),
    "sequences": Specimen(write_some_sequences, read_some_sequences),
    "search index": Specimen(write_search, read_search, (".png", ".lock")),
    "row index": Specimen(write_rows, read_stored_rows, (".csv",), sign_rows),
    "run for a report": Specimen(write_run, lambda folder: write_report([read_run(folder)], folder / "report.html")),
    "foreign weights": Specimen(write_vit, read_vit),
    "foreign pickle": Specimen(
        write_pickled, lambda folder: convert_file(folder / "file.pth", folder / "out.safetensors")
    ),
}
