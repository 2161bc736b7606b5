"""The engine and the phases: what learns, what stays, what is logged, and what a bad step may not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.config import Config, with_statistics
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.sources import Sample
from bridle.errors import CheckpointError, NonFiniteError
from bridle.machine import Machine, StopRequest
from bridle.models.build import build_nets
from bridle.models.cost import encoder_step
from bridle.quantize import ResidualQuantizer
from bridle.runs.checkpoint import checkpoint_folders, load, publish
from bridle.runs.folder import RunFolder
from bridle.runs.results import Results
from bridle.runs.results_file import ResultsFile
from bridle.train import engine, joint, phases
from bridle.train.algorithm1 import Turn, build_phase, interleave, renew, schedule
from bridle.train.engine import fit
from bridle.train.optim import build_optimizer, decays, learning_rate
from bridle.train.run import Run, open_machine
from bridle.train.step_metrics import Clock, describe

Small = Callable[..., Config]
StateOf = Callable[[Any], dict[str, torch.Tensor]]


def a_run(config: Config, folder: Path, *, later_tokenizer: bool = False) -> Run:
    config = with_statistics(config, [0.3], [0.35])
    place = RunFolder(folder)
    place.prepare(config)
    place.write_settings(config, command="test")
    nets = build_nets(config, later_tokenizer=later_tokenizer)
    machine = open_machine(config.runtime)
    return Run(place, config, machine, open_data(config).train, nets, StopRequest(), ProgressLine())


def train(run: Run, turn: Turn, index: int = 0) -> None:
    fit(run, build_phase(run, index, turn), None)


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_the_encoder_phase_leaves_the_started_tokenizer_bit_identical(
    small: Small, tmp_path: Path, state_of: StateOf
) -> None:
    run = a_run(small(), tmp_path)
    train(run, Turn(1, "encoder"))  # the codebooks are started here
    tokenizer, encoder = state_of({"t": run.nets.tokenizer}), state_of({"e": run.nets.encoder})
    train(run, Turn(2, "encoder"))  # no start in later iterations
    assert changed(tokenizer, state_of({"t": run.nets.tokenizer})) == set()
    assert all(parameter.grad is None for parameter in run.nets.tokenizer.parameters())
    assert len(changed(encoder, state_of({"e": run.nets.encoder}))) == len(encoder)


def test_the_tokenizer_phase_leaves_the_teacher_bit_identical_and_trains_the_rest(
    small: Small, tmp_path: Path, state_of: StateOf
) -> None:
    run = a_run(small(), tmp_path, later_tokenizer=True)
    frozen = {"encoder": run.nets.encoder, "decoder": run.nets.decoder, "heads": run.nets.heads}
    before, tokenizer = state_of(frozen), state_of({"t": run.nets.tokenizer})
    train(run, Turn(2, "tokenizer"))
    assert changed(before, state_of(frozen)) == set()
    assert all(p.grad is None and not p.requires_grad for m in frozen.values() for p in m.parameters())
    moved = changed(tokenizer, state_of({"t": run.nets.tokenizer}))
    assert {name for name in tokenizer if "encoder" in name or "code" in name} <= moved
    assert run.nets.estimator is not None
    assert run.nets.estimator.teacher_mean.abs().sum() > 0


def test_the_joint_phase_updates_codebooks_every_n_steps(small: Small, tmp_path: Path) -> None:
    run = a_run(small("schedule.mode=joint", "schedule.joint_every=3", steps=7), tmp_path, later_tokenizer=True)
    phase = build_phase(run, 0, Turn(1, "joint"))
    updates = []
    quantizer = run.nets.tokenizer.quantizer
    phase.after_update = lambda statistics: (updates.append(1), quantizer.ema_update(statistics))[1]
    fit(run, phase, None)
    assert len(updates) == 2  # after the third and the sixth step


def test_joint_training_keeps_its_codes_in_use_and_its_target_centred(small: Small, tmp_path: Path) -> None:
    overrides = ("schedule.mode=joint", "encoder_phase.batch=32", "encoder_phase.learning_rate=3e-3")
    run = a_run(small(*overrides, "geometry.patch=[4, 4]", steps=150), tmp_path, later_tokenizer=True)
    phase = build_phase(run, 0, Turn(1, "joint"))
    fit(run, phase, None)
    (last,) = next(iter(run.loader(phase=phase.key, batch=32, micro_batch=None).steps(149, 150)))
    assert run.nets.estimator is not None
    target = run.nets.estimator.target(phases.teach(run, last.x, last.valid))  # (B, T, D)
    constant = target.mean(0)
    assert constant.square().sum() * len(target) / target.square().sum() < 0.05
    usage = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["code_usage"]
    assert min(usage) > 0.9


def test_joint_training_teaches_its_tokenizer_at_the_tokenizers_learning_rate(small: Small, tmp_path: Path) -> None:
    run = a_run(small("schedule.mode=joint"), tmp_path, later_tokenizer=True)  # 1e-3 and 5e-4
    scale = build_phase(run, 0, Turn(1, "joint")).rate_scale
    names = ("encoder.norm.weight", "heads.0.weight", "tokenizer.projection.weight", "estimator.head.weight")
    assert [scale(name) for name in names] == [1.0, 1.0, 0.5, 0.5]


def test_micro_batches_give_the_update_of_the_whole_batch(small: Small, tmp_path: Path) -> None:
    states = []
    for micro in ("null", "2"):
        overrides = [f"{phase}.micro_batch={micro}" for phase in ("encoder_phase", "tokenizer_phase")]
        run = a_run(small(*overrides, "encoder.drop_path=0.2"), tmp_path / micro, later_tokenizer=True)
        train(run, Turn(2, "tokenizer"))
        train(run, Turn(2, "encoder"), index=1)
        states.append(run.nets.state())
    for name, whole in states[0].items():
        torch.testing.assert_close(states[1][name], whole, atol=2e-4, rtol=1e-3, msg=name)


def test_micro_batches_give_the_joint_update_of_the_whole_batch(small: Small, tmp_path: Path) -> None:
    states = []
    for micro in ("null", "2"):
        overrides = ("schedule.mode=joint", "schedule.joint_every=2", f"encoder_phase.micro_batch={micro}")
        run = a_run(small(*overrides), tmp_path / micro, later_tokenizer=True)
        train(run, Turn(1, "joint"))
        states.append(run.nets.state())
    for name, whole in states[0].items():
        torch.testing.assert_close(states[1][name], whole, atol=2e-4, rtol=1e-3, msg=name)


class Padded:
    """Sixty-four-token samples of which some are mostly padding."""

    classes = labels = None

    def __len__(self) -> int:
        return 16

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        valid = torch.arange(64) < (60 if index % 3 else 8)
        return Sample(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index)), None, valid)

    def describe(self, index: int) -> str:
        return f"sample {index}"


def test_with_padding_too_micro_batches_give_the_update_of_the_whole_batch(small: Small, tmp_path: Path) -> None:
    states, losses = [], []
    for micro in ("null", "1"):
        run = a_run(small(f"tokenizer_phase.micro_batch={micro}", steps=2), tmp_path / micro, later_tokenizer=True)
        run.source = Padded()
        train(run, Turn(2, "tokenizer"))
        states.append(run.nets.state())
        row = json.loads((tmp_path / micro / "metrics.jsonl").read_text().splitlines()[0])
        losses.append([row[key] for key in ("loss", "cosine", "commitment")])
        assert row["energy"][0] == pytest.approx(1.0)  # shares of the tokens add up
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for name, whole in states[0].items():
        torch.testing.assert_close(states[1][name], whole, atol=2e-4, rtol=1e-3, msg=name)


def test_with_padding_too_token_accuracy_is_that_of_the_whole_batch(small: Small, tmp_path: Path) -> None:
    found = []
    for micro in ("null", "1", "2"):
        run = a_run(small(f"encoder_phase.micro_batch={micro}", steps=1), tmp_path / micro)
        run.source = Padded()
        train(run, Turn(1, "encoder"))
        found.append(json.loads((tmp_path / micro / "metrics.jsonl").read_text().splitlines()[0])["token_accuracy"])
    assert max(found[0]) > 0
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)


def test_with_padding_the_energy_is_a_mean_over_tokens(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    forward = ResidualQuantizer.forward

    def noted(self: ResidualQuantizer, x: torch.Tensor, *, valid: torch.Tensor | None = None) -> Any:
        out = forward(self, x, valid=valid)
        assert valid is not None
        seen.append((int(valid.sum()), out.energy.detach()))
        return out

    run = a_run(small("tokenizer_phase.micro_batch=1", steps=1), tmp_path / "run", later_tokenizer=True)
    run.source = Padded()
    monkeypatch.setattr(ResidualQuantizer, "forward", noted)
    train(run, Turn(2, "tokenizer"))
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    seen = seen[-run.config.tokenizer_phase.batch :]
    assert len({tokens for tokens, _ in seen}) == 2
    wanted = sum(tokens * energy for tokens, energy in seen) / sum(tokens for tokens, _ in seen)
    assert row["energy"] == pytest.approx(wanted.tolist(), abs=2e-6)


def test_schedule_of_algorithm_1(small: Small) -> None:
    assert schedule(small("schedule.iterations=3")) == [
        Turn(1, "encoder"), Turn(2, "tokenizer"), Turn(2, "encoder"), Turn(3, "tokenizer"), Turn(3, "encoder"),
    ]  # fmt: skip
    assert schedule(small("schedule.mode=joint")) == [Turn(1, "joint"), Turn(2, "joint")]


def test_each_iteration_renews_tokenizer_and_heads_and_encoder_on_request(small: Small, tmp_path: Path) -> None:
    for restart in ("continue", "fresh"):
        run = a_run(small(f"schedule.encoder_restart={restart}"), tmp_path / restart)
        old = run.nets.encoder, run.nets.decoder, run.nets.heads, run.nets.tokenizer
        renew(run, Turn(2, "tokenizer"))
        assert run.nets.tokenizer is not old[3]
        assert run.nets.encoder is old[0]
        renew(run, Turn(2, "encoder"))
        assert run.nets.heads is not old[2]
        assert (run.nets.encoder is old[0]) == (restart == "continue")
        assert (run.nets.decoder is old[1]) == (restart == "continue")


def test_a_non_finite_step_changes_nothing_and_five_in_a_row_stop(
    small: Small, tmp_path: Path, state_of: StateOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(small(steps=9), tmp_path, later_tokenizer=True)
    phase = build_phase(run, 0, Turn(2, "tokenizer"))
    real, calls, states = phase.step, [], []

    def poisoned(batch: Any, draws: Any) -> Any:
        states.append(state_of(run.nets.modules()))
        calls.append(draws.step)
        result = real(batch, draws)
        return result._replace(loss=result.loss * (float("nan") if draws.step == 1 or draws.step >= 3 else 1.0))

    phase.step = poisoned
    with pytest.raises(NonFiniteError, match="5 steps in a row"):
        fit(run, phase, None)
    assert calls == [0, 1, 2, 3, 4, 5, 6, 7]
    assert changed(states[1], states[2]) == set()  # step 1 was skipped
    assert changed(states[2], states[3]) != set()  # step 2 was taken
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows[:4]] == [0, 1, 1, 2]
    assert rows[1]["loss"] is None


def test_rows_that_are_not_of_a_quarantine_are_passed_over(small: Small, tmp_path: Path) -> None:
    good = {"index": 3, "path": "a.png", "reason": "it is empty"}
    rows = [{}, {"index": "3", "path": "a", "reason": "b"}, {"index": 4, "path": None, "reason": "b"}, good]
    a_run(small(), tmp_path / "run")
    (tmp_path / "run/quarantine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "[5]\n")
    assert set(a_run(small(), tmp_path / "run").bad) == {3}


@pytest.mark.parametrize("wrong", [{"phase_index": 99}, {"iteration": 2}, {"phase": "nosuch"}])
def test_a_checkpoint_of_a_phase_that_the_run_has_not_is_refused(
    small: Small, tmp_path: Path, wrong: dict[str, object]
) -> None:
    run = a_run(small(steps=1), tmp_path / "run")
    train(run, Turn(1, "encoder"))
    last = load(checkpoint_folders(run.folder.checkpoints)[-1])
    publish(run.folder.checkpoints, "p0009-iter9-encoder-00000001-end", last.tensors, {**last.state, **wrong}, keep=2)
    results = ResultsFile(tmp_path / "results.json", Results())
    with pytest.raises(CheckpointError, match="the run has no such phase"):
        interleave(run, results, None)


def test_learning_rate_rises_and_falls_as_worked_by_hand() -> None:
    rates = [learning_rate(s, steps=10, warmup=2, peak=1.0, final=0.1) for s in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.55)  # half way: the mean of peak and final
    assert rates[10] == pytest.approx(0.1)  # after the last step, which is number 9


def test_the_last_step_still_learns() -> None:
    assert learning_rate(9, steps=10, warmup=0, peak=1.0, final=0.0) == pytest.approx(0.0245, abs=1e-4)


def test_norms_biases_tokens_and_codes_do_not_decay(small: Small) -> None:
    config = small("quantizer.update=gradient", "encoder.class_token=true")
    nets = build_nets(config, later_tokenizer=True)
    optimizer = build_optimizer(nets.modules(), config.encoder_phase)
    spared = {id(p) for p in optimizer.param_groups[1]["params"]}
    named = {f"{m}.{n}": p for m, module in nets.modules().items() for n, p in module.named_parameters()}
    assert optimizer.param_groups[1]["weight_decay"] == 0
    for name, parameter in named.items():
        free = name.endswith(("bias", "token", ".code")) or "norm" in name
        assert (id(parameter) in spared) == free, name
        assert decays(name, parameter) == (not free)


def test_pretraining_and_fine_tuning_have_betas_of_their_own(small: Small) -> None:
    config = small()
    heads = {"heads": build_nets(config).heads}
    betas = [
        build_optimizer(heads, phase).param_groups[0]["betas"] for phase in (config.encoder_phase, config.finetune)
    ]
    assert betas == [(0.9, 0.95), (0.9, 0.999)]


def test_a_row_of_metrics_has_what_people_look_for(small: Small, tmp_path: Path) -> None:
    run = a_run(small(), tmp_path)
    train(run, Turn(1, "encoder"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["iteration"], row["phase"], row["step"], row["steps"], row["world_size"]) == (1, "encoder", 4, 4, 1)
    assert len(row["token_accuracy"]) == len(row["code_usage"]) == len(row["top_share"]) == 4
    assert row["loss"] > 0
    assert row["samples_per_second"] > 0
    assert row["tokens_per_second"] == pytest.approx(
        row["samples_per_second"] * run.config.geometry.build().tokens, rel=0.01
    )
    assert row["flop_utilisation"] is None  # too few steps to count their operations
    assert all(0 <= row[f"waiting_{cause}"] <= 1 for cause in ("data", "checkpoint", "ranks"))
    line = describe({**row, "code_dimension": [3.6, 20.4]}, iterations=2, eta_seconds=5)
    assert " · directions 4/20 · " in line


def test_the_clock_shares_out_the_time_since_the_last_look(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("bridle.train.step_metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Machine, "product_rate", 1e6)
    run = a_run(small(), tmp_path)
    phase = replace(build_phase(run, 0, Turn(1, "encoder")), operations=lambda: 5000)
    clock = Clock(run, phase, step=98, spent=0.0, began=0.0)

    for _ in range(2):
        clock.ask()
        now[0] += 3.0  # seconds of decoding
        clock.arrive()
    with clock.waiting("checkpoint"):
        now[0] += 1.0
    now[0] += 3.0  # of training
    found = clock.look(100)
    batch, tokens = phase.settings.batch, run.config.geometry.build().tokens
    assert (found["waiting_data"], found["waiting_checkpoint"], found["waiting_ranks"]) == (0.6, 0.1, 0.0)
    assert (found["samples_per_second"], found["tokens_per_second"]) == (
        round(0.2 * batch, 1),
        round(0.2 * batch * tokens, 1),
    )
    assert found["flop_utilisation"] == pytest.approx(0.2 * batch * 5000 / 1e6, abs=1e-4)
    now[0] += 1.0
    assert clock.look(101)["waiting_data"] == 0.0


def test_operations_of_a_step_are_those_of_the_plan(small: Small, tmp_path: Path) -> None:
    run = a_run(small(), tmp_path)
    count = build_phase(run, 0, Turn(1, "encoder")).operations
    assert count is not None
    assert count() == encoder_step(run.config, later_tokenizer=False).total.operations


def test_draws_are_made_for_the_global_batch(small: Small, tmp_path: Path) -> None:
    run = a_run(small("encoder.drop_path=0.5"), tmp_path)
    phase = build_phase(run, 0, Turn(1, "encoder"))
    loader = run.loader(phase=phase.key, batch=8, micro_batch=4)
    halves = next(iter(loader.steps(0, 1)))
    whole = next(iter(run.loader(phase=phase.key, batch=8, micro_batch=None).steps(0, 1)))[0]
    draws = engine.Draws(run, phase, 0)
    assert torch.equal(torch.cat([draws.mask(half).visible for half in halves]), draws.mask(whole).visible)
    parts = [draws.drop_path(half) for half in halves]
    assert torch.equal(torch.cat([p for p in parts if p is not None], dim=2), draws.drop_path(whole))
    other = engine.Draws(run, phase, 1)
    assert not torch.equal(draws.mask(whole).visible, other.mask(whole).visible)


def redraws(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch, *, phase: str = "tokenizer") -> list[int]:
    """How many codes each call redrew in a phase whose first codebook begins with codes that nothing chooses."""
    run = a_run(config, folder, later_tokenizer=True)
    counts: list[int] = []
    original = ResidualQuantizer.reset_codes

    def spy(self: ResidualQuantizer, x: torch.Tensor, which: Any, **rest: Any) -> int:
        counts.append(original(self, x, which, **rest))
        return counts[-1]

    started = phases.start_codebooks

    def start_far_away(run: Any, key: str, settings: Any) -> None:
        started(run, key, settings)
        book = run.nets.tokenizer.quantizer.books[0]
        book.restart(torch.full_like(book.code, 50.0), torch.arange(len(book.code)) < 5)

    monkeypatch.setattr(ResidualQuantizer, "reset_codes", spy)
    for module in (phases, joint):
        monkeypatch.setattr(module, "start_codebooks", start_far_away)
    train(run, Turn(2, phase))
    return counts


def test_codes_that_died_are_redrawn_while_the_tokenizer_learns(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = redraws(small("quantizer.reset_every=2", steps=6), tmp_path, monkeypatch)
    assert counts[0] >= 5  # after two steps; every code out of reach has a new place
    assert len(counts) <= 2  # after steps 2 and 4: the last two steps only settle


def test_codes_that_died_are_redrawn_in_joint_training_too(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("schedule.mode=joint", "schedule.joint_every=2", "quantizer.reset_every=2", steps=6)
    assert redraws(config, tmp_path, monkeypatch, phase="joint")[0] >= 5


@pytest.mark.parametrize("off", ["quantizer.reset_every=0", "quantizer.reset_below=0"])
def test_redrawing_can_be_turned_off(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    assert redraws(small("quantizer.reset_every=2", off, steps=6), tmp_path, monkeypatch) == []
