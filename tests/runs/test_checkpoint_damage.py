"""Checkpoints under attack: flipped bits, cut files, full disks, and rotation that must not take the last good one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from soak.damage import damage_copy, flipped, one_bit_of_every_byte, save_small
from soak.disk import fill_disk
from soak.tally import Tally

from bridle import failpoints, files
from bridle.errors import CheckpointError
from bridle.files import locked_folder, read_lines
from bridle.quantize.usage import CodeAge
from bridle.runs import checkpoint
from bridle.runs.callbacks import append_row
from bridle.runs.checkpoint import Loaded, load, load_latest, publish, require_space_for_run, write_json
from bridle.runs.folder import RunFolder
from bridle.train.algorithm1 import load_modules, step_of
from bridle.train.engine import restore
from bridle.train.optim import optimizer_tensors


def tensors(value: float = 1.0, size: int = 5) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), float(value))}, "optimizer": {"m": torch.arange(float(size))}}


def name(step: int) -> str:
    return f"p0000-iter1-encoder-{step:08}"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        publish(root, name(step), tensors(step), {"progress": {"step": step}}, keep=2)
    return root


def used_step(root: Path) -> int:
    loaded, _ = load_latest(root)
    assert loaded is not None
    step: int = loaded.state["progress"]["step"]
    return step


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_flipped_bit_in_every_byte_and_every_truncation_is_found(tmp_path: Path, file: str) -> None:
    found = damage_copy(save_small, tmp_path / "c", file, one_bit_of_every_byte)
    assert found.wrong == []
    assert found.held == found.tried > 50


def test_damage_that_is_not_found_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_damage", lambda path, **more: None)
    found = damage_copy(
        save_small, tmp_path / "c", "model.safetensors", lambda content: flipped(content, [8 * len(content) - 1])
    )
    assert (found.tried, found.held, len(found.wrong)) == (1, 0, 1)


def test_a_damaged_or_missing_latest_changes_nothing(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "c")
    for content in (b"", b"{", json.dumps({"checkpoint": "../../etc"}).encode(), os.urandom(20)):
        (tmp_path / "c" / "latest").write_bytes(content)
        assert used_step(tmp_path / "c") == 2
    (tmp_path / "c" / "latest").unlink()
    assert used_step(tmp_path / "c") == 2


def test_if_none_is_whole_that_is_said(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "c")
    for step in (1, 2):
        (tmp_path / "c" / name(step) / "model.safetensors").write_bytes(b"")
    loaded, messages = load_latest(tmp_path / "c")
    assert loaded is None
    assert "starting anew" in messages[-1]


def test_a_damaged_checkpoint_does_not_count_as_one_of_those_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        publish(tmp_path, name(step), tensors(step), {"progress": {"step": step}}, keep=2)
    (tmp_path / name(2) / "model.safetensors").write_bytes(b"short")
    publish(tmp_path, name(3), tensors(3), {"progress": {"step": 3}}, keep=2)
    (tmp_path / name(3) / "state.json").unlink()
    loaded, _ = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.state["progress"]["step"] == 1


def test_a_checkpoint_that_cannot_be_read_back_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, name(1), tensors(1), {"progress": {"step": 1}}, keep=1)
    original = files._publish_folder

    def bad_disk(temporary: Path, final: Path, **options: bool) -> None:
        original(temporary, final, **options)
        (final / "model.safetensors").write_bytes(b"rot")

    monkeypatch.setattr(files, "_publish_folder", bad_disk)
    with pytest.raises(CheckpointError, match="do not trust this disk"):
        publish(tmp_path, name(2), tensors(2), {"progress": {"step": 2}}, keep=1)
    assert used_step(tmp_path) == 1


def test_rotation_leaves_folders_alone_that_are_not_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other-run"
    publish(other, name(1), tensors(1), {"progress": {"step": 1}}, keep=1)
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "my backup").mkdir()
    (root / "zzz-00000001").mkdir()
    (root / name(0)).symlink_to(other / name(1))
    for step in (1, 2, 3):
        publish(root, name(step), tensors(step), {"progress": {"step": step}}, keep=1)
    assert {path.name for path in root.iterdir()} == {"latest", "my backup", "zzz-00000001", name(0), name(3)}
    assert load(other / name(1)).state["progress"]["step"] == 1


@pytest.mark.parametrize("share", [0.01, 0.25, 0.50, 0.99])
def test_a_disk_that_fills_up_in_the_middle_costs_only_this_checkpoint(share: float) -> None:
    assert fill_disk(share) == Tally(1, 1, [])


def test_too_little_space_is_told_before_a_run_and_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, name(1), tensors(), {"progress": {"step": 1}}, keep=1)
    there = sum(file.stat().st_size for file in (tmp_path / name(1)).iterdir())
    needed = 3 * 3 * 1000 + 2 * 1000 + 1_000_000 - there  # (keep + 1) with averages, two ends, spare, what is there
    free = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=rf"this run's checkpoints: needed {needed:,} bytes, free {needed - 1:,}"):
        require_space_for_run(tmp_path, model=1000, ends=2, keep=2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=1_000_039))
    with pytest.raises(CheckpointError, match=r"a checkpoint: needed 1,000,040 bytes, free 1,000,039 bytes"):
        publish(tmp_path, name(2), tensors(), {"progress": {"step": 2}}, keep=1)


@pytest.mark.parametrize("writer", ["metrics", "results", "quarantine"])
def test_a_full_disk_under_the_other_files_is_one_clear_error(tmp_path: Path, writer: str) -> None:
    path = tmp_path / f"{writer}.jsonl"
    place = {"metrics": "metrics.append", "results": "results.write", "quarantine": "quarantine.append"}[writer]
    failpoints.arm(f"{place}=enospc")
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot be written \(No space left on device\); free on that disk: [\d,]+ bytes"
        ) as e:
            if writer == "results":
                write_json(path, {"a": 1})
            elif writer == "metrics":
                RunFolder(tmp_path).add_metrics({"a": 1})
            else:
                append_row(path, {"a": 1}, failpoint=place)
    finally:
        failpoints.arm("")
    assert e.value.exit_code == 74
    assert str(path) in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_a_row_cut_short_is_replaced_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"index": 1}\n{"index": 2, "pa')
    assert read_lines(path) == [{"index": 1}]
    append_row(path, {"index": 2}, failpoint="quarantine.append")
    append_row(path, {"index": 3}, failpoint="quarantine.append")
    assert read_lines(path) == [{"index": 1}, {"index": 2}, {"index": 3}]


def test_a_state_that_leaves_something_out_is_a_checkpoint_error(tmp_path: Path) -> None:
    loaded = load(publish(tmp_path, name(1), tensors(), {"phase_index": 0, "progress": {"step": 1}}, keep=2))
    with pytest.raises(CheckpointError, match=r"state\.json: damaged or made by other software .*'iteration'"):
        loaded.state["iteration"]
    with pytest.raises(CheckpointError, match="its progress is no progress"):
        step_of(loaded)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("iteration", "x"),
        ("iteration", True),
        ("phase_index", -1),
        ("phase_index", 0.5),
        ("phase", 3),
        ("finished", "no"),
        ("progress", [1]),
        ("progress", {"step": None}),
        ("made_with", "torch"),
        ("norms_start", [1.0]),
    ],
)
def test_a_state_that_makes_no_sense_is_damage(two: Path, tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(two, tmp_path / "c")
    path = publish(tmp_path / "c", name(3), tensors(3), {"progress": {"step": 3}, key: value}, keep=3)
    with pytest.raises(CheckpointError, match=rf"state\.json: damaged or made by other software \(its '{key}' is"):
        load(path)
    loaded, messages = load_latest(tmp_path / "c")
    assert loaded is not None
    assert loaded.state["progress"]["step"] == 2
    assert len(messages) == 1


def saved_by_adamw() -> tuple[torch.optim.Optimizer, dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.sum().backward()
    optimizer.step()
    return optimizer, {"net.w": weight}, optimizer_tensors(optimizer, {"net.w": weight})


def inside(folder: Path, **groups: dict[str, torch.Tensor]) -> Loaded:
    return Loaded(groups, {"progress": {"step": 1, "skipped": 0, "skipped_in_a_row": 0}}, folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"other.w|step": torch.tensor(1.0)}, r"'other.w\|step' is not of this run's networks"),
        ({"net.w|momentum": torch.zeros(3)}, r"'net.w\|momentum' is not"),
        ({"net.w|exp_avg": torch.zeros(4)}, r"'net.w\|exp_avg' has the shape \[4\]"),
        ({"net.w|exp_avg_sq": None}, "not all of it is there"),
    ],
)
def test_an_optimizer_of_other_networks_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], why: str
) -> None:
    optimizer, names, saved = saved_by_adamw()
    changed = {key: value for key, value in {**saved, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=why) as error:
        restore(inside(tmp_path, optimizer=changed), optimizer, names, None)
    assert "\n" not in str(error.value)
    assert restore(inside(tmp_path, optimizer=saved), optimizer, names, None).step == 1


def test_a_checkpoint_inside_a_phase_needs_its_optimizer_and_ages(tmp_path: Path) -> None:
    optimizer, names, saved = saved_by_adamw()
    with pytest.raises(CheckpointError, match=r"names no optimizer\.safetensors"):
        restore(inside(tmp_path), optimizer, names, None)
    with pytest.raises(CheckpointError, match=r"names no ages\.safetensors"):
        restore(inside(tmp_path, optimizer=saved), optimizer, names, CodeAge([4]))
    with pytest.raises(CheckpointError, match="saved code ages"):
        restore(inside(tmp_path, optimizer=saved, ages=CodeAge([5]).state()), optimizer, names, CodeAge([4]))
    with pytest.raises(CheckpointError, match=r"names no model\.safetensors"):
        load_modules({"net": torch.nn.Linear(1, 1)}, inside(tmp_path))


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b"null", b'"a"', b'{"a": "\xff"}', b"[" * 100_000])
def test_a_line_that_is_no_row_is_left_out_like_one_cut_short(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"phase_index": 0, "step": 1}
    path.write_bytes(json.dumps(row).encode() + b"\n" + line + b"\n")
    assert read_lines(path) == [row]
    RunFolder(tmp_path).rewind_metrics(phase_index=0, step=5)
    assert path.read_text() == json.dumps(row) + "\n"


@pytest.mark.parametrize(
    "row", [{}, {"phase_index": 0}, {"phase_index": "0", "step": 1}, {"phase_index": 0, "step": None}]
)
def test_a_row_without_a_place_is_not_kept(tmp_path: Path, row: dict[str, object]) -> None:
    whole = {"phase_index": 0, "step": 1}
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(row)}\n{json.dumps(whole)}\n")
    RunFolder(tmp_path).rewind_metrics(phase_index=0, step=5)
    assert read_lines(path) == [whole]


def test_a_process_that_outlives_the_run_does_not_hold_its_lock(tmp_path: Path) -> None:
    lives, tell = os.pipe()
    with locked_folder(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")
            time.sleep(30)
            os._exit(0)
        assert os.read(lives, 1) == b"!"
    try:
        with locked_folder(tmp_path):  # refused while the child shares the lock
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(lives)
        os.close(tell)
