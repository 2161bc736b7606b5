"""How good the search of a labelled collection is: mean average precision over queries.

Shapes: N files, Q queries of them. Every query ranks the other n = N − 1 files; those that share a label with it are
relevant, R of them. Queries without any are left out.

    AP     =  mean over the relevant files of the precision at their rank (ties together, as scikit-learn does)
    mAP    =  mean of AP over queries
    chance =  mean over queries of E[AP] of a random order  =  (H_n + (n − H_n)·(R − 1)/(n − 1)) / n,   H_n = Σ 1/k
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError, quoted
from bridle.evaluate.metrics import Ranking, bootstrap_interval
from bridle.files import write_json
from bridle.runs.results import Interval
from bridle.search.query import By, Index
from bridle.seeding import generator

BATCH = 64  # queries ranked at once
QUERIES = 1000
Scores = Callable[[NDArray[np.int64]], NDArray[Any]]  # numbers of queries (b,) -> scores (N, b)


class Quality(NamedTuple):
    """mAP of one way of searching."""

    by: By
    mean_average_precision: float
    interval: Interval  # 95 % bootstrap over queries
    precision_at_1: float
    chance: float
    queries: int
    files: int


def measure_quality(index: Index, *, queries: int = QUERIES, seed: int = 0) -> list[Quality]:
    """mAP by features and by codes, over at most `queries` labelled files drawn by the seed."""
    truth = _relevance(index)
    labelled = np.array([n for n in range(len(index)) if truth.has_partner(n)], dtype=np.int64)
    if len(labelled) == 0:
        raise UsageError(
            f"{quoted(index.folder)} has no two files with the same label; retrieval is judged by class folders or "
            "by the labels of a manifest."
        )
    draw = np.random.default_rng(seed).permutation(labelled)[:queries]
    chosen = np.sort(draw)
    # mAP is a mean over queries, so that both ways of searching are asked the same ones.
    return [_judge(by, scores, truth, chosen, seed) for by, scores in _ways(index).items()]


def write_quality(index: Index, measured: Sequence[Quality]) -> Path:
    """Write the scores as JSON beside the arrays they were measured on."""
    path = index.generation / "quality.json"
    write_json(path, [{**one._asdict(), "interval": list(one.interval)} for one in measured])
    return path


class Relevance:
    """Which files share a label."""

    def __init__(self, labels: list[tuple[str, ...]]) -> None:
        names = {name: n for n, name in enumerate(dict.fromkeys(name for own in labels for name in own))}
        self.member = np.zeros((len(labels), max(1, len(names))), dtype=np.float32)  # (N, K)
        for n, own in enumerate(labels):
            self.member[n, [names[name] for name in own]] = 1.0
        self.sizes = self.member.sum(axis=0)

    def has_partner(self, n: int) -> bool:
        return bool((self.sizes[self.member[n] > 0] > 1).any())

    def of(self, queries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(N, b): does a file share a label with a query, and is not the query?"""
        shared: NDArray[np.bool_] = self.member @ self.member[queries].T > 0
        shared[queries, np.arange(len(queries))] = False
        return shared


def _relevance(index: Index) -> Relevance:
    return Relevance([entry.labels for entry in index.items])


def _ways(index: Index) -> dict[By, Scores]:
    def by_features(queries: NDArray[np.int64]) -> NDArray[Any]:
        return np.asarray(index.vectors @ index.vectors[queries].T)

    ways: dict[By, Scores] = {"features": by_features}
    if index.has_codes:
        ways["codes"] = CodeScores(index)
    return ways


class CodeScores:
    """Scores of files against each other by n-grams, from the index's own weights, without a model."""

    def __init__(self, index: Index) -> None:
        from scipy.sparse import csc_array

        grams = index.grams
        shape = (len(index), len(grams.terms))
        self.weights = csc_array((grams.weights, grams.docs, grams.ends), shape=shape).tocsr()  # (N, V)

    def __call__(self, queries: NDArray[np.int64]) -> NDArray[Any]:
        found: NDArray[Any] = (self.weights @ self.weights[queries].T).toarray()
        return found


def _judge(by: By, scores: Scores, truth: Relevance, queries: NDArray[np.int64], seed: int) -> Quality:
    precisions = list(_precisions(scores, truth, queries))
    average, first = (np.concatenate([getattr(part, name) for part in precisions]) for name in ("average", "first"))
    relevant = np.concatenate([truth.of(part).sum(axis=0) for part in _batches(queries)])
    return Quality(
        by,
        float(average.mean()),
        bootstrap_interval(average, generator=generator(seed, "retrieval", by)),
        float(first.mean()),
        float(np.mean([chance_precision(int(r), len(truth.member) - 1) for r in relevant])),
        len(queries),
        len(truth.member),
    )


class _Precision(NamedTuple):
    average: NDArray[np.float64]  # (b,)
    first: NDArray[np.float64]  # (b,) is the best hit relevant?


def _precisions(scores: Scores, truth: Relevance, queries: NDArray[np.int64]) -> Iterator[_Precision]:
    for part in _batches(queries):
        found, relevant = scores(part).astype(np.float64), truth.of(part)
        found[part, np.arange(len(part))] = -np.inf  # behind all others, where it changes no precision
        best = found.argmax(axis=0)
        yield _Precision(
            Ranking(found, relevant).average_precision(),
            relevant[best, np.arange(len(part))].astype(np.float64),
        )


def _batches(queries: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for at in range(0, len(queries), BATCH):
        yield queries[at : at + BATCH]


def chance_precision(relevant: int, files: int) -> float:
    """The expected average precision of a random order of `files` of which `relevant` count."""
    harmonic = float(np.sum(1.0 / np.arange(1, files + 1)))
    share = 0.0 if files == 1 else (relevant - 1) / (files - 1)
    return (harmonic + (files - harmonic) * share) / files
