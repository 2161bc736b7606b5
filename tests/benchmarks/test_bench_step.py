"""`bridle bench step`: the plain step computes the same loss, and the table holds what it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench import step as bench
from bench.step import PlainStep
from typer.testing import CliRunner

from bridle.cli import app
from bridle.config import Config
from bridle.errors import UsageError
from bridle.models.build import build_nets
from bridle.models.losses import CodeTargets, Hidden, encoder_loss
from bridle.nn.masking import draw_mask
from bridle.train.phases import targets
from bridle.train.trial_steps import start_codes

Small = Callable[..., Config]


@pytest.mark.parametrize("kind", ["window", "cross"])
def test_the_plain_step_has_the_same_loss_as_ours(small: Small, kind: str) -> None:
    config = small(f"decoder.kind={kind}")
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    start_codes(nets, config)
    x = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    mask = draw_mask(
        "random", grid=(8, 8), ratio=0.5, batch=4, generator=torch.Generator().manual_seed(1), device="cpu"
    )
    hidden = Hidden.of(mask.masked, 32)
    found: CodeTargets = targets(nets, x, None)
    logits = nets.heads(nets.decoder(nets.encoder(x, mask=mask).z, mask=mask, only=hidden.at))
    ours = encoder_loss(logits, found.at(hidden), hidden.counted).item()
    plain = PlainStep(nets, config, generator=torch.Generator().manual_seed(1))
    assert plain(x) == pytest.approx(ours, rel=1e-5)


def test_a_table_has_ratios_and_memory(small: Small) -> None:
    said: list[str] = []
    (row,) = bench.run([bench.Measured("digits-tiny", small(), 2, 1)], tell=said.append)
    assert row.ratio("live") == row.seconds("live") / row.seconds("plain")  # one turn
    assert 0 < row.utilisation < 1.5
    text = bench.to_markdown([row])
    assert "| digits-tiny | 2 |" in text
    assert "reused / live" in text
    assert said == ["digits-tiny, 2 rows, 1 turns"]


def test_verdicts_follow_the_budgets() -> None:
    turns = {"plain": [1.0, 2.0, 1.0], "live": [0.9, 1.8, 0.7], "reused": [0.61, 1.3, 0.6]}
    row = bench.StepRow("x", 1, turns, 10, 100.0, None)
    assert row.verdict("live") == "0.90 (met)"
    assert row.verdict("reused") == "0.61 (missed)"
    assert row.utilisation == pytest.approx(10 / 0.9 / 100)


def test_reused_codes_skip_the_tokenizer(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    with bench.prepared(config, 2) as steps:
        steps["reused"]()

        def refuse(*args: object, **named: object) -> None:
            raise AssertionError("the tokenizer was asked again")

        monkeypatch.setattr("bridle.train.phases.targets", refuse)
        steps["reused"]()
        with pytest.raises(AssertionError, match="asked again"):
            steps["live"]()


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="tiny, small, base"):
        CliRunner().invoke(app, ["bench", "step", "--size", "huge"], catch_exceptions=False)


def test_without_a_checkout_one_line_says_where_to_get_the_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.cli.machine.__file__", str(tmp_path / "bridle" / "cli" / "machine.py"))
    with pytest.raises(UsageError, match="get bridle's repository"):
        CliRunner().invoke(app, ["bench", "step"], catch_exceptions=False)
