"""Frozen features of labelled items, collected once: from a network, or from the input itself.

Shapes: B batch, V views of an item, C channels, T tokens, D feature width, N items, K classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import floor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle import distributed
from bridle.config import Config
from bridle.data.loading.balance import label_set
from bridle.data.loading.loader import Batch
from bridle.data.sources import Labels, Splits, real_values
from bridle.errors import DataError, NonFiniteError
from bridle.seeding import generator

Array = NDArray[Any]

RAW_LIMIT = 4096  # the widest raw feature vector a probe should be asked to fit
UNLABELLED = 2**31  # stands for the label of an item without any
TRIAL_ITEMS = 300  # of a run with max_steps
TOKEN_LIMIT = 2 * 2**30  # bytes of all tokens together; fitting holds them about twice


class Features(NamedTuple):
    """What is known of every item: one vector or its tokens, and its label or labels."""

    x: Array  # (N, D) float32, or tokens (N, T, D)
    y: Array  # (N,) int64, or (N, K) bool where an item may have several labels
    valid: Array | None = None  # (N, T) bool, False where a token is padding; None means all tokens are real

    @property
    def multilabel(self) -> bool:
        """May an item have several labels?"""
        return self.y.ndim == 2

    def part(self, rows: Array) -> Features:
        """The items where `rows` (N,) is true."""
        return Features(self.x[rows], self.y[rows], None if self.valid is None else self.valid[rows])


# What ranks other than the first hold.
NO_FEATURES = Features(np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64))


def collect_features(
    batches: Iterable[Batch],
    network: Callable[[Tensor, Tensor | None], Tensor],
    *,
    views: int = 1,
    items: int | None = None,
) -> Features:
    """Run `network(x, valid)` over all batches, without gradients, and join the rows in order.

    Collective: every rank brings its share of the batches, rank 0 gets all rows.
    Each item comes as `views` rows that follow one another in the same batch. The network returns vectors (B, D), which
    are averaged over the views, or, with `items` given, tokens (B, T, D), which are concatenated: (N, V·T, D).
    `items` is how many will be held at once; too many for the memory they may take are refused at the first batch.
    """
    xs, ys, real = list[Tensor](), list[Tensor](), list[Tensor]()

    @torch.no_grad()
    def run() -> None:
        for index, batch in enumerate(batches):
            ys.append(_labels(batch, index)[::views])
            rows, repeat = distinct_rows(batch, views)
            found = network(batch.x[rows], None if batch.valid is None else batch.valid[rows]).float()[repeat]
            if items is not None:
                valid = found.new_ones(found.shape[:2], dtype=torch.bool) if batch.valid is None else batch.valid
                found = torch.where(valid[..., None], found, 0.0)  # padding may be anything, even not finite
                real.append(valid.reshape(-1, views * valid.shape[1]).cpu())
            if not bool(torch.isfinite(found).all()):
                bad = int((~torch.isfinite(found)).flatten(1).any(dim=1).sum())
                raise NonFiniteError(
                    f"features of {bad} of {len(found)} items in batch {index} are not finite; "
                    "the encoder or its input holds NaN or infinity: evaluate an earlier checkpoint."
                )
            found = found.unflatten(0, (-1, views))  # (B, …) -> (B/V, V, …)
            xs.append((found.mean(dim=1) if items is None else found.flatten(1, 2)).cpu())
            if items is not None:
                _require_memory(items, xs[0][0].numel())

    distributed.done_together(run)
    valid = None if items is None else _joined(real).numpy()
    return Features(_joined(xs).numpy(), _joined(ys).numpy(), None if valid is None or valid.all() else valid)


def distinct_rows(batch: Batch, views: int) -> tuple[Tensor | slice, Tensor | slice]:
    """Rows that the network must see, and of which of them each row of the batch is a copy.

    The views of an item that fits one window are the same.
    """
    if views == 1:
        return slice(None), slice(None)
    x = batch.x.unflatten(0, (-1, views))
    same = (x == x[:, :1]).flatten(2).all(2)  # (B/V, V), as the item's first view
    if batch.valid is not None:
        valid = batch.valid.unflatten(0, (-1, views))
        same &= (valid == valid[:, :1]).all(2)
    same[:, 0] = False
    rows = torch.nonzero(~same.flatten()).flatten()
    first = torch.arange(0, len(batch.x), views, device=x.device).repeat_interleave(views)
    stands_for = torch.where(same.flatten(), first, torch.arange(len(batch.x), device=x.device))
    return rows, torch.searchsorted(rows, stands_for)


def _labels(batch: Batch, index: int) -> Tensor:
    """(B,) int64 or (B, K) bool."""
    label = batch.label
    if label is None or (label.dim() == 1 and bool((label < 0).any())):
        raise DataError(
            f"batch {index} has items without a label, but a probe needs one for every item; "
            "put the files in one folder per class, or name a manifest with a label column."
        )
    return (label.long() if label.dim() == 1 else label > 0).cpu()


def _require_memory(items: int, numbers: int) -> None:
    needed, most = 4 * items * numbers, TOKEN_LIMIT // (4 * numbers)
    if needed > TOKEN_LIMIT:
        raise DataError(
            f"attentive pooling keeps all tokens: {items:,} items need {needed / 2**30:.1f} GiB, more than the "
            f"{TOKEN_LIMIT / 2**30:.0f} GiB allowed; give probe.items={most // 2} or less, or another probe.pool."
        )


def _joined(rows: list[Tensor]) -> Tensor:
    """The rows of all ranks on rank 0, none elsewhere."""
    joined = distributed.rows_on_first_rank(rows)
    if joined is None:
        raise DataError("there are no items to collect features from; expected at least one batch.")
    return joined


def raw_features(x: Tensor, valid: Tensor | None = None, *, grid: Sequence[int] | None = None) -> Tensor:
    """The baseline without any network: (B, C, *input) -> (B, ·), at most 4,096 numbers where that is possible.

    A small input is flattened. Of a larger one, mean and standard deviation are taken along its first axis (log-mel:
    over time, per band), and along further axes until few enough numbers are left. Padding is left out of both;
    to tell where it is, `grid` (patches per axis) must be given with a `valid` (B, T) that is not all true.
    """
    if x[0].numel() <= RAW_LIMIT:
        return x.flatten(1).float()
    axes = 1
    while axes < x.dim() - 2 and 2 * x[0].numel() // int(np.prod(x.shape[2 : 2 + axes])) > RAW_LIMIT:
        axes += 1
    dims = tuple(range(2, 2 + axes))
    real = real_positions(x, valid, grid)  # (B, 1, *input)
    x = torch.where(real, x.double(), 0.0)
    count = real.sum(dim=dims, keepdim=True).clamp(min=1)
    mean = x.sum(dim=dims, keepdim=True) / count
    spread = torch.where(real, (x - mean).square(), 0.0).sum(dim=dims, keepdim=True) / count
    return torch.cat([mean.flatten(1), spread.sqrt().flatten(1)], dim=1).float()


def real_positions(x: Tensor, valid: Tensor | None, grid: Sequence[int] | None) -> Tensor:
    """(B, 1, *input) bool from (B, T) tokens."""
    if valid is None or bool(valid.all()):
        return torch.ones_like(x[:, :1], dtype=torch.bool)
    if grid is None:
        raise ValueError("raw_features needs grid= (patches per axis) to leave padding out of its means.")
    return real_values(valid, x.shape[2:], grid)[:, None]


def split_features(features: Features, *, seed: int, test_share: float = 0.2) -> tuple[Features, Features]:
    """(train, test), stratified by class: for a data set that comes without a test split."""
    test = stratified(features.y, test_share, generator(seed, "probe split"))
    if not test.any():
        raise DataError(
            f"cannot hold back a test split: none of the {len(np.unique(features.y, axis=0))} classes has two items; "
            "add labelled items, give a test split, or raise probe.items if it is set."
        )
    return features.part(~test), features.part(test)


def stratified(y: Array, share: float, source: torch.Generator) -> Array:
    """(N,) bool, true for about `share` of each class; a class keeps an item on both sides if it has two.

    Items with several labels (N, K) go by their rarest one.
    """
    kinds = _kinds(y)
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(kinds):
        items = np.flatnonzero(kinds == label)
        order = torch.randperm(len(items), generator=source).numpy()
        count = min(max(1, round(share * len(items))), len(items) - 1)
        held[items[order[:count]]] = True
    return held


def stratified_folds(y: Array, count: int, *, seed: int) -> list[int]:
    """A fold from 1 to `count` for every item, each class spread evenly over them."""
    kinds, source = _kinds(y), generator(seed, "probe folds")
    folds, place = np.zeros(len(y), dtype=int), 0
    for label in np.unique(kinds):
        items = np.flatnonzero(kinds == label)
        order = torch.randperm(len(items), generator=source).numpy()
        # Going on where the last class ended, so that folds are of one size.
        folds[items[order]] = (place + np.arange(len(items))) % count + 1
        place += len(items)
    return folds.tolist()


def joined(first: Features, second: Features) -> Features:
    """The items of both, in that order."""
    valid = None
    if first.valid is not None or second.valid is not None:
        masks = [np.ones(one.x.shape[:2], bool) if one.valid is None else one.valid for one in (first, second)]
        valid = np.concatenate(masks)
    return Features(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]), valid)


def choose_items(
    count: int, limit: int | None, *, labels: Labels | None, folds: Sequence[int] | None = None, seed: int, split: str
) -> list[int]:
    """At most `limit` of `count` indices in ascending order, each class of each fold by its share.

    Every n-th item would not do: class folders come one after the other, and a step that fits their size picks the same
    few of each, or none of some.

    With room for all, every class keeps an item. Items with several labels go by their rarest one. The choice depends
    on labels and seed only.
    """
    if limit is None or limit >= count:
        return list(range(count))
    kinds = [0] * count if labels is None else rarest_labels(labels)
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


def _grouped(items: Iterable[int], kinds: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for item in items:
        groups.setdefault(kinds[item], []).append(item)
    return list(groups.values())


def rarest_labels(labels: Labels) -> list[int]:
    """The label of each item that the fewest items have; UNLABELLED for an item without any."""
    sets = [label_set(label) for label in labels]
    frequency = Counter(one for own in sets for one in own)
    return [min(own, key=lambda one: (frequency[one], one), default=UNLABELLED) for own in sets]


def _kinds(y: Array) -> Array:
    """(N,) what items are stratified by: the label, or of several, y (N, K), the rarest."""
    return y if y.ndim == 1 else np.array(rarest_labels([tuple(np.flatnonzero(row).tolist()) for row in y]))


def while_training(config: Config, splits: Splits) -> Config:
    """The config of the probe that follows an encoder phase: on at most `probe.training_items` items.

    A trial (`max_steps`) is probed on a few items: it shows that everything runs, not how good the features are.
    """
    limit, asked = config.probe.training_items, config.probe.items
    if config.max_steps is not None:
        limit = min(limit or TRIAL_ITEMS, TRIAL_ITEMS)
    most = max(len(splits.train), 0 if splits.test is None else len(splits.test))
    if limit is None or min(most, asked or most) <= limit:
        return config
    return config.model_copy(update={"probe": config.probe.model_copy(update={"items": limit})})
