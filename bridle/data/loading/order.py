"""Which sample comes at which place: a data order that is computed, never stored.

The stream of a phase is an endless line of positions t = 0, 1, 2, …; epoch e covers t in [e·N, (e+1)·N) and is a
permutation of all N samples keyed by (seed, phase, e):

    index(t) = permutation_e(t mod N),   e = t // N

The permutation is a Feistel network on a rectangle of a·b ≥ N cells, x = (left, right): each round adds a keyed hash of
one half to the other (modulo that half's size), which can be undone and is therefore a bijection. Results ≥ N walk on
through the network until they land inside (cycle walking), which keeps it a bijection of range(N). Nothing is shuffled
or saved: any position costs the same, at any size, after any restart, on any rank.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridle.errors import DataError
from bridle.seeding import mix

ROUNDS = 8  # four are enough against a passive observer; a few more make tiny data sets well mixed
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: an odd step that visits all 64-bit numbers

Words = NDArray[np.uint64]


def scramble(x: Words) -> Words:
    """The 64-bit finaliser of splitmix64: every input bit changes about half of the output bits."""
    x = x + GOLDEN  # wraps around modulo 2^64, as meant
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order:
    """The order of `size` samples in one phase; epochs follow one another without a gap."""

    def __init__(self, *, size: int, seed: int, phase: str) -> None:
        if size < 1:
            raise DataError("the data set holds no samples; there is nothing to put in order.")
        self.size = size
        self.width = isqrt(size - 1) + 1  # the smallest w with w·w ≥ size
        self.height = -(-size // self.width)  # rows needed: fewer than w cells are left over, so walks are rare
        self.key = np.uint64(mix(seed, phase, "order"))

    def at(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Sample index at each stream position; same shape as `positions`."""
        where = np.asarray(positions, dtype=np.int64)
        if where.size and where.min() < 0:
            raise ValueError(f"stream positions start at 0; got {where.min()}")
        flat = where.reshape(-1)
        epoch = (flat // self.size).astype(np.uint64)
        index = self._permute((flat % self.size).astype(np.uint64), epoch)
        while (outside := np.flatnonzero(index >= self.size)).size:
            index[outside] = self._permute(index[outside], epoch[outside])
        return index.astype(np.int64).reshape(where.shape)

    def _permute(self, cell: Words, epoch: Words) -> Words:
        """One pass of the network over the a·b cells, with each position's own epoch keys."""
        left, right = np.divmod(cell, np.uint64(self.width))
        for round_ in range(ROUNDS):
            key = scramble(self.key + GOLDEN * (epoch * np.uint64(ROUNDS) + np.uint64(round_)))
            if round_ % 2 == 0:
                left = (left + scramble(key ^ right) % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + scramble(key ^ left) % np.uint64(self.width)) % np.uint64(self.width)
        return left * np.uint64(self.width) + right
