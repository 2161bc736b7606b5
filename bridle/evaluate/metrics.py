"""Scores of a classifier, per item first and averaged last, so that every score can carry an interval.

Shapes: N items, K classes. `scores` is (N, K), larger is better; `y` is (N,) with the index of the true class;
`truth` is (N, K) booleans for items with several labels.

    top-k accuracy      mean_n [ y_n is among the k best columns of scores_n ]; equal scores: the later column wins
    balanced accuracy   mean over the classes present in y of the share of their items answered rightly
    average precision   AP_c = Σ_j (R_j − R_{j−1}) · P_j over the distinct thresholds of class c; mAP is their mean
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Interval(NamedTuple):
    """The middle 95 % of a bootstrap."""

    low: float
    high: float


def best_class(scores: Array) -> Array:
    """(N,) column with the highest score; of equal ones the last, as everywhere here."""
    best: Array = scores.shape[1] - 1 - scores[:, ::-1].argmax(axis=1)
    return best


def top_k_hits(scores: Array, y: Array, k: int = 1) -> Array:
    """(N,) bool: is the true class among the k best? With k ≥ K always true."""
    own = np.take_along_axis(scores, y[:, None], axis=1)  # (N, 1)
    later = np.arange(scores.shape[1])[None, :] > y[:, None]
    # Rank of the true class: how many columns come before it. Ties go to the later column, as in scikit-learn.
    ahead = (scores > own) | ((scores == own) & later)
    hits: Array = ahead.sum(axis=1) < k
    return hits


def top_k_accuracy(scores: Array, y: Array, k: int = 1) -> float:
    """Share of items whose true class is among the k best."""
    return float(top_k_hits(scores, y, k).mean())


def balanced_accuracy(predicted: Array, y: Array) -> float:
    """Mean recall over the classes that occur in `y`; a class without items has no recall and is left out."""
    classes, own = np.unique(y, return_inverse=True)
    right = np.bincount(own, weights=predicted == y, minlength=len(classes))
    return float((right / np.bincount(own, minlength=len(classes))).mean())


def average_precision(scores: Array, truth: Array) -> Array:
    """(K,) average precision of each class; NaN for a class without a positive item."""
    return np.array([_average_precision(scores[:, c], truth[:, c] > 0) for c in range(scores.shape[1])])


def mean_average_precision(scores: Array, truth: Array) -> float:
    """mAP over the classes with at least one positive item (scikit-learn would count the others as zero)."""
    per_class = average_precision(scores, truth)
    present = ~np.isnan(per_class)
    return float(per_class[present].mean()) if present.any() else float("nan")


def _average_precision(scores: Array, truth: Array) -> float:
    if not truth.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    scores, truth = scores[order], truth[order]
    # Items with equal scores enter together: only the last of a run of ties is a threshold.
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    found = np.cumsum(truth)[last]
    precision, recall = found / (last + 1), found / truth.sum()
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def bootstrap_interval(per_item: Array, *, generator: torch.Generator, draws: int = 1000) -> Interval:
    """95 % percentile bootstrap of the mean of `per_item` (N,), drawing items with replacement."""
    values = torch.as_tensor(per_item, dtype=torch.float64)
    # One draw at a time keeps memory at N, whatever the size of the test set.
    means = torch.stack([values[_draw(len(values), generator)].mean() for _ in range(draws)])
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high)


def _draw(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(n, (n,), generator=generator)
