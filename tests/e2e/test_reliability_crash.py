"""Killed at a failpoint and continued equals never killed, bit for bit; signals save and leave; NaN changes nothing.

A choice of the grid that `make soak` runs whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from soak import faults
from soak.faults import POINTS, Ended, command, copy_run, differences, resumed_from, run


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each kind."""
    root = tmp_path_factory.mktemp("whole")
    found = {}
    for kind in ("encoder", "joint", "finetune"):
        found[kind] = root / kind
        if kind == "finetune":
            copy_run(found["encoder"], root / "base")
            copy_run(root / "base", found[kind])
            found[kind].with_name("finetune.ledger").unlink()
            root.joinpath("base.ledger").unlink()
        ended = run(command(kind, found[kind]), found[kind])
        assert ended.code == 0, ended.said
    return {**found, "tokenizer": found["encoder"], "base": root / "base"}


def begin(kind: str, wholes: dict[str, Path], folder: Path) -> None:
    if kind == "finetune":
        shutil.copytree(wholes["base"], folder)


def finish(kind: str, wholes: dict[str, Path], folder: Path, *more: str) -> Ended:
    ended = run(command(kind, folder, *more), folder)
    assert ended.code == 0, ended.said
    assert differences(kind, wholes[kind], folder) == []
    return ended


CHOSEN = [
    ("encoder", "checkpoint.half_written"),
    ("encoder", "evaluation.begin"),
    ("tokenizer", "kmeans.iteration"),
    ("tokenizer", "step.after_backward"),
    ("tokenizer", "checkpoint.before_rename"),
    ("joint", "step.begin"),
    ("finetune", "checkpoint.before_rotate"),
    ("finetune", "evaluation.end"),
]


@pytest.mark.parametrize(("kind", "point"), CHOSEN)
def test_killed_and_continued_equals_never_killed(
    wholes: dict[str, Path], tmp_path: Path, kind: str, point: str
) -> None:
    folder, fault = tmp_path / "run", f"{point}@{POINTS[kind][point]}=kill"
    begin(kind, wholes, folder)
    killed = run(command(kind, folder), folder, faults=fault)
    assert (killed.code, killed.fired) == (-9, [fault])
    ended = finish(kind, wholes, folder)
    assert faults.resume_faults(kind, point, ended.said) == []


def test_three_kills_in_one_run_and_workers_change_nothing(wholes: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Each leaves one certain checkpoint: the write after step 1 may or may not have ended when step 2 is under way. The
    # last strikes in step 3 of the third phase, which began only after the checkpoint of step 1 was published.
    for fault in ("step.after_update@1=kill", "checkpoint.before_latest@5=kill", "step.begin@5=kill"):
        killed = run(command("encoder", folder, "data.workers=2"), folder, faults=fault)
        assert (killed.code, killed.fired) == (-9, [fault])
    finish("encoder", wholes, folder, "data.workers=1")
    assert (resumed_from(folder) or 0) > 0


@pytest.mark.parametrize(
    ("kind", "fault", "code"),
    [
        ("encoder", "kmeans.iteration@2=sigterm", 143),
        ("tokenizer", "step.begin@5=sigterm;checkpoint.before_manifest@7=sigint", 143),  # the second during the save
        ("joint", "step.begin@2=sigint", 130),
        ("finetune", "evaluation.begin=sigterm", 143),
    ],
)
def test_a_signal_saves_and_leaves_within_a_step(
    wholes: dict[str, Path], tmp_path: Path, kind: str, fault: str, code: int
) -> None:
    folder = tmp_path / "run"
    begin(kind, wholes, folder)
    stopped = run(command(kind, folder), folder, faults=fault)
    assert stopped.code == code, stopped.said
    assert stopped.fired == fault.split(";")
    assert "Run the same command again to continue" in stopped.said
    if "step.begin@" in fault:  # nothing was done after the step that the signal came in
        steps = int(fault.partition("step.begin@")[2][0])
        assert faults.stop_faults(kind, folder, steps=steps) == []
    finish(kind, wholes, folder)


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(tmp_path: Path) -> None:
    assert faults.check_one_skip("joint", tmp_path / "run", "step.input") == []


def test_five_in_a_row_stop_the_run_and_the_last_checkpoint_is_finite(tmp_path: Path) -> None:
    assert faults.check_five_skips("joint", tmp_path / "run", "step.loss") == []


@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        ("checkpoint.half_written@2=enospc", 0),  # before the first step
        ("checkpoint.half_written@5=enospc", 2),  # after it, while the second is taken; there is no third
        ("metrics.append@2=enospc", 1),
    ],
)
def test_a_full_disk_ends_a_run_with_74_and_the_run_goes_on_later(
    wholes: dict[str, Path], tmp_path: Path, fault: str, steps: int
) -> None:
    folder = tmp_path / "run"
    ended = run(command("joint", folder), folder, faults=fault)
    assert (ended.code, ended.fired) == (74, [fault]), ended.said
    assert "No space left on device" in ended.said
    assert str(folder) in ended.said
    assert "Traceback" not in ended.said
    assert len(faults.rows(folder)) <= steps
    finish("joint", wholes, folder)
