"""The order of a phase: every sample once per epoch, whatever the sizes, and nothing remembered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.data.loading.order import Order
from bridle.errors import DataError

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**40)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_every_epoch_holds_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    indices = Order(size=size, seed=seed, phase="encoder").at(np.arange(epoch * size, (epoch + 1) * size))
    assert sorted(indices.tolist()) == list(range(size))


@given(size=sizes, seed=seeds, batch=st.integers(1, 900), steps=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_batches_of_any_size_drop_and_repeat_nothing(size: int, seed: int, batch: int, steps: int) -> None:
    order = Order(size=size, seed=seed, phase="encoder")
    seen = np.concatenate([order.at(np.arange(s * batch, (s + 1) * batch)) for s in range(steps)])
    times = np.bincount(seen, minlength=size)
    whole, rest = divmod(batch * steps, size)
    assert times.min() >= whole
    assert (times == whole + 1).sum() == rest


@given(size=sizes, seed=seeds, position=st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_a_position_means_the_same_alone_and_among_others(size: int, seed: int, position: int) -> None:
    order = Order(size=size, seed=seed, phase="encoder")
    among = order.at(np.arange(max(0, position - 3), position + 4))
    assert int(order.at(position)) == among[min(3, position)]


def test_epochs_phases_and_seeds_have_their_own_orders() -> None:
    one = Order(size=100, seed=1, phase="encoder").at(np.arange(200))
    orders = {
        tuple(one[:100]),
        tuple(one[100:]),
        tuple(Order(size=100, seed=1, phase="tokenizer").at(np.arange(100))),
        tuple(Order(size=100, seed=2, phase="encoder").at(np.arange(100))),
    }
    assert len(orders) == 4


def test_all_orders_of_four_samples_are_about_equally_likely() -> None:
    order = Order(size=4, seed=0, phase="p")
    drawn = order.at(np.arange(4 * 12_000)).reshape(-1, 4)
    _, times = np.unique(drawn, axis=0, return_counts=True)
    assert len(times) == 24
    assert times.min() > 400  # 500 expected, standard deviation 22
    assert times.max() < 600


def test_neighbours_in_the_order_are_unrelated_samples() -> None:
    drawn = Order(size=10_007, seed=3, phase="p").at(np.arange(10_007)).astype(float)
    assert abs(np.corrcoef(drawn, np.arange(10_007))[0, 1]) < 0.05
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.05


def test_a_billion_samples_cost_no_memory() -> None:
    indices = Order(size=2_000_000_011, seed=0, phase="p").at(np.arange(10_000))
    assert len(set(indices.tolist())) == 10_000
    assert indices.max() > 1_900_000_000


def test_an_empty_data_set_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples"):
        Order(size=0, seed=0, phase="p")


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        Order(size=3, seed=0, phase="p").at([-1])
