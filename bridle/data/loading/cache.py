"""Decoded items kept in memory, so that a small data set is read from disk once per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MEGABYTE = 2**20


class ItemCache:
    """Tensors by item number, up to `limit_mb`; 0 keeps nothing.

    What came first stays: a training run visits all items equally often, so replacing one by another would only cost
    time. Each worker process fills its own copy; the content never travels with the source that holds the cache.
    Callers must not change what they get.
    """

    def __init__(self, limit_mb: int) -> None:
        self.limit = limit_mb * MEGABYTE  # bytes
        self.used = 0  # bytes
        self.items: dict[int, Tensor] = {}

    def get(self, index: int, make: Callable[[], Tensor]) -> Tensor:
        """Item `index`, made now or earlier in this process."""
        item = self.items.get(index)
        return self.add(index, make()) if item is None else item

    def add(self, index: int, item: Tensor) -> Tensor:
        """Keep an item if there is room for it; returns it."""
        size = item.numel() * item.element_size()
        if self.used + size <= self.limit:
            # A view would keep alive all that it is a part of, uncounted.
            self.items[index] = item if item.untyped_storage().nbytes() == size else item.clone()
            self.used += size
        return item

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "used": 0, "items": {}}
