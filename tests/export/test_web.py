"""What `bridle export --web` asks for before it writes anything."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from small_models import SIZES, build_model, signal_model

from bridle.config import load_config
from bridle.errors import UsageError
from bridle.export.onnx import export_model
from bridle.export.web import RUNTIME, find_runtime, page_input
from bridle.infer.model import load


def write_package(folder: Path) -> Path:
    """A package as npm installs it."""
    (folder / "dist").mkdir(parents=True)
    for name in RUNTIME:
        (folder / "dist" / name).write_text(name)
    return folder


def test_the_runtime_is_found_in_node_modules_above_in_a_folder_and_in_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, below = write_package(tmp_path / "node_modules" / "onnxruntime-web"), tmp_path / "some" / "folder"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with tarfile.open(tmp_path / "pack.tgz", "w:gz") as archive:
        archive.add(package, "package")
    for given in (None, tmp_path, package, package / "dist", tmp_path / "pack.tgz"):
        assert find_runtime(given) == {name: name.encode() for name in RUNTIME}


def test_a_missing_runtime_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"run `npm install onnxruntime-web`"):
        export_model(load("digits-tiny").trained(), tmp_path / "page", web=True)
    (tmp_path / "other.tgz").write_bytes(b"no archive")
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    for given in (tmp_path / "other.tgz", tmp_path / "empty.tgz", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=r"does not hold ort\.wasm\.min\.js"):
            find_runtime(given)
    assert not (tmp_path / "page").exists()


def test_the_page_knows_what_a_file_of_the_model_is() -> None:
    assert page_input(load("digits-tiny").trained()) == {"kind": "picture", "size": (8, 8)}
    assert page_input(signal_model().trained()) == {"kind": "array"}
    audio = build_model(load_config("audio", [*SIZES, "geometry.input=[64, 32]", "geometry.patch=[8, 16]"]))
    found = page_input(audio.trained())
    assert found.pop("silence") == pytest.approx(-15.9424, abs=1e-4)  # ln 1.19e-7
    assert found == {"kind": "sound", "rate": 16_000, "window": 400, "shift": 160, "samples": 400 + 63 * 160}


def test_models_without_a_page_are_refused(tmp_path: Path) -> None:
    shape = ("geometry.input=[4, 16, 16]", "geometry.patch=[2, 8, 8]", "mask.ratio=0.5", "data.mean=[0.5]")
    clips = build_model(load_config("video", [*SIZES, *shape])).trained()
    with pytest.raises(UsageError, match=r"--web: pages exist for pictures, recordings and signals; this model reads"):
        page_input(clips)
    with pytest.raises(UsageError, match=r"this model has no tokenizer"):
        page_input(signal_model().trained()._replace(own_tokenizer=None))
    with pytest.raises(UsageError, match=r"leave out --waveform"):
        export_model(clips, tmp_path / "e", web=True, waveform=True)
    with pytest.raises(UsageError, match=r"--runtime is for the page"):
        export_model(clips, tmp_path / "e", runtime=tmp_path)
