"""What `bridle bench data` concludes from its numbers, and that it can take them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bench.data import DataTable, run

from bridle.config import Config


def table(*, alone: float, one: float, model: float, configured: int) -> DataTable:
    return DataTable(
        name="a",
        batch=64,
        configured=configured,
        loading={0: alone, 1: one},
        model=model,
        rows=16,
        device="cuda",
        cores=4,
    )


def test_too_few_workers_make_the_data_the_bottleneck() -> None:
    found = table(alone=50, one=40, model=100, configured=2)
    assert found.balance == 3  # 3 · 40 ≥ 100
    assert "bottleneck is the data: data.workers=2 loads 0.8 times as fast" in found.verdict()
    assert "3 worker(s) balance the two" in found.verdict()


def test_workers_beyond_the_cores_add_nothing() -> None:
    found = table(alone=50, one=40, model=1000, configured=64)
    assert "loads 0.2 times as fast" in found.verdict()  # 4 · 40 of 1000
    assert "25 worker(s) balance the two. This machine has 4 core(s)" in found.verdict()


def test_enough_workers_make_the_model_the_bottleneck() -> None:
    assert "bottleneck is the model: data.workers=3" in table(alone=50, one=40, model=100, configured=3).verdict()


def test_without_workers_loading_takes_its_share_of_the_time() -> None:
    # 100 samples: 3 s of loading and 1 s of learning.
    found = table(alone=100 / 3, one=30, model=100, configured=0)
    assert found.loading_share == pytest.approx(0.75)
    assert "bottleneck is the data: without workers a run spends 75% of its time loading" in found.verdict()


def test_who_loads_in_no_time_needs_no_workers() -> None:
    found = table(alone=10_000, one=3000, model=100, configured=0)
    assert found.balance == 0
    assert "It needs no workers" in found.verdict()


def test_a_recipe_is_measured(small: Callable[..., Config]) -> None:
    told: list[str] = []
    found = run(small(), seconds=0.1, workers=(0, 1), tell=told.append)
    assert list(found.loading) == [0, 1]
    assert min(found.loading.values()) > 0
    assert found.rows in (2, 8)  # 8 unless the machine is too busy for so many in so short a time
    assert found.model > 0
    text = found.to_markdown()
    assert text.count("\n| ") == 4  # a rule, two rates and the step
    assert f"encoder step, {found.rows} of 8 rows" in text
    assert len(told) == 4


def test_a_recipe_without_a_tokenizer_is_measured_too(small: Callable[..., Config]) -> None:
    assert run(small("loss.target=patches"), seconds=0.05, workers=(0,)).model > 0
