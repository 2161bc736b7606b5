"""`bridle search --evaluate`: mean average precision of the search of a labelled collection.

Shapes: N files, K labels, Q queries, which are files of the collection. Every query ranks the other n = N − 1 files;
those that share a label with it are relevant, R of them. Files without any relevant one are no queries.

    AP     =  mean over the relevant files of the precision at their rank (ties together, as scikit-learn does)
    mAP    =  mean of AP over queries
    chance =  mean over queries of E[AP] of a random order  =  (H_n + (n − H_n)·(R − 1)/(n − 1)) / n,   H_n = Σ 1/k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError, needs, quoted
from bridle.evaluate.metrics import Ranking, bootstrap_interval
from bridle.files import write_json
from bridle.runs.results import Interval
from bridle.search.query import By, Index
from bridle.seeding import generator

BATCH = 64  # queries ranked at once
QUERIES = 1000
Rows = NDArray[np.int64]  # numbers of files
Scores = Callable[[Rows], NDArray[Any]]  # queries (b,) -> scores (N, b)


class SearchScores(NamedTuple):
    """How well one kind of search finds files of the same label."""

    by: By
    mean_average_precision: float
    interval: Interval  # 95 % bootstrap over queries
    precision_at_1: float
    chance: float
    queries: int
    files: int


def evaluate_search(index: Index, *, queries: int = QUERIES, seed: int = 0) -> list[SearchScores]:
    """mAP by features and by codes, over the same queries: at most `queries` labelled files drawn by the seed."""
    labels = label_matrix([entry.labels for entry in index.items])
    labelled = np.flatnonzero((labels * (labels.sum(axis=0) > 1)).any(axis=1))
    if len(labelled) == 0:
        raise UsageError(
            f"{quoted(index.folder)} has no two files with the same label; a search is evaluated by class folders or "
            "by the labels of a manifest."
        )
    drawn = np.sort(np.random.default_rng(seed).permutation(labelled)[:queries])
    kinds: dict[By, Scores] = {"features": lambda rows: np.asarray(index.vectors @ index.vectors[rows].T)}
    if index.settings.codes:
        with needs("search"):
            from scipy.sparse import csc_array

        grams = index.grams
        shape = (len(index), len(grams.terms))
        weights = csc_array((grams.weights, grams.docs, grams.ends), shape=shape).tocsr()  # (N, V)
        kinds["codes"] = lambda rows: (weights @ weights[rows].T).toarray()
    return [_evaluate(by, scores, labels, drawn, seed) for by, scores in kinds.items()]


def write_scores(index: Index, measured: Sequence[SearchScores]) -> Path:
    """Write the scores as JSON beside the arrays they were measured on."""
    path = index.generation / "quality.json"
    write_json(path, [{**one._asdict(), "interval": list(one.interval)} for one in measured])
    return path


def label_matrix(labels: Sequence[tuple[str, ...]]) -> NDArray[np.float32]:
    """(N, K): 1 where a file has a label."""
    with needs("search"):
        from sklearn.preprocessing import MultiLabelBinarizer

    matrix: NDArray[np.float32] = MultiLabelBinarizer().fit_transform(labels).astype(np.float32)
    return matrix


class QueryScores(NamedTuple):
    """What some queries found."""

    average_precision: NDArray[np.float64]  # (b,)
    first_is_relevant: NDArray[np.bool_]  # (b,)
    relevant: NDArray[np.int64]  # (b,) files that share a label


def score_queries(scores: NDArray[Any], labels: NDArray[np.float32], rows: Rows) -> QueryScores:
    """Compare scores (N, b) of queries, the files `rows` (b,), with the labels (N, K)."""
    columns = np.arange(len(rows))
    relevant: NDArray[np.bool_] = labels @ labels[rows].T > 0  # (N, b)
    relevant[rows, columns] = False
    ranked = scores.astype(np.float64)
    ranked[rows, columns] = -np.inf  # the query itself comes last, where it changes no precision
    precision = Ranking(ranked, relevant).average_precision()
    return QueryScores(precision, relevant[ranked.argmax(axis=0), columns], relevant.sum(axis=0))


def _evaluate(by: By, scores: Scores, labels: NDArray[np.float32], queries: Rows, seed: int) -> SearchScores:
    batches = [queries[at : at + BATCH] for at in range(0, len(queries), BATCH)]
    found = [score_queries(scores(rows), labels, rows) for rows in batches]
    precision, first, relevant = (np.concatenate(values) for values in zip(*found, strict=True))
    return SearchScores(
        by,
        float(precision.mean()),
        bootstrap_interval(precision, generator=generator(seed, "retrieval", by)),
        float(first.mean()),
        float(np.mean([chance_precision(int(count), len(labels) - 1) for count in relevant])),
        len(queries),
        len(labels),
    )


def chance_precision(relevant: int, files: int) -> float:
    """The expected average precision of a random order of `files` of which `relevant` count."""
    harmonic = float(np.sum(1.0 / np.arange(1, files + 1)))
    share = 0.0 if files == 1 else (relevant - 1) / (files - 1)
    return (harmonic + (files - harmonic) * share) / files
