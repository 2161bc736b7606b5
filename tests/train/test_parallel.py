"""What several processes share of a phase, looked at in one."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bridle import api, distributed
from bridle.data.loading.loader import BadSample
from bridle.errors import DataError, RankError, UsageError
from bridle.machine import StopRequest
from bridle.quantize import Statistics
from bridle.quantize.initialise import Rows, Solved, solve_stages
from bridle.runs.results import Results
from bridle.runs.results_file import ResultsFile
from bridle.train.parallel import Gathered, Replicas, agree, blocks, digest, require_equal

cli_app = importlib.import_module("bridle.cli.app")  # `bridle.cli.app` is also the name of what it holds

TINY = ["probe.enabled=false", "schedule.iterations=1", "max_steps=2", "runtime.log_every=1", "encoder_phase.batch=16"]


def test_alone_a_step_agrees_with_itself() -> None:
    stop, own = StopRequest(), Gathered({"loss": torch.tensor(0.1), "grad_norm": torch.tensor(1.0)})
    bad = [BadSample(3, "c.png", "damaged")]
    assert agree(own, bad, stop) == (own, bad, False, True)
    stop.received = signal.SIGTERM
    assert agree(own, [], stop).stop
    own.figures["grad_norm"] = torch.tensor(float("inf"))
    assert not agree(own, [], stop).is_finite


def test_what_a_step_has_found_is_summed_in_one_call_and_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        sent.append(x)
        return x + x

    monkeypatch.setattr(distributed, "is_active", lambda: True)
    monkeypatch.setattr(distributed, "sum_over_ranks", twice)
    figures = {"loss": torch.tensor(0.25), "token_accuracy": torch.tensor([0.1, 0.2]), "grad_norm": torch.tensor(2.0)}
    n, l_sum = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([[0.1], [0.3]], dtype=torch.float64)
    own = Gathered(figures, Statistics((n,), (l_sum,)), torch.tensor([2**40 + 1, 3]))
    total, bad, stop, is_finite = agree(own, [], StopRequest())
    assert len(sent) == 1
    assert (bad, stop, is_finite) == ([], False, True)
    assert {key: value.tolist() for key, value in total.figures.items()} == {
        key: (2 * value).tolist() for key, value in figures.items()
    }
    assert total.figures["loss"].dtype == torch.float32
    assert total.counts is not None
    assert total.counts.tolist() == [2**41 + 2, 6]
    assert total.statistics is not None
    assert torch.equal(total.statistics.n[0], 2 * n)
    assert torch.equal(total.statistics.l_sum[0], 2 * l_sum)


def test_alone_the_step_is_the_phase_own_and_losses_keep_their_size() -> None:
    replicas = Replicas({"net": nn.Linear(2, 2)}, lambda x: x + 1, shard="full", compiled=False, some_steps_only=False)
    assert replicas.wrapped is None
    assert replicas.sharded == []
    assert replicas.scale == 1
    with replicas.accumulating(last=False):
        assert replicas(41) == 42


def test_one_bit_changes_a_digest() -> None:
    x = torch.zeros(3, 4)
    y = x.clone()
    y[2, 3] = -0.0
    assert digest(x) == digest(x.clone().t().contiguous().t())
    assert digest(x) != digest(y)
    assert 0 <= digest(x.bool()) < 2**63


class Pretended:
    """A second rank that holds the numbers given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: dict[str, torch.Tensor]) -> None:
        theirs = torch.tensor([[digest(value) for value in other.values()]])
        monkeypatch.setattr(distributed, "is_active", lambda: True)
        monkeypatch.setattr(distributed, "gather_rows", lambda x, **_: torch.cat([x, theirs]))


def test_a_difference_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"encoder.weight": torch.ones(2), "quantizer.code": torch.arange(4.0), "quantizer.usage": torch.ones(4)}
    Pretended(monkeypatch, state)
    require_equal(state, where="step 100")
    Pretended(monkeypatch, {**state, "quantizer.code": torch.arange(4.0) + 1})
    with pytest.raises(RankError, match=r"step 100: 'quantizer.code' on rank 1 .* \(1 of 3 tensors differ\)"):
        require_equal(state, where="step 100")


