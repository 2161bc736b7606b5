"""Retrieval quality of a feature space: does looking for the nearest items find those of the same class?

Shapes: N items, D features. Every test item is a query; the training items are ranked by their cosine with it, and
those that share a label with it are what should come first. The average precision of the ranking, averaged over
queries, is the mAP. Queries whose label no training item has are left out.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from bridle.evaluate.features import Array, Features
from bridle.evaluate.metrics import Ranking, bootstrap_interval
from bridle.evaluate.scorers import Pair, Score, Task, register_scorer
from bridle.evaluate.scorers.knn import unit_rows
from bridle.seeding import generator

MOST_COSINES = 2**27  # per fold; of larger sets some queries are drawn
AT_ONCE = 2**23  # cosines that are ranked at once


def retrieval(task: Task) -> dict[str, Score]:
    """How well test items find training items with their label; with folds the mean over them.

    Empty if no query has anything to find.
    """
    precisions, chances, skipped = list[Array](), list[float](), 0
    for pair in task.pairs():
        found, shares = query_precision(_some(pair, task.seed), pair.train)
        known = ~np.isnan(found)
        skipped += int((~known).sum())
        if known.any():
            precisions.append(found[known])
            chances.append(float(shares[known].mean()))
    if not precisions:
        return {}
    sizes, source = [len(own) for own in precisions], generator(task.seed, "retrieval bootstrap")
    score = Score(
        value=statistics.fmean(float(own.mean()) for own in precisions),
        interval=bootstrap_interval(np.concatenate(precisions), generator=source, sizes=sizes),
        chance=statistics.fmean(chances),  # the share of items that should be found, which a random order reaches
        items=sum(sizes),
        short=skipped,
    )
    return {"retrieval mAP": score}


def query_precision(queries: Features, gallery: Features) -> tuple[Array, Array]:
    """Average precision of each query (N,), NaN where nothing is relevant, and the relevant share of the gallery."""
    known, asked = unit_rows(gallery.x), unit_rows(queries.x)
    precisions, shares = [], []
    for rows in np.array_split(np.arange(len(asked)), max(1, len(asked) * len(known) // AT_ONCE)):
        if len(rows) == 0:
            continue
        relevant = _share_a_label(queries.y[rows], gallery.y)  # (rows, gallery)
        cosine = (asked[rows] @ known.T).numpy()
        precisions.append(Ranking(cosine.T, relevant.T).average_precision())  # a query is a class of the ranking
        shares.append(relevant.mean(axis=1))
    return np.concatenate(precisions), np.concatenate(shares)


def _share_a_label(a: Array, b: Array) -> Array:
    """(A, B) bool."""
    if a.ndim == 1:
        same: Array = a[:, None] == b[None, :]
        return same
    common: Array = a.astype(np.float32) @ b.astype(np.float32).T > 0
    return common


def _some(pair: Pair, seed: int) -> Features:
    """The test items, or as many of them as may be compared with all training items."""
    most = max(1, MOST_COSINES // len(pair.train.y))
    if len(pair.test.y) <= most:
        return pair.test
    drawn = torch.randperm(len(pair.test.y), generator=generator(seed, "retrieval queries", pair.name))[:most]
    return pair.test.part(drawn.sort().values.numpy())


register_scorer("retrieval", retrieval)
