"""Few-shot probe: which labels are drawn, what is fitted on them, and how models are compared draw by draw."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression

from bridle.config.training_schema import ProbeConfig
from bridle.evaluate.features import Features
from bridle.evaluate.scorers import Pair, Score, Task
from bridle.evaluate.scorers.fewshot import class_orders, few_shot
from bridle.evaluate.scorers.probe import fold_pairs, split_pairs
from bridle.seeding import generator


def few_shots(pairs: Iterable[Pair], *, shots: list[int], draws: int, seed: int) -> list[Score]:
    every, settings = list(pairs), ProbeConfig(shots=tuple(shots), draws=draws)
    return list(few_shot(Task(lambda: iter(every), settings, seed)).values())


def clouds(items: int, *, classes: int = 3, seed: int = 0) -> Features:
    """(N, 5) points around one centre per class."""
    random = np.random.default_rng(seed)
    y = np.arange(items) % classes
    centres = np.random.default_rng(7).normal(size=(classes, 5))
    return Features((centres[y] + 0.7 * random.normal(size=(items, 5))).astype(np.float32), y)


def test_a_draw_orders_the_items_of_each_class_and_fewer_shots_are_among_more() -> None:
    y = np.array([0, 0, 0, 1, 1, 2])
    orders = class_orders(y, torch.Generator().manual_seed(0))
    assert [sorted(own.tolist()) for own in orders] == [[0, 1, 2], [3, 4], [5]]
    again = class_orders(y, torch.Generator().manual_seed(0))
    assert all((a == b).all() for a, b in zip(orders, again, strict=True))


def test_of_several_labels_each_gets_its_items() -> None:
    y = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]], dtype=bool)  # nobody has the last label
    assert [sorted(own.tolist()) for own in class_orders(y, torch.Generator())] == [[0, 1], [1, 2]]


def widened(items: Features) -> Features:
    """The same points in 200 features, more than there are items, with noise of their own in each."""
    turn = np.random.default_rng(8).normal(size=(5, 200))
    noise = np.random.default_rng(len(items.y)).normal(size=(len(items.y), 200))
    return items._replace(x=(items.x @ turn + 4 * noise).astype(np.float32))


@pytest.mark.parametrize("wide", [False, True])
def test_scores_are_those_of_scikit_learn_on_the_same_draws(wide: bool) -> None:
    train, test = clouds(60), clouds(90, seed=1)
    if wide:
        train, test = widened(train), widened(test)
    (found,) = few_shots(split_pairs(train, test, seed=3), shots=[4], draws=3, seed=3)
    mean, scale = train.x.mean(axis=0), train.x.std(axis=0)
    expected = []
    for draw in range(3):
        rows = np.concatenate([own[:4] for own in class_orders(train.y, generator(3, "few shots", "", draw))])
        model = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit((train.x[rows] - mean) / scale, train.y[rows])
        expected.append(model.score((test.x - mean) / scale, test.y))
    assert found.draws == pytest.approx(expected)
    assert (found.items, found.short) == (12, 0)


def test_a_class_with_too_few_items_gives_all_it_has_and_is_counted() -> None:
    train = clouds(30)
    kept = np.concatenate([np.flatnonzero(train.y != 2), np.flatnonzero(train.y == 2)[:2]])
    (found,) = few_shots(split_pairs(train.part(kept), clouds(30, seed=1), seed=0), shots=[5], draws=2, seed=0)
    assert (found.items, found.short) == (12, 1)


def test_mean_and_interval_over_draws_are_students() -> None:
    (one, five) = few_shots(split_pairs(clouds(60), clouds(60, seed=1), seed=0), shots=[1, 5], draws=6, seed=0)
    for found in (one, five):
        expected = stats.ttest_1samp(found.draws, 0).confidence_interval(0.95)
        assert found.interval == pytest.approx([expected.low, expected.high])
        assert found.value == pytest.approx(np.mean(found.draws))
    assert five.value > one.value


def test_models_get_the_same_draws() -> None:
    good = clouds(60)
    (own,), (same,) = (few_shots(split_pairs(good, good, seed=0), shots=[2], draws=5, seed=0) for _ in range(2))
    assert own == same
    (other,) = few_shots(split_pairs(good, good, seed=1), shots=[2], draws=5, seed=1)
    assert own.draws != other.draws


def test_with_folds_a_draw_is_scored_by_the_mean_over_folds_of_items_it_never_saw() -> None:
    items, folds = clouds(60), [i // 30 for i in range(60)]
    (found,) = few_shots(fold_pairs(items, folds, seed=0), shots=[3], draws=4, seed=0)
    alone = []
    for fold in (0, 1):
        own = np.array(folds) == fold
        pair = Pair(str(fold), items.part(~own), np.zeros(30, dtype=bool), items.part(own))
        alone.append(few_shots([pair], shots=[3], draws=4, seed=0)[0].draws)
    assert found.draws == pytest.approx(np.mean(alone, axis=0))


def test_items_with_several_labels_are_scored_by_map() -> None:
    random = np.random.default_rng(0)
    y = random.random((80, 4)) < 0.4
    x = (y @ random.normal(size=(4, 6)) + 0.1 * random.normal(size=(80, 6))).astype(np.float32)
    items = Features(x, y)
    (found,) = few_shots(split_pairs(items, items, seed=0), shots=[8], draws=3, seed=0)
    assert found.value > 0.8 > y.mean()
    assert found.items <= 32
