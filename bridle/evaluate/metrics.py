"""Scores of a classifier, per item first and averaged last, so that every score can carry an interval.

Shapes: N items, K classes. `scores` is (N, K), larger is better; `y` is (N,) with the index of the true class;
`truth` is (N, K), above zero where an item has a label; `counts` (N,) says how often each item is counted.

    top-k accuracy      mean_n [ y_n is among the k best columns of scores_n ]; equal scores: the later column wins
    balanced accuracy   mean over the classes present in y of the share of their items answered rightly
    average precision   AP_c = Σ_j (R_j − R_{j−1}) · P_j over the distinct thresholds of class c; mAP is their mean
    AUC                 AUC_c = P(an item with label c scores above one without it), equal scores counting half
    d′                  √2 · Φ⁻¹(AUC): how far two unit normal distributions with that AUC lie apart

mAP and mean AUC leave out the classes for which they are not defined: those that no item has, for AUC also those that
every item has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bridle.runs.results import Interval

Array = NDArray[Any]
RankingScore = Callable[["Ranking", Array | None], Array]  # of a ranking and counts (N,), per class (K,)

DRAWS = 1000  # of a bootstrap
DRAWN_SCORES = 500_000_000  # scores gone through by the bootstrap of a ranking; large sets get fewer draws
FEWEST_DRAWS = 100


# one label per item


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


def balanced_accuracy(predicted: Array, y: Array) -> float:
    """Accuracy averaged over the classes that occur in y (N,)."""
    classes, own = np.unique(y, return_inverse=True)
    right = np.bincount(own, weights=predicted == y, minlength=len(classes))
    return float((right / np.bincount(own, minlength=len(classes))).mean())


# a ranking of the items per class


class Ranking:
    """Items sorted by each class's score once; then scored as they are, or as often as bootstrap draws count them.

    Items with equal scores enter together: what holds for one of them is read at the last of its run of ties. Only the
    places of positive items are kept, of which there are few.
    """

    def __init__(self, scores: Array, truth: Array) -> None:
        by_class = np.ascontiguousarray(scores.T)  # (K, N)
        K, N = by_class.shape
        self.items, self.classes = N, K
        self.order = np.argsort(-by_class, axis=1, kind="stable").astype(np.int32)  # best first
        ranked = np.take_along_axis(by_class, self.order, axis=1)
        self.column, place = np.nonzero(np.take_along_axis((truth > 0).T, self.order, axis=1))  # (P,) positives
        new_run = np.concatenate([np.ones((K, 1), dtype=bool), ranked[:, 1:] != ranked[:, :-1]], axis=1)
        starts = np.maximum.accumulate(np.where(new_run, np.arange(N), 0), axis=1)  # of the own run of ties
        run = (self.column * N + starts[self.column, place]).astype(np.int64)  # the same number for tied positives
        ends = np.minimum.accumulate(np.where(np.roll(new_run, -1, axis=1), np.arange(N), N)[:, ::-1], axis=1)[:, ::-1]
        # Where to read running sums that begin with a zero: before the run of ties, and after it.
        self.before = self.column * (N + 1) + starts[self.column, place]
        self.after = self.column * (N + 1) + ends[self.column, place] + 1
        self.own = self.order[self.column, place]  # the item itself
        self.positives_before = np.searchsorted(run, run, side="left")
        self.positives_after = np.searchsorted(run, run, side="right")
        self.first_positive = np.searchsorted(self.column, self.column, side="left")

    def average_precision(self, counts: Array | None = None) -> Array:
        """(K,) average precision of each class; NaN for a class without a positive item."""
        sums = self._sums(counts)
        # Every positive raises recall by its share of all positives, at the precision where its run of ties ends.
        precision = sums.positives_after / np.maximum(sums.after, 1)
        return _ratio(self._per_class(sums.own * precision), self._per_class(sums.own))

    def auc(self, counts: Array | None = None) -> Array:
        """(K,) area under the ROC curve; NaN for a class without a positive or without a negative item."""
        sums = self._sums(counts)
        positives = self._per_class(sums.own)
        negatives = (self.items if counts is None else counts.sum()) - positives
        above = (sums.after - sums.positives_after + sums.before - sums.positives_before) / 2  # negatives, ties half
        won = self._per_class(sums.own * (negatives[self.column] - above))
        return _ratio(won, positives * negatives)

    def _sums(self, counts: Array | None) -> _Sums:
        each = np.ones(self.items, dtype=np.int32) if counts is None else counts.astype(np.int32)
        running = np.zeros((self.classes, self.items + 1), dtype=np.int32)
        np.cumsum(each[self.order], axis=1, out=running[:, 1:])
        own = each[self.own]
        positives = np.concatenate([[0], np.cumsum(own)])
        base = positives[self.first_positive]
        return _Sums(
            own,
            running.ravel()[self.before],
            running.ravel()[self.after],
            positives[self.positives_before] - base,
            positives[self.positives_after] - base,
        )

    def _per_class(self, values: Array) -> Array:
        return np.bincount(self.column, weights=values, minlength=self.classes)


class _Sums(NamedTuple):
    """Of every positive (P,): its own count, and how much is ranked before and up to the end of its run of ties."""

    own: Array
    before: Array
    after: Array
    positives_before: Array
    positives_after: Array


def mean_average_precision(scores: Array, truth: Array) -> float:
    """mAP over the classes with at least one positive item (scikit-learn would count the others as zero)."""
    return mean_of_known(Ranking(scores, truth).average_precision())


def d_prime(auc: float) -> float:
    """√2 · Φ⁻¹(AUC), as AudioSet results are reported; infinite for a perfect ranking."""
    return math.sqrt(2) * float(torch.special.ndtri(torch.tensor(auc, dtype=torch.float64)))


def mean_of_known(per_class: Array) -> float:
    """The mean without NaN; NaN if nothing else is there."""
    known = ~np.isnan(per_class)
    return float(per_class[known].mean()) if known.any() else float("nan")


def _ratio(above: Array, below: Array) -> Array:
    """above / below, NaN where below is zero."""
    found: Array = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)
    return found


# intervals


def bootstrap_interval(
    per_item: Array, *, generator: torch.Generator, draws: int = DRAWS, sizes: Sequence[int] | None = None
) -> Interval:
    """95 % percentile bootstrap of the mean of `per_item` (N,), drawing items with replacement.

    With `sizes` of folds that follow one another, of the mean over folds of their means, drawing inside each fold.
    """
    folds = torch.as_tensor(per_item, dtype=torch.float64).split(list(sizes or [len(per_item)]))
    # One draw at a time keeps memory at N, whatever the size of the test set.
    return _middle(
        torch.stack(
            [torch.stack([own[_draw(len(own), generator)].mean() for own in folds]).mean() for _ in range(draws)]
        )
    )


def bootstrap_rankings(
    rankings: Sequence[Ranking], scores: Sequence[RankingScore], *, generator: torch.Generator
) -> list[Interval]:
    """For each of `scores`, a 95 % bootstrap of its mean over classes, then over rankings (folds).

    Items are drawn with replacement inside each ranking. The draws are as many as 500 million scores allow, 100 to
    1,000. An item drawn twice stands beside itself in the ranking, which flatters precision; so the draws are shifted
    to have the score itself as their mean.
    """
    size = sum(ranking.order.size for ranking in rankings)
    itself = _scored(rankings, scores, [None for _ in rankings])
    drawn = np.array(
        [
            _scored(rankings, scores, [_draw_counts(ranking.items, generator) for ranking in rankings])
            for _ in range(min(DRAWS, max(FEWEST_DRAWS, DRAWN_SCORES // size)))
        ]
    )  # (draws, scores)
    intervals = []
    for score, column in zip(itself, drawn.T, strict=True):
        shifted = np.clip(column + score - mean_of_known(column), 0.0, 1.0)
        intervals.append(_middle(torch.from_numpy(shifted)))
    return intervals


def _scored(rankings: Sequence[Ranking], scores: Sequence[RankingScore], counts: Sequence[Array | None]) -> list[float]:
    """Each score's mean over classes, then over rankings."""
    return [
        mean_of_known(np.array([mean_of_known(score(r, c)) for r, c in zip(rankings, counts, strict=True)]))
        for score in scores
    ]


def _draw_counts(n: int, generator: torch.Generator) -> Array:
    """(n,): how often each of n items was drawn in n draws."""
    found: Array = torch.bincount(_draw(n, generator), minlength=n).numpy()
    return found


def _middle(means: torch.Tensor) -> Interval:
    low, high = torch.nanquantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high)


def _draw(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(n, (n,), generator=generator)