def test_alone_nothing_is_waited_for() -> None:
    x = torch.arange(6).reshape(3, 2)
    assert distributed.gather_rows(x) is x
    assert distributed.gather_json({"a": 1}) == [{"a": 1}]
    assert distributed.done_once(lambda: "done") == "done"
    rows = distributed.rows_on_first_rank([x, x])
    assert rows is not None
    assert rows.shape == (6, 2)
    assert distributed.rows_on_first_rank([]) is None
    with pytest.raises(DataError, match="no"):
        distributed.done_together(lambda: (_ for _ in ()).throw(DataError("no")))
    with distributed.process_group():
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.speaks_first()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """As if this were rank 0 of 2; what it asks of the other is noted."""
    asked: list[object] = []

    def gather(value: object, **_: bool) -> list[object]:
        asked.append(value)
        return [value, value]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "gather_json", gather)
    return asked


def test_what_is_done_once_asks_nothing_of_ranks_that_wait_for_it(two_ranks: list[object], tmp_path: Path) -> None:
    def work() -> int:
        ResultsFile(tmp_path / "results.json", Results())  # itself read once for all ranks
        return distributed.world_size()

    assert distributed.done_once(work) == 1
    assert two_ranks == [None, [1]]  # that nothing went wrong, and what was found
    assert distributed.world_size() == 2
    with pytest.raises(DataError, match="no"):
        distributed.done_once(lambda: (_ for _ in ()).throw(DataError("no")))
    assert distributed.world_size() == 2


def test_ranks_wait_patiently_for_the_codebooks_that_the_first_one_solves(
    two_ranks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[object] = []
    monkeypatch.setitem(distributed._groups, "patient", "the patient one")  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "broadcast", lambda x, *, src, group=None: groups.append(group))
    rows = Rows(torch.arange(6.0).reshape(3, 2), 0)
    code = torch.ones(2, 2)
    found = solve_stages(
        rows, [code.shape], lambda *_: Solved(code, 2, torch.zeros(2, dtype=torch.bool)), rule="once", poll=None
    )
    assert torch.equal(found[0].code, code)
    assert groups == ["the patient one"] * 3


def test_a_batch_that_cannot_be_shared_is_refused_before_there_is_a_run(
    two_ranks: list[object], tmp_path: Path
) -> None:
    for phase in ("encoder", "tokenizer"):
        with pytest.raises(UsageError, match=f"batch of 15 cannot be shared .* by 2 .* for {phase}_phase.batch"):
            api.pretrain("digits-tiny", out=tmp_path / "run", overrides=[f"{phase}_phase.batch=15"])
    assert not (tmp_path / "run").exists()


def test_a_command_for_one_process_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli_app, "app", lambda **_: seen.append(os.environ.get("WORLD_SIZE")))
    monkeypatch.setattr(sys, "argv", ["bridle", "demo"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    cli_app.main()
    assert seen == []  # another rank does it
    monkeypatch.setenv("RANK", "0")
    cli_app.main()
    assert seen == [None]


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="RANK is not"), distributed.process_group():
        pass


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("[x/gloo/transport/tcp/pair.cc:534] Connection closed by peer", True), ("mat1 and mat2 differ", False)],
)
def test_a_lost_rank_is_told_from_a_mistake(text: str, wanted: bool) -> None:
    assert distributed.lost_contact(RuntimeError(text)) is wanted


def test_compiled_blocks_train_as_others_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The eager back end: what is traced is run as it is, and no C++ compiler is needed.
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    losses = []
    for name in ("false", "true"):
        api.pretrain("digits-tiny", out=tmp_path / name, overrides=[*TINY, f"runtime.compile={name}"])
        losses.append([line.split('"loss": ')[1].split(",")[0] for line in (tmp_path / name / "metrics.jsonl").open()])
    assert losses[0] == losses[1]


def test_blocks_are_found_in_every_trunk() -> None:
    from bridle.config import load_config
    from bridle.models.build import build_nets

    config = load_config("digits-tiny")
    nets = build_nets(config, later_tokenizer=True)
    depth = 2 * config.encoder.depth + config.decoder.depth + config.estimator.depth
    assert len(blocks(nets.modules().values())) == depth
