"""Decoded items in memory: kept up to the limit, never carried to another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch
from torch import Tensor

from bridle.data.loading.cache import ItemCache

MEGABYTE = 2**20


def maker(calls: list[int], index: int, size: int = MEGABYTE) -> Callable[[], Tensor]:
    def make() -> Tensor:
        calls.append(index)
        return torch.full((size,), index, dtype=torch.uint8)

    return make


def test_an_item_is_made_once() -> None:
    cache, calls = ItemCache(4), []
    for _ in range(3):
        assert int(cache.get(7, maker(calls, 7))[0]) == 7
    assert calls == [7]


def test_a_full_cache_keeps_what_it_has_and_makes_the_rest_each_time() -> None:
    cache, calls = ItemCache(2), []
    for _ in range(2):
        for index in (0, 1, 2):
            assert int(cache.get(index, maker(calls, index))[0]) == index
    assert calls == [0, 1, 2, 2]
    assert cache.used == 2 * MEGABYTE


def test_an_item_too_large_leaves_room_for_smaller_ones() -> None:
    cache, calls = ItemCache(1), []
    cache.get(0, maker(calls, 0, size=2 * MEGABYTE))
    cache.get(1, maker(calls, 1, size=1000))
    cache.get(1, maker(calls, 1, size=1000))
    assert calls == [0, 1]


def test_no_megabytes_keep_nothing() -> None:
    cache, calls = ItemCache(0), []
    for _ in range(2):
        cache.get(0, maker(calls, 0))
    assert calls == [0, 0]


def test_a_part_of_something_large_is_kept_alone() -> None:
    cache = ItemCache(1)
    part = cache.get(0, lambda: torch.zeros(2 * MEGABYTE, dtype=torch.uint8)[:100])
    kept = cache.items[0].untyped_storage().nbytes()  # not in the assertion, which would print every byte
    assert part.shape == (100,)
    assert kept == 100


def test_a_copy_for_a_worker_starts_empty_with_the_same_limit() -> None:
    cache, calls = ItemCache(4), []
    cache.get(0, maker(calls, 0))
    sent = pickle.dumps(cache)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert (copy.limit, copy.used, copy.items) == (4 * MEGABYTE, 0, {})
    assert int(copy.get(0, maker(calls, 0))[0]) == 0
    assert calls == [0, 0]
