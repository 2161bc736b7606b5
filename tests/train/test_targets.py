"""Runs that predict patches, keep their tokenizer or reuse codes: they train, resume bit for bit, and are judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_folders import StopAt
from safetensors.torch import load_file

import bridle
from bridle import api
from bridle.config import Config, load_config
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Loader
from bridle.errors import Interrupted, UsageError
from bridle.evaluate.codebooks.command import examine_run
from bridle.files import read_lines
from bridle.grid.cells import cells
from bridle.grid.table_file import read_grid
from bridle.machine import Machine
from bridle.models.build import build_nets
from bridle.models.tokenizer import ColdStartTokenizer, VitTokenizer
from bridle.runs.results import read_results
from bridle.train.algorithm1 import schedule
from bridle.train.phases import teach

Small = Callable[..., Config]


def interrupted_run(config: Config, folder: Path, place: tuple[str, int, int]) -> None:
    stop = StopAt(place)
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
    losses = [[row["loss"] for row in read_lines(folder / "metrics.jsonl")] for folder in (a, b)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def patches_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import SMALL

    folder = tmp_path_factory.mktemp("patches") / "run"
    overrides = [*SMALL, "loss.target=patches", "schedule.iterations=1", "max_steps=3"]
    api.pretrain("digits-tiny", out=folder, overrides=overrides)
    return folder


def test_a_run_that_predicts_patches_trains_and_is_probed(patches_run: Path) -> None:
    results = read_results(patches_run / "results.json")
    assert results.method == "patches"
    (entry,) = results.evaluations
    assert entry.probe is not None and entry.probe.accuracy > 0.1
    assert entry.codebooks == ()
    assert not any(name.startswith("tokenizer") for name in last_state(patches_run))
    assert all("code_usage" not in row for row in read_lines(patches_run / "metrics.jsonl"))


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
    interrupted_run(config, tmp_path / "parts", ("encoder", 2, 1))
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
    interrupted_run(config, tmp_path / "parts", ("encoder", 2, 4))  # step 3 is done, step 4 shares its batch
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_targets_are_tokenized_in_float32_whatever_a_step_computes_in(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[bool] = []
    encode = VitTokenizer.encode

    def watched(self: Any, x: Any, *, valid: Any = None) -> Any:
        reduced.append(torch.is_autocast_enabled("cpu"))
        return encode(self, x, valid=valid)

    monkeypatch.setattr(VitTokenizer, "encode", watched)
    # bf16, which real runs use, would need a safe CPU
    monkeypatch.setattr(Machine, "autocast", lambda self: torch.autocast("cpu", dtype=torch.float16))
    api.pretrain(small(steps=2), out=tmp_path / "run")
    assert reduced.count(True) == 2  # the steps of the tokenizer phase; the start and the targets are in float32
    assert reduced.count(False) >= 3


def test_an_earlier_block_can_teach(small: Small, tmp_path: Path) -> None:
    config = small("loss.teacher_block=1", "probe.enabled=false", steps=2)
    assert config.encoder.depth > 1
    nets, random = build_nets(config), torch.Generator().manual_seed(0)
    x = torch.randn(2, *config.geometry.build().shape, generator=random)
    run = SimpleNamespace(config=config, nets=nets)
    (first,) = nets.encoder.layers(x, wanted=[1])
    centred = first.z - first.z.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(teach(run, x, None), expected)  # type: ignore[arg-type]
    last = SimpleNamespace(config=small(), nets=nets)
    assert torch.equal(teach(last, x, None), nets.encoder(x).z)  # type: ignore[arg-type]
    api.pretrain(config, out=tmp_path / "first")
    api.pretrain(small("probe.enabled=false", steps=2), out=tmp_path / "last")
    first_run, last_run = (last_state(tmp_path / name) for name in ("first", "last"))
    assert not torch.equal(first_run["estimator.teacher_mean"], last_run["estimator.teacher_mean"])


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
    page = (Path(__file__).parents[2] / "docs" / "quantizer.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    trained = [line.split() for line in lines if line.startswith("bridle pretrain")]
    assert len(trained) == 7
    for _, _, recipe, *changes in trained:
        load_config(recipe, [change for change in changes if "=" in change])
    (table,) = (line.split() for line in lines if line.startswith("bridle ablate"))
    grid = read_grid(table[table.index("--table") + 1])
    found = list(cells(table[2], table[3:4], grid, seeds=[0, 1, 2], out=Path("out")))
    assert len({cell.folder for cell in found}) == len(grid.rows) * 3
    iterations = {cell.row: load_config(table[2], cell.pretrain).schedule.iterations for cell in found}
    assert iterations["RQ 4 x 256, first tokenizer kept"] == iterations["RQ 4 x 256, iteration 2"] == 2
    assert set(iterations.values()) == {1, 2}
    assert iterations["patches"] == 1
