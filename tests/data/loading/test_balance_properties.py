"""Balanced sampling: weights by the formula, draws in proportion, and nothing remembered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.balance import WeightedOrder, balancing_weights
from bridle.data.loading.loader import Loader
from bridle.errors import DataError


def test_weights_worked_by_hand() -> None:
    # Class 0 has three items, class 1 two, class 2 one; one item has no label and is a class of its own.
    labels = [0, (0, 1), (1, 2), (0, 0), ()]
    assert balancing_weights(labels) == pytest.approx([1 / 3, 1 / 3 + 1 / 2, 1 / 2 + 1, 1 / 3, 1])


def test_single_labels_are_drawn_equally_often_whatever_their_numbers() -> None:
    labels = [0] * 900 + [1] * 90 + [2] * 10
    order = WeightedOrder(weights=balancing_weights(labels), seed=0, phase="p")
    drawn = np.bincount(np.array(labels)[order.at(np.arange(30_000))])
    assert drawn.min() > 9_700  # 10,000 expected, standard deviation 82
    assert drawn.max() < 10_300


def test_frequencies_match_the_weights() -> None:
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.5, 0.0])
    drawn = WeightedOrder(weights=weights, seed=1, phase="p").at(np.arange(90_000))
    found = np.bincount(drawn, minlength=6)
    assert found[[0, 2, 5]].tolist() == [0, 0, 0]
    assert found / 90_000 == pytest.approx(weights / 4.5, abs=0.006)  # four standard deviations


def test_neighbouring_draws_are_independent() -> None:
    drawn = WeightedOrder(weights=np.ones(1000), seed=3, phase="p").at(np.arange(20_000)).astype(float)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn, np.arange(20_000))[0, 1]) < 0.03


@given(size=st.integers(1, 300), seed=st.integers(0, 2**40), position=st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_a_position_means_the_same_alone_and_among_others(size: int, seed: int, position: int) -> None:
    order = WeightedOrder(weights=np.arange(1.0, size + 1), seed=seed, phase="p")
    among = order.at(np.arange(max(0, position - 3), position + 4))
    alone = int(order.at(position))
    assert alone == among[min(3, position)]
    assert 0 <= alone < size


def test_seeds_and_phases_have_their_own_draws() -> None:
    names = [(0, "a"), (1, "a"), (0, "b")]
    drawn = {tuple(WeightedOrder(weights=np.ones(50), seed=s, phase=p).at(np.arange(40))) for s, p in names}
    assert len(drawn) == 3


def test_workers_micro_batches_and_restarts_see_the_same_stream() -> None:
    source = TensorSource(x=torch.arange(20.0).reshape(20, 1, 1), labels=[0] * 18 + [1] * 2)
    weights = balancing_weights(source.labels or [])

    def shown(start: int, *, workers: int = 0, micro_batch: int | None = None) -> list[list[int]]:
        loader = Loader(
            source=source, seed=0, phase="p", batch=8, mean=[0.0], std=[1.0], workers=workers, micro_batch=micro_batch,
            order=WeightedOrder(weights=weights, seed=0, phase="p"),
        )  # fmt: skip
        return [[int(i) for batch in step for i in batch.index] for step in loader.steps(start, 6)]

    whole = shown(0)
    assert shown(0, workers=2) == whole
    assert shown(0, micro_batch=2) == whole
    assert shown(4) == whole[4:]
    assert sum(index >= 18 for step in whole for index in step) > 12  # 24 of 48 expected; without weights 5


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_without_meaning_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="sampling weights"):
        WeightedOrder(weights=weights, seed=0, phase="p")
