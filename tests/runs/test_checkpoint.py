"""Checkpoints: published whole, damage found, the previous good one used, nothing non-finite saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from bridle.errors import CheckpointError, NonFiniteError
from bridle.runs.checkpoint import load, load_latest, publish


def tensors(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((3,), value)}, "ages": {"a": torch.arange(2)}}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    publish(tmp_path, "p00-iter1-encoder-00000001", tensors(2.5), {"step": 1}, keep=2)
    loaded, messages = load_latest(tmp_path)
    assert loaded is not None
    assert messages == []
    assert torch.equal(loaded.tensors["model"]["w"], torch.full((3,), 2.5))
    assert loaded.state["step"] == 1
    assert json.loads((tmp_path / "latest").read_text()) == {"checkpoint": "p00-iter1-encoder-00000001"}


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_is_found_and_the_previous_checkpoint_used(tmp_path: Path, file: str, damage: str) -> None:
    publish(tmp_path, "p00-iter1-encoder-00000001", tensors(1), {"step": 1}, keep=2)
    newest = publish(tmp_path, "p00-iter1-encoder-00000002", tensors(2), {"step": 2}, keep=2)
    path, content = newest / file, bytearray((newest / file).read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-3])
    else:
        path.unlink()
    loaded, messages = load_latest(tmp_path)
    if loaded is not None and loaded.state["step"] == 2:  # a flipped bit in the manifest's white space is no damage
        assert (file, damage) == ("manifest.json", "flip")
        return
    assert loaded is not None
    assert loaded.state["step"] == 1
    assert len(messages) == 1
    assert "p00-iter1-encoder-00000002" in messages[0]
    assert "previous" in messages[0]


def test_non_finite_values_are_not_saved_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    publish(tmp_path, "p00-iter1-encoder-00000001", tensors(1), {"step": 1}, keep=1)
    with pytest.raises(NonFiniteError, match=r"model\.w"):
        publish(tmp_path, "p00-iter1-encoder-00000002", tensors(float("nan")), {"step": 2}, keep=1)
    loaded, _ = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.state["step"] == 1


def test_a_full_disk_costs_only_the_checkpoint_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "p00-iter1-encoder-00000001", tensors(1), {"step": 1}, keep=1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bridle.runs.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*needed .* bytes, free"):
        publish(tmp_path, "p00-iter1-encoder-00000002", tensors(2), {"step": 2}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "p00-iter1-encoder-00000001"]


def test_an_error_of_the_tensor_library_is_a_failed_save_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("I/O error: File too large")

    monkeypatch.setattr("bridle.runs.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="File too large"):
        publish(tmp_path, "p00-iter1-encoder-00000001", tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_the_last_n_and_every_end_of_a_phase(tmp_path: Path) -> None:
    for step in range(1, 5):
        publish(tmp_path, f"p00-iter1-encoder-{step:08}", tensors(step), {"step": step}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["p00-iter1-encoder-00000003", "p00-iter1-encoder-00000004"]
    publish(tmp_path, "p00-iter1-encoder-00000005-end", tensors(5), {"step": 5}, keep=2)
    publish(tmp_path, "p01-iter2-tokenizer-00000001", tensors(6), {"step": 1}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["p00-iter1-encoder-00000005-end", "p01-iter2-tokenizer-00000001"]


def test_steps_inside_a_finished_phase_stay_where_a_curve_is_wanted(tmp_path: Path) -> None:
    for name in ("00000001", "00000002", "00000003", "00000003-end"):
        publish(tmp_path, f"p00-iter1-encoder-{name}", tensors(1), {"step": 1}, keep=2, keep_finished=True)
    publish(tmp_path, "p01-iter2-tokenizer-00000000", tensors(6), {"step": 0}, keep=2, keep_finished=True)
    kept = [path.name.removeprefix("p0") for path in sorted(tmp_path.glob("p*"))]
    assert kept == ["0-iter1-encoder-00000003", "0-iter1-encoder-00000003-end", "1-iter2-tokenizer-00000000"]


def test_a_pickle_named_like_a_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, "p00-iter1-encoder-00000001", tensors(), {}, keep=1)
    torch.save({"w": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
