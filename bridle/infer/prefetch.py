"""Windows of many items in order, decoded here or ahead of time by worker processes.

Worker w of W reads the items w, w + W, w + 2W, … as one stream, a piece at a time; the streams are taken up item by
item. So the order is that of the items, a long recording is a stream too, and each worker holds no more than a few
pieces, whatever lies in the files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count
from typing import NamedTuple

import torch

from bridle.data.listing.items import Item
from bridle.data.loading import watchdog
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.sources import Reader, Window
from bridle.errors import DataError, quoted

PIECE_BYTES = 4 * 2**20  # of windows that travel together from a worker
PIECE_ITEMS = 64  # most items that do


class Placed(NamedTuple):
    """A window and the item it belongs to."""

    item: int
    window: Window


class Ended(NamedTuple):
    """An item is done; with an error its windows do not count."""

    item: int
    error: DataError | None


Event = Placed | Ended


class Reached(NamedTuple):
    """How far a stream has come: the pieces before, and where the next one begins."""

    pieces: int = 0
    items: int = 0  # of the stream, that are done
    windows: int = 0  # of the next item, that are done


class Call(NamedTuple):
    """Piece `piece` of a stream is wanted; a worker that was just replaced begins at `reached`, which is not far."""

    piece: int
    reached: Reached


def events_of_items(items: Sequence[Item], reader: Reader, *, workers: int) -> Generator[Event, None, None]:
    """The windows of every item, each item followed by its end."""
    streams = max(min(workers, len(items)), 1)
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(closing(_stream(Reading(items, reader, first, streams, ahead=workers > 0), workers)))
            for first in range(streams)
        ]
        for number in range(len(items)):
            for event in waiting[number % streams]:
                yield event
                if isinstance(event, Ended):
                    break


def _stream(reading: Reading, workers: int) -> Generator[Event, None, None]:
    """The events of one worker's items."""
    reached = Reached()

    def calls() -> Iterator[Call]:
        for piece in count():
            yield Call(piece, reached)

    for events in map_in_order(reading, calls(), workers=min(workers, 1), records=(Placed, Ended, Window)):
        if not events:
            return
        reached = _after(events, reached)
        yield from events


def _after(events: Sequence[Event], reached: Reached) -> Reached:
    """Where a stream is after one more piece."""
    ends = [at for at, event in enumerate(events) if isinstance(event, Ended)]
    open_windows = len(events) - (ends[-1] + 1) if ends else reached.windows + len(events)
    return Reached(reached.pieces + 1, reached.items + len(ends), open_windows)


class Reading:
    """The events of every `step`-th item, piece by piece; an empty piece at the end."""

    def __init__(self, items: Sequence[Item], reader: Reader, first: int, step: int, *, ahead: bool) -> None:
        self.items, self.reader, self.numbers = items, reader, range(first, len(items), step)
        self.limit = PIECE_BYTES if ahead else 1  # without a worker nothing is gained by reading more than is needed
        self.events: Iterator[Event] | None = None
        self.pieces = 0  # sent so far
        self.open_file = watchdog.NONE, watchdog.NONE  # key and timeout of the file that the last piece ended in

    def __call__(self, call: Call) -> list[Event]:
        if watchdog.slot is not None:
            watchdog.slot.write(*self.open_file)
        try:
            if self.events is None or self.pieces > call.piece:
                self.events, self.pieces = self._from(call.reached), call.reached.pieces
            while self.pieces < call.piece:
                self._piece(self.events)
            return self._piece(self.events)
        finally:
            if watchdog.slot is not None:  # a file that stays open must not time out before the next piece is asked for
                self.open_file = watchdog.slot.key, watchdog.slot.timeout
                watchdog.slot.write(watchdog.NONE, watchdog.NONE)

    def _piece(self, events: Iterator[Event]) -> list[Event]:
        piece: list[Event] = []
        size = 0
        for event in events:
            piece.append(event)
            size += event.window.x.nbytes if isinstance(event, Placed) else self.limit // PIECE_ITEMS + 1
            if size >= self.limit:
                break
        self.pieces += 1
        return piece

    def _from(self, reached: Reached) -> Iterator[Event]:
        skip = reached.windows
        for number in self.numbers[reached.items :]:
            for event in events_of_item(self.items[number], number, self.reader):
                if skip and isinstance(event, Placed):
                    skip -= 1
                    continue
                yield event
            skip = 0


def events_of_item(item: Item, number: int, reader: Reader) -> Iterator[Event]:
    """The windows of an item that hold anything, then its end."""
    empty = True
    try:
        for window in item.windows(reader):
            if not torch.isfinite(window.x).all():
                raise DataError(f"{quoted(item.path)} holds numbers that are not finite (NaN or infinity).")
            if window.valid is None or bool(window.valid.any()):
                empty = False
                yield Placed(number, window)
    except DataError as error:
        yield Ended(number, DataError(str(error)))  # its causes may not be able to travel between processes
    except OSError as error:
        yield Ended(number, DataError(f"{quoted(item.path)} cannot be read: {error.strerror or quoted(error)}."))
    else:
        nothing = DataError(f"{quoted(item.path)} holds nothing that fills a token of this model.")
        yield Ended(number, nothing if empty else None)
