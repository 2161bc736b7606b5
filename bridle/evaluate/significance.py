"""Paired differences of scores and their 95 % intervals.

Over seeds, folds or draws: d_1 … d_n are differences of two scores each, t the 97.5 % point of Student's distribution,

    change = mean(d) ± t · sd(d)/√n      from n = 2 on.

Over test items, where there is one seed: d_i ∈ {−1, 0, 1} says which of the two models was right about item i. Their
mean has a bootstrap interval, and McNemar's exact test gives the probability of so uneven a split of the items that
only one model answered, if both were equally good. Results keep one bit per item for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Literal, NamedTuple

import numpy as np
import torch

from bridle.errors import needs
from bridle.evaluate.metrics import Array, bootstrap_interval
from bridle.runs.results import Hits

SIGNIFICANT = 0.05  # of McNemar's test
NO_SPREAD = 1e-9  # half an interval that is only rounding


class Change(NamedTuple):
    """A score beside another one."""

    change: float
    half: float | None  # of the 95 % interval; None for a single pair
    pairs: int
    over: Literal["seeds", "items"] = "seeds"  # seeds stands for folds and draws too
    p: float | None = None  # of McNemar's test, over items

    @property
    def is_clear(self) -> bool:
        """Can it hardly be chance? Differences that are all the same tell nothing of their spread."""
        if self.p is not None:
            return self.p < SIGNIFICANT
        return self.half is not None and NO_SPREAD < self.half < abs(self.change)

    def __str__(self) -> str:
        if self.half is None:
            return f"{100 * self.change:+.1f}"
        return f"{100 * self.change:+.1f} ±{100 * self.half:.1f}{' *' if self.is_clear else ''}"


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95 % interval of the mean of two or more values."""
    with needs("train"):
        from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / sqrt(len(values))


def compare(own: Sequence[float], other: Sequence[float]) -> Change:
    """Paired difference of two lists of scores."""
    differences = [a - b for a, b in zip(own, other, strict=True)]
    n = len(differences)
    return Change(mean(differences), half_width(differences) if n > 1 else None, n)


def make_hits(right: Array, truth: Sequence[Array]) -> Hits:
    """Hits (N,) of items whose labels are given fold by fold."""
    digest = hashlib.sha256()
    for labels in truth:
        digest.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
    return Hits.pack(right, sizes=[len(labels) for labels in truth], truth=digest.hexdigest()[:12])


def compare_hits(own: Hits | None, other: Hits | None, *, generator: torch.Generator) -> Change | None:
    """Paired difference over the same test items; None where they are not the same, or not known."""
    if own is None or other is None or (own.sizes, own.truth) != (other.sizes, other.truth):
        return None
    with needs("train"):
        from scipy.special import bdtr

    mine, theirs = own.right, other.right
    differences = mine.astype(np.int64) - theirs
    low, high = bootstrap_interval(differences, generator=generator, sizes=own.sizes)
    change = mean(float(fold.mean()) for fold in np.split(differences, np.cumsum(own.sizes)[:-1]))
    only_own, only_other = int((mine & ~theirs).sum()), int((theirs & ~mine).sum())
    apart = only_own + only_other
    # McNemar's exact test: twice the smaller tail of a fair coin, which is symmetric.
    p = min(1.0, 2 * float(bdtr(min(only_own, only_other), apart, 0.5))) if apart else 1.0
    return Change(change, (high - low) / 2, own.items, "items", p)
