"""Interrupted and continued equals never interrupted, bit for bit, at every kind of phase."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from run_folders import StopAt
from safetensors.torch import load_file
from torch.utils.data import Dataset

import bridle
from bridle import api
from bridle.config import Config
from bridle.errors import ConfigError, Interrupted, UsageError
from bridle.files import locked_folder
from bridle.runs.folder import RunFolder
from bridle.train.step_metrics import TIMINGS

Small = Callable[..., Config]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "checkpoints").glob("*-end"))[-1]
    return {f"{f.stem}/{k}": v for f in sorted(last.glob("*.safetensors")) for k, v in load_file(f).items()}


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def assert_same(a: Path, b: Path) -> None:
    left, right = final_state(a), final_state(b)
    assert sorted(left) == sorted(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []
    assert rows(a) == rows(b)
    results = [json.loads((folder / "results.json").read_text()) for folder in (a, b)]
    for result in results:
        for entry in [*result["baselines"].values(), *(e["probe"] for e in result["evaluations"])]:
            entry.pop("seconds")
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_three_interruptions_change_nothing(small: Small, tmp_path: Path, workers: int) -> None:
    config = small("encoder.drop_path=0.1", "runtime.checkpoint_every=3", "quantizer.reset_every=2", steps=5)
    api.pretrain(config, out=tmp_path / "whole")
    interrupted = config.model_copy(update={"data": config.data.model_copy(update={"workers": workers})})
    for place in (("encoder", 1, 2), ("tokenizer", 2, 4), ("encoder", 2, 1)):
        stop = StopAt(place)
        with pytest.raises(Interrupted) as caught:
            api.pretrain(interrupted, out=tmp_path / "parts", callbacks=[stop])
        assert stop.fired == 1
        assert caught.value.exit_code == 143
        assert f"saved at step {place[2]} of iter{place[1]}-{place[0]}" in str(caught.value)
    api.pretrain(interrupted, out=tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    resumed = [
        json.loads(line)["resumed_from"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert resumed[-1] == 1


def test_joint_training_resumes_exactly(small: Small, tmp_path: Path) -> None:
    config = small("schedule.mode=joint", "schedule.joint_every=2", "schedule.iterations=1", steps=6)
    api.pretrain(config, out=tmp_path / "whole")
    with pytest.raises(Interrupted) as caught:
        api.pretrain(config, out=tmp_path / "parts", callbacks=[StopAt(("joint", 1, 3), number=signal.SIGINT)])
    assert caught.value.exit_code == 130
    api.pretrain(config, out=tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_crash_between_checkpoints_loses_only_the_steps_since(small: Small, tmp_path: Path) -> None:
    class Crash(StopAt):
        def on_metrics(self, row: Mapping[str, Any]) -> None:
            if (row["phase"], row["iteration"], row["step"]) in self.places:
                self.fired += 1
                raise RuntimeError("power cut")

    config = small("runtime.checkpoint_every=2", steps=5)
    api.pretrain(config, out=tmp_path / "whole")
    crash = Crash(("tokenizer", 2, 5))
    with pytest.raises(RuntimeError, match="power cut"):
        api.pretrain(config, out=tmp_path / "parts", callbacks=[crash])
    assert crash.fired == 1
    names = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir() if path.is_dir())
    assert names[-1] == "p0001-iter2-tokenizer-00000004"
    api.pretrain(config, out=tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_is_left_alone(small: Small, tmp_path: Path) -> None:
    config = small()
    assert not api.pretrain(config, out=tmp_path).was_finished
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert api.pretrain(config, out=tmp_path).was_finished
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


def test_another_config_in_the_same_directory_is_refused(small: Small, tmp_path: Path) -> None:
    api.pretrain(small("schedule.iterations=1"), out=tmp_path)
    with pytest.raises(ConfigError, match=r"another config \(encoder_phase\.learning_rate: 0\.001 against 0\.002"):
        api.pretrain(small("schedule.iterations=1", "encoder_phase.learning_rate=2e-3"), out=tmp_path)


class TerminatesItself(Dataset[tuple[torch.Tensor, int]]):
    """Labelled noise; item 0 asks the process to end when it is read for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self.at, self.reads, self.targets = at, 0, [i % 2 for i in range(24)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += index == 0
        listening = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # before the run, a signal would end pytest
        if index == 0 and self.reads == self.at and listening:
            os.kill(os.getpid(), signal.SIGTERM)
        noise = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        return noise + index % 2, index % 2


def test_a_signal_in_the_middle_of_an_evaluation_loses_nothing(tmp_path: Path) -> None:
    def go(at: int, folder: str) -> None:
        changes = [*SMALL, "geometry.patch=[4, 4]", "schedule.iterations=1"]
        bridle.pretrain("image", dataset=TerminatesItself(at), out=tmp_path / folder, max_steps=2, overrides=changes)

    go(0, "whole")
    reads = 0
    for at in range(1, 9):  # the first reads happen before and in training, the later ones in the evaluation
        try:
            go(at, f"parts{at}")
        except Interrupted:
            ended = (tmp_path / f"parts{at}" / "checkpoints").exists() and any(
                path.name.endswith("-end") for path in (tmp_path / f"parts{at}" / "checkpoints").iterdir()
            )
            reads += ended
            go(0, f"parts{at}")
            if (tmp_path / f"parts{at}" / "results.json").exists():
                assert_same(tmp_path / "whole", tmp_path / f"parts{at}")
    assert reads >= 2  # some signals did fall into the evaluation


def test_without_any_checkpoint_the_log_begins_anew(small: Small, tmp_path: Path) -> None:
    config = small("schedule.iterations=1")
    with pytest.raises(Interrupted):
        api.pretrain(config, out=tmp_path, callbacks=[StopAt(("encoder", 1, 3))])
    shutil.rmtree(tmp_path / "checkpoints")
    api.pretrain(config, out=tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_scores_without_the_weights_they_are_of_are_not_trained_over(small: Small, tmp_path: Path) -> None:
    config = small("schedule.iterations=1")
    api.pretrain(config, out=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    kept = (tmp_path / "results.json").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="no checkpoint to go on from"):
        api.pretrain(config, out=tmp_path)
    assert ((tmp_path / "results.json").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()) == kept


def test_what_changed_since_the_checkpoint_is_named(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("schedule.iterations=1")
    with pytest.raises(Interrupted):
        api.pretrain(config, out=tmp_path, callbacks=[StopAt(("encoder", 1, 3))])
    state = next(path for path in sorted((tmp_path / "checkpoints").glob("p*"))[::-1])
    assert json.loads((state / "state.json").read_text())["made_with"]["samples"] == 1437
    api.pretrain(small("schedule.iterations=1", "runtime.threads=2"), out=tmp_path)
    torch.set_num_threads(1)
    assert "changed since the checkpoint, so results may differ: threads 1 -> 2" in capsys.readouterr().err


def test_a_refused_command_changes_nothing_in_a_running_run(small: Small, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        api.pretrain(small(), out=tmp_path, callbacks=[StopAt(("encoder", 1, 2))])
    before = (tmp_path / "config.yaml").read_text()
    with locked_folder(tmp_path), pytest.raises(UsageError, match="another bridle command"):
        api.pretrain(small("probe.items=7"), out=tmp_path)
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_run_killed_before_its_config_was_in_place_can_begin_again(small: Small, tmp_path: Path) -> None:
    (tmp_path / ".config.yaml.tmp").write_text("half")
    api.pretrain(small("schedule.iterations=1", steps=1), out=tmp_path)
    assert (tmp_path / "results.json").exists()


def test_a_foreign_directory_and_a_running_run_are_refused(small: Small, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(UsageError, match="not empty and not a run"):
        api.pretrain(small(), out=tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    with locked_folder(run), pytest.raises(UsageError, match="another bridle command is running"):
        api.pretrain(small(), out=run)


def test_damage_to_the_newest_checkpoint_falls_back_and_still_ends_the_same(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("runtime.checkpoint_every=2", steps=5)
    api.pretrain(config, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        api.pretrain(config, out=tmp_path / "parts", callbacks=[StopAt(("tokenizer", 2, 4))])
    newest = sorted((tmp_path / "parts" / "checkpoints").glob("p*"))[-1] / "model.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    api.pretrain(config, out=tmp_path / "parts")
    assert "damaged" in capsys.readouterr().err
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_what_a_message_about_bad_files_asks_to_raise_may_be_raised(small: Small, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_settings(small("data.bad_share=0.1"))
    run.require_same(small("data.bad_share=0.5"))  # raises nothing
    with pytest.raises(ConfigError, match="seed"):
        run.require_same(small("data.bad_share=0.5", "seed=1"))
