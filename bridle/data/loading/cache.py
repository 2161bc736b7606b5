"""Decoded items kept in memory, so that a small data set is decoded once in a run.

A pass over the data (a codebook start, a phase, a probe) has worker processes of its own. What they decode is kept in
memory that the run and all its forked workers share, so that the next pass finds it.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MEGABYTE = 2**20
KINDS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
WORDS = 8  # int64 numbers before an item: its number, CRC-32, kind, rank and up to four sizes
RECORD = 8 * WORDS  # bytes; items begin at multiples of it
MOST_SIZES = 4


class ItemCache:
    """Tensors by item number, up to `limit_mb`; 0 keeps nothing.

    What came first stays: a training run visits all items equally often, so replacing one by another would only cost
    time. Forked processes share one memory; a spawned one starts empty and fills its own. Callers must not change what
    they get.
    """

    def __init__(self, limit_mb: int) -> None:
        self.limit = limit_mb * MEGABYTE  # bytes
        self.items: dict[int, Tensor] = {}  # that this process has made or read
        self.shared = SharedItems.create(self.limit) if self.limit else None
        self.private = 0  # bytes kept where there is no memory to share

    @property
    def used(self) -> int:
        """Bytes of all items that are kept."""
        return self.private if self.shared is None else self.shared.used

    def get(self, index: int, make: Callable[[], Tensor]) -> Tensor:
        """Item `index`, made now or earlier."""
        item = self.find(index)
        return self.add(index, make()) if item is None else item

    def find(self, index: int) -> Tensor | None:
        """Item `index` if it is kept."""
        item = self.items.get(index)
        if item is None and self.shared is not None and (item := self.shared.find(index)) is not None:
            self.items[index] = item
        return item

    def add(self, index: int, item: Tensor) -> Tensor:
        """Keep an item if there is room for it; returns it."""
        size = item.numel() * item.element_size()
        if self.shared is not None:
            self.shared.add(index, item, limit=self.limit)
            return item
        if self.used + size <= self.limit:
            # A view would keep alive all that it is a part of, uncounted.
            self.items[index] = item if item.untyped_storage().nbytes() == size else item.clone()
            self.private += size
        return item

    def __contains__(self, index: int) -> bool:
        return self.find(index) is not None

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["limit"] // MEGABYTE)  # type: ignore[misc]  # a new process begins with an empty cache


class Place(NamedTuple):
    """Where an item lies, and what it is."""

    start: int  # bytes
    kind: torch.dtype
    sizes: tuple[int, ...]
    checksum: int


class SharedItems:
    """Tensors in memory that a process and its forks append to and read.

    Record follows record, and the first number says where they end. It moves last: a process that is killed while it
    writes leaves nothing behind. A decoder that runs wild could write here, so that sizes are checked, and every item
    once in each process against its CRC-32; what does not match is made again.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.memory = descriptor, mmap.mmap(descriptor, size)
        self.words = np.frombuffer(self.memory, dtype=np.int64)
        self.places: dict[int, Place] = {}
        self.seen, self.used = RECORD, 0  # bytes: read so far, of the items in them
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, limit: int) -> SharedItems | None:
        """Memory for `limit` bytes of items, which takes none before they come; None where it cannot be had."""
        if not hasattr(os, "memfd_create"):
            return None
        size = limit + limit // 8 + MEGABYTE  # with their records
        try:
            descriptor = os.memfd_create("bridle-items")
            os.ftruncate(descriptor, size)
            made = cls(descriptor, size)
        except OSError:
            return None
        made.words[0] = RECORD
        return made

    def find(self, index: int) -> Tensor | None:
        """Item `index`, as a view of the memory."""
        if index not in self.places:
            self._catch_up()
        place = self.places.get(index)
        if place is None:
            return None
        count = prod(place.sizes)
        if count == 0:
            return torch.zeros(place.sizes, dtype=place.kind)
        item = torch.frombuffer(self.memory, dtype=place.kind, count=count, offset=place.start).reshape(place.sizes)
        if zlib.crc32(item.numpy().data) != place.checksum:
            del self.places[index]
            return None
        return item

    def add(self, index: int, item: Tensor, *, limit: int) -> None:
        """Append an item unless it is there, or too much with the others."""
        if item.dtype not in KINDS or item.dim() > MOST_SIZES:
            return
        content = item.contiguous().numpy()
        with self._locked():
            end = self._catch_up()
            start, stop = end + RECORD, end + RECORD + content.nbytes
            if index in self.places or self.used + content.nbytes > limit or stop + RECORD > len(self.memory):
                return
            self.memory[start:stop] = content.tobytes()
            sizes = [*item.shape, *([0] * (MOST_SIZES - item.dim()))]
            record = [index, zlib.crc32(content.data), KINDS.index(item.dtype), item.dim(), *sizes]
            self.words[end // 8 : end // 8 + WORDS] = record
            self.words[0] = -(-stop // RECORD) * RECORD
            self._catch_up()

    def _catch_up(self) -> int:
        """Note what was appended since; returns where it ends."""
        end = int(self.words[0])
        if not self.seen <= end <= len(self.memory) or end % RECORD:
            return len(self.memory)  # overwritten: nothing can be added
        while self.seen < end:
            index, checksum, kind, rank, *sizes = self.words[self.seen // 8 : self.seen // 8 + WORDS].tolist()
            if not (0 <= kind < len(KINDS) and 0 <= rank <= MOST_SIZES and min(sizes) >= 0):
                break
            sizes, start = sizes[:rank], self.seen + RECORD
            length = prod(sizes) * KINDS[kind].itemsize
            if start + length > end:
                break
            self.places[index] = Place(start, KINDS[kind], tuple(sizes), checksum)
            self.used += length
            self.seen = -(-(start + length) // RECORD) * RECORD
        self.seen = end  # also where a record makes no sense
        return end

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process appends at a time; the lock of one that is killed is released."""
        import fcntl

        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
