"""Drawing rare classes more often: a weight for every sample, and an order that follows the weights.

Shapes: N samples, K classes. With n_c the number of samples that carry label c, sample i weighs

    w_i = Σ_{c ∈ labels(i)} 1 / n_c,

so that of single labels each class is drawn equally often. This is the practice for AudioSet, where an item has several
labels. Samples without any label count as one class more.

The order is computed, never stored, as in `order.py`: the sample at stream position t is the inverse of the weights'
distribution function at a number u_t in [0, 1) hashed from (seed, phase, t). Draws are independent, with replacement;
an epoch is still N draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridle.data.loading.order import GOLDEN, scramble
from bridle.data.sources import Labels
from bridle.errors import DataError
from bridle.seeding import mix

UNLABELLED = -1


def balancing_weights(labels: Labels) -> NDArray[np.float64]:
    """(N,) how often each sample is drawn, relative to the others; their sum is the number of classes present."""
    sets = [label_set(label) or (UNLABELLED,) for label in labels]
    counts = Counter(label for one in sets for label in one)
    return np.array([sum(1.0 / counts[label] for label in one) for one in sets])


def label_set(label: int | tuple[int, ...]) -> tuple[int, ...]:
    """The labels of a sample, each once, in ascending order."""
    return (label,) if isinstance(label, int) else tuple(sorted(set(label)))


class WeightedOrder:
    """Independent draws in proportion to `weights`; any position costs the same, after any restart, on any rank."""

    def __init__(self, *, weights: Sequence[float] | NDArray[np.float64], seed: int, phase: str) -> None:
        given = np.asarray(weights, dtype=np.float64)
        if not given.size or not np.isfinite(given).all() or given.min() < 0 or given.max() <= 0:
            raise DataError("sampling weights must be finite and not negative, and one of them above 0.")
        total = np.cumsum(given)
        self.up_to = total / total[-1]  # (N,) P(index ≤ i); ends at exactly 1, which no draw reaches
        self.key = np.uint64(mix(seed, phase, "weighted order"))

    def at(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Sample index at each stream position; same shape as `positions`."""
        where = np.asarray(positions, dtype=np.int64)
        if where.size and where.min() < 0:
            raise ValueError(f"stream positions start at 0; got {where.min()}")
        hashed = scramble(self.key + GOLDEN * where.astype(np.uint64).reshape(-1))
        u = (hashed >> np.uint64(11)) * 2.0**-53  # the 53 bits a double holds: never 1
        return np.searchsorted(self.up_to, u, side="right").astype(np.int64).reshape(where.shape)
