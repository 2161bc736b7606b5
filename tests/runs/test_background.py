"""Checkpoints written in the background: one at a time, failures are raised, and a kill leaves one that loads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from bridle import failpoints
from bridle.errors import CheckpointError
from bridle.runs import checkpoint
from bridle.runs.background import BackgroundWriter, snapshot

POINTS = sorted(point for point in failpoints.POINTS if point.startswith("checkpoint."))


def publish(root: Path, step: int) -> Path:
    tensors = {stem: {"w": torch.full((4,), float(step))} for stem in ("model", "optimizer")}
    name = checkpoint.CheckpointName(0, 1, "encoder", step, False)
    return checkpoint.publish(root, str(name), tensors, {"progress": {"step": step}}, keep=1)


def value(root: Path) -> float:
    loaded, _ = checkpoint.load_latest(root)
    assert loaded is not None
    return float(loaded.group("model")["w"][0])


def test_a_snapshot_does_not_move_with_the_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    copy = snapshot({"model": {"w": weight.T}})
    with torch.no_grad():
        weight += 1
    assert copy["model"]["w"].tolist() == [[1.0, 1.0]] * 3 and copy["model"]["w"].is_contiguous()


def test_the_second_write_waits_for_the_first_and_the_run_does_not() -> None:
    order, may_end = [], threading.Event()

    def first() -> None:
        may_end.wait(10)
        order.append("first")

    with BackgroundWriter() as writer:
        writer.start(first)
        order.append("step")  # reached while the first write is under way
        may_end.set()
        writer.start(lambda: order.append("second"))
    assert order == ["step", "first", "second"]


def test_a_failed_write_is_raised_at_the_next_look_once_and_at_the_end() -> None:
    def fail() -> None:
        raise CheckpointError("no space")

    writer = BackgroundWriter()
    writer.start(fail)
    assert writer.thread is not None
    writer.thread.join()
    with pytest.raises(CheckpointError, match="no space"):
        writer.check()
    writer.check()
    with pytest.raises(CheckpointError, match="no space"), writer:
        writer.start(fail)


def test_where_the_run_fails_too_its_own_error_is_raised() -> None:
    def fail() -> None:
        raise CheckpointError("no space")

    with pytest.raises(ValueError, match="of the run") as caught, BackgroundWriter() as writer:
        writer.start(fail)
        raise ValueError("of the run")
    assert caught.value.__notes__ == ["a checkpoint could not be written either: no space"]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_background_write_leaves_a_checkpoint_that_loads(tmp_path: Path, point: str) -> None:
    publish(tmp_path, 1)
    child = os.fork()
    if child == 0:
        failpoints.arm(f"{point}=kill")
        with BackgroundWriter() as writer:
            writer.start(lambda: publish(tmp_path, 2))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
    published = point in ("checkpoint.before_latest", "checkpoint.before_rotate", "checkpoint.inside_rotate")
    assert value(tmp_path) == (2 if published else 1)
    publish(tmp_path, 3)
    assert value(tmp_path) == 3


@pytest.mark.parametrize("point", [point for point in POINTS if "rotate" not in point])
def test_a_full_disk_at_any_point_is_raised_and_the_checkpoint_before_loads(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 1)
    monkeypatch.setattr(failpoints, "armed", failpoints.Armed(f"{point}=enospc", None))
    writer = BackgroundWriter()
    writer.start(lambda: publish(tmp_path, 2))
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.wait()
    assert value(tmp_path) == (2 if point == "checkpoint.before_latest" else 1)
