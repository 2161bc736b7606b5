"""Retrieval beside scikit-learn: tf-idf cosines of code n-grams, average precision, and its chance level."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import average_precision_score

from bridle.search.evaluate import chance_precision, label_matrix, score_queries
from bridle.search.ngrams import Lines, terms_of, weigh

GRID = (4, 3)
SIZES = (5, 4)


def files(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Codes (12, 2) and positions (12, 2) of some files."""
    random = np.random.default_rng(seed)
    positions = np.indices(GRID).reshape(2, -1).T
    return [(np.stack([random.integers(0, k, 12) for k in SIZES], 1), positions) for _ in range(count)]


def words(codes: np.ndarray, *, axis: int) -> list[str]:
    """The terms of a file as words, gone through line by line."""
    found = []
    for stage in range(codes.shape[1]):
        table = codes[:, stage].reshape(GRID)
        for number, line in enumerate(table.T if axis == 0 else table):
            found += [f"{stage}/{number}:{code}" for code in line]
            found += [f"{stage}/{number}:{a},{b}" for a, b in pairwise(line)]
    return found


@pytest.mark.parametrize("axis", [0, 1])
def test_cosines_of_code_n_grams_are_those_of_a_text_index(axis: int) -> None:
    corpus, queries = files(9), files(3, seed=1)
    lines = Lines(GRID, axis, SIZES)
    grams = weigh(terms_of(codes, places, lines) for codes, places in corpus)
    vectorizer = TfidfVectorizer(analyzer=lambda file: words(file[0], axis=axis), sublinear_tf=True)
    expected = vectorizer.fit_transform(corpus)
    for query in [*corpus[:2], *queries]:
        mine = grams.scores(terms_of(*query, lines), len(corpus))
        asked = vectorizer.transform([query])
        # scikit-learn forgets a query's words that no file has; here they count in its length, which scales all scores.
        theirs = (expected @ asked.T).toarray()[:, 0]
        known = set(vectorizer.vocabulary_)
        if set(words(query[0], axis=axis)) <= known:
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
        else:
            np.testing.assert_allclose(mine / mine.max(), theirs / theirs.max(), atol=1e-6)
            assert mine.max() < theirs.max()


def test_average_precision_of_queries_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    labels = [(f"class {n}",) for n in random.integers(0, 4, 30)]
    scores = np.round(random.random((30, 30)), 1)  # with ties
    queries = np.arange(30)
    found = score_queries(scores, label_matrix(labels), queries)
    for query in queries:
        others = [n for n in range(30) if n != query]
        relevant = [labels[n] == labels[query] for n in others]
        expected = average_precision_score(relevant, scores[others, query])
        assert found.average_precision[query] == pytest.approx(expected)


def test_files_with_several_labels_are_relevant_when_they_share_one() -> None:
    labels = label_matrix([("a", "b"), ("b",), ("c",), ()])
    assert labels.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    found = score_queries(np.array([[9, 9], [3, 3], [5, 5], [1, 1]]), labels, np.array([0, 2]))
    assert found.relevant.tolist() == [1, 0]
    assert found.average_precision[0] == 0.5  # behind a file with another label
    assert not found.first_is_relevant.any()


@pytest.mark.parametrize(("relevant", "count"), [(1, 1), (1, 5), (3, 8), (8, 8)])
def test_chance_is_the_mean_over_random_orders(relevant: int, count: int) -> None:
    random = np.random.default_rng(0)
    truth = np.arange(count) < relevant
    drawn = [average_precision_score(truth, random.permutation(count)) for _ in range(2000)]
    assert chance_precision(relevant, count) == pytest.approx(np.mean(drawn), abs=0.02)
