"""`bridle plan`: every figure against a real run or worked by hand."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridle import api
from bridle.cli import app
from bridle.cli.plan import duration, scaled
from bridle.config import Config, load_config
from bridle.errors import ConfigError, UsageError
from bridle.models.build import build_nets
from bridle.plan import DEVICES, Plan, make_plan

Small = Callable[..., Config]


def tensor_bytes(folder: Path) -> int:
    """Without the headers of the files, which hold names only."""
    total = 0
    for file in folder.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        total += file.stat().st_size - 8 - header
    return total


class Weigh:
    """Looks at the checkpoint of step 1 when step 2 is logged; it is gone at the end of the phase."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if row["step"] == 2:
            pattern, deadline = f"p{row['phase_index']:04}-*-00000001", time.monotonic() + 60
            while not (paths := list((self.folder / "checkpoints").glob(pattern))):  # a thread writes it
                assert time.monotonic() < deadline
                time.sleep(0.01)
            self.found.append(tensor_bytes(paths[0]))

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...


def test_checkpoints_and_parameters_are_as_planned(small: Small, tmp_path: Path) -> None:
    config = small("probe.enabled=false", "runtime.checkpoint_every=1", steps=2)
    plan, weigh = make_plan(config), Weigh()
    api.pretrain(config, out=tmp_path, callbacks=[weigh])
    ends = sorted((tmp_path / "checkpoints").glob("*-end"))
    assert [tensor_bytes(path) for path in ends] == [phase.checkpoint_end for phase in plan.phases]
    assert weigh.found == [phase.checkpoint for phase in plan.phases]
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    expected = {name: sum(t.numel() for t in m.state_dict().values()) for name, m in nets.modules().items()}
    assert plan.parameters == expected
    trained = sum(p.numel() for m in (nets.encoder, nets.decoder, nets.heads) for p in m.parameters())
    assert plan.phases[-1].trained == trained
    assert plan.phases[-1].frozen == sum(expected.values()) - trained


def test_memory_and_traffic_as_worked_by_hand(small: Small) -> None:
    one, four = (make_plan(small("schedule.iterations=1"), devices=n).phases[0] for n in (1, 4))
    P = one.trained
    assert (one.memory_replicated.gradients, one.memory_replicated.optimizer) == (4 * P, 8 * P)
    assert one.memory_replicated.weights == 4 * (P + one.frozen)
    assert four.memory_sharded.optimizer == 8 * P / 4
    assert (one.rows, four.rows) == (8, 2)
    assert four.memory_replicated.activations < one.memory_replicated.activations
    assert (one.traffic_replicated, one.traffic_sharded) == (0, 0)
    assert four.traffic_replicated == 2 * 3 / 4 * 4 * P
    assert four.traffic_sharded == 3 * 3 / 4 * 4 * P


def test_steps_epochs_and_time_follow_from_the_schedule(small: Small) -> None:
    keep = "schedule.tokenizer=keep"
    config = small("encoder_phase.epochs=2", "encoder_phase.warmup_steps=0", "max_steps=null", keep)
    plan = make_plan(config, devices=2, samples=400, utilisation=0.5)
    first, last = plan.phases
    assert (first.steps, first.epochs, first.tokens_per_step) == (100, 2.0, 8 * 64)
    seconds = 8 * last.operations_per_sample / (2 * DEVICES["a100"].peak * 0.5)
    assert last.estimated_seconds_per_step == pytest.approx(seconds)
    assert plan.estimated_days == pytest.approx(
        sum(p.steps * p.estimated_seconds_per_step for p in plan.phases) / 86_400
    )


def test_reused_codes_cost_their_share(small: Small) -> None:
    once = "schedule.iterations=1"
    live, reused = (make_plan(small(f"encoder_phase.masks={n}", once)).phases[-1] for n in (1, 4))
    assert reused.operations["tokenizer"] == pytest.approx(live.operations["tokenizer"] / 4, abs=1)
    assert reused.operations["encoder"] == live.operations["encoder"]


def test_a_run_without_tokenizer_plans_encoder_phases_only(small: Small) -> None:
    plan = make_plan(small("loss.target=patches", "schedule.iterations=1"))
    assert [phase.name for phase in plan.phases] == ["encoder"]
    assert list(plan.parameters) == ["encoder", "decoder", "heads"]


def test_a_batch_that_cannot_be_shared_is_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match="batch of 8 cannot be shared evenly by 3"):
        make_plan(small(), devices=3)


def test_epochs_of_unknown_data_ask_for_the_number_of_samples() -> None:
    with pytest.raises(UsageError, match="--samples"):
        make_plan(load_config("signal"))


def test_the_command_prints_tables_or_json() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["plan", "digits-tiny", "encoder.depth=1", "--devices", "2"], catch_exceptions=False)
    assert shown.exit_code == 0
    for word in ("iter1 encoder", "runtime.shard=full", "Estimated", "tokens per step", "Next:"):
        assert word in shown.stdout
    wanted = ["plan", "digits-tiny", "schedule.iterations=1", "--device", "cpu", "--json"]
    found = runner.invoke(app, wanted, catch_exceptions=False)
    value = json.loads(found.stdout)
    assert value["samples"] == 1437
    assert value["phases"][0]["memory_replicated"]["total"] > 0
    assert value["estimated_days"] > 0


@pytest.mark.parametrize(
    ("days", "text"), [(0.005, "7.2 minutes"), (0.5, "12 hours"), (2.5, "2.5 days"), (1 / 86_400, "0.0167 minutes")]
)
def test_times_are_written_in_a_unit_that_fits(days: float, text: str) -> None:
    assert duration(days) == text


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="a100, h100, cpu"):
        CliRunner().invoke(app, ["plan", "digits-tiny", "--device", "tpu"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.23k"), (2.5e9, "2.5G"), (999_600, "1M")]
)
def test_numbers_are_written_short(number: float, text: str) -> None:
    assert scaled(number) == text


def test_the_commands_of_the_guide_are_understood(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made by the tests above; here the words of every command are checked."""
    page = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    planned = [shlex.split(line)[1:] for line in lines if line.startswith("bridle plan")]
    a_plan = make_plan(small("loss.target=patches", "schedule.iterations=1"))
    asked: list[str] = []

    def stand_in(config: Config, **named: Any) -> Plan:
        asked.append(config.name)
        return a_plan

    monkeypatch.setattr("bridle.plan.make_plan", stand_in)
    for words in planned:
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert len(asked) == len(planned) >= 3


def test_fine_tuning_is_planned_by_the_draws_of_an_epoch() -> None:
    plan = make_plan(load_config("audioset2m"), devices=64)
    assert plan.finetune is not None
    assert asdict(plan.finetune) == {"steps": 93_750, "batch": 256, "epochs": 120.0, "epoch_items": 200_000}
    shown = CliRunner().invoke(app, ["plan", "audioset2m", "--devices", "64"]).output
    assert "Fine-tuning: 93,750 steps at a global batch of 256: 120 epochs of 200,000 draws" in " ".join(shown.split())
