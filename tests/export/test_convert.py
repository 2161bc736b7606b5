"""Checkpoints from elsewhere become safetensors; whatever could run is refused."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bridle.errors import DataError, UsageError
from bridle.export.convert import convert_file

W = {"blocks.0.weight": torch.arange(6.0).reshape(2, 3), "norm.bias": torch.ones(3, dtype=torch.float16)}


def saved(tmp_path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, tmp_path / "in.pth", **options)
    return tmp_path / "in.pth"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (W, ""),
        ({"model": W, "epoch": 3}, "model"),
        ({"state_dict": {f"module.{name}": value for name, value in W.items()}}, "state_dict"),
        ({"model": W, "args": argparse.Namespace(lr=0.1)}, "model"),
    ],
)
def test_tensors_are_taken_from_where_they_usually_are(tmp_path: Path, content: Any, key: str) -> None:
    found = convert_file(saved(tmp_path, content), tmp_path / "out.safetensors")
    assert found.key == key
    written = load_file(tmp_path / "out.safetensors")
    assert set(written) == set(W)
    assert all(torch.equal(written[name], W[name]) for name in W)
    assert found.prefix == ("module." if key == "state_dict" else "")
    assert f"{len(W)} tensors" in found.describe()


def test_what_is_left_out_is_named_and_a_key_leads_deeper(tmp_path: Path) -> None:
    path = saved(tmp_path, {"ema": {"student": {**W, "steps": 7}}, "loss": 0.5, "opt": {"lr": 1.0}})
    with pytest.raises(DataError, match="its keys are ema, loss, opt: give the right one with --key"):
        convert_file(path, tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match="has no tensors there"):
        convert_file(path, tmp_path / "out.safetensors", key="ema.teacher")
    found = convert_file(path, tmp_path / "out.safetensors", key="ema.student")
    assert found.dropped == ("loss", "opt", "steps")
    with pytest.raises(UsageError, match="exists; give --overwrite"):
        convert_file(path, tmp_path / "out.safetensors", key="ema.student")


def test_older_files_and_shared_storages_are_read(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    path = saved(tmp_path, {"a": base[:4], "b": base[2:], "c": base}, _use_new_zipfile_serialization=False)
    convert_file(path, tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert written["b"].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


class Trap:
    """Makes a folder when it is unpickled by somebody careless."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_that_would_run_something_is_refused_and_does_not_run(tmp_path: Path, plain: bool) -> None:
    content = {"model": W, "x": Trap(tmp_path / "ran")}
    path = tmp_path / "in.pth"
    if plain:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(DataError) as caught:
        convert_file(path, tmp_path / "out.safetensors")
    assert "refused" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(50), None])
def test_damaged_files_are_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = saved(tmp_path, W)
    path.write_bytes(path.read_bytes()[:700] if content is None else content)
    with pytest.raises(DataError) as caught:
        convert_file(path, tmp_path / "out.safetensors")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_tensors_that_claim_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    huge = torch.zeros(1).expand(1_000_000, 1_000_000)  # four terabytes on paper
    with pytest.raises(DataError, match="claim 4,000,000,000,000"):
        convert_file(saved(tmp_path, {"a": huge}), tmp_path / "out.safetensors")
    with pytest.raises(DataError, match="are sparse"):
        convert_file(saved(tmp_path, {"a": torch.eye(3).to_sparse()}), tmp_path / "out.safetensors")


def test_numbers_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    for odd in (torch.zeros(3, dtype=torch.complex128), torch.zeros(3).to_sparse()):
        with pytest.raises(DataError, match=r"'?w'? are sparse, quantised or complex"):
            convert_file(saved(tmp_path, {"w": odd, "v": torch.zeros(3)}), tmp_path / "out.safetensors")


def test_dictionaries_that_lie_in_themselves_or_very_deep_are_refused(tmp_path: Path) -> None:
    itself: dict[str, Any] = {"w": torch.zeros(3)}
    itself["model"] = itself["again"] = itself
    deep: dict[str, Any] = {"w": torch.zeros(3)}
    for _ in range(100):
        deep = {"w": torch.zeros(3), "model": deep}
    for content in (itself, deep):
        with pytest.raises(DataError, match="is nested in itself, met twice, or more than 32 deep"):
            convert_file(saved(tmp_path, content), tmp_path / "out.safetensors")


def test_wrong_names_are_told(tmp_path: Path) -> None:
    path = saved(tmp_path, W)
    with pytest.raises(UsageError, match=r"ends in \.safetensors"):
        convert_file(path, tmp_path / "out.bin")
    with pytest.raises(UsageError, match="does not exist"):
        convert_file(tmp_path / "none.pth", tmp_path / "out.safetensors")
    with pytest.raises(DataError, match="holds a list"):
        convert_file(saved(tmp_path, [W]), tmp_path / "out.safetensors")
