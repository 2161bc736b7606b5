"""Runs that predict patches, keep their tokenizer or reuse codes: they train, resume bit for bit, and are judged."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bridle
from bridle import api
from bridle.ablation import cells, read_grid
from bridle.config import Config, load_config
from bridle.data.loader import Loader
from bridle.data.memory import TensorSource
from bridle.errors import Interrupted, UsageError
from bridle.evaluate.examine import examine_run
from bridle.models.tokenizer import ColdStartTokenizer, VitTokenizer
from bridle.train.interleave import schedule
from bridle.train.log import read_rows

Small = Callable[..., Config]


class StopAt:
    """Asks the run to stop once it has logged a step."""

    def __init__(self, iteration: int, phase: str, step: int) -> None:
        self.place, self.fired = (iteration, phase, step), False

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None: ...

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if (row["iteration"], row["phase"], row["step"]) == self.place:
            self.fired = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...


def interrupted_run(config: Config, folder: Path, place: tuple[int, str, int]) -> None:
    stop = StopAt(*place)
    with pytest.raises(Interrupted):
        api.pretrain(config, out=folder, callbacks=[stop])
    assert stop.fired
    api.pretrain(config, out=folder)


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    end = sorted((folder / "checkpoints").glob("*-end"))[-1]
    return load_file(end / "model.safetensors")


def assert_same(a: Path, b: Path) -> None:
    left, right = last_state(a), last_state(b)
    assert sorted(left) == sorted(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    losses = [[row["loss"] for row in read_rows(folder / "metrics.jsonl")] for folder in (a, b)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def patches_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import SMALL

    folder = tmp_path_factory.mktemp("patches") / "run"
    overrides = [*SMALL, "loss.target=patches", "schedule.iterations=1", "max_steps=3"]
    api.pretrain("digits-tiny", out=folder, overrides=overrides)
    return folder


def test_a_run_that_predicts_patches_trains_and_is_probed(patches_run: Path) -> None:
    results = api.Results(patches_run / "results.json", {}).value
    assert results["method"] == "patches"
    (entry,) = results["evaluations"]
    assert entry["probe"]["accuracy"] > 0.1
    assert entry["codebooks"] == []
    assert not any(name.startswith("tokenizer") for name in last_state(patches_run))
    assert all("code_usage" not in row for row in read_rows(patches_run / "metrics.jsonl"))


def test_its_features_can_be_used_and_its_codes_are_refused_in_words(patches_run: Path) -> None:
    model = bridle.load(patches_run)
    assert model.encode(torch.zeros(2, 1, 16, 16)).shape == (2, 16, 16)
    with pytest.raises(UsageError, match="no tokenizer"):
        model.tokenize(torch.zeros(2, 1, 16, 16))
    with pytest.raises(UsageError, match="no tokenizer"):
        examine_run(patches_run)


def test_predicting_patches_resumes_bit_for_bit(small: Small, tmp_path: Path) -> None:
    config = small("loss.target=patches", "schedule.iterations=2", "probe.enabled=false", steps=3)
    assert [turn.name for turn in schedule(config)] == ["encoder", "encoder"]
    api.pretrain(config, out=tmp_path / "whole")
    interrupted_run(config, tmp_path / "parts", (2, "encoder", 1))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_first_tokenizer_can_stay_for_all_iterations(small: Small, tmp_path: Path) -> None:
    config = small("schedule.tokenizer=keep", "probe.enabled=false", steps=2)
    assert [turn.name for turn in schedule(config)] == ["encoder", "encoder"]
    api.pretrain(config, out=tmp_path)
    first, second = (load_file(path / "model.safetensors") for path in sorted((tmp_path / "checkpoints").glob("*-end")))
    tokenizer = [name for name in first if name.startswith("tokenizer")]
    assert "tokenizer.projection" in tokenizer
    assert all(torch.equal(first[name], second[name]) for name in tokenizer)
    assert not torch.equal(first["encoder.norm.weight"], second["encoder.norm.weight"])


def test_reused_codes_resume_bit_for_bit_in_the_middle_of_a_turn(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = dict.fromkeys((ColdStartTokenizer, VitTokenizer), 0)
    for kind in calls:
        encode = kind.encode

        def counted(self: Any, x: Any, *, valid: Any = None, kind: Any = kind, encode: Any = encode) -> Any:
            calls[kind] += 1
            return encode(self, x, valid=valid)

        monkeypatch.setattr(kind, "encode", counted)
    config = small("encoder_phase.masks=3", "encoder.drop_path=0.1", "probe.enabled=false", steps=5)
    api.pretrain(config, out=tmp_path / "whole")
    starts = 1  # the codebooks' start is one batch of 64 samples
    assert calls[ColdStartTokenizer] == starts + 2  # steps 0-2 and 3-4
    assert calls[VitTokenizer] == starts + 5 + 2  # its own phase takes every step
    interrupted_run(config, tmp_path / "parts", (2, "encoder", 4))  # step 3 is done, step 4 shares its batch
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_repeated_batch_is_made_once_and_comes_back_after_a_restart() -> None:
    source = TensorSource(x=torch.arange(8.0).reshape(8, 1, 1))
    loader = Loader(source=source, seed=0, phase="p", batch=2, mean=[0.0], std=[1.0], repeats=3)
    plain = Loader(source=source, seed=0, phase="p", batch=2, mean=[0.0], std=[1.0])
    whole = [batches[0].index.tolist() for batches in loader.steps(0, 7)]
    single = [batches[0].index.tolist() for batches in plain.steps(0, 3)]
    assert whole == [single[0]] * 3 + [single[1]] * 3 + [single[2]]
    assert [batches[0].index.tolist() for batches in loader.steps(4, 7)] == whole[4:]
    first, second, *_ = loader.steps(0, 3)
    assert first is second


def test_the_commands_of_the_guide_are_understood() -> None:
    """What they do is run by the tests above; here their words are checked."""
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    trained = [line.split() for line in lines if line.startswith("bridle pretrain")]
    assert len(trained) == 4
    for _, _, recipe, change, *_ in trained:
        load_config(recipe, [change])
    (table,) = (line.split() for line in lines if line.startswith("bridle ablate"))
    grid = read_grid(table[table.index("--table") + 1])
    found = list(cells(table[2], table[3:4], grid, seeds=[0, 1, 2], out=Path("out")))
    assert len({cell.folder for cell in found}) == len(grid.rows) * 3
    iterations = {cell.row: load_config(table[2], cell.pretrain).schedule.iterations for cell in found}
    assert iterations["RQ 4 x 256, first tokenizer kept"] == iterations["RQ 4 x 256, iteration 2"] == 2
    assert set(iterations.values()) == {1, 2}
    assert iterations["patches"] == 1
