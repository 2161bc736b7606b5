"""Collects the features of items: runs a network over all views of all items, or reads what RUN/cache holds of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from bridle import distributed
from bridle.config import Config
from bridle.config.data_schema import DataConfig
from bridle.console import ProgressLine, eta
from bridle.data.digests import data_digest
from bridle.data.loading.loader import Batch, Loader, load_samples, sequential
from bridle.data.modality import settings_of
from bridle.data.sources import Source, Views
from bridle.errors import DataError
from bridle.evaluate.feature_cache import FeatureCache, make_key
from bridle.evaluate.features import Features, collect_features
from bridle.machine import Machine
from bridle.train.engine import move

MOST_ROWS = 256  # samples that go through a network at once
MOST_TOKENS_CPU = 4096  # tokens at once on a CPU; batches that leave the cache take half as long again
MOST_NUMBERS = 2**24  # input numbers at once
QUIET_SECONDS = 2.0  # before progress is shown

Collect = Callable[[Source], Features]
Network = Callable[[Tensor, Tensor | None], Tensor]  # x (B, C, *input), valid (B, T) -> (B, D) or (B, T, D)


def readable_rows(
    parts: Sequence[Source], settings: DataConfig, progress: ProgressLine
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Of each part the items that can be read, and the names of the others; DataError if they are many (collective)."""
    bad = distributed.done_once(lambda: [find_bad(part, settings.workers) for part in parts])
    names = tuple(part.describe(i) for part, rows in zip(parts, bad, strict=True) for i in rows)
    items, limit = sum(map(len, parts)), settings.bad_share
    if len(names) > limit * items:
        raise DataError(
            f"{len(names)} of {items} labelled items cannot be read, more than data.bad_share={limit}, the first: "
            f"{names[0]}; `bridle data check` lists them."
        )
    if names:
        more = " …" if len(names) > 3 else ""
        progress.note(f"{len(names)} of {items} items cannot be read and are not scored: {', '.join(names[:3])}{more}")
    return [[i for i in range(len(part)) if i not in set(rows)] for part, rows in zip(parts, bad, strict=True)], names


def find_bad(source: Source, workers: int) -> list[int]:
    """The items of which a view cannot be read."""
    views = Views(source)
    samples = load_samples(views, range(len(views)), workers=workers)
    return sorted({row // views.views for row, sample in enumerate(samples) if isinstance(sample, DataError)})


class Collector:
    """Collects features of one data set on one machine."""

    def __init__(
        self, config: Config, machine: Machine, progress: ProgressLine, cache: FeatureCache | None = None
    ) -> None:
        self.config, self.machine, self.progress, self.cache = config, machine, progress, cache
        geometry = config.geometry.build()
        most = [MOST_ROWS, MOST_NUMBERS // prod(geometry.shape)]
        if machine.device.type == "cpu":
            most.append(MOST_TOKENS_CPU // geometry.tokens)
        self.rows = max(1, min(most))

    def features(self, network: Network, what: Mapping[str, Any] | None = None, *, items: int | None = None) -> Collect:
        """A function that returns the features of a source's items; `what` names them in the cache.

        With `items`, the number held at once, these are all tokens of every item, else one vector each.
        """

        def collect(source: Source) -> Features:
            views = Views(source)
            return collect_features(self.batches(views), network, views=views.views, items=items)

        cache, inputs = self.cache, self.input_settings()
        if cache is None or what is None or distributed.is_active():  # ranks might not agree on what is kept
            return collect

        def cached(source: Source) -> Features:
            digest = data_digest(source)
            if digest is None:
                return collect(source)
            key = make_key({**what, **inputs, "items": digest, "device": self.machine.device.type})
            return cache.get(key, lambda: collect(source))

        return cached

    def input_settings(self) -> dict[str, Any]:
        """The settings that turn items into inputs."""
        aside = {"root", "manifest", "workers", "cache_mb", "bad_share"}
        sections = {"data": self.config.data, "geometry": self.config.geometry, **settings_of(self.config)}
        return {name: section.model_dump(mode="json", exclude=aside) for name, section in sections.items()}

    def batches(self, source: Views) -> Iterator[Batch]:
        """All views of all items, those of an item in one batch."""
        data, (mean, std) = self.config.data, self.config.data.statistics
        rows, began, done = max(1, self.rows // source.views) * source.views, time.monotonic(), 0
        for batch in sequential(
            source, batch=rows, mean=mean, std=std, workers=data.workers,
            rank=distributed.rank(), world_size=distributed.world_size(),
        ):  # fmt: skip
            yield move(batch, self.machine.device)
            done += len(batch.x) * distributed.world_size()
            self.show_progress("features of items", len(source), min(done, len(source)), began)

    def first_batches(self, source: Source) -> Iterator[Batch]:
        """One pass over a source in which a file that cannot be read is replaced, not an error."""
        data, (mean, std) = self.config.data, self.config.data.statistics
        loader = Loader(
            source=source, seed=self.config.seed, phase="codebooks",
            batch=self.rows * distributed.world_size(), mean=mean, std=std, workers=data.workers,
            rank=distributed.rank(), world_size=distributed.world_size(),
        )  # fmt: skip
        return (move(batch, self.machine.device) for batch in loader.first(len(source), rows=self.rows))

    def show_progress(self, what: str, total: int, done: int, began: float) -> None:
        """A progress line for work that takes longer than a few seconds."""
        if (spent := time.monotonic() - began) > QUIET_SECONDS:
            text = f"{what} {done:,}/{total:,}"
            self.progress.show(f"{text} · {eta(done, total, spent)}", text)
