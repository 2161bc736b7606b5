"""What a data set holds: how many items of which class, how long they are, and the mean and spread of its samples.

Samples become inputs as (x − data.mean) / data.std. For pictures, clips and signals data.std is the standard deviation;
for log-mel features it is twice that, as usual there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bridle.config import Config, load_config
from bridle.config.data_schema import AugmentConfig
from bridle.data.build import open_data
from bridle.data.inspect.check import Lengths, commonest_modality, find_media, lengths_of
from bridle.data.inspect.findings import CheckOptions
from bridle.data.inspect.inspection import inspect_file
from bridle.data.listing.audioset import Availability, availability, has_audioset
from bridle.data.listing.layouts import find_listing, holds_shards
from bridle.data.listing.manifest import MANIFESTS
from bridle.data.loading.moments import Moments, measure
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import Modality, all_extensions, file_modalities, modality_of
from bridle.data.shards.reader import first_names
from bridle.data.sources import Labels, Measured, Source
from bridle.errors import UsageError, quoted


class ClassSizes(NamedTuple):
    """Classes and how many train items each has."""

    classes: int
    smallest: int
    median: float
    largest: int
    without: int  # classes that no item has


class Statistics(NamedTuple):
    """A data set in numbers."""

    train: int  # items
    test: int | None
    classes: ClassSizes | None
    folds: int | None
    lengths: Lengths | None  # of the sounds whose header was read
    shape: tuple[int, ...]  # of a sample
    moments: Moments  # plain mean and standard deviation per channel
    std: tuple[float, ...]  # data.std
    tried: int  # samples that were to be measured; those missing in `moments.count` cannot be used
    notes: tuple[str, ...]
    available: Availability | None  # AudioSet: what of it is there

    def overrides(self) -> tuple[str, str]:
        """What to write behind a command, or with colons into a recipe."""
        return f"data.mean={numbers(self.moments.mean)}", f"data.std={numbers(self.std)}"


def data_std(moments: Moments, modality: Modality) -> tuple[float, ...]:
    """data.std for data of this modality."""
    return tuple(modality.std_factor * std for std in moments.std)


def numbers(values: Sequence[float]) -> str:
    return "[" + ",".join(f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}" for value in values) + "]"


def guess_modality(path: Path) -> Modality:
    """The modality of most files below a folder, in shards or in a manifest."""
    if holds_shards(path):
        return commonest_modality(first_names(path, all_extensions(file_modalities())))
    if path.is_file() and path.suffix.lower() not in MANIFESTS:
        raise UsageError(f"{quoted(path)} is one file; give a folder, or a manifest ({' '.join(MANIFESTS)}).")
    return commonest_modality(file.name for file in find_media(path))


def own_settings(path: Path, modality: Modality) -> list[str]:
    """Overrides without which the recipe of a modality cannot read these files: the channels of signals."""
    name, *settings = modality.own_recipe
    first = find_listing(path, extensions=modality.extensions).train.paths[0]
    if len(load_config(name).geometry.input) > 1:
        return settings
    shape = inspect_file(first, modality, CheckOptions()).shape
    return settings if shape is None else [*settings, f"geometry.channels={shape[0]}"]


def measure_data(
    config: Config, *, limit: int = 2048, workers: int = 0, tell: Callable[[int, int], None] | None = None
) -> Statistics:
    """Open the data of a config and measure it over up to `limit` train items."""
    # Each item is read once.
    plain = {"augment": AugmentConfig(), "data": config.data.model_copy(update={"cache_mb": 0})}
    splits = open_data(config.model_copy(update=plain))
    source, root, modality = splits.train, config.data.root, modality_of(config)
    moments = measure(source, limit=limit, workers=workers, grid=config.geometry.build().grid, tell=tell)
    by_name = root is not None and config.data.manifest is None and config.data.layout in ("auto", "audioset")
    return Statistics(
        train=len(source),
        test=None if splits.test is None else len(splits.test),
        classes=count_classes(source.labels, source.classes),
        folds=None if splits.folds is None else len(set(splits.folds)),
        lengths=measure_lengths(source, limit=limit, workers=workers),
        shape=config.geometry.build().shape,
        moments=moments,
        std=data_std(moments, modality),
        tried=min(limit, len(source)),
        notes=splits.notes,
        available=availability(Path(root), extensions=modality.extensions)
        if root is not None and by_name and has_audioset(Path(root))
        else None,
    )


def count_classes(labels: Labels | None, classes: Sequence[str] | None) -> ClassSizes | None:
    """How many items have each label; None where the data has no labels."""
    if labels is None or classes is None:
        return None
    counts = Counter(one for label in labels for one in ((label,) if isinstance(label, int) else label))
    sizes = sorted(counts[number] for number in range(len(classes)))
    there = [size for size in sizes if size] or [0]
    return ClassSizes(len(classes), there[0], float(np.median(there)), there[-1], sizes.count(0))


def measure_lengths(source: Source, *, limit: int, workers: int) -> Lengths | None:
    """Lengths of the items as their headers tell them, scaled up to all of them; None where they have none."""
    if not isinstance(source, Measured):
        return None
    chosen = Order(size=len(source), seed=0, phase="measure").at(range(min(limit, len(source)))).tolist()
    found = [length for length in map_in_order(source.seconds, chosen, workers=workers) if length is not None]
    if not found:
        return None
    lengths = lengths_of(np.array(found))
    return lengths._replace(total=lengths.total * len(source) / len(found))
