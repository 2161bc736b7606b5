"""Fewer items than there are: of each class its share, the same for every model."""

from __future__ import annotations

from collections import Counter

import pytest

from bridle.evaluate.features import choose_items, shares


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([50, 30, 20], 10, [5, 3, 2]),
        ([97, 2, 1], 10, [8, 1, 1]),  # none empty, the largest pays
        ([1, 1, 1], 2, [1, 1, 0]),  # no room for all
        ([10, 10, 10], 10, [4, 3, 3]),
    ],
)
def test_groups_keep_their_shares(sizes: list[int], limit: int, expected: list[int]) -> None:
    assert shares(sizes, limit) == expected


def test_classes_that_come_one_after_the_other_all_keep_their_share() -> None:
    labels = [i // 100 for i in range(1000)]
    kept = choose_items(1000, 100, labels=labels, seed=0, split="test")
    assert Counter(labels[i] for i in kept) == dict.fromkeys(range(10), 10)
    assert kept == sorted(set(kept))
    assert len({i % 10 for i in kept}) == 10  # not every tenth item


def test_the_choice_is_the_same_again_and_another_with_another_seed_or_split() -> None:
    labels = [i % 2 for i in range(100)]
    kept = choose_items(100, 10, labels=labels, seed=0, split="train")
    assert kept == choose_items(100, 10, labels=labels, seed=0, split="train")
    assert kept != choose_items(100, 10, labels=labels, seed=1, split="train")
    assert kept != choose_items(100, 10, labels=labels, seed=0, split="test")


def test_without_a_limit_or_below_it_all_are_kept() -> None:
    assert choose_items(3, None, labels=None, seed=0, split="") == choose_items(3, 3, labels=None, seed=0, split="")


def test_folds_keep_their_shares_and_classes_within_them() -> None:
    folds, labels = [1] * 60 + [2] * 40, [i % 2 for i in range(100)]
    kept = choose_items(100, 10, labels=labels, folds=folds, seed=0, split="train")
    assert Counter((folds[i], labels[i]) for i in kept) == {(1, 0): 3, (1, 1): 3, (2, 0): 2, (2, 1): 2}


def test_items_with_several_labels_go_by_their_rarest() -> None:
    labels: list[int | tuple[int, ...]] = [(0,)] * 80 + [(0, 1)] * 18 + [(0, 1, 2)] * 2
    kept = choose_items(100, 10, labels=labels, seed=0, split="train")
    assert Counter(labels[i] for i in kept) == {(0,): 8, (0, 1): 1, (0, 1, 2): 1}
    assert len(choose_items(100, 10, labels=None, seed=0, split="train")) == 10
