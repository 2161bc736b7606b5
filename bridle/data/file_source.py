"""What all sources of files share: a listing of paths, labels and time spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.folders import printable
from bridle.data.listing.table import DataListing, Listing, span_text
from bridle.data.loading.cache import ItemCache
from bridle.data.sources import Source, Splits, label_of


class FileSource:
    """Base of sources whose items are files, parts of files, or members of tar shards; a subclass adds `load`."""

    from_files = True

    def __init__(self, listing: Listing, classes: Sequence[str] | None, *, cache_mb: int = 0) -> None:
        self.paths, self.labels, self.spans = listing
        self.classes = classes
        self.cache = ItemCache(cache_mb)

    def __len__(self) -> int:
        return len(self.paths)

    def describe(self, index: int) -> str:
        """Path of item `index`, and the seconds of it where it is a part of a file."""
        return printable(self.paths[index]) + span_text(self.span(index))

    def span(self, index: int) -> Span:
        """Start and end of item `index` in its file, in seconds."""
        return WHOLE if self.spans is None else self.spans[index]

    def label(self, index: int) -> int | Tensor | None:
        """The class of item `index`, or the shares (K,) of all classes where items are multilabel."""
        return label_of(self.labels, index, self.classes)


def open_splits(found: DataListing, source: Callable[..., Source], *, cache_mb: int = 0) -> Splits:
    """A source for train and for test, made by `source(listing, classes, cache_mb=…)`; they share the cache by size."""
    count = len(found.train.paths) + (0 if found.test is None else len(found.test.paths))

    def opened(listing: Listing) -> Source:
        return source(listing, found.classes, cache_mb=cache_mb * len(listing.paths) // max(count, 1))

    test = None if found.test is None else opened(found.test)
    return Splits(opened(found.train), test, found.folds, found.notes)


ChooseStart = Callable[[int], int]  # frames that an item has to spare -> its first frame shown


def start_of_view(view: int, views: int) -> ChooseStart:
    """Where a view begins: the first at the start, the last so that it ends at the end; a single one in the centre."""
    return (lambda spare: spare // 2) if views == 1 else lambda spare: round(view * spare / (views - 1))
