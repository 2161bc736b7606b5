"""Retrieval quality against scikit-learn's average precision, query by query."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score
from sklearn.metrics.pairwise import cosine_similarity

from bridle.config.training_schema import ProbeConfig
from bridle.evaluate.features import Array, Features
from bridle.evaluate.scorers import Pair, Score, Task
from bridle.evaluate.scorers import retrieval as module
from bridle.evaluate.scorers.retrieval import query_precision


def items(count: int, *, classes: int = 3, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)
    y = random.integers(classes, size=count)
    return Features((np.eye(classes)[y] @ np.ones((classes, 4)) + random.normal(size=(count, 4))).astype(np.float32), y)


def pair(train: Features, test: Features, name: str = "") -> Pair:
    return Pair(name, train, np.zeros(len(train.y), dtype=bool), test)


def retrieval(pairs: list[Pair], *, seed: int) -> Score | None:
    return module.retrieval(Task(lambda: iter(pairs), ProbeConfig(), seed)).get("retrieval mAP")


def oracle(queries: Features, gallery: Features) -> Array:
    cosine = cosine_similarity(queries.x, gallery.x)
    return np.array(
        [average_precision_score(gallery.y == y, scores) for y, scores in zip(queries.y, cosine, strict=True)]
    )


def test_every_query_is_scored_as_scikit_learn_does() -> None:
    train, test = items(60), items(25, seed=1)
    found, share = query_precision(test, train)
    np.testing.assert_allclose(found, oracle(test, train), atol=1e-6)
    np.testing.assert_allclose(share, [(train.y == y).mean() for y in test.y])


def test_equal_cosines_enter_together() -> None:
    x = np.array([[1, 0], [2, 0], [4, 0], [0, 1]], dtype=np.float32)  # the first three point the same way
    train = Features(x, np.array([0, 1, 1, 0]))
    found, _ = query_precision(Features(x[:1], np.array([0])), train)
    np.testing.assert_allclose(found, 0.5 * (1 / 3) + 0.5 * (2 / 4))


def test_cutting_the_work_into_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = items(60), items(25, seed=1)
    whole = query_precision(test, train)[0]
    monkeypatch.setattr(module, "AT_ONCE", 100)
    np.testing.assert_array_equal(query_precision(test, train)[0], whole)


def test_the_mean_leaves_out_queries_that_nothing_could_be_found_for() -> None:
    train, test = items(60), items(25, seed=1)
    strange = test._replace(y=np.where(np.arange(25) < 5, 99, test.y))
    found = retrieval([pair(train, strange)], seed=0)
    assert found is not None
    assert (found.items, found.short) == (20, 5)
    assert found.value == pytest.approx(oracle(test, train)[5:].mean(), abs=1e-6)
    low, high = found.interval
    assert low < found.value < high
    assert retrieval([pair(train, test._replace(y=test.y + 50))], seed=0) is None


def test_with_folds_it_is_the_mean_over_folds() -> None:
    pairs = [pair(items(60), items(10, seed=1), "1"), pair(items(60), items(30, seed=2), "2")]
    found, alone = retrieval(pairs, seed=0), [retrieval([one], seed=0) for one in pairs]
    assert found is not None
    expected = np.mean([one.value for one in alone if one is not None])
    assert found.value == pytest.approx(expected)


def test_items_with_several_labels_look_for_any_of_theirs() -> None:
    gallery = Features(np.eye(3, dtype=np.float32), np.array([[1, 0], [0, 1], [0, 0]], dtype=bool))
    query = Features(np.array([[0.1, 0.9, 0.5]], dtype=np.float32), np.array([[1, 1]], dtype=bool))
    found, share = query_precision(query, gallery)
    assert found.tolist() == pytest.approx([0.5 * 1 + 0.5 * 2 / 3])  # second nearest is the unlabelled one
    assert share.tolist() == pytest.approx([2 / 3])


def test_of_large_sets_some_queries_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COSINES", 600)
    found = retrieval([pair(items(60), items(25, seed=1))], seed=0)
    assert found is not None
    assert found.items == 10
