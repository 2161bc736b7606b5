"""One job of `tokenize` or `embed`: rows of items into a sink that remembers what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bridle.console import ProgressLine, clock
from bridle.data.listing.folders import Lazy
from bridle.errors import DataError
from bridle.infer.columns import Column, Parts
from bridle.infer.files import Compute, Pool, Rows, rows_of_files
from bridle.infer.inputs import Item, Items
from bridle.infer.model import BATCH, Model
from bridle.infer.prefetch import Ended
from bridle.machine import StopRequest

MEGABYTE = 2**20


class Job(NamedTuple):
    """What is computed of every item."""

    compute: Compute
    columns: tuple[Column, ...]
    pool: Callable[[], Pool] | None
    header: dict[str, Any]


class Options(NamedTuple):
    """How a job is carried out; none of them changes what is computed."""

    batch: int = BATCH
    overwrite: bool = False  # replace a result that exists, and forget an unfinished job that does not fit
    strict: bool = False  # stop at the first file that cannot be read
    workers: int = 0  # processes that decode ahead
    part_mb: int = 256  # of a folder's parts
    part_format: str = "npz"


class Sink(Protocol):
    """Where rows go; `number` counts all items of the job."""

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Rows of an item, by column."""
        ...

    def finish(self, number: int, item: Item, reason: str | None) -> None:
        """An item is done, or could not be read."""
        ...


class OneFile:
    """All items into the same parts."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        self.parts.add(values)

    def finish(self, number: int, item: Item, reason: str | None) -> None:
        self.parts.finish(item.name, item.stamp(), reason=reason)


class Chosen(Lazy[Item]):
    """Some of the items."""

    def __init__(self, items: Items, numbers: Sequence[int]) -> None:
        self.items, self.numbers = items, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, at: int) -> Item:
        return self.items[self.numbers[at]]


def work(
    model: Model, job: Job, left: Chosen, sink: Sink, options: Options, progress: ProgressLine, stop: StopRequest
) -> None:
    """Compute the items that are left."""
    pace = Pace(files=len(left), tokens_per_second=job.header["tokens_per_second"])
    pool = None if job.pool is None else job.pool()
    found = rows_of_files(
        left,
        reader=model.reader,
        geometry=model.geometry,
        compute=job.compute,
        batch=options.batch,
        workers=options.workers,
    )
    for event in found:
        if isinstance(event, Rows):
            pace.rows += len(event.values)
            if pool is None:
                sink.add(left.numbers[event.item], {job.columns[0].name: event.values, **_place_values(event)})
            else:
                pool.add(event)
        else:
            _finish_item(event, left, pool, sink, strict=options.strict)
            pool = None if job.pool is None else job.pool()
            pace.done += 1
        progress.show(pace.text(), pace.text(), final=pace.done == pace.files)
        stop.leave(f"{pace.done} of {pace.files} files are done.")


def _place_values(rows: Rows) -> dict[str, Any]:
    return {"positions": rows.positions, **({} if rows.times is None else {"times": rows.times})}


def _finish_item(ended: Ended, left: Chosen, pool: Pool | None, sink: Sink, *, strict: bool) -> None:
    if ended.error is not None and strict:
        raise ended.error
    number = left.numbers[ended.item]
    if ended.error is None and pool is not None:
        sink.add(number, {"features": pool.mean()[None]})
    sink.finish(number, left[ended.item], None if ended.error is None else str(ended.error))


def refuse_failed(reasons: Sequence[str | None], *, strict: bool) -> None:
    """An earlier command that was not strict may have met what this one stops at."""
    bad = next((reason for reason in reasons if reason is not None), None)
    if bad is not None and strict:
        raise DataError(bad)


class Pace:
    """How far and how fast a job goes."""

    def __init__(self, *, files: int, tokens_per_second: float | None) -> None:
        self.files, self.done, self.rows = files, 0, 0
        self.tokens_per_second = tokens_per_second
        self.began = time.monotonic()

    def text(self) -> str:
        passed = max(time.monotonic() - self.began, 1e-9)
        shown = [f"{self.done}/{self.files} files", f"{self.done / passed:.1f} files/s"]
        if self.tokens_per_second is not None:
            seconds = self.rows / self.tokens_per_second  # of what was recorded
            shown.append(f"{clock(seconds)} read, {seconds / passed:.0f}× realtime")
        if 0 < self.done < self.files:
            shown.append(f"ETA {clock((self.files - self.done) * passed / self.done)}")
        return " · ".join(shown)
