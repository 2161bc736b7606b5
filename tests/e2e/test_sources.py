"""Runs on Hugging Face datasets, webdataset tars and other file systems end as a run on the files themselves does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
import torch
import webdataset
from conftest import SMALL
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from run_folders import StopAt
from safetensors.torch import load_file
from typer.testing import CliRunner

from bridle import api
from bridle.cli import app
from bridle.config import load_config
from bridle.errors import Interrupted
from bridle.infer.read import read_codes
from bridle.runs.folder import RunFolder

CLASSES = ("bee", "moth")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and test/ of two classes as PNG files."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 8)):
        for number in range(count):
            path = root / split / CLASSES[number % 2] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            low = 100 * (number % 2)
            Image.fromarray(random.integers(low, low + 150, (20, 24, 3), np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> api.Finished:
    """A run on the files."""
    size = ("geometry.input=[16, 16]", "geometry.patch=[4, 4]", "schedule.iterations=1", "runtime.checkpoint_every=2")
    config = load_config("image", [*SMALL, *size, "max_steps=4", f"data.root={photos}"])
    return api.pretrain(config, out=tmp_path_factory.mktemp("runs") / "whole")


def write_arrow(photos: Path, place: Path) -> str:
    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    splits = datasets.DatasetDict()
    for split in ("train", "test"):
        files = sorted((photos / split).rglob("*.png"))
        columns = {"image": list(map(str, files)), "label": [file.parent.name for file in files]}
        splits[split] = datasets.Dataset.from_dict(columns, features=features)
    splits.save_to_disk(place / "arrow", num_shards={"train": 2, "test": 1})
    return str(place / "arrow")


def write_to_memory(photos: Path, place: Path) -> str:
    """Tars of webdataset at memory://tars."""
    (place / "tars").mkdir()
    for split in ("train", "test"):
        with webdataset.ShardWriter(f"{place}/tars/{split}-%03d.tar", maxcount=10, verbose=0) as sink:
            for file in sorted((photos / split).rglob("*.png")):
                key = f"{file.parent.name}/{file.stem}"
                sink.write({"__key__": key, "png": file.read_bytes(), "cls": CLASSES.index(file.parent.name)})
    MemoryFileSystem.store.clear()
    fsspec.filesystem("memory").put(f"{place}/tars", "/tars", recursive=True)
    return "memory://tars/{test-000,train-000,train-001,train-002}.tar"


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "checkpoints").glob("*-end"))[-1]
    return {f"{f.stem}/{k}": v for f in sorted(last.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.mark.parametrize("write", [write_arrow, write_to_memory])
def test_a_run_is_that_of_the_files_also_when_it_is_interrupted(
    write: Callable[[Path, Path], str],
    photos: Path,
    whole: api.Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    config = RunFolder(whole.folder).config()
    root = write(photos, tmp_path)
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"root": root, "workers": 2})})
    with pytest.raises(Interrupted):
        api.pretrain(elsewhere, out=tmp_path / "parts", callbacks=[StopAt(("encoder", 1, 3))])
    parts = api.pretrain(elsewhere, out=tmp_path / "parts")
    left, right = final_state(whole.folder), final_state(parts.folder)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    scores = [run.results.evaluations[-1].scores for run in (whole, parts)]
    assert scores[0] is not None
    assert scores[0].main == scores[1].main  # type: ignore[union-attr]

    run_commands(str(photos), root, tmp_path)
    codes = [[found.codes for _, found in read_codes(tmp_path / name)] for name in ("here.npz", "there.npz")]
    assert len(codes[0]) == 32
    assert np.array_equal(*codes)


def run_commands(here: str, there: str, place: Path) -> None:
    """Check the data, probe the run, and write its codes of the files themselves and of the same files elsewhere."""
    commands = [
        ["data", "check", there, "--strict", "--workers", "0"],
        ["data", "stats", there, "--workers", "0"],
        ["probe", str(place / "parts")],
        ["tokenize", str(place / "parts"), here, "--out", str(place / "here.npz")],
        ["tokenize", str(place / "parts"), there, "--out", str(place / "there.npz")],
    ]
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
