"""Two models on the same ground: differences of scores that were made pairwise, and what is chance about them.

Over seeds, folds or draws: d_1 … d_n are differences of two scores each, t the 97.5 % point of Student's distribution,

    change = mean(d) ± t · sd(d)/√n      from n = 2 on.

Over test items, where there is one seed: d_i ∈ {−1, 0, 1} says which of the two models was right about item i. Their
mean has a bootstrap interval, and McNemar's exact test asks how likely so uneven a split of the items that only one
model answered would be if both were equally good. So that this can be done later, results keep one bit per item.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from bridle.evaluate.metrics import Array, bootstrap_interval

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
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def compare(own: Sequence[float], other: Sequence[float]) -> Change:
    """Paired difference of two lists of scores."""
    differences = [a - b for a, b in zip(own, other, strict=True)]
    n = len(differences)
    return Change(mean(differences), half_width(differences) if n > 1 else None, n)


class Hits(NamedTuple):
    """Which test items were answered rightly, in the order they were tested."""

    right: Array  # (N,) bool
    sizes: tuple[int, ...]  # items of each fold, which follow one another; the only number without folds
    truth: str  # names the labels of the items: hits of other items are not compared

    def packed(self) -> dict[str, Any]:
        """For JSON: a bit an item."""
        bits = base64.b64encode(np.packbits(self.right).tobytes()).decode()
        return {"items": len(self.right), "sizes": list(self.sizes), "truth": self.truth, "bits": bits}


def make_hits(right: Array, truth: Sequence[Array]) -> Hits:
    """Hits (N,) of items whose labels are given fold by fold."""
    digest = hashlib.sha256()
    for labels in truth:
        digest.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
    return Hits(right, tuple(len(labels) for labels in truth), digest.hexdigest()[:12])


def read_hits(result: Mapping[str, Any]) -> Hits | None:
    """The hits of a stored result; None where it has none that can be read."""
    found = result.get("hits")
    try:
        items, sizes = int(found["items"]), tuple(int(size) for size in found["sizes"])  # type: ignore[index]
        raw = np.frombuffer(base64.b64decode(found["bits"], validate=True), dtype=np.uint8)  # type: ignore[index]
        truth = str(found["truth"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError, binascii.Error):
        return None
    if min(sizes, default=0) < 1 or sum(sizes) != items or len(raw) != (items + 7) // 8:
        return None
    return Hits(np.unpackbits(raw, count=items).astype(bool), sizes, truth)


def compare_hits(own: Hits | None, other: Hits | None, *, generator: torch.Generator) -> Change | None:
    """Paired difference over the same test items; None where they are not the same, or not known."""
    if own is None or other is None or (own.sizes, own.truth) != (other.sizes, other.truth):
        return None
    from scipy.stats import binomtest

    differences = own.right.astype(np.int64) - other.right
    low, high = bootstrap_interval(differences, generator=generator, sizes=own.sizes)
    change = mean(float(fold.mean()) for fold in np.split(differences, np.cumsum(own.sizes)[:-1]))
    only_own, only_other = int((own.right & ~other.right).sum()), int((other.right & ~own.right).sum())
    apart = only_own + only_other
    p = float(binomtest(only_own, apart).pvalue) if apart else 1.0
    return Change(change, (high - low) / 2, len(own.right), "items", p)
