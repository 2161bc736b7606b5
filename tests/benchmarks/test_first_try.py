"""The table of a first try; the commands that it calls have their own tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

COLUMNS = ("all", "shots5", "shots10", "knn")


def row(name: str, features: str, score: float, gain: float | None = None, clear: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"set": name, "features": features, **dict.fromkeys(COLUMNS, score)}
    return found if gain is None else found | {"gain": {column: [gain, 1.5, clear] for column in COLUMNS}}


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    good = [row("icons", name, 50, 20) for name in ("raw", "untrained", "classical")]
    bad = [row("charts", "raw", 80, -10), row("charts", "untrained", 60, 10), row("charts", "classical", 69, 1, False)]
    return [*good, row("icons", "codes", 90, -20), row("icons", "trained", 70), *bad, row("charts", "trained", 70)]


def test_the_table_shows_the_best_in_bold_and_what_training_gained(
    benchmark_script: Callable[[str], Any], rows: list[dict[str, Any]]
) -> None:
    lines = benchmark_script("first_try").table(rows).splitlines()
    assert lines[2].startswith("| icons | raw input | 50.0 (+20.0 ±1.5 *) |")
    assert "| icons | RQ codes | **90.0** (-20.0 ±1.5 *) |" in lines[5]
    assert lines[6].startswith("| icons | trained | 70.0 |")
    assert "**80.0** (-10.0 ±1.5 *)" in lines[7] and "69.0 (+1.0 ±1.5)" in lines[9]


def test_a_set_is_won_where_all_three_baselines_are_clearly_beaten(
    benchmark_script: Callable[[str], Any], rows: list[dict[str, Any]]
) -> None:
    said = benchmark_script("first_try").summary(rows)
    assert said == "10 a class: beats all of raw input, untrained encoder, classical on 1 of 2 sets; not on charts"


def test_codes_are_counted_stage_by_stage_over_the_real_tokens(benchmark_script: Callable[[str], Any]) -> None:
    codes = torch.tensor([[[0, 2], [1, 2], [1, 0], [2, 2]]])  # (1, 4 tokens, 2 stages) of 3 codes
    tokenizer = SimpleNamespace(tokenize=lambda x, valid: codes, quantizer=SimpleNamespace(codes=(3, 3)))
    count = benchmark_script("first_try").code_counts
    everything = count(tokenizer, torch.zeros(1), None).square()
    assert torch.allclose(everything, torch.tensor([[1, 2, 1, 1, 0, 3]]) / 4)
    real = count(tokenizer, torch.zeros(1), torch.tensor([[True, True, True, False]])).square()
    assert torch.allclose(real, torch.tensor([[1, 2, 0, 1, 0, 2]]) / 3)
