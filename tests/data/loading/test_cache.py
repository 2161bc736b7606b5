"""Decoded items in memory: kept up to the limit, shared by forks, never sent to another process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bridle.data.loading.cache import RECORD, ItemCache

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
    assert part.shape == (100,)
    assert cache.used == 100


def test_without_shared_memory_items_are_kept_by_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    cache, calls = ItemCache(2), []
    for _ in range(2):
        for index in (0, 1, 2):
            assert int(cache.get(index, maker(calls, index))[0]) == index
    assert (calls, cache.used, cache.shared) == ([0, 1, 2, 2], 2 * MEGABYTE, None)
    part = ItemCache(1)
    part.get(0, lambda: torch.zeros(2 * MEGABYTE, dtype=torch.uint8)[:100])
    kept = part.items[0].untyped_storage().nbytes()  # not in the assertion, which would print every byte
    assert kept == 100


def in_fork(do: Callable[[], None]) -> None:
    """Run `do` in a forked process and wait for it."""
    child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "item",
    [torch.arange(6.0).reshape(2, 3), torch.tensor(7, dtype=torch.int16), torch.zeros(0, 4), torch.ones(2, 1, 2, 3)],
)
def test_what_one_fork_makes_another_finds_to_the_bit(item: Tensor) -> None:
    cache = ItemCache(1)
    in_fork(lambda: cache.add(3, item) and None)  # as one worker does
    calls: list[int] = []
    for look in (lambda: cache.get(3, maker(calls, 3)), lambda: cache.get(3, maker(calls, 3))):
        found = look()
        assert found.dtype == item.dtype and torch.equal(found, item)
    assert calls == []


def test_several_processes_fill_one_cache_together() -> None:
    cache = ItemCache(1)
    children = []
    for first in range(3):  # 0 … 99, 1 … 100 and 2 … 101
        children.append(os.fork())
        if children[-1] == 0:
            for index in range(first, first + 100):
                cache.get(index, lambda index=index: torch.full((100,), index))
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    assert [int(cache.get(index, lambda: torch.zeros(1))[-1]) for index in range(102)] == list(range(102))
    assert cache.used == 102 * 100 * 8  # nothing twice


def test_a_process_killed_while_it_writes_leaves_nothing_behind() -> None:
    cache = ItemCache(1)
    cache.add(0, torch.ones(10))

    def die() -> None:
        cache.shared.words[cache.shared.seen // 8 :][:50] = 5  # type: ignore[union-attr]  # half a record
        os.kill(os.getpid(), 9)

    in_fork(die)
    assert 1 not in cache
    cache.add(1, torch.full((10,), 2.0))
    assert cache.find(1).tolist() == [2.0] * 10 and cache.find(0).tolist() == [1.0] * 10  # type: ignore[union-attr]


def test_numbers_that_something_overwrote_are_made_again() -> None:
    cache, calls = ItemCache(1), []
    in_fork(lambda: cache.add(4, torch.full((100,), 4, dtype=torch.uint8)) and None)
    assert cache.shared is not None
    cache.shared.memory[2 * RECORD + 5] = 99
    assert int(cache.get(4, maker(calls, 4, size=100))[5]) == 4
    assert int(cache.get(4, maker(calls, 4, size=100))[5]) == 4
    assert calls == [4]


@pytest.mark.parametrize("word", range(2, 8))
@pytest.mark.parametrize("value", [-1, 2**40])
def test_a_record_that_something_overwrote_is_left_out_and_later_ones_are_found(word: int, value: int) -> None:
    cache = ItemCache(1)
    in_fork(lambda: cache.add(0, torch.ones(2, 2, 2, 2)) and None)
    assert cache.shared is not None
    cache.shared.words[RECORD // 8 + word] = value
    assert 0 not in cache
    cache.add(1, torch.ones(3))
    assert cache.find(1) is not None
    cache.shared.words[0] = value  # where all records end
    cache.add(2, torch.ones(3))
    assert 2 not in cache


def test_a_copy_for_a_worker_starts_empty_with_the_same_limit() -> None:
    cache, calls = ItemCache(4), []
    cache.get(0, maker(calls, 0))
    sent = pickle.dumps(cache)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert (copy.limit, copy.used, copy.items) == (4 * MEGABYTE, 0, {})
    assert int(copy.get(0, maker(calls, 0))[0]) == 0
    assert calls == [0, 0]
