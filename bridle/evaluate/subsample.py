"""Which items are judged where not all of them are: of each class its share, drawn once for all models.

Every n-th item would not do: class folders come one after the other, and a step that fits their size picks the same few
of each, or none of some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import floor

import torch

from bridle.config import Config
from bridle.data.loading.balance import label_set
from bridle.data.sources import Labels, Splits
from bridle.seeding import generator


def choose_items(
    count: int, limit: int | None, *, labels: Labels | None, folds: Sequence[int] | None = None, seed: int, split: str
) -> list[int]:
    """At most `limit` of `count` indices in ascending order, each class of each fold by its share.

    With room for all, every class keeps an item. Items with several labels go by their rarest one. The choice depends
    on labels and seed only.
    """
    if limit is None or limit >= count:
        return list(range(count))
    kinds = [None] * count if labels is None else _rarest_labels(labels)
    source, kept = generator(seed, "items", split), list[int]()
    outer = _grouped(range(count), [0] * count if folds is None else folds)
    for fold, room in zip(outer, shares([len(fold) for fold in outer], limit), strict=True):
        inner = _grouped(fold, kinds)
        for items, size in zip(inner, shares([len(items) for items in inner], room), strict=True):
            order = torch.randperm(len(items), generator=source)[:size]
            kept += [items[i] for i in order.tolist()]
    return sorted(kept)


def shares(sizes: Sequence[int], limit: int) -> list[int]:
    """How many of each group make `limit` together: proportional, by largest remainder, none empty if that can be."""
    total = sum(sizes)
    fair = [limit * size / total for size in sizes]
    found = [max(floor(share), 1 if limit >= len(sizes) else 0) for share in fair]
    while sum(found) != limit:
        step = 1 if sum(found) < limit else -1
        free = [g for g, n in enumerate(found) if (n < sizes[g] if step > 0 else n > 1)]
        best = max(free, key=lambda g: step * (fair[g] - found[g]))
        found[best] += step
    return found


def _grouped(items: Iterable[int], kinds: Sequence[int | None]) -> list[list[int]]:
    groups: dict[int | None, list[int]] = {}
    for item in items:
        groups.setdefault(kinds[item], []).append(item)
    return list(groups.values())


def _rarest_labels(labels: Labels) -> list[int | None]:
    """The label of each item that the fewest items have; None for an item without any."""
    sets = [label_set(label) for label in labels]
    frequency = Counter(one for own in sets for one in own)
    return [min(own, key=lambda one: (frequency[one], one), default=None) for own in sets]


def while_training(config: Config, splits: Splits) -> Config:
    """The config of the probe that follows an encoder phase: on at most `probe.training_items` items."""
    limit, asked = config.probe.training_items, config.probe.items
    most = max(len(splits.train), 0 if splits.test is None else len(splits.test))
    if limit is None or min(most, asked or most) <= limit:
        return config
    return config.model_copy(update={"probe": config.probe.model_copy(update={"items": limit})})
